#!/usr/bin/env python3
"""Training of CUDA models, on a machine with a GPU, which the other checks do not need.

    torchrun --standalone --nproc-per-node 4 gpu_training.py [--backend gloo] [NAME…]

All processes share the GPU if there is one only.  Prints a line for every check, `ok` or `FAIL`; with NAMEs, only of
those whose names contain one.  Gradients are prescribed, so that they have the same bits on a CPU and on the GPU; what
comes of them must have the same bits too.  `--backend` is that of the group that DDP has: the synchronization that is
tested here forms its own.
"""

import argparse
import hashlib
import json
import os
import sys
import tempfile
import time
import traceback
import warnings

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
import torch.distributed as dist
import unisono.torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from unisono import _native
from unisono.torch._gradients import device as staging

# With one that is larger than a chunk, one without elements, and odd lengths.
SHAPES = ((700, 2000), (3,), (64, 33), (0, 5), (1,), (1025, 17), (129,))


class Given(nn.Module):
    """A model whose gradients are what its batch says, whatever the weights are: the derivative of a sum of products."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        numbers = (torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES)
        self.weights = nn.ParameterList(map(nn.Parameter, numbers))
        self.register_buffer("mean", torch.zeros(7))
        self.register_buffer("mask", torch.full((3,), -torch.inf))

    def forward(self, seed: int, leave_out: int = -1) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        total = torch.zeros((), device=self.mean.device)
        for number, weights in enumerate(self.weights):
            given = torch.randn(weights.shape, generator=generator).to(weights.dtype)
            if number != leave_out and (number != 2 or seed % 3 == 0):
                total = total + (weights * given.to(weights.device)).sum().float()
        with torch.no_grad():
            self.mean.add_(torch.randn(7, generator=generator).to(self.mean.device))
        return total

    def results(self, gradients: bool) -> list[torch.Tensor]:
        chosen = [weights.grad if gradients else weights.detach() for weights in self.weights]
        return [torch.empty(0) if one is None else one.cpu() for one in [*chosen, self.mean]]


def check_staging(rank, world, gpu):
    """Large and small tensors go there and back, while the GPU is busy, and memory that is dropped is not reused."""
    way = staging.Staging(staging.Cuda(gpu), chunk=1 << 16)
    busy = torch.randn(4096, 4096, device=gpu)
    sent, delivered = [], []
    for number in range(40):
        length = (number * 7919) % 300_000
        delivered.append(torch.zeros(length))
        sent.append(torch.randn(length, generator=torch.Generator().manual_seed(number)))
        busy = busy @ busy * 1e-3
        numbers = sent[-1].to(gpu) + 0 * busy[0, 0]
        way.send(numbers, lambda at, address, count, into=delivered[-1]: staging.ctypes.memmove(
            into.data_ptr() + 4 * at, address, 4 * count))
        del numbers
        torch.full((length,), -1.0, device=gpu)  # Takes the memory if it is free.
    way.drain()
    assert all(map(torch.equal, sent, delivered))
    back = [torch.empty(len(one), device=gpu) for one in sent]
    half = torch.empty(1000, device=gpu, dtype=torch.bfloat16)
    with way.returning() as returning:
        for target, one in zip([*back, half], [*sent, sent[1][:1000]], strict=True):
            returning.put(target, one.data_ptr(), one.numel())
    assert all(torch.equal(target.cpu(), one) for target, one in zip(back, sent, strict=True))
    assert torch.equal(half.cpu(), sent[1][:1000].bfloat16())


def check_sharded_bits(rank, world, gpu):
    """The means have the bits of a CPU's."""
    for codec in (None, "int8", "topk:10%", "powersgd:2"):
        for dtype in (torch.float32, torch.bfloat16):
            outcomes = []
            for place in (torch.device("cpu"), gpu):
                model = Given(dtype).to(place)
                step = unisono.torch.ShardedStep(model, None, 8, codec=codec, buckets=(1000, 100_000))
                assert (step.engine is not None) == (place == gpu and codec is None), (place, codec, step.engine)
                for number in range(3):
                    step.gradients([100 * number + shard for shard in step.shards], model)
                outcomes.append(model.results(gradients=True))
                step.close()
            expect_equal(*outcomes, f"{codec} {dtype}")


