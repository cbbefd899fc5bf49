"""Local steps and accumulation."""

import copy

import torch
import torch.distributed as dist
import unisono.torch
from tools import assert_replicas_equal, equal, raises
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from checks.compress import loss_of, network


def steps(model, optimizer, rank: int, count: int, first: int = 0) -> float:
    """Local steps on samples of this rank; the loss on samples of no rank."""
    for step in range(first, first + count):
        optimizer.zero_grad()
        loss_of(model, 32, 1000 * step + rank).backward()
        optimizer.step()
    with torch.no_grad():
        return loss_of(model, 512, -1).item()


def are_equal(model) -> bool:
    """Whether all ranks have the same weights; the same answer on all."""
    weights = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    all_weights = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(all_weights, weights)
    return all(torch.equal(all_weights[0], others) for others in all_weights)


def check_local_sgd_of_every_step(rank, world):
    synchronous = DistributedDataParallel(network())
    steps(synchronous, torch.optim.SGD(synchronous.parameters(), lr=0.1), rank, 6)
    model = network()
    steps(model, unisono.torch.LocalSGD(torch.optim.SGD(model.parameters(), lr=0.1), 1), rank, 6)
    for ours, theirs in zip(model.parameters(), synchronous.parameters(), strict=True):
        equal(ours, theirs)
    assert_replicas_equal(model)


def check_local_sgd_periods(rank, world):
    model = network()
    if rank:  # Weights become rank 0's.
        nn.init.zeros_(model[0].weight)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = unisono.torch.LocalSGD(inner, every=2, longest=3)
    assert_replicas_equal(model)
    agreed = []
    for step in range(9):
        steps(model, optimizer, rank, 1, step)
        agreed.append(are_equal(model))
    assert agreed == [False, True, False, False, True, False, False, True, False], agreed
    optimizer.settle()
    assert_replicas_equal(model)
    # A scheduler takes it for the optimizer that it is.
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    steps(model, optimizer, rank, 1)
    scheduler.step()
    assert inner.param_groups[0]["lr"] == 0.05 and optimizer.steps == 10


def check_diloco_learns(rank, world):
    before = loss_of(network(), 512, -1).item()
    sent = {}
    for name, options in {
        "plain": {},
        "int8": {"codec": "int8"},
        "fragments": {"fragments": 3},
        "delayed": {"fragments": 2, "delay": 2, "codec": "topk:25%"},
    }.items():
        model = network()
        inner = torch.optim.AdamW(model.parameters(), lr=5e-3)
        optimizer = unisono.torch.DiLoCo(inner, every=6, outer_momentum=0.5, **options)
        loss = steps(model, optimizer, rank, 48)
        sent[name] = optimizer.sent_bytes
        optimizer.settle()
        assert_replicas_equal(model)
        assert loss < 0.35 * before, (name, before, loss)
    gradients = 48 * 4 * sum(parameter.numel() for parameter in model.parameters())
    assert sent["plain"] < gradients / 3, (sent, gradients)
    assert sent["plain"] > 2.5 * sent["int8"], sent
    assert sent["fragments"] < 1.1 * sent["plain"], sent


def check_local_steps_resume(rank, world):
    """At every step, whether the model is loaded before or after: the weights of the whole run."""
    length = 6

    def local_sgd(model):
        inner = torch.optim.AdamW(model.parameters(), lr=5e-3)
        return unisono.torch.LocalSGD(inner, every=2, longest=3, codec="int8")

    def diloco(fragments, delay):
        def begin(model):
            inner = torch.optim.AdamW(model.parameters(), lr=5e-3)
            return unisono.torch.DiLoCo(
                inner, every=4, fragments=fragments, delay=delay, codec="int8"
            )

        return begin

    for begin in (local_sgd, diloco(1, 0), diloco(2, 1)):
        # Every rank begins with weights of its own, as one that sets no seed.
        whole = network()
        nn.init.normal_(whole[0].weight, generator=torch.Generator().manual_seed(rank))
        optimizer, saved = begin(whole), []
        for step in range(length):
            saved.append(copy.deepcopy((whole.state_dict(), optimizer.state_dict())))
            steps(whole, optimizer, rank, 1, first=step)
        orders = [("model first", step) for step in range(length)]
        for order, step in [*orders, ("model between", 3), ("model last", 5)]:
            # What is loaded, the optimizer goes on with.
            weights, state = copy.deepcopy(saved[step])
            model = network()
            nn.init.normal_(model[2].weight, generator=torch.Generator().manual_seed(rank))
            if order == "model first":
                model.load_state_dict(weights)
            optimizer = begin(model)
            if order == "model between":
                model.load_state_dict(weights)
            optimizer.load_state_dict(state)
            if order == "model last":
                model.load_state_dict(weights)
            steps(model, optimizer, rank, length - step, first=step)
            for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
                assert torch.equal(ours, theirs), (optimizer, step, order)
            optimizer._close(10.0)


