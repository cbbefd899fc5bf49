"""CUDA tensors, without a GPU: over a driver whose device is the host, and without a driver."""

import ctypes
import os
import subprocess
import sys
import tempfile

import harness
import pretend
import torch
import torch.distributed as dist
from tools import equal

import unisono
from unisono import _native
from unisono.torch._backend.codes import ALL_REDUCE, F32, SUM

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def _driver() -> str:
    folder = os.environ.get("PRETEND_FOLDER", os.path.join(tempfile.gettempdir(), "unisono-pretend"))
    library = pretend.driver(folder)
    assert library is not None, "the driver's sources are beside this package"
    return library


def case_pretended_gpu() -> None:
    """Every call on memory of a device, against the same call on memory of the host."""
    folder = os.path.dirname(_driver())
    for world, names in ((2, []), (3, ["all_reduce", "scatter", "disagreement"])):
        program = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
        program += [os.path.join(_HERE, "gpu.py"), "--pretend", "--seconds", "300", *names]
        environment = {**os.environ, "PRETEND_FOLDER": folder}
        ended = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=800)
        assert ended.returncode == 0 and "all passed" in ended.stdout, ended.stdout + ended.stderr


def case_no_cuda_before_cuda_tensors() -> None:
    """Neither the import nor calls on CPU tensors load the driver."""
    os.environ["UNISONO_CUDA_DRIVER"] = _driver()
    try:
        assert harness.run(_loads_no_driver, 2) == [0, 0]
    finally:
        del os.environ["UNISONO_CUDA_DRIVER"]


def _loads_no_driver(rank, world):
    def is_loaded():
        with open("/proc/self/maps") as maps:
            return os.environ["UNISONO_CUDA_DRIVER"] in maps.read()

    tensor = torch.ones(10)
    dist.all_reduce(tensor)
    dist.all_reduce(tensor, async_op=True).wait()
    dist.barrier()
    dist.new_group()
    assert not is_loaded()
    assert not torch.cuda.is_initialized()
    pretend.begin(os.environ["UNISONO_CUDA_DRIVER"])
    with pretend.on_device():
        dist.all_reduce(tensor)
    assert is_loaded()


def case_no_driver() -> None:
    """Where a rank has no driver, all learn which, and the group goes on."""
    assert harness.run(_has_no_driver, 2) == [0, 0]


def _has_no_driver(rank, world):
    pretend.begin(_driver())
    if rank == 1:
        os.environ["UNISONO_CUDA_DRIVER"] = "/nowhere/libcuda.so.1"
    for asynchronous in (False, True):
        try:
            with pretend.on_device():
                dist.all_reduce(torch.ones(10), async_op=asynchronous)
        except unisono.FormError as error:
            assert "rank 1" in str(error) and "/nowhere/libcuda.so.1" in str(error), error
            assert "install NVIDIA's driver" in str(error), error
        else:
            raise AssertionError("formed without a driver")
    tensor = torch.ones(10)
    dist.all_reduce(tensor)
    equal(tensor, torch.full((10,), float(world)))
    pretend.begin(_driver())
    with pretend.on_device():
        dist.all_reduce(tensor)
    equal(tensor, torch.full((10,), float(world * world)))


def case_one_device_for_a_group() -> None:
    """Memory of another GPU than the group has is refused, and so are tensors of two kinds."""
    assert harness.run(_has_one_device, 2) == [0, 0]


def _has_one_device(rank, world):
    from unisono.torch._backend import device

    pretend.begin(_driver())
    tensor = torch.ones(10)
    with pretend.on_device():
        dist.all_reduce(tensor)
    equal(tensor, torch.full((10,), float(world)))
    number_of = device.number_of
    for numbers, text in (((1, 1), "cuda:1"), ((0, None), "different devices"), ((None, 1), "different devices")):
        given = iter(numbers)
        device.number_of = lambda tensor: next(given)  # noqa: B023
        try:
            dist.all_gather_into_tensor(torch.empty(2 * world), torch.ones(2))
        except unisono.InvalidCall as error:
            assert text in str(error), error
        else:
            raise AssertionError(f"{numbers} is not refused")
    device.number_of = number_of
    with pretend.on_device():
        dist.all_reduce(tensor)
    equal(tensor, torch.full((10,), float(world * world)))


def case_order_of_streams() -> None:
    """A call sees what its stream was given before, and a stream that waits for it sees the result."""
    assert harness.run(_keeps_order, 2) == [0, 0]


def _keeps_order(rank, world):
    library = ctypes.CDLL(_driver())
    pretend.begin(_driver())
    tensor, copy = torch.zeros(1 << 18), torch.zeros(1 << 18)
    with pretend.on_device():
        dist.all_reduce(tensor)
    native = dist.group.WORLD._on_gpu
    origin = _native.Origin(None, None)
    streams = []
    for _ in range(2):
        stream = ctypes.c_void_p()
        assert library.cuStreamCreateWithPriority(ctypes.byref(stream), 1, 0) == 0
        streams.append(stream.value)
    before, after = streams
    into, at = ctypes.c_uint64(copy.data_ptr()), ctypes.c_uint64(tensor.data_ptr())
    words, length = ctypes.c_size_t(tensor.numel()), ctypes.c_size_t(4 * tensor.numel())
    for step in range(40):
        # The last of these counts, and is done long after the call was made.
        for value in (7.0, 8.0, 9.0, rank + step + 1.0):
            bits = torch.tensor(value).view(torch.int32).item()
            assert library.cuMemsetD32Async(at, ctypes.c_uint(bits), words, ctypes.c_void_p(before)) == 0
        call = _native.Call.reducing(ALL_REDUCE, F32, SUM, tensor.data_ptr(), tensor.data_ptr(), tensor.numel())
        if step % 2:
            native.run(call, origin, 60.0, before)
            used = before
        else:
            work = native.submit(call, origin, tensor.untyped_storage(), before)
            # What comes later on the stream of the call does not keep the call waiting, nor disturb it.
            work.wait(60.0, after)
            used = after
        assert library.cuMemcpyDtoDAsync_v2(into, at, length, ctypes.c_void_p(used)) == 0
        assert library.cuStreamSynchronize(ctypes.c_void_p(used)) == 0
        equal(copy, torch.full_like(copy, world * (step + 1.0) + sum(range(world))))
        if step % 2 == 0:
            assert work.has_landed()
    # A stream that records for a graph, as that driver knows it.
    for asynchronous in (False, True):
        try:
            if asynchronous:
                native.submit(call, origin, None, 2)
            else:
                native.run(call, origin, 60.0, 2)
        except unisono.InvalidCall as error:
            assert "graph" in str(error), error
        else:
            raise AssertionError("recorded")
    native.run(call, origin, 60.0, before)
