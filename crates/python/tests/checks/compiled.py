"""Programs that `torch.compile` compiles: what is around the calls, and the calls among it.

All but Unisono's own wrappers also run on Gloo (`run.py --backend gloo`).
"""

import copy

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import unisono.torch
from tools import assert_replicas_equal, equal, on_gloo
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

# Dynamo finds the graphs, and operations stay as they are.  "inductor", which users get, compiles
# them too, which takes it long: it has a turn where the graph has a call in it.
COMPILER = "aot_eager"


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def batches(world: int, step: int) -> torch.Tensor:
    """A batch for every rank."""
    return torch.randn(world, 6, 8, generator=torch.Generator().manual_seed(step))


def train(step, world: int, rank: int | None) -> None:
    """Four steps of `step(batch)`, on this rank's batches or, without a rank, on all."""
    for number in range(4):
        data = batches(world, number)
        step(data.flatten(0, 1) if rank is None else data[rank])


def step_of(model, optimizer):
    """A step of training, as a function of the batch."""

    def step(batch):
        optimizer.zero_grad()
        model(batch).pow(2).mean().backward()
        optimizer.step()

    return step


def sgd(model) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1)


def expected(world: int) -> nn.Module:
    """The weights that one process with all the data comes to, without a compiler."""
    model = network()
    train(step_of(model, sgd(model)), world, None)
    return model


def expect(model, reference) -> None:
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        equal(ours.detach(), theirs.detach())


def check_compiled_ddp(rank, world):
    reference = expected(world)
    for options in (
        {},
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"gradient_as_bucket_view": True},
    ):
        torch._dynamo.reset()
        replica = DistributedDataParallel(network(), **options)
        compiled = torch.compile(replica, backend=COMPILER)
        train(step_of(compiled, sgd(replica)), world, rank)
        expect(replica.module, reference)


def check_compiled_ddp_in_place(rank, world):
    reference = expected(world)
    replica = DistributedDataParallel(network())
    replica.compile(backend=COMPILER)
    train(step_of(replica, sgd(replica)), world, rank)
    expect(replica.module, reference)
    # The other way round.
    torch._dynamo.reset()
    replica = DistributedDataParallel(torch.compile(network(), backend=COMPILER))
    train(step_of(replica, sgd(replica)), world, rank)
    expect(replica.module, reference)


def check_compiled_step(rank, world):
    """The whole step is compiled: forward, backward, and the optimizer's."""
    reference = expected(world)
    torch._dynamo.reset()
    replica = DistributedDataParallel(network())
    step = torch.compile(step_of(replica, sgd(replica)), backend=COMPILER)
    train(step, world, rank)
    expect(replica.module, reference)


def check_compiled_ddp_buffers(rank, world):
    """DDP gives all ranks the buffers of rank 0 before every forward pass."""

    def begin():
        torch.manual_seed(3)
        return DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))

    plain = begin()
    train(step_of(plain, sgd(plain)), world, rank)
    torch._dynamo.reset()
    replica = begin()
    train(step_of(torch.compile(replica, backend=COMPILER), sgd(replica)), world, rank)
    expect(replica, plain)
    for ours, theirs in zip(replica.buffers(), plain.buffers(), strict=True):
        equal(ours, theirs)


def check_compiled_no_sync(rank, world):
    replica = DistributedDataParallel(network())
    compiled = torch.compile(replica, backend=COMPILER)
    data, whole = batches(world, 0), network()
    for half in (data[:, :3], data[:, 3:]):
        (whole(half.flatten(0, 1)).pow(2).mean() / 2).backward()
    with replica.no_sync():
        (compiled(data[rank, :3]).pow(2).mean() / 2).backward()
    (compiled(data[rank, 3:]).pow(2).mean() / 2).backward()
    for ours, theirs in zip(replica.parameters(), whole.parameters(), strict=True):
        equal(ours.grad, theirs.grad)


def check_compiled_fsdp(rank, world):
    reference = expected(world)
    mesh = init_device_mesh("cpu", (world,))
    torch._dynamo.reset()
    model = network()
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(step_of(torch.compile(model, backend=COMPILER), sgd(model)), world, rank)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        equal(ours.full_tensor().detach(), theirs.detach())


# Calls inside a compiled function, with something to compute before and after.


