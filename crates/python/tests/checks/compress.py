"""Codecs under DDP."""

import torch
import torch.distributed as dist
import unisono.torch
from tools import assert_replicas_equal, equal, on_gloo, raises
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from unisono.torch._gradients.floats import Floats

CODECS = (
    "fp16", "bf16", "int8", "int8:stochastic", "int4", "qsgd:4", "sign", "topk:10%",
    "topk:10%+int8", "randk:20%", "dgc:10%,momentum=0,clip=none", "powersgd:4", "powersgd:4+bf16",
)


def network() -> nn.Module:
    torch.manual_seed(1)
    hidden = nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()
    return nn.Sequential(*hidden, nn.Linear(64, 4))


def train(replica, rank: int, steps: int, first: int = 0) -> float:
    """Learns a function from other samples on every rank; the loss on samples of no rank."""
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.2)
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss_of(replica, 32, 1000 * step + rank).backward()
        optimizer.step()
    with torch.no_grad():
        return loss_of(replica.module, 512, -1).item()


def loss_of(model: nn.Module, samples: int, seed: int) -> torch.Tensor:
    inputs = torch.randn(samples, 16, generator=torch.Generator().manual_seed(seed))
    target = torch.tanh(2 * inputs[:, :4]) + inputs[:, 4:8]
    return nn.functional.mse_loss(model(inputs), target)


def check_compress_none(rank, world):
    plain, replica = (DistributedDataParallel(network()) for _ in range(2))
    compression = unisono.torch.compress(replica, "none")
    equal(torch.tensor(train(replica, rank, 5)), torch.tensor(train(plain, rank, 5)))
    for ours, theirs in zip(replica.parameters(), plain.parameters(), strict=True):
        equal(ours, theirs)
    ratio = compression.wire_ratio()
    # Through shared memory, more than two ranks send a little less than over a network.
    assert compression.steps == 5 and 0.9 < ratio < 1.4, ratio


def check_compress_codecs(rank, world):
    before, steps = train(DistributedDataParallel(network()), rank, 1), 60
    dense = train(DistributedDataParallel(network()), rank, steps)
    assert dense < 0.75 * before, (before, dense)
    for codec in CODECS:
        replica = DistributedDataParallel(network(), bucket_cap_mb=0.01)
        compression = unisono.torch.compress(replica, codec)
        loss = train(replica, rank, steps)
        # What was learned, but for a tenth of it.
        assert loss < dense + 0.1 * (before - dense), (codec, before, dense, loss)
        least = 1.7 if codec == "fp16" or codec == "bf16" else 2.0
        assert compression.wire_ratio() > least, (codec, compression.wire_ratio())
        assert_replicas_equal(replica)


def check_compress_auto(rank, world):
    """A codec, or none, is chosen after some steps, the same on all ranks, and says why."""
    replica = DistributedDataParallel(network())
    compression = unisono.torch.compress(replica)
    train(replica, rank, 4)
    assert compression.choice is None
    train(replica, rank, 8)
    choices = [None] * world
    dist.all_gather_object(choices, compression.choice)
    codecs = [choice and choice[0] for choice in choices]
    assert codecs[0] is not None and codecs == [codecs[0]] * world, choices
    # What it has cost to find out is said with it: it is more than these steps can save.
    observed, more = compression.observing
    assert observed == 8 and more > 0, compression.observing
    told = choices[rank][1]
    assert "8 steps without a codec" in told and f"{more} bytes" in told, told
    assert_replicas_equal(replica)


def check_compress_modes_of_ddp(rank, world):
    for options in (
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"gradient_as_bucket_view": True, "find_unused_parameters": True},
    ):
        replica = DistributedDataParallel(network(), **options)
        compression = unisono.torch.compress(replica, "topk:10%", rules={"*.bias": "fp16"})
        train(replica, rank, 4)
        assert_replicas_equal(replica)
        assert compression.steps == 4


