"""The ranks of one system, started once and driven over FIFOs; ../README.md has the protocol.

A `Session` owns everything it started: leaving it ends every process of the system, by asking
first and by force after a grace period.
"""

import json
import os
import select
import signal
import statistics
import subprocess
import time

START_SECONDS = 120  # importing torch on sixteen ranks at once takes a while
RUN_SECONDS = 120  # beyond this a run counts as hung
GRACE_SECONDS = 5  # between each of: asking to quit, terminating, killing


class SystemFailed(Exception):
    """The system died, hung or answered nonsense: its session is over."""


class RunFailed(Exception):
    """All ranks answered, at least one of them with an error: the session goes on."""


class Session:
    def __init__(self, launcher, world, transport, directory):
        self.name = f"{launcher.key}-{transport}"
        self.world = world
        self.log_path = os.path.join(directory, f"{self.name}.log")
        self.processes = []
        self.unread = b""
        self.deadline_of_first_run = time.monotonic() + START_SECONDS
        # Opened for reading and writing, so that neither end waits for the other to open it and
        # a rank sees the end of the file exactly when this program is gone.
        self.commands = [
            self._fifo(os.path.join(directory, f"{self.name}.{rank}")) for rank in range(world)
        ]
        self.answers = self._fifo(os.path.join(directory, f"{self.name}.out"))
        with open(self.log_path, "wb") as log:
            for command, environment in launcher.commands(world, transport, directory, self.name):
                self.processes.append(
                    subprocess.Popen(
                        command,
                        env={**os.environ, **environment},
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                )

    @staticmethod
    def _fifo(path):
        os.mkfifo(path)
        return os.open(path, os.O_RDWR | os.O_NONBLOCK)

    def run(self, op, size, iterations, warmup):
        """The samples, in microseconds per operation, of the rank with the largest median."""
        line = f"run {op} {size} {iterations} {warmup}\n".encode()
        deadline = max(time.monotonic() + RUN_SECONDS, self.deadline_of_first_run)
        for fifo in self.commands:
            os.write(fifo, line)
        answers = [self._answer(deadline) for _ in range(self.world)]
        errors = [text for text in answers if text.startswith("error")]
        if errors:
            raise RunFailed(errors[0])
        try:
            samples = [json.loads(text) for text in answers if text != "ok"]
        except ValueError:
            raise SystemFailed(f"{self.name} answered {answers}") from None
        if not samples or not all(samples):
            raise SystemFailed(f"{self.name} reported no samples")
        return max(samples, key=statistics.median)

    def _answer(self, deadline):
        while b"\n" not in self.unread:
            if time.monotonic() > deadline:
                raise SystemFailed(f"{self.name} hung{self._log_tail()}")
            ready, _, _ = select.select([self.answers], [], [], 0.5)
            if ready:
                self.unread += os.read(self.answers, 1 << 20)
            elif any(process.poll() is not None for process in self.processes):
                raise SystemFailed(f"{self.name} ended{self._log_tail()}")
        line, _, self.unread = self.unread.partition(b"\n")
        return line.decode(errors="replace")

    def _log_tail(self):
        with open(self.log_path, errors="replace") as log:
            lines = log.read().splitlines()[-15:]
        return "".join(f"\n    {line}" for line in lines)

    def close(self):
        for fifo in self.commands:
            try:
                os.write(fifo, b"quit\n")
            except OSError:
                pass  # a full FIFO: its rank hangs, and is ended below
        if not self._ended_within(GRACE_SECONDS):
            for process in self.processes:
                process.terminate()
            self._ended_within(GRACE_SECONDS)
        for process in self.processes:
            _kill_session(process.pid)
            process.wait()
        for fifo in [*self.commands, self.answers]:
            os.close(fifo)

    def _ended_within(self, seconds):
        deadline = time.monotonic() + seconds
        for process in self.processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                return False
        return True


def _kill_session(leader):
    """Kills what is left of the process session that `leader` led. A launcher may have put its
    ranks into process groups of their own, so killing the leader's group would not do."""
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            if os.getsid(int(entry)) == leader:
                os.kill(int(entry), signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue
