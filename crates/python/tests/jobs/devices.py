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
from late_device import late_device
from tools import equal, raises
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import unisono
import unisono.torch
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


def case_pretended_compress() -> None:
    """Gradients of DDP that are encoded on the device, against the same that are encoded by the host."""
    _driver()
    for world in (2, 3):
        assert harness.run(_compresses_on_device, world) == [0] * world


class Given(nn.Module):
    """A model whose gradients are what its batch says; one of its parameters is used by some ranks in some steps."""

    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(5)
        shapes = ((40, 70), (70,), (64, 33), (0, 5), (9, 999))
        self.weights = nn.ParameterList(torch.randn(shape).to(dtype) for shape in shapes)

    def forward(self, step: int, rank: int, some: bool) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * step + rank)
        total = torch.zeros(())
        for number, weights in enumerate(self.weights):
            given = torch.randn(weights.shape, generator=generator) * (1 + number + step % 3)
            if not (some and number == 2 and (step % 3 == 1 or (step % 3 == 2 and rank > 0))):
                total = total + (weights * given.to(weights.dtype)).sum().float()
        return total


def _given(rank, codec, steps, dtype=torch.float32, some=False, state=None, **settings):
    """The gradients of the last step, and what is remembered then."""
    model = Given(dtype)
    options = {"find_unused_parameters": True} if some else {}
    replica = DistributedDataParallel(model, bucket_cap_mb=0.01, broadcast_buffers=False, **options)
    compression = unisono.torch.compress(replica, codec, seed=3, **settings)
    first = 0
    if state is not None:
        compression.load_state_dict(state)
        first = state["steps"]
    for step in range(first, steps):
        replica.zero_grad()
        replica(step, rank, some).backward()
    assert compression.steps == steps
    gradients = [weights.grad for weights in model.weights]
    return [torch.empty(0) if one is None else one for one in gradients], compression


def _compresses_on_device(rank, world):
    library = _driver()
    for codec, settings in (
        ("none", {}),
        ("fp16", {}),
        ("int8", {"warm_up": 1}),
        ("qsgd:4", {"rules": {"weights.0": "sign", "weights.4": None}}),
        ("topk:5%", {"error_feedback": False}),
        ("topk:5%+int8", {}),
        ("randk:10%+bf16", {}),
        ("powersgd:2", {}),
    ):
        for dtype, some in ((torch.float32, False), (torch.bfloat16, True)):
            about = codec, dtype, some
            here, host = _given(rank, codec, 4, dtype, some, **settings)
            saved = host.state_dict()
            with pretend.models_on_device(library):
                there, encoded = _given(rank, codec, 4, dtype, some, **settings)
                assert isinstance(encoded._native, _native.DeviceExchange), about
                own = encoded.state_dict()
                _same(here, there, about)
                assert own["steps"] == 4 and own["tensors"].keys() == saved["tensors"].keys(), about
                for name, tensor in saved["tensors"].items():
                    _same([tensor], [own["tensors"][name]], (*about, name))
                # From what the host has saved, and the other way round.
                there, _ = _given(rank, codec, 6, dtype, some, state=saved, **settings)
            here, _ = _given(rank, codec, 6, dtype, some, state=own, **settings)
            _same(here, there, about)
            if world > 1 and codec == "int8":
                assert encoded.wire_ratio() > 1.5 and host.wire_ratio() > 1.5, about
    with pretend.models_on_device(library):
        for codec in ("dgc:5%", "auto"):
            # Whose way is through the host, which the pretended device has not.
            try:
                _given(rank, codec, 1)
            except AttributeError as error:
                assert "pinned" in str(error) or "stream" in str(error), error
            else:
                raise AssertionError(f"{codec} on the device")


def _same(here, there, about) -> None:
    for number, (one, other) in enumerate(zip(here, there, strict=True)):
        assert one.dtype == other.dtype and one.shape == other.shape, (about, number)
        assert torch.equal(one.flatten().view(torch.uint8), other.flatten().view(torch.uint8)), (
            about, number, (one.float() - other.float()).abs().max(),
        )  # fmt: skip


def case_pretended_compress_loses_a_rank() -> None:
    """Where a rank leaves in the middle of a run, the others' backward raises, and names it."""
    _driver()
    assert harness.run(_loses_a_rank, 3) == [0, 0, 0]


def _loses_a_rank(rank, world):
    model = Given(torch.float32)
    replica = DistributedDataParallel(model, bucket_cap_mb=0.01, broadcast_buffers=False)
    with pretend.models_on_device(_driver()):
        compression = unisono.torch.compress(replica, "int8")
        # In the second step DDP arranges its buckets anew, which takes calls of its own group.
        for step in range(2):
            replica(step, rank, False).backward()
        if rank == 1:
            os._exit(0)
        try:
            for step in range(2, 20):
                replica(step, rank, False).backward()
        except unisono.Error as error:
            assert "rank 1" in str(error), error
        else:
            raise AssertionError("went on without rank 1")
        del compression
    os._exit(0)  # DDP's own group has lost a rank too.


def case_pretended_sharded() -> None:
    """Sums of shards that are exchanged on the device, against the same through the host."""
    _driver()
    for world in (1, 2, 3, 4):
        assert harness.run(_shares_on_device, world) == [0] * world