class Branches(nn.Module):
    """Uses one of two layers, or a third that no rank uses."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.ModuleList(nn.Linear(40, 40) for _ in range(3))

    def forward(self, inputs, which):
        return self.layers[which](inputs)


def check_compress_unused_parameters(rank, world):
    replica = DistributedDataParallel(Branches(), find_unused_parameters=True)
    compression = unisono.torch.compress(replica, "topk:5%")
    for _ in range(3):
        replica.zero_grad()
        # Rank 0 uses the first layer, the others use the second.
        replica(torch.ones(2, 40), min(rank, 1)).sum().backward()
    used = [layer.weight.grad is not None for layer in replica.module.layers]
    assert used == [True, True, False], used
    # Every element of the gradient is 2 on one rank; an element is sent with all that is owed.
    sent = set(replica.module.layers[0].weight.grad.unique().tolist())
    assert sent <= {0.0, *(2.0 * steps / world for steps in (1, 2, 3))}, sent
    # What rank 0 owes is of the layer that it used.
    tensors = compression.state_dict()["tensors"]
    if rank == 0:
        names = [f"codec.residual.0.layers.{layer}.weight" for layer in range(3)]
        assert [bool(tensors[name].any()) for name in names] == [True, False, False]


def check_compress_no_sync(rank, world):
    replica = DistributedDataParallel(network())
    compression = unisono.torch.compress(replica, "none")
    inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(rank))
    whole = network()
    halves = [torch.randn(8, 16, generator=torch.Generator().manual_seed(r)) for r in range(world)]
    sum(whole(half).square().mean() for half in halves).div(world).backward()
    with replica.no_sync():
        (replica(inputs[:4]).square().mean() / 2).backward()
    assert compression.steps == 0
    (replica(inputs[4:]).square().mean() / 2).backward()
    assert compression.steps == 1
    for ours, theirs in zip(replica.parameters(), whole.parameters(), strict=True):
        equal(ours.grad, theirs.grad)


def check_compress_resume(rank, world):
    for codec in ("topk:5%", "int8", "powersgd:2"):
        whole = DistributedDataParallel(network())
        unisono.torch.compress(whole, codec)
        train(whole, rank, 8)
        weights = []
        for keeps in (True, False):
            first = DistributedDataParallel(network())
            compression = unisono.torch.compress(first, codec)
            train(first, rank, 4)
            state = compression.state_dict()
            assert bool(state["tensors"]) == (rank == 0)
            second = DistributedDataParallel(network())
            second.load_state_dict(first.state_dict())
            resumed = unisono.torch.compress(second, codec)
            if keeps:
                resumed.load_state_dict(state)
                assert resumed.steps == 4
            train(second, rank, 4, first=4)
            weights.append(nn.utils.parameters_to_vector(second.parameters()))
        expected = nn.utils.parameters_to_vector(whole.parameters())
        assert torch.equal(weights[0], expected), codec
        assert not torch.equal(weights[1], expected), f"{codec} owes nothing"


def check_compress_other_types(rank, world):
    for dtype in (torch.float16, torch.float64):
        replica = DistributedDataParallel(network().to(dtype))
        unisono.torch.compress(replica, "int8")
        replica(torch.full((4, 16), rank + 1.0, dtype=dtype)).sum().backward()
        assert all(p.grad.dtype == dtype and p.grad.isfinite().all() for p in replica.parameters())
        # They travel as 32-bit floats.
        assert all(torch.equal(p.grad, p.grad.float().to(dtype)) for p in replica.parameters())
    floats = torch.arange(3.0)
    [negated] = Floats([torch._neg_view(floats)])._floats
    assert not negated.is_neg() and negated.tolist() == [0.0, -1.0, -2.0]
    assert Floats([floats]).buffers == [(floats.data_ptr(), 3)]
    replica = DistributedDataParallel(nn.Conv2d(8, 16, 3).to(memory_format=torch.channels_last))
    unisono.torch.compress(replica, "none")
    inputs = torch.randn(2, 8, 5, 5, generator=torch.Generator().manual_seed(3))
    replica(inputs * (rank + 1)).sum().backward()
    expected = nn.Conv2d(8, 16, 3)
    expected(inputs * (world + 1) / 2).sum().backward()
    equal(replica.module.weight.grad, expected.weight.grad, rtol=1e-4, atol=1e-4)


def check_compress_mistakes(rank, world):
    replica = DistributedDataParallel(network())
    for codec in ("zip", "topk:200%", ""):
        error = raises(unisono.InvalidCall, unisono.torch.compress, replica, codec)
        assert error.rank == rank, error
    raises(unisono.InvalidCall, unisono.torch.compress, network(), "int8")
    raises(unisono.InvalidCall, unisono.torch.compress, replica, "int8", rules={"*": "zip"})
    # A rule for nothing is a mistake, and most often one of spelling.
    error = raises(ValueError, unisono.torch.compress, replica, "int8", rules={"0.wieght": None})
    assert isinstance(error, unisono.InvalidCall) and "'0.wieght'" in str(error), error
    assert "'0.weight', '0.bias', '2.weight'" in str(error), error
    codec = "int8" if rank == 0 else "int4"
    error = raises(unisono.InvalidCall, unisono.torch.compress, replica, codec)
    assert "rank 1 was given other settings" in str(error), error
    compression = unisono.torch.compress(replica, "int8")
    raises(unisono.InvalidCall, compression.load_state_dict, {"steps": 1, "tensors": {}})
    raises(unisono.InvalidCall, compression.load_state_dict, {"model": 1})
    train(replica, rank, 1)


def check_builtin_hooks(rank, world):
    """The one that cannot work is refused at once, with what to use instead."""
    if on_gloo():
        return
    replica = DistributedDataParallel(network())
    kinds = dist.BuiltinCommHookType
    error = raises(RuntimeError, replica._register_builtin_comm_hook, kinds.FP16_COMPRESS)
    assert 'unisono.torch.compress(model, "fp16")' in str(error), error
    replica._register_builtin_comm_hook(kinds.ALLREDUCE)
    train(replica, rank, 2)
    assert_replicas_equal(replica)
    gloo = dist.new_group(backend="gloo")
    replica = DistributedDataParallel(network(), process_group=gloo)
    replica._register_builtin_comm_hook(kinds.FP16_COMPRESS)
    train(replica, rank, 2)
    assert_replicas_equal(replica)
    del replica
    dist.destroy_process_group(gloo)


def check_compress_on_another_backend(rank, world):
    gloo = dist.new_group(backend="gloo")
    replica = DistributedDataParallel(network(), process_group=gloo)
    compression = unisono.torch.compress(replica, "int4")
    train(replica, rank, 3)
    assert_replicas_equal(replica)
    assert compression.wire_ratio() > 2
    del replica
    # Gloo's groups hang in a child of fork that ends them.
    dist.destroy_process_group(gloo)