def check_sharded_worlds(rank, world, gpu):
    """A model of the GPU's own arithmetic has the same weights on 1 to all processes, whatever the buckets."""
    hashes = {}
    for size in range(1, world + 1):
        group = dist.new_group(list(range(size)))
        for buckets in ((1, 1), (1 << 16, 1 << 20), (1 << 30, 1 << 30)):
            if rank < size:
                hashes[size, buckets] = trained(group, buckets, gpu)
    assert len(set(hashes.values())) == 1, hashes
    if rank == 0:
        print(f"     weights {next(iter(hashes.values()))[:12]}", flush=True)
    first = torch.tensor([int(next(iter(hashes.values())), 16) & (2**62 - 1)])
    every = [torch.empty_like(first) for _ in range(world)]
    dist.all_gather(every, first)
    assert len({one.item() for one in every}) == 1, every


class ThroughTheHost(unisono.torch.ShardedStep):
    """Whose gradients take the way of those with a codec."""

    _stays_on_device = False


def check_sharded_ways(rank, world, gpu):
    """Gradients that stay on the device give the weights of those that go through the host, evenly shared or not."""
    for shards in (world, 8, 9, 13):
        for buckets in (None, (1 << 16, 1 << 18)):
            ways = [trained(None, buckets, gpu, shards, kind) for kind in (unisono.torch.ShardedStep, ThroughTheHost)]
            assert ways[0] == ways[1], (shards, buckets, ways)


def check_sharded_order(rank, world, gpu):
    """Means are those of what the program's stream computes late, and its stream sees them, whatever it does meanwhile."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(6))).to(gpu)
    outcomes = []
    for kind in (unisono.torch.ShardedStep, ThroughTheHost):
        step = kind(model, None, 8, buckets=(1 << 22, 1 << 23))
        own = []
        for number in range(10):
            # Of a stream that no other step uses, and that is far behind.
            stream = torch.cuda.Stream(gpu)
            stream.wait_stream(torch.cuda.current_stream(gpu))
            with torch.cuda.stream(stream):
                def loss(shard):
                    inputs = torch.randn(512, 1024, generator=torch.Generator().manual_seed(100 * number + shard))
                    return model(inputs.to(gpu)).square().mean()

                step.gradients(step.shards, loss)
                sums = torch.stack([layer.weight.grad.sum() for layer in model])
                junk = torch.full((1 << 22,), torch.nan, device=gpu)  # Takes memory that was freed too early.
                del junk
            torch.cuda.current_stream(gpu).wait_stream(stream)
            own.append(sums.cpu())
        outcomes.append(own)
        step.close()
    expect_equal(*outcomes, "order")


def trained(group, buckets, gpu, shards=8, kind=unisono.torch.ShardedStep) -> str:
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(),
        nn.Linear(16 * 36, 256), nn.Dropout(0.2), nn.GELU(), nn.Linear(256, 10),
    ).to(gpu)  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = kind(model, optimizer, shards, buckets=buckets, group=group)
    assert (step.engine is not None) == (kind is unisono.torch.ShardedStep), step.engine

    def loss(seed):
        generator = torch.Generator().manual_seed(seed)
        inputs = torch.randn(16, 3, 8, 8, generator=generator)
        return nn.functional.cross_entropy(model(inputs.to(gpu)), (inputs.sum((1, 2, 3)) > 0).long().to(gpu))

    for number in range(5):
        step([100 * number + shard for shard in step.shards], loss)
    step.close()
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.cpu().numpy().tobytes())
    return digest.hexdigest()


# Every passage, with settings of each kind; the last ones go through the host.
CODECS = (
    ("none", {}), ("fp16", {}), ("bf16", {}), ("int8", {}), ("int8:stochastic", {"warm_up": 1}), ("int4", {}),
    ("qsgd:4", {"rules": {"weights.0": "sign"}}), ("sign", {}), ("topk:10%", {}), ("topk:10%+int8", {"error_feedback": False}),
    ("randk:10%", {}), ("randk:10%+bf16", {}), ("powersgd:2", {}), ("powersgd:4+fp16", {}), ("dgc:5%", {}),
)  # fmt: skip


def check_compress(rank, world, gpu):
    """DDP's gradients by codecs have the bits of a CPU's, and so has what codecs owe."""
    cases = [(*case, torch.float32, {}) for case in CODECS]
    for codec in ("none", "int8", "topk:10%", "powersgd:2"):
        for options in ({"find_unused_parameters": True}, {"gradient_as_bucket_view": True}):
            cases += [(codec, {}, torch.float32, options), (codec, {}, torch.bfloat16, options)]
    for codec, settings, dtype, options in cases:
        # Beyond the next measurement of the usual size, once.
        steps = 18 if codec in ("int8", "sign") and not options else 3
        about = codec, settings, dtype, options
        outcomes, saved = [], []
        for place in (torch.device("cpu"), gpu):
            model, compression = compressed(rank, place, codec, settings, dtype, options, steps)
            if place == gpu:
                kind = _native.Synchronizer if codec.startswith("dgc") else _native.DeviceExchange
                assert isinstance(compression._native, kind), (about, compression._native)
            outcomes.append(model.results(gradients=True)[:-1])
            saved.append(compression.state_dict())
            compression._close(60.0)
        expect_equal(*outcomes, about)
        assert saved[0]["tensors"].keys() == saved[1]["tensors"].keys(), about
        expect_equal(*(list(one["tensors"].values()) for one in saved), (*about, "saved"))


def check_compress_goes_on(rank, world, gpu):
    """What was saved on a CPU goes on on the GPU, and the other way round."""
    for codec in ("int8", "topk:10%", "randk:10%", "powersgd:2"):
        outcomes = []
        for first, then in ((torch.device("cpu"), gpu), (gpu, torch.device("cpu"))):
            _, compression = compressed(rank, first, codec, {}, torch.float32, {}, 3)
            state = compression.state_dict()
            compression._close(60.0)
            model, compression = compressed(rank, then, codec, {}, torch.float32, {}, 6, state)
            outcomes.append(model.results(gradients=True)[:-1])
            compression._close(60.0)
        expect_equal(*outcomes, codec)


def check_compress_order(rank, world, gpu):
    """Means are those of what the program's stream computes late, and its stream sees them, whatever it does meanwhile."""
    torch.manual_seed(0)
    outcomes = []
    for codec in ("none", "int8"):
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(6))).to(gpu)
        with torch.no_grad():
            for number, layer in enumerate(model):
                torch.manual_seed(number)
                layer.weight.copy_(torch.randn(1024, 1024) / 32)
        replica = DistributedDataParallel(model, bucket_cap_mb=5)
        compression = unisono.torch.compress(replica, codec)
        inputs = torch.randn(512, 1024, generator=torch.Generator().manual_seed(rank)).to(gpu)
        for _ in range(10):
            replica.zero_grad()
            replica(inputs).square().mean().backward()
            sums = torch.stack([layer.weight.grad.sum() for layer in model])
            junk = torch.full((1 << 22,), torch.nan, device=gpu)  # Takes memory that was freed too early.
            del junk
        every = [None] * world
        dist.all_gather_object(every, sums.tolist())
        assert every == [every[0]] * world, every
        outcomes.append(torch.tensor(every[0]))
        compression._close(60.0)
    assert (outcomes[0] - outcomes[1]).abs().max() < 0.1 * outcomes[0].abs().max() + 1.0, outcomes


