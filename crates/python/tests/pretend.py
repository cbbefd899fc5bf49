"""A GPU where there is none: the driver of crates/cuda's tests, whose device is the host.

The backend takes tensors of the CPU for tensors of a GPU while `on_device` lasts, and gives them to the
device engine over that driver.  What PyTorch itself would order by streams is ordered by waiting for the
driver's streams here; all else is as on a GPU: streams of the driver are threads that lag behind.
"""

import contextlib
import ctypes
import os
import pathlib
import subprocess
import threading

import torch

_CRATE = pathlib.Path(__file__).resolve().parents[2] / "cuda"
_DTYPES = ("f32", "f64", "f16", "bf16", "i8", "u8", "i32", "i64")
_FLOATS = ("f32", "f64", "f16", "bf16")
_FAMILIES = ("cast", "quantize", "sign", "topk", "randk", "powersgd", "scale")

# Whether tensors of the CPU are taken for tensors of the device.
_pretending = False


def driver(folder: str) -> str | None:
    """Compiles the driver into a folder, unless what is there is newer than its sources; its library, or None without them."""
    source = _CRATE / "tests/window/host_device.cpp"
    if not source.exists():
        return None
    os.makedirs(folder, exist_ok=True)
    library = os.path.join(folder, "libcuda.so")
    sources = [source, *(_CRATE / "kernels").glob("*.cu*"), *(_CRATE / "tests/without_device").iterdir()]
    newest = max(path.stat().st_mtime for path in sources)
    if os.path.exists(library) and os.path.getmtime(library) > newest:
        return library
    compiler = ["c++", "-std=c++17", "-O1", "-ffp-contract=off", "-w", "-shared", "-fPIC", "-pthread"]
    kernels = _CRATE / "tests/without_device/kernels.cpp"
    for dtype in _DTYPES:
        macros = [f"-DNAME={dtype}", f"-DFORMAT={dtype.capitalize()}", f"-DFLOATS={int(dtype in _FLOATS)}"]
        made = os.path.join(folder, f"fold_{dtype}.so")
        subprocess.run([*compiler, *macros, str(kernels), "-o", made, "-ldl"], check=True)
    # Their threads are contexts, among which they jump.
    blocks = [*compiler, "-U_FORTIFY_SOURCE", str(_CRATE / "tests/without_device/blocks.cpp")]
    for family in _FAMILIES:
        macro = f'-DKERNELS="{_CRATE / "kernels" / f"{family}.cu"}"'
        subprocess.run([*blocks, macro, "-o", os.path.join(folder, f"{family}.so"), "-ldl"], check=True)
    macro = f'-DKERNELS="{folder}"'
    subprocess.run([*compiler, macro, str(source), "-o", f"{library}.made", "-ldl"], check=True)
    os.rename(f"{library}.made", library)
    return library


class Device:
    """What a model is on, as `unisono.torch._gradients.device.Cuda`: its streams are the driver's."""

    device = torch.device("cpu")

    def holds(self, tensor):
        return True

    def number(self):
        return 0

    def current_address(self):
        return 0

    def seeded(self):
        return []


@contextlib.contextmanager
def models_on_device(library: str):
    """Within this, models that are made are on the device. The program waits for it where a stream would."""
    from unisono.torch._gradients import device as staging
    from unisono.torch._gradients.member import Member

    os.environ["UNISONO_CUDA_DRIVER"] = library
    loaded = ctypes.CDLL(library)
    find, wait = staging.device_of, Member._wait

    def settled(self, call, buffers):
        outcome = wait(self, call, buffers)
        assert loaded.cuCtxSynchronize() == 0
        return outcome

    staging.device_of, Member._wait = lambda tensors: Device(), settled
    try:
        yield
    finally:
        staging.device_of, Member._wait = find, wait


@contextlib.contextmanager
def on_device():
    """Tensors of the CPU are of the device."""
    global _pretending
    before, _pretending = _pretending, True
    try:
        yield
    finally:
        _pretending = before


def begin(library: str) -> None:
    """Lets the backend of this process use the driver."""
    os.environ["UNISONO_CUDA_DRIVER"] = library
    from unisono.torch._backend import core, device, work

    loaded = ctypes.CDLL(library)
    # Calls are made in the order of the default stream, and waited for by another: what the stream of a call
    # waits for is freed at once, for the stream to use again in its order, and the host knows no such order.
    waiting = ctypes.c_void_p()
    assert loaded.cuStreamCreateWithPriority(ctypes.byref(waiting), 1, 0) == 0
    in_wait = threading.local()

    def settle():
        loaded.cuCtxSynchronize()

    class Settling:
        """A group of the engine whose calls have ended on the device when they return."""

        def __init__(self, native):
            self._native = native

        def __getattr__(self, name):
            return getattr(self._native, name)

        def run(self, *arguments):
            self._native.run(*arguments)
            settle()

    @contextlib.contextmanager
    def aside(number):
        in_wait.is_so = True
        try:
            yield
        finally:
            in_wait.is_so = False

    class Happened:
        def query(self):
            return True

    device.number_of = lambda tensor: 0 if _pretending else None
    device.stream_of = lambda number: waiting.value if getattr(in_wait, "is_so", False) else 0
    device.refuse_recording = lambda rank: None
    device.reached = lambda number: Happened()
    device.wait_for = lambda event, number: None
    device.use_on_current = lambda tensors, number: None
    device.host_memory = torch.empty_like
    device.to_host = torch.clone
    device.future = lambda number: torch.futures.Future()
    device.aside = aside

    native_for = core.Core._native_for

    def settling(self, number):
        native = native_for(self, number)
        return native if number is None else Settling(native)

    core.Core._native_for = settling
    wait = work.DeviceWork.wait

    def wait_elsewhere(self, timeout=None):
        with aside(0):
            return wait(self, timeout)

    work.DeviceWork.wait = wait_elsewhere
    settle_work = work.DeviceWork._settle

    def settled(self):
        settle()
        settle_work(self)

    work.DeviceWork._settle = settled