class Changing(nn.Module):
    """A model whose gradients and losses are what its batch says, with a buffer that most batches change, one that none
    does, and a parameter that some batches use, one that none does, and one that few do not, whose gradient is −0."""

    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(5)
        shapes = ((40, 70), (70,), (64, 33), (0, 5), (9, 999), (3, 3), (5,))
        self.weights = nn.ParameterList(torch.randn(shape).to(dtype) for shape in shapes)
        self.register_buffer("mean", torch.zeros(7, dtype=dtype))
        self.register_buffer("mask", torch.full((2, 2), -torch.inf))
        self.register_buffer("number", torch.zeros((), dtype=torch.int64))

    def forward(self, batch: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(batch)
        total = torch.zeros(())
        for number, weights in enumerate(self.weights):
            given = torch.randn(weights.shape, generator=generator) * 3.0 ** (batch % 9)
            given = torch.full(weights.shape, -0.0) if number == 6 else given
            if number != 5 and not (number == 2 and batch % 5 > 1) and not (number == 6 and batch % 20 == 4):
                total = total + (weights * given.to(weights.dtype)).sum().float()
        if batch % 3:
            with torch.no_grad():
                self.mean.add_(torch.randn(7, generator=generator).to(self.mean.dtype))
        # Not of 32 bits where the weights are not: a loss is rounded, too.
        return total.double() if batch % 2 else total


def _shared(shards, dtype, buckets, steps, group=None, state=None, expected=None):
    """Gradients, buffers and losses of every step, and what is saved then; by the expected way, if there is one."""
    model = Changing(dtype)
    step = unisono.torch.ShardedStep(model, None, shards, buckets=buckets, group=group)
    if expected is not None:
        assert (step.engine is not None) == expected, step.engine
    if state is not None:
        step.load_state_dict(state)
    found = []
    for number in range(step.steps, steps):
        loss = step.gradients([20 * number + shard for shard in step.shards], model)
        gradients = [weights.grad for weights in model.weights]
        assert gradients[5] is None
        found += [torch.empty(0) if one is None else one.clone() for one in gradients]
        found += [model.mean.clone(), model.mask.clone(), torch.tensor(loss)]
    assert step.steps == steps
    saved = step.state_dict()
    step.close()
    return found, saved


def _shares_on_device(rank, world):
    library = _driver()
    some = (3000, 20_000)
    cases = [(shards, torch.float32, some) for shards in (1, 5, 8, 9) if shards >= world]
    cases += [(8, torch.float32, None), (8, torch.float32, (1, 1)), (8, torch.bfloat16, some), (8, torch.float64, some)]
    for case in cases:
        here, saved = _shared(*case, 3, expected=False)
        with pretend.models_on_device(library):
            there, own = _shared(*case, 3, expected=True)
        _same(here, there, case)
        assert own == saved == {"steps": 3, "tensors": {}}, (own, saved)
    # From what the host has saved, and the other way round.
    with pretend.models_on_device(library):
        there, _ = _shared(8, torch.float32, some, 5, state=saved, expected=True)
    here, _ = _shared(8, torch.float32, some, 5, state=own, expected=False)
    _same(here, there, "resumed")


def case_pretended_sharded_goes_through_the_host() -> None:
    """With a codec, where a rank has no driver, and where one has its model elsewhere, all take the host's way."""
    _driver()
    assert harness.run(_shares_through_the_host, 3) == [0, 0, 0]


def _shares_through_the_host(rank, world):
    here, _ = _shared(8, torch.float32, None, 2)
    with late_device() as late:
        late.number = lambda: 0
        os.environ["UNISONO_CUDA_DRIVER"] = "/nowhere/libcuda.so.1" if rank == 1 else _driver()
        there, _ = _shared(8, torch.float32, None, 2, expected=False)
        _same(here, there, "no driver")
        os.environ["UNISONO_CUDA_DRIVER"] = _driver()
        late.number = lambda: None if rank == 1 else 0
        there, _ = _shared(8, torch.float32, None, 2, expected=False)
        _same(here, there, "a model elsewhere")
        late.number = lambda: 0
        step = unisono.torch.ShardedStep(Changing(torch.float32), None, 8, codec="int8")
        assert step.engine is None
        step.close()


def case_pretended_sharded_fails() -> None:
    """A loss that raises is raised, and the step cannot be finished; models that differ and a rank that leaves are named."""
    _driver()
    assert harness.run(_shares_and_fails, 3) == [0, 0, 0]


def _shares_and_fails(rank, world):
    with pretend.models_on_device(_driver()):
        model = nn.Linear(3, 4 + (rank == 1))
        error = raises(unisono.Error, unisono.torch.ShardedStep, model, None, 8)
        assert "rank 1" in str(error), error
        model = Changing(torch.float32)
        step = unisono.torch.ShardedStep(model, None, 8)

        def loss(batch):
            raise ValueError("of the program")

        raises(ValueError, step.gradients, step.shards, loss)
        error = raises(unisono.InvalidCall, step.gradients, step.shards, model)
        assert "not finished" in str(error), error
        dist.barrier()
        step.close()
        raises(unisono.Error, step.gradients, step.shards, model)
        step = unisono.torch.ShardedStep(model, None, 8)
        step.gradients(step.shards, model)
        if rank == 1:
            os._exit(0)
        try:
            for _ in range(20):
                step.gradients(step.shards, model)
        except unisono.Error as error:
            assert "rank 1" in str(error), error
        else:
            raise AssertionError("went on without rank 1")
    os._exit(0)


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
