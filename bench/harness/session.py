"""The ranks of one system, started once and driven over FIFOs; ../README.md has the protocol.

A `Session` owns everything it started: leaving it ends every process of the system, by asking
first and by force after a grace period.
"""

import contextlib
import fcntl
import json
import os
import select
import signal
import statistics
import subprocess
import time

F_SETPIPE_SZ = 1031  # the module fcntl names it only from Python 3.10 on

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
        self.fifos = []
        self.unread = b""
        self.deadline_of_first_run = time.monotonic() + START_SECONDS
        # Opened for reading and writing, so that neither end waits for the other to open it and
        # a rank sees the end of the file exactly when this program is gone.
        self.commands = [
            self._fifo(os.path.join(directory, f"{self.name}.{rank}")) for rank in range(world)
        ]
        self.answers = self._fifo(os.path.join(directory, f"{self.name}.out"))
        # Room for the longest answers of many ranks: a full pipe would mix their lines.
        fcntl.fcntl(self.answers, F_SETPIPE_SZ, 1 << 20)
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

    def _fifo(self, path):
        os.mkfifo(path)
        self.fifos.append(os.open(path, os.O_RDWR | os.O_NONBLOCK))
        return self.fifos[-1]

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

    def cpu_seconds(self):
        """The processor time that the living processes of the system have used."""
        ticks = 0
        for pid in _members({process.pid for process in self.processes}):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as stat:
                # The second field, the name, may hold spaces; user and system time are 14 and 15.
                fields = stat.read().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def close(self):
        """Ends all processes of the system; a second call does nothing."""
        for fifo in self.commands:
            with contextlib.suppress(OSError):  # full, of a rank that hangs and is ended below
                os.write(fifo, b"quit\n")
        if not self._ended_within(GRACE_SECONDS):
            for process in self.processes:
                process.terminate()
            self._ended_within(GRACE_SECONDS)
        for pid in _members({process.pid for process in self.processes}):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()
        while self.fifos:
            os.close(self.fifos.pop())
        self.processes, self.commands = [], []

    def _ended_within(self, seconds):
        deadline = time.monotonic() + seconds
        for process in self.processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                return False
        return True


def _members(leaders):
    """The processes in the process sessions that `leaders` lead. A launcher may have put its
    ranks into process groups of their own, so going by groups would miss them."""
    for entry in os.listdir("/proc"):
        try:
            if entry.isdigit() and os.getsid(int(entry)) in leaders:
                yield int(entry)
        except (ProcessLookupError, PermissionError):
            continue