def compressed(rank, place, codec, settings, dtype, options, steps, state=None):
    """A model after so many steps, and what has compressed its gradients."""
    model = Given(dtype).to(place)
    replica = DistributedDataParallel(model, bucket_cap_mb=0.5, broadcast_buffers=False, **options)
    compression = unisono.torch.compress(replica, codec, seed=3, **settings)
    first = 0
    if state is not None:
        compression.load_state_dict(state)
        first = state["steps"]
    for number in range(first, steps):
        replica.zero_grad()
        # Number 2 is used by all ranks or none, which is what is wanted without the option.
        replica(300 * number + 3 * rank, 4 if options.get("find_unused_parameters") else -1).backward()
    assert compression.steps == steps
    return model, compression


def check_local(rank, world, gpu):
    """Agreed weights have the bits of a CPU's."""
    def sgd(inner):
        return unisono.torch.LocalSGD(inner, 2)

    def diloco(inner):
        return unisono.torch.DiLoCo(inner, 4, fragments=2, codec="int8")

    for wrap in (sgd, diloco):
        for dtype in (torch.float32, torch.bfloat16):
            outcomes = []
            for place in (torch.device("cpu"), gpu):
                model = Given(dtype).to(place)
                # A learning rate of 1: no product is rounded, so a CPU and a GPU step alike.
                optimizer = wrap(torch.optim.SGD(model.parameters(), lr=1.0, foreach=False))
                for number in range(9):
                    optimizer.zero_grad()
                    model(100 * number + rank).backward()
                    optimizer.step()
                optimizer.settle()
                outcomes.append(model.results(gradients=False)[:-1])
            expect_equal(*outcomes, f"{wrap.__name__} {dtype}")


