"""NVIDIA's MPS, through which processes use a GPU at once instead of in turns.

The daemon is a private one: its folder is new, only programs with its `environment` use it, and it is
stopped when the context ends, however it ends. Daemons of others are left alone.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time

PROGRAM = "nvidia-cuda-mps-control"
STOP_SECONDS = 15


class NoMps(Exception):
    """There is no such daemon here, or it does not start."""


@contextlib.contextmanager
def running():
    """Runs a daemon; gives the variables with which programs find it."""
    if not shutil.which(PROGRAM):
        raise NoMps(f"there is no {PROGRAM} on this machine")
    # Sockets are in it, whose paths must be short.
    folder = tempfile.mkdtemp(prefix="mps-", dir="/tmp")
    environment = {
        "CUDA_MPS_PIPE_DIRECTORY": os.path.join(folder, "pipe"),
        "CUDA_MPS_LOG_DIRECTORY": os.path.join(folder, "log"),
    }
    for path in environment.values():
        os.mkdir(path)
    everything = {**os.environ, **environment}
    try:
        started = subprocess.run(
            [PROGRAM, "-d"], env=everything, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30
        )
        if started.returncode:
            raise NoMps(f"{PROGRAM} -d: {(started.stderr or started.stdout).strip()}")
        yield environment
    finally:
        _stop(everything)
        shutil.rmtree(folder, ignore_errors=True)


def _stop(environment):
    """Asks the daemon to quit, and ends it by force if it does not."""
    daemon = _daemon(environment["CUDA_MPS_PIPE_DIRECTORY"])
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        subprocess.run(
            [PROGRAM], env=environment, input="quit\n", capture_output=True, text=True, timeout=STOP_SECONDS
        )
    if daemon is None:
        return
    deadline = time.monotonic() + STOP_SECONDS
    while _lives(daemon):
        if time.monotonic() > deadline:
            with contextlib.suppress(ProcessLookupError):
                os.kill(daemon, signal.SIGKILL)
            return
        time.sleep(0.1)


def _daemon(pipe):
    """The daemon's number, which it writes into its folder."""
    try:
        with open(os.path.join(pipe, f"{PROGRAM}.pid")) as file:
            return int(file.read())
    except (OSError, ValueError):
        return None


def _lives(process):
    try:
        with open(f"/proc/{process}/cmdline", "rb") as file:
            return PROGRAM.encode() in file.read()
    except OSError:
        return False