def check_compiled_calls(rank, world):
    own = torch.full((2,), rank + 1.0)
    numbers = torch.arange(1.0, world + 1)

    def all_reduce(x):
        x = x * 2
        dist.all_reduce(x)
        return x + 1

    def all_reduce_max(x):
        x = x * 2
        dist.all_reduce(x, op=dist.ReduceOp.MAX)
        return x + 1

    def broadcast(x):
        x = x * 2
        dist.broadcast(x, 1)
        return x + 1

    def all_gather(x):
        outputs = [torch.empty_like(x) for _ in range(world)]
        dist.all_gather(outputs, x * 2)
        return torch.cat(outputs) + 1

    def all_gather_into_tensor(x):
        output = x.new_empty(2 * world)
        dist.all_gather_into_tensor(output, x * 2)
        return output + 1

    def reduce_scatter(x):
        output = torch.empty_like(x)
        dist.reduce_scatter(output, [x * (i + 1) for i in range(world)])
        return output + 1

    def reduce_scatter_tensor(x):
        output = torch.empty_like(x)
        dist.reduce_scatter_tensor(output, torch.cat([x * (i + 1) for i in range(world)]))
        return output + 1

    def all_to_all(x):
        outputs = [torch.empty_like(x) for _ in range(world)]
        dist.all_to_all(outputs, [x * 2 for _ in range(world)])
        return torch.cat(outputs) + 1

    def all_to_all_single(x):
        output = x.new_empty(2 * world)
        dist.all_to_all_single(output, torch.cat([x * 2 for _ in range(world)]))
        return output + 1

    def reduce(x):
        x = x * 2
        dist.reduce(x, 0)
        return x + 1

    def gather(x):
        outputs = [torch.empty_like(x) for _ in range(world)] if rank == 0 else None
        dist.gather(x * 2, outputs, 0)
        return torch.cat(outputs if rank == 0 else [x] * world) + 1

    def scatter(x):
        output = torch.empty_like(x)
        dist.scatter(output, [x * (i + 2) for i in range(world)] if rank == 0 else None, 0)
        return output + 1

    def started(x):
        x = x * 2
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        return x + 1

    def broadcast_started(x):
        x = x * 2
        work = dist.broadcast(x, 1, async_op=True)
        work.wait()
        return x + 1

    def asked(x):
        x = x * 2
        work = dist.all_reduce(x, async_op=True)
        while not work.is_completed():
            pass
        work.wait()
        return x + 1

    def around(x):
        dist.barrier()
        received = torch.empty_like(x)
        sent = dist.isend(x * 2, (rank + 1) % world)
        dist.recv(received, (rank - 1) % world)
        sent.wait()
        dist.barrier()
        return received + 1

    total, pairs = numbers.sum().item(), numbers.repeat_interleave(2)
    results = {
        all_reduce: [2 * total] * 2,
        all_reduce_max: [2.0 * world] * 2,
        broadcast: [4.0] * 2,
        all_gather: 2 * pairs,
        all_gather_into_tensor: 2 * pairs,
        reduce_scatter: [(rank + 1) * total] * 2,
        reduce_scatter_tensor: [(rank + 1) * total] * 2,
        all_to_all: 2 * pairs,
        all_to_all_single: 2 * pairs,
        reduce: [2 * total] * 2 if rank == 0 else None,  # The others' is not defined.
        gather: 2 * pairs if rank == 0 else None,
        scatter: [rank + 2.0] * 2,
        started: [2 * total] * 2,
        broadcast_started: [4.0] * 2,
        asked: [2 * total] * 2,
        around: [2.0 * ((rank - 1) % world + 1)] * 2,
    }
    for call, result in results.items():
        torch._dynamo.reset()
        compiled = torch.compile(call, backend=COMPILER)
        for _ in range(2):  # The first compiles.
            outcome = compiled(own.clone())
            if result is not None:
                equal(outcome, torch.as_tensor(result) + 1, msg=call.__name__)


def check_compiled_functional(rank, world):
    """In one graph, without a break."""
    group = dist.group.WORLD
    own = torch.full((world,), rank + 1.0)

    def all_reduce(x):
        return functional.all_reduce(x * 2, "sum", group) + 1

    def all_gather(x):
        return functional.all_gather_tensor(x * 2, 0, group) + 1

    def reduce_scatter(x):
        return functional.reduce_scatter_tensor(x * 2, "sum", 0, group) + 1

    def all_to_all(x):
        return functional.all_to_all_single(x * 2, None, None, group) + 1

    def broadcast(x):
        return functional.broadcast(x * 2, 1, group) + 1

    def coalesced(x):
        return torch.cat(functional.all_reduce_coalesced([x, x * 2], "sum", group)) + 1

    total, numbers = world * (world + 1.0), torch.arange(1.0, world + 1)
    results = {
        all_reduce: [total] * world,
        all_gather: 2 * numbers.repeat_interleave(world),
        reduce_scatter: [total],
        all_to_all: 2 * numbers,
        broadcast: [4.0] * world,
        coalesced: [total / 2] * world + [total] * world,
    }
    for call, result in results.items():
        for compiler in (COMPILER, "inductor") if call is all_reduce else (COMPILER,):
            torch._dynamo.reset()
            compiled = torch.compile(call, backend=compiler, fullgraph=True)
            for _ in range(2):
                text = f"{call.__name__}, {compiler}"
                equal(compiled(own.clone()), torch.as_tensor(result) + 1, msg=text)


# Unisono's own wrappers.


def check_compiled_codec(rank, world):
    if on_gloo():
        return
    weights = []
    for compiler in (None, COMPILER):
        torch._dynamo.reset()
        replica = DistributedDataParallel(network())
        compression = unisono.torch.compress(replica, "fp16", rules={"*": "fp16"})
        step = step_of(replica, sgd(replica))
        train(step if compiler is None else torch.compile(step, backend=compiler), world, rank)
        assert compression.steps == 4
        assert_replicas_equal(replica)
        weights.append(copy.deepcopy(replica.module))
    for compiled in weights[1:]:
        for ours, theirs in zip(compiled.parameters(), weights[0].parameters(), strict=True):
            equal(ours, theirs, rtol=1e-3, atol=1e-4)


def check_compiled_local_steps(rank, world):
    if on_gloo():
        return

    def local(model):
        return unisono.torch.DiLoCo(sgd(model), every=2)

    def one_shard_each(model):
        step = unisono.torch.ShardedStep(model, sgd(model), shards=world)
        return lambda batch: step([batch], lambda part: model(part).pow(2).mean())

    for begin in (lambda model: step_of(model, local(model)), one_shard_each):
        models = []
        for compiler in (None, COMPILER):
            torch._dynamo.reset()
            models.append(network())
            step = begin(models[-1])
            train(step if compiler is None else torch.compile(step, backend=compiler), world, rank)
            assert_replicas_equal(models[-1])
        for compiled in models[1:]:
            expect(compiled, models[0])