def check_local_steps_of_halves(rank, world):
    model = network().to(torch.float16)
    optimizer = unisono.torch.LocalSGD(torch.optim.SGD(model.parameters(), lr=0.1), 2)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.full((4, 16), rank + 1.0, dtype=torch.float16)).square().mean().backward()
        optimizer.step()
    assert all(parameter.dtype == torch.float16 for parameter in model.parameters())
    assert_replicas_equal(model)


def check_local_steps_of_doubles(rank, world):
    """Weights that would come back with fewer digits are refused, and left as they are."""
    model = network().double()
    with torch.no_grad():
        model[0].weight += 1e-12  # More digits than 32 bits have.
    before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    for local in (unisono.torch.LocalSGD, unisono.torch.DiLoCo):
        error = raises(unisono.Unsupported, local, inner, 2)
        assert "float64" in str(error), error
    assert torch.equal(nn.utils.parameters_to_vector(model.parameters()), before)


def check_local_steps_of_shards(rank, world):
    """What FSDP2 has sharded is refused: its parameters are parts, and have no address."""
    model = fully_shard(network())
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    error = raises(unisono.Unsupported, unisono.torch.LocalSGD, inner, 2)
    assert "DTensor" in str(error), error
    raises(unisono.Unsupported, unisono.torch.ShardedStep, model, inner, shards=world)


def check_resume_of_different_steps(rank, world):
    """Ranks that would go on after different steps are told which."""
    model = network()
    replica = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for member in (
        unisono.torch.LocalSGD(optimizer, 2),
        unisono.torch.ShardedStep(model, optimizer),
        unisono.torch.compress(replica, "int8"),
    ):
        state = member.state_dict()
        agreement = state.get("agreement", state)
        agreement["steps"] = 7 if rank == 1 else 4
        error = raises(unisono.InvalidCall, member.load_state_dict, state)
        assert "rank 0 would go on after step 4, and rank 1 after step 7" in str(error), error
        assert member.steps == 0
        agreement["steps"] = 4
        member.load_state_dict(state)
        assert member.steps == 4


def check_local_steps_mistakes(rank, world):
    inner = torch.optim.SGD(network().parameters(), lr=0.1)
    for options in ({"every": 0}, {"every": 2, "longest": 1}, {"every": 2, "codec": "auto"}):
        error = raises(unisono.InvalidCall, unisono.torch.LocalSGD, inner, **options)
        assert list(options)[-1] in str(error), error
    for options in ({"fragments": 5}, {"delay": 4}, {"outer_lr": -1.0}, {"outer_momentum": 1.0}):
        error = raises(unisono.InvalidCall, unisono.torch.DiLoCo, inner, every=4, **options)
        assert list(options)[-1] in str(error), error
    error = raises(unisono.InvalidCall, unisono.torch.LocalSGD, inner, every=2 + rank)
    assert "other settings" in str(error), error
    optimizer = unisono.torch.LocalSGD(inner, every=2)
    raises(unisono.InvalidCall, optimizer.add_param_group, {"params": []})
    raises(unisono.InvalidCall, optimizer.load_state_dict, inner.state_dict())
    state = optimizer.state_dict()
    state["weights"] = state["weights"][1:]
    error = raises(unisono.InvalidCall, optimizer.load_state_dict, state)
    assert "another model" in str(error), error
    error = raises(
        unisono.InvalidCall, unisono.torch.LocalSGD, inner, 2, codec="int8", rules={"*.bias": None}
    )
    assert "'*.bias'" in str(error) and "'0.0', '0.1'" in str(error), error
    named = torch.optim.SGD(network().named_parameters(), lr=0.1)
    unisono.torch.LocalSGD(named, 2, codec="int8", rules={"*.bias": None})


