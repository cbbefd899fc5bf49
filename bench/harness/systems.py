"""The systems under comparison: how each is found or installed, and how its ranks start.

Each class has `key` (its name in options, files and tables), `prepare()`, which makes it
runnable, installing only what is missing, and returns a line that says what will run, and
`commands(world, transport, directory, name)`, which gives the processes to start as pairs of
command and additional environment.

No rank of any system is bound to cores: the threads that Gloo has beside a rank's own would share
one core with it, and a comparison that binds some systems and not others compares the binding.
"""

import json
import os
import re
import shutil
import subprocess
import sys

BENCH = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
ROOT = os.path.dirname(BENCH)
TARGET = os.path.join(ROOT, "target")

# The index of the CPU builds, a tenth of the size; where it cannot be reached, PyPI's will do.
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"

# After which the measurement of a limit is taken to hang.
LIMIT_SECONDS = 120


class Missing(Exception):
    """What was wanted of a system is not there: most often, it is not installed and could not be."""


class Unisono:
    key = "unisono"
    title = "Unisono"

    def __init__(self, program=None):
        self.program = program

    def prepare(self):
        if self.program is None:
            self.program = os.path.join(TARGET, "release", "unisono")
            if shutil.which("cargo"):
                _do("cargo", "build", "--release", "--bin", "unisono", "--target-dir", TARGET,
                    cwd=ROOT)
            elif not os.path.exists(self.program):
                raise Missing("no cargo to build Unisono with: name a program with --unisono")
        self.program = os.path.abspath(self.program)
        return _output(self.program, "--version")

    def commands(self, world, transport, directory, name):
        serve = [self.program, "bench", "serve", "--fifo-dir", directory, "--name", name,
                 "--transport", transport]
        return [([self.program, "run", "-n", str(world), "--", *serve], {})]

    def limit(self, op, world, transport, size):
        """The microseconds that the machine needs at least, measured now; None where Unisono knows none."""
        out = _output(self.program, "bench", "collective", "--op", op, "--ranks", str(world),
                      "--transport", transport, "--sizes", str(size), "--seconds", "0.01", "--json",
                      timeout=LIMIT_SECONDS)
        try:
            row = json.loads(out)
            # busbw is algbw by a factor of the operation, and so is the limit.
            needed = row["median_us"] * row["busbw_gbs"]
            return needed / row["limit_gbs"] if needed and row["limit_gbs"] else None
        except (ValueError, TypeError, KeyError) as error:
            raise Missing(f"{self.program} answered {out!r}") from error


class Before(Unisono):
    """Another build of Unisono, such as that of the commit before: a peer like the others."""

    key = "before"
    title = "before"

    def prepare(self):
        return f"before: {super().prepare()} ({self.program})"


class Gloo:
    key = "gloo"
    title = "Gloo"

    def __init__(self, python=None):
        self.python = python

    def prepare(self):
        venv = os.path.join(TARGET, "peers-venv")
        venv_python = os.path.join(venv, "bin", "python")
        candidates = [self.python] if self.python else [venv_python, "python3"]
        for python in candidates:
            version = self._torch_version(python)
            if version:
                self.python = python
                return f"Gloo of PyTorch {version}"
        if self.python:
            raise Missing(f"{self.python} cannot import torch with Gloo")
        self._install(venv, venv_python)
        self.python = venv_python
        version = self._torch_version(venv_python)
        if not version:
            raise Missing(f"the torch installed in {venv} cannot be imported")
        return f"Gloo of PyTorch {version}"

    @staticmethod
    def _torch_version(python):
        check = (
            "import torch; assert torch.distributed.is_gloo_available(); print(torch.__version__)"
        )
        try:
            return _output(python, "-W", "ignore", "-c", check)
        except Missing:
            return None

    @staticmethod
    def _install(venv, venv_python):
        try:
            _do(sys.executable, "-m", "venv", "--clear", venv)
        except Missing:  # Debian ships Python without the means to create an environment
            _apt("python3-venv")
            _do(sys.executable, "-m", "venv", "--clear", venv)
        pip = [venv_python, "-m", "pip", "install", "--quiet", "--retries", "1"]
        try:
            _do(*pip, "--timeout", "10", "--index-url", TORCH_CPU_INDEX, "torch")
        except Missing:
            _do(*pip, "torch")

    def commands(self, world, _transport, directory, name):
        script = os.path.join(BENCH, "peers", "pytorch.py")
        environment = {
            "WORLD_SIZE": str(world),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        return [
            ([self.python, "-W", "ignore", script, directory, name],
             {**environment, "RANK": str(rank)})
            for rank in range(world)
        ]


class OpenMpi:
    key = "mpi"
    title = "Open MPI"

    def __init__(self, program=None):
        self.program = program
        self.major = None

    def prepare(self):
        if not shutil.which("mpirun"):
            _apt("openmpi-bin", "libopenmpi-dev", "gcc", "libc6-dev")
        if self.program is None:
            self.program = os.path.join(TARGET, "peers-build", "mpi")
            self._build()
        self.program = os.path.abspath(self.program)
        version = _output("mpirun", "--version").splitlines()[0]
        match = re.search(r"Open MPI\)? v?(\d+)[\d.]*", version)
        if not match:
            raise Missing(f"mpirun is not Open MPI's: {version}")
        self.major = int(match.group(1))
        return version

    def _build(self):
        source = os.path.join(BENCH, "peers", "mpi.c")
        if not shutil.which("mpicc"):
            if os.path.exists(self.program):
                return
            _apt("libopenmpi-dev", "gcc", "libc6-dev")
        os.makedirs(os.path.dirname(self.program), exist_ok=True)
        _do("mpicc", "-O3", source, "-o", self.program, "-lm")

    def commands(self, world, transport, directory, name):
        shared_memory = "vader" if self.major < 5 else "sm"
        components = {
            "shm": ["--mca", "btl", f"self,{shared_memory}"],
            "tcp": ["--mca", "btl", "self,tcp", "--mca", "btl_tcp_if_include", "lo"],
        }[transport]
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        command = ["mpirun", *root, "--oversubscribe", "--bind-to", "none", "-n", str(world),
                   "--mca", "pml", "ob1", *components, self.program, directory, name]
        return [(command, {})]


def _do(*command, **options):
    print("+", *command, file=sys.stderr, flush=True)
    try:
        subprocess.run(command, check=True, stdout=sys.stderr, **options)
    except (OSError, subprocess.CalledProcessError) as error:
        raise Missing(str(error)) from error


def _output(*command, timeout=None):
    try:
        done = subprocess.run(command, check=True, text=True, capture_output=True, timeout=timeout)
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip().splitlines()[-1:]
        raise Missing(": ".join([f"{command[0]} exits with {error.returncode}", *said])) from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Missing(str(error)) from error
    return done.stdout.strip()


def _apt(*packages):
    if not shutil.which("apt-get"):
        raise Missing(f"no apt-get to install {' '.join(packages)} with")
    become_root = [] if os.geteuid() == 0 else ["sudo", "-n"]
    apt = [*become_root, "env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-qq"]
    _do(*apt, "update")
    _do(*apt, "install", "-y", "--no-install-recommends", *packages)
