"""Shards of a batch on one group of processes; `jobs/sharded.py` compares several."""

import torch
import unisono.torch
from tools import assert_replicas_equal, equal, raises
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from unisono.torch._gradients.sampler import drawn_from

from checks.compress import network

# From the numbers 3 and 0.
DRAWN = 1378707193901708815


def check_sharded_sampler(rank, world):
    sampler = unisono.torch.ShardedSampler(50, batch_size=16, shards=8, seed=3)
    assert sampler.steps_per_epoch == 3
    # A run that is resumed counts on it, with any version of Python.
    assert drawn_from(3, 0) == DRAWN
    own = list(sampler)
    shards = len(own) // 3
    assert len(sampler) == len(own) and all(len(part) == 2 for part in own)
    expected = [sampler.indices(step, shard) for step in range(3) for shard in range(8)]
    flat = [index for part in expected for index in part]
    assert len(set(flat)) == 48 and set(flat) <= set(range(50))
    first = sum(8 // world + (r < 8 % world) for r in range(rank))
    assert own == [expected[8 * s + first + i] for s in range(3) for i in range(shards)]
    steps = list(sampler.steps(sampler))
    assert [part for step in steps for part in step] == own and sampler.epoch == 1
    assert list(sampler) != own, "every epoch is shuffled anew"
    sampler.set_epoch(0, step=2)
    assert list(sampler) == own[2 * shards :] and len(sampler) == shards
    raises(unisono.InvalidCall, list, sampler.steps(own[: shards + 1]))
    for samples, batch, shards in ((50, 15, 8), (10, 16, 8), (50, world - 1, world - 1)):
        raises(unisono.InvalidCall, unisono.torch.ShardedSampler, samples, batch, shards)


def check_sharded_step(rank, world):
    """The gradient is that of the whole batch, and parts can be clipped before the step."""
    batch = torch.randn(16, 16, generator=torch.Generator().manual_seed(8))
    whole, model = network(), network()
    expected = whole(batch).square().mean()
    expected.backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    step = unisono.torch.ShardedStep(model, optimizer, shards=8)
    shards = [batch[2 * shard : 2 * shard + 2] for shard in step.shards]
    mean = step.gradients(shards, lambda part: model(part).square().mean())
    equal(torch.tensor(mean), expected.detach())
    for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        equal(ours.grad, theirs.grad)
    before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    moved = nn.utils.parameters_to_vector(model.parameters()) - before
    assert moved.norm() <= 0.1001 and step.steps == 1
    # Outside of a step, gradients are the caller's.
    optimizer.zero_grad()
    model(batch).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    step(shards, lambda part: model(part).square().mean())
    assert_replicas_equal(model)
    assert step.steps == 2 and (world == 1 or step.sent_bytes > 0)


def check_sharded_begins_equal(rank, world):
    """Frozen parameters and buffers become rank 0's too; what is thawed later is refused."""
    model = network()
    model[2].requires_grad_(False)
    model.register_buffer("scale", torch.full((2, 3), float(rank)))
    model.register_buffer("count", torch.tensor(rank))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += rank
    step = unisono.torch.ShardedStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert_replicas_equal(model)
    assert model.scale.tolist() == [[0.0] * 3] * 2 and model.count.item() == 0
    batches = [torch.ones(2, 16)] * len(step.shards)
    step(batches, lambda part: model(part).square().mean())
    assert model[2].weight.grad is None
    assert_replicas_equal(model)
    model[2].requires_grad_(True)
    error = raises(unisono.InvalidCall, step, batches, lambda part: model(part).square().mean())
    assert "2.weight was frozen" in str(error), error


def check_sharded_doubles(rank, world):
    """Gradients in float64 are rounded on their way, and the weights keep their digits."""
    model = network().double()
    with torch.no_grad():
        model[0].weight += 1e-12  # More digits than 32 bits have.
    before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = unisono.torch.ShardedStep(model, optimizer)
    batches = [torch.ones(2, 16, dtype=torch.float64)] * len(step.shards)
    step.gradients(batches, lambda part: model(part).square().mean())
    for parameter in model.parameters():
        assert parameter.grad.dtype == torch.float64
        assert torch.equal(parameter.grad, parameter.grad.float().double())
    now = nn.utils.parameters_to_vector(model.parameters())
    assert torch.equal(now, before), "the weights were rounded"
    assert_replicas_equal(model)


def check_sharded_mistakes(rank, world):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = unisono.torch.ShardedStep
    raises(unisono.InvalidCall, step, model, optimizer, world - 1)
    raises(unisono.InvalidCall, step, model, optimizer, codec="auto")
    raises(unisono.InvalidCall, step, model, optimizer, codec="zip")
    raises(unisono.InvalidCall, step, DistributedDataParallel(model), optimizer)
    raises(unisono.InvalidCall, step, model, optimizer, shards=8 + rank)
    step = step(model, optimizer)
    raises(unisono.InvalidCall, step, [torch.ones(1, 16)] * 9, model)
    raises(unisono.InvalidCall, step.load_state_dict, {"steps": 1})


def check_ddp_after_sharded_step(rank, world):
    model = network()
    step = unisono.torch.ShardedStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
    replica = DistributedDataParallel(model)
    error = raises(unisono.InvalidCall, step, [torch.ones(1, 16)] * len(step.shards), replica)
    assert "do not wrap the model" in str(error), error


def check_synchronizer_refuses(rank, world):
    """What the library would panic about, or wait for, is refused."""
    step = unisono.torch.ShardedStep(nn.Linear(3, 2), None)
    native, numbers = step._native, torch.ones(6)
    address = numbers.data_ptr()

    def refused(text, call, *arguments):
        error = raises(unisono.InvalidCall, call, *arguments)
        assert text in str(error) and error.rank == rank, error

    refused("after its backward", native.end_shard)
    refused("begins once", native.begin_backward, 0.0)
    refused("after all shards", native.finish, [(address, 6), (address, 2)], 9.0)
    native.begin_shard()
    refused("not ended", native.begin_shard)
    refused("outside", native.gradient, 0, address, 6)
    native.begin_backward(1.0)
    refused("begins once", native.begin_backward, 1.0)
    refused("2 parameters", native.gradient, 2, address, 6)
    refused("which has 6", native.gradient, 0, address, 5)
    refused("not one of 32-bit", native.gradient, 0, address + 1, 6)
    native.gradient(0, address, 6)
    refused("a second gradient", native.gradient, 0, address, 6)
    refused("after all shards", native.finish, [(address, 6), (address, 2)], 9.0)
    refused("between two steps", native.save, 9.0)
    native.end_shard()
    for _ in step.shards[1:]:
        native.begin_shard()
        native.begin_backward(2.0)
        native.end_shard()
    refused("finish it", native.begin_shard)
    refused("1 buffers", native.finish, [(address, 6)], 9.0)
    bias = torch.full((2,), 9.0)
    loss, used, _ = native.finish([(address, 6), (bias.data_ptr(), 2)], 9.0)
    equal(numbers, torch.full((6,), world / 8))
    assert used == [0] and loss == (8 * 2 - world) / 8 and bias.tolist() == [9.0, 9.0]
    native.close(9.0)
    raises(unisono.Error, native.begin_shard)