def check_local_steps_over_ddp(rank, world):
    """DDP would average the gradients of every step, and nothing would be local."""
    for local in (unisono.torch.LocalSGD, unisono.torch.DiLoCo):
        model = network()
        replica = DistributedDataParallel(model)
        inner = torch.optim.SGD(replica.parameters(), lr=0.1)
        error = raises(unisono.InvalidCall, local, inner, 2)
        assert "DistributedDataParallel" in str(error), error
        # One that is gone does nothing any more.
        del replica, error
        steps(model, local(inner, 2), rank, 2)
        assert_replicas_equal(model)


def check_ddp_after_local_steps(rank, world):
    """A model that is wrapped after its optimizer was is refused in the first step."""
    for local in (unisono.torch.LocalSGD, unisono.torch.DiLoCo):
        model = network()
        optimizer = local(torch.optim.SGD(model.parameters(), lr=0.1), 2)
        replica = DistributedDataParallel(model)
        before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        replica(torch.ones(2, 16)).square().mean().backward()
        error = raises(unisono.InvalidCall, optimizer.step)
        text = str(error)
        assert local.__name__ in text and "do not wrap the model" in text, error
        now = nn.utils.parameters_to_vector(model.parameters())
        assert torch.equal(now, before), "the refused step changed the weights"
        del replica, error
        steps(model, optimizer, rank, 2)
        assert_replicas_equal(model)


def check_accumulate(rank, world):
    samples = torch.randn(world, 12, 16, generator=torch.Generator().manual_seed(5))
    whole = network()
    expected = whole(samples.reshape(-1, 16)).square().mean()
    expected.backward()
    plain, wrapped, sharded = network(), DistributedDataParallel(network()), network()
    for layer in sharded:
        fully_shard(layer)
    fully_shard(sharded)
    for model in (plain, wrapped, sharded):
        own = samples.reshape(-1, 16) if model is plain else samples[rank]
        for parts, size in ((own.chunk(4), None), (own.split([3, 1, own.shape[0] - 4]), len)):
            model.zero_grad()
            calls = []

            def loss(part):
                calls.append(len(part))
                return model(part).square().mean()

            mean = torch.tensor(unisono.torch.accumulate(model, parts, loss, size=size))
            if model is not plain:
                dist.all_reduce(mean, op=dist.ReduceOp.AVG)
            equal(mean, expected.detach())
            assert calls == [len(part) for part in parts]
            for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
                gradient = ours.grad.full_tensor() if model is sharded else ours.grad
                equal(gradient, theirs.grad)
    raises(unisono.InvalidCall, unisono.torch.accumulate, plain, [], lambda part: part)


def check_accumulate_after_an_error(rank, world):
    """A loss that raises leaves a model that synchronizes as before."""
    wrapped, sharded = DistributedDataParallel(network()), fully_shard(network())
    batch = torch.full((4, 16), rank + 1.0)
    expected = network()
    everything = torch.cat([torch.full((4, 16), r + 1.0) for r in range(world)])
    expected(everything).square().mean().backward()
    for model in (wrapped, sharded):

        def loss(_):
            raise KeyError("nothing of ours")

        raises(KeyError, unisono.torch.accumulate, model, [batch, batch], loss)
        model(batch).square().mean().backward()
        for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
            assert ours.grad is not None
            equal(ours.grad.full_tensor() if model is sharded else ours.grad, theirs.grad)


def check_accumulate_synchronizes_once(rank, world):
    """Before the last backward pass, gradients are each rank's own."""
    parts = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(rank))
    replica, alone = DistributedDataParallel(network()), network()
    seen = []

    def loss(part):
        seen.append([p.grad for p in replica.parameters() if p.grad is not None])
        seen[-1] = [gradient.clone() for gradient in seen[-1]]
        return replica(part).square().mean()

    unisono.torch.accumulate(replica, parts, loss)
    (alone(parts[0]).square().mean() / 2).backward()
    assert seen[0] == [] and len(seen) == 2
    for ours, theirs in zip(seen[1], alone.parameters(), strict=True):
        equal(ours, theirs.grad)