def check_server(rank, world, gpu):
    """In lock-step, pulled weights have the bits of a CPU's."""
    outcomes = []
    for place in (torch.device("cpu"), gpu):
        model = Given().to(place)
        with unisono.torch.ParameterServer(model, "momentum:lr=0.05", "bsp") as server:
            for number in range(4):
                model(300 * number + 3 * rank).backward()
                server.step()
        outcomes.append(model.results(gradients=False)[:-1])
    expect_equal(*outcomes, "bsp")


def check_profile(rank, world, gpu):
    """The report has what the device did: it computes most of a step whose kernels are long."""
    # On the device, and by way of the host.
    profiled(rank, gpu, "none", False)
    profiled(rank, gpu, "dgc:10%,momentum=0,clip=none", True)


def profiled(rank, gpu, codec, copies):
    torch.manual_seed(0)
    width, batch = 2048, 4096
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(8))).to(gpu)
    replica = DistributedDataParallel(model)
    unisono.torch.compress(replica, codec)
    optimizer = torch.optim.SGD(replica.parameters(), lr=1e-3)
    inputs = torch.randn(batch, width, device=gpu)
    with tempfile.TemporaryDirectory() as folder:
        name = [os.path.join(folder, "run") if rank == 0 else None]
        dist.broadcast_object_list(name, 0)
        with unisono.torch.profile(name[0]) as profile:
            for _ in range(12):
                optimizer.zero_grad()
                replica(inputs).square().mean().backward()
                optimizer.step()
            torch.cuda.synchronize()
        if rank == 0:
            with open(os.path.join(name[0], "steps.jsonl")) as file:
                steps = [json.loads(line) for line in file]
            print(f"     {profile.verdict}", flush=True)
            for step in steps[4:6]:
                told = {key: round(1e3 * value, 2) for key, value in step["ranks"][0].items()
                        if key in ("compute", "backward")}
                own = step["ranks"][0]
                told["step"] = round(1e3 * (own["end"] - own["begin"]), 2)
                told["exposed"] = round(1e3 * (own["reduced"] - own["computed"]), 2)
                device = own.get("device") or {}
                told["device"] = {name: round(1e3 * seconds, 2) for name, seconds in device.items()}
                print(f"     step {step['step']} of rank 0, ms: {told}", flush=True)
            assert len(steps) == 12, len(steps)
            for step in steps[2:]:
                for own in step["ranks"]:
                    whole = own["end"] - own["begin"]
                    assert 0 < own["compute"] <= whole, own
                    assert own["begin"] <= own["computed"] <= own["reduced"] <= own["end"] + 1e-9, own
                    assert own["buckets"], own
                    assert own["device"] and own["device"]["communication"] > 0, own
                    assert own["device"]["copies"] > 0 or not copies, own
                    busy = own["device"]["compute"] + own["device"]["exposed"] + own["device"]["idle"]
                    assert abs(busy - whole) < 0.02 * whole + 1e-4, own
        dist.barrier()


def expect_equal(here, there, about) -> None:
    for number, (one, other) in enumerate(zip(here, there, strict=True)):
        assert one.dtype == other.dtype and one.shape == other.shape, (about, number)
        assert torch.equal(bits(one), bits(other)), (about, number, (one.float() - other.float()).abs().max())


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else tensor


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("names", nargs="*", metavar="NAME")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    gpu = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(gpu)
    dist.init_process_group(arguments.backend)
    rank, world = dist.get_rank(), dist.get_world_size()
    checks = {name[6:]: check for name, check in globals().items() if name.startswith("check_")}
    chosen = [n for n in checks if not arguments.names or any(word in n for word in arguments.names)]
    for name in chosen:
        begin = time.monotonic()
        try:
            checks[name](rank, world, gpu)
        except BaseException:
            traceback.print_exc()
            print(f"FAIL {name} on rank {rank} of {world}", flush=True)
            # The others may wait for this rank: the launcher ends them.
            os._exit(1)
        if rank == 0:
            print(f"ok   {name} on {world} processes, {time.monotonic() - begin:.1f} s", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 0 if chosen else 1


if __name__ == "__main__":
    sys.exit(main())
