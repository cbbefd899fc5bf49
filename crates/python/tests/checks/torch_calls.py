"""Every kind of call that torch makes, once.

Most also run on Gloo (`run.py --backend gloo`), which shows that they ask for what torch promises.
"""

import copy
import os
import tempfile
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint
from tools import equal, is_old_torch, on_gloo, raises
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel

import unisono.torch

# Collectives.


def check_all_reduce_types(rank, world):
    number_types = (
        torch.float32, torch.float64, torch.float16, torch.bfloat16,
        torch.int8, torch.uint8, torch.int32, torch.int64,
    )
    for dtype in number_types:
        tensor = torch.full((5, 3), rank + 1, dtype=dtype)
        dist.all_reduce(tensor)
        equal(tensor, torch.full((5, 3), world * (world + 1) // 2, dtype=dtype))
    tensor = torch.tensor([rank == 0, True, False])
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    equal(tensor, torch.tensor([True, True, False]))
    tensor = torch.complex(torch.ones(3), torch.full((3,), float(rank)))
    dist.all_reduce(tensor)
    equal(tensor, torch.full((3,), complex(world, sum(range(world)))))


def check_allocated(rank, world):
    """Memory that ranks read in place: the same results, on all of it and on a part."""
    if on_gloo():
        return
    tensor = unisono.torch.allocate(3, 1 << 19)
    assert tensor.shape == (3, 1 << 19) and not tensor.any()
    tensor.copy_(torch.arange(tensor.numel()).view_as(tensor) % 97 + rank)
    expected = (torch.arange(tensor.numel()).view_as(tensor) % 97) * world + sum(range(world))
    dist.all_reduce(tensor)
    equal(tensor, expected.float())
    part = tensor[1]
    dist.all_reduce(part, dist.ReduceOp.AVG)
    equal(tensor, expected.float())
    dist.broadcast(tensor, src=world - 1)
    equal(tensor, expected.float())
    halves = unisono.torch.allocate(7, dtype=torch.float16)
    halves += rank + 1
    dist.all_reduce(halves)
    equal(halves, torch.full((7,), world * (world + 1) / 2, dtype=torch.float16))
    assert unisono.torch.allocate(0, 4).shape == (0, 4)
    raises(unisono.errors.InvalidCall, unisono.torch.allocate, -1)


def check_allocated_by_some(rank, world):
    """In place is how it runs: a rank whose tensor lies elsewhere makes another call."""
    if on_gloo() or world == 1:
        return
    group = dist.new_group()
    tensor = unisono.torch.allocate(1 << 20, group=group)
    mine = tensor if rank == 0 else torch.zeros(1 << 20)
    error = raises(unisono.errors.Mismatch, dist.all_reduce, mine, group=group)
    assert "rank" in str(error), error


def check_all_reduce_reductions(rank, world):
    factorial = torch.arange(1, world + 1).prod().item()
    expected = {
        dist.ReduceOp.MAX: world,
        dist.ReduceOp.MIN: 1,
        dist.ReduceOp.PRODUCT: factorial,
        dist.ReduceOp.AVG: (world + 1) / 2,
    }
    for op, result in expected.items():
        tensor = torch.full((4,), rank + 1.0)
        dist.all_reduce(tensor, op=op)
        equal(tensor, torch.full((4,), float(result)))
    tensor = torch.tensor([1 << rank])
    dist.all_reduce(tensor, op=dist.ReduceOp.BOR)
    equal(tensor, torch.tensor([(1 << world) - 1]))


def check_all_reduce_shapes(rank, world):
    dist.all_reduce(torch.empty(0))
    tensor = torch.tensor(float(rank))
    dist.all_reduce(tensor)
    equal(tensor, torch.tensor(float(sum(range(world)))))
    if on_gloo():  # It takes the memory of such tensors for contiguous.
        return
    tensor = torch.full((6, 6), float(rank)).t()[::2]
    assert not tensor.is_contiguous()
    dist.all_reduce(tensor)
    equal(tensor, torch.full((3, 6), float(sum(range(world)))))
    # The memory of a negated view holds other numbers than the view.
    tensor = torch._neg_view(torch.full((3,), rank + 1.0))
    dist.all_reduce(tensor)
    equal(tensor.clone(), torch.full((3,), -world * (world + 1) / 2))


def check_asynchronous(rank, world):
    tensor = torch.ones(1000)
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    equal(tensor, torch.full((1000,), float(world)))
    if not on_gloo():  # Its handle says so a little later.
        assert work.is_completed() and work.is_success() and work.exception() is None
    future = dist.all_reduce(torch.ones(3), async_op=True).get_future()
    equal(future.wait()[0], torch.full((3,), float(world)))
    future = dist.all_reduce(torch.ones(3), async_op=True).get_future()
    equal(future.then(lambda ended: ended.value()[0] * 2).wait(), torch.full((3,), 2.0 * world))


def check_broadcast(rank, world):
    for root in range(world):
        tensor = torch.full((3,), float(rank))
        dist.broadcast(tensor, root)
        equal(tensor, torch.full((3,), float(root)))
    if not on_gloo():  # Moves every type; Gloo moves those that it can reduce.
        tensor = torch.full((3,), rank, dtype=torch.int16)
        dist.broadcast(tensor, 1)
        equal(tensor, torch.ones(3, dtype=torch.int16))


def check_all_gather(rank, world):
    outputs = [torch.empty(2, 2) for _ in range(world)]
    dist.all_gather(outputs, torch.full((2, 2), float(rank)))
    for source, output in enumerate(outputs):
        equal(output, torch.full((2, 2), float(source)))
    output = torch.empty(2 * world)
    dist.all_gather_into_tensor(output, torch.full((2,), float(rank)))
    equal(output, torch.arange(world).repeat_interleave(2).float())


def check_reduce_scatter(rank, world):
    output = torch.empty(2)
    dist.reduce_scatter(output, [torch.full((2,), float(rank + i)) for i in range(world)])
    equal(output, torch.full((2,), float(sum(range(world)) + rank * world)))
    # Of different lengths.
    output = torch.empty(rank + 1)
    dist.reduce_scatter(output, [torch.full((r + 1,), float(rank + r)) for r in range(world)])
    equal(output, torch.full((rank + 1,), float(sum(range(world)) + rank * world)))
    output = torch.empty(2)
    source = torch.arange(2 * world).float()
    dist.reduce_scatter_tensor(output, source)
    equal(output, source[2 * rank : 2 * rank + 2] * world)


def check_all_to_all(rank, world):
    output = torch.empty(world)
    dist.all_to_all_single(output, torch.arange(world).float() + 10 * rank)
    equal(output, torch.arange(world).float() * 10 + rank)
    source = torch.full((sum(range(1, world + 1)), 2), float(rank))
    output = torch.empty((world * (rank + 1), 2))
    dist.all_to_all_single(output, source, [rank + 1] * world, list(range(1, world + 1)))
    equal(output[:, 0], torch.arange(world).float().repeat_interleave(rank + 1))
    # Started, not waited for: a message that a rank sends after it has started may be what another
    # waits for before it starts.
    output = torch.empty((world * (rank + 1), 2))
    if rank == 0:
        splits = [rank + 1] * world, list(range(1, world + 1))
        work = dist.all_to_all_single(output, source, *splits, async_op=True)
        for peer in range(1, world):
            dist.send(torch.ones(1), peer)
    else:
        dist.recv(torch.empty(1), 0)
        splits = [rank + 1] * world, list(range(1, world + 1))
        work = dist.all_to_all_single(output, source, *splits, async_op=True)
    work.wait()
    equal(output[:, 0], torch.arange(world).float().repeat_interleave(rank + 1))
    if not on_gloo():  # It has no lists of tensors here.
        outputs = [torch.empty(2) for _ in range(world)]
        dist.all_to_all(outputs, [torch.full((2,), float(rank))] * world)
        for source, output in enumerate(outputs):
            equal(output, torch.full((2,), float(source)))
        # From rank r to rank s, r + s elements.
        outputs = [torch.empty(source + rank) for source in range(world)]
        inputs = [torch.full((rank + to,), float(rank)) for to in range(world)]
        dist.all_to_all(outputs, inputs, async_op=True).wait()
        for source, output in enumerate(outputs):
            equal(output, torch.full((source + rank,), float(source)))


def check_rooted(rank, world):
    tensor = torch.full((3,), rank + 1.0)
    dist.reduce(tensor, 1)
    if rank == 1:
        equal(tensor, torch.full((3,), world * (world + 1) / 2))
    elif not on_gloo():  # It leaves partial sums behind.
        equal(tensor, torch.full((3,), rank + 1.0))
    outputs = [torch.empty(2) for _ in range(world)] if rank == 0 else None
    dist.gather(torch.full((2,), float(rank)), outputs, 0)
    for source, output in enumerate(outputs or []):
        equal(output, torch.full((2,), float(source)))
    output = torch.empty(2)
    inputs = [torch.full((2,), float(i)) for i in range(world)] if rank == 0 else None
    dist.scatter(output, inputs, 0)
    equal(output, torch.full((2,), float(rank)))


def check_lists(rank, world):
    """Tensors of a list may lie anywhere; those that lie well are used where they are."""
    memory = torch.zeros(3 * world, 5)
    orders = {
        "backwards, with gaps": [memory[3 * i] for i in reversed(range(world))],
        "apart": [torch.zeros(5) for _ in range(world)],
        "not contiguous": list(torch.zeros(5, 2 * world).t()[::2]),
    }
    for name, blocks in orders.items():
        dist.all_gather(blocks, torch.full((5,), rank + 1.0))
        for source, block in enumerate(blocks):
            equal(block, torch.full((5,), source + 1.0), msg=name)
        output = torch.empty(5)
        dist.reduce_scatter(output, blocks)
        equal(output, torch.full((5,), world * (rank + 1.0)), msg=name)
        dist.scatter(output, [10 * block for block in blocks] if rank == 0 else None, 0)
        equal(output, torch.full((5,), 10 * (rank + 1.0)), msg=name)
        dist.gather(torch.full((5,), float(-rank)), blocks if rank == 1 else None, 1)
        for source, block in enumerate(blocks):
            equal(block, torch.full((5,), float(-source if rank == 1 else source + 1)), msg=name)
    equal(memory[1::3], torch.zeros(world, 5))
    equal(memory[2::3], torch.zeros(world, 5))


def check_barriers(rank, world):
    dist.barrier()
    if not is_old_torch():  # It has monitored barriers for Gloo only.
        dist.monitored_barrier()


def check_objects(rank, world):
    gathered = [None] * world
    dist.all_gather_object(gathered, {"rank": rank})
    assert gathered == [{"rank": source} for source in range(world)]
    objects = [1, "x"] if rank == 0 else [None, None]
    dist.broadcast_object_list(objects, 0)
    assert objects == [1, "x"]
    gathered = [None] * world if rank == 0 else None
    dist.gather_object(rank, gathered, 0)
    assert gathered in (None, list(range(world)))
    own = [None]
    dist.scatter_object_list(own, list(range(world)) if rank == 0 else None, 0)
    assert own == [rank]


def check_functional(rank, world):
    ranks = list(range(world))
    total = functional.all_reduce(torch.ones(3), "sum", ranks)
    equal(total + 0, torch.full((3,), float(world)))
    gathered = functional.all_gather_tensor(torch.full((2,), float(rank)), 0, ranks)
    equal(gathered + 0, torch.arange(world).repeat_interleave(2).float())
    part = functional.reduce_scatter_tensor(torch.ones(2 * world), "sum", 0, ranks)
    equal(part + 0, torch.full((2,), float(world)))
    exchanged = functional.all_to_all_single(torch.full((world,), float(rank)), None, None, ranks)
    equal(exchanged + 0, torch.arange(world).float())
    copied = functional.broadcast(torch.full((2,), float(rank)), 1, ranks)
    equal(copied + 0, torch.ones(2))
    totals = functional.all_reduce_coalesced([torch.ones(2), torch.ones(3)], "sum", ranks)
    equal(totals[1] + 0, torch.full((3,), float(world)))


def check_compiled(rank, world):
    ranks = list(range(world))

    @torch.compile(backend="eager")
    def doubled(tensor):
        return functional.all_reduce(tensor, "sum", ranks) * 2

    equal(doubled(torch.ones(2)) + 0, torch.full((2,), 2.0 * world))


def check_coalesced(rank, world):
    tensors = [torch.ones(2), torch.full((3,), 2.0)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    equal(tensors[0], torch.full((2,), float(world)))
    equal(tensors[1], torch.full((3,), 2.0 * world))
    # With a device, torch asks the group for the work that stands for all; Gloo has none.
    if on_gloo():
        return
    tensors = [torch.ones(1 << 20), torch.ones(1 << 20, 2).t()]
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    assert all(torch.all(tensor == world) for tensor in tensors)
    group = dist.group.WORLD
    group.start_coalescing()
    group.send([torch.full((3,), float(rank))], (rank + 1) % world)
    received = torch.empty(3)
    group.recv([received], (rank - 1) % world)
    future = group.end_coalescing().get_future()
    future.wait()
    equal(received, torch.full((3,), float((rank - 1) % world)))


def check_memory_of_calls(rank, world):
    """A call keeps the memory that it uses, whatever the program does with its tensors."""
    if on_gloo():
        return
    count = 1 << 18
    outputs = [torch.zeros(count) for _ in range(world)]
    seen = list(outputs)
    work = dist.all_gather(outputs, torch.full((count,), rank + 1.0), async_op=True)
    outputs.clear()
    work.wait()
    for source, output in enumerate(seen):
        assert torch.all(output == source + 1)
    strided = [torch.zeros(2, 3).t() for _ in range(world)]
    seen = list(strided)
    work = dist.all_to_all(strided, [torch.full((3, 2), rank + 1.0)] * world, async_op=True)
    strided.clear()
    work.wait()
    for source, output in enumerate(seen):
        equal(output, torch.full((3, 2), source + 1.0))
    # Also if a tensor is given other memory: rank 0's call waits for those that have not begun.
    if rank > 0:
        dist.recv(torch.empty(1), 0)
    tensor = torch.ones(count)
    memory = StorageWeakRef(tensor.untyped_storage())
    work = dist.all_reduce(tensor, async_op=True)
    tensor.data = torch.zeros(1)
    if rank == 0:
        assert not memory.expired()
        for other in range(1, world):
            dist.send(torch.ones(1), other)
    work.wait()


def check_tensors_with_gradients(rank, world):
    """Calls fill leaves too, contiguous or not: what they do is no part of a model."""
    if on_gloo():
        return
    for shape in (lambda tensor: tensor, lambda tensor: tensor.t()):
        tensor = shape(torch.full((2, 3), float(rank))).requires_grad_()
        dist.broadcast(tensor, 1)
        assert torch.all(tensor == 1) and tensor.grad_fn is None
        places = [shape(torch.zeros(2, 3)).requires_grad_() for _ in range(world)]
        dist.all_gather(places, tensor)
        assert all(torch.all(place == 1) for place in places)
        dist.all_to_all(places, [2 * tensor for _ in range(world)])
        assert all(torch.all(place == 2) for place in places)


def check_settled_once(rank, world):
    """A thread that waits for a call finds it finished, also while another thread finishes it."""
    if on_gloo():
        return
    for _ in range(20):
        tensor = torch.ones(512, 512).t()
        work = dist.all_reduce(tensor, async_op=True)
        seen = []

        def look(work=work, tensor=tensor, seen=seen):
            work.wait()
            seen.append(bool(torch.all(tensor == world)))

        threads = [threading.Thread(target=look) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert seen == [True] * 3, seen


def check_formed_again(rank, world):
    """Groups of one name follow each other in one store, each with keys of its own."""
    if on_gloo():
        return
    from unisono.torch._backend import rendezvous

    store = dist.PrefixStore("again", dist.distributed_c10d._get_default_store())
    for _ in range(2):
        if rank == 0:
            time.sleep(0.5)  # The others find what the group before has left, if anything.
        own = rendezvous.own_part(store, rank)
        native = rendezvous.form(own, rank, world, timedelta(seconds=60))
        assert (native.rank, native.size) == (rank, world)
        native.close(10.0)


# Messages.


def check_messages(rank, world):
    if rank == 0:
        dist.send(torch.ones(3), 1, tag=5)
    elif rank == 1:
        tensor = torch.zeros(3)
        assert dist.recv(tensor, 0, tag=5) == 0
        equal(tensor, torch.ones(3))


def check_messages_of_anybody(rank, world):
    """Each message is received once, and the receiver learns whose it is."""
    if rank != 0:
        dist.send(torch.full((3,), float(rank)), 0, tag=rank % 2)
        dist.send(torch.full((2,), 10.0 * rank), 0, tag=7)
        return
    senders = []
    for tag in (rank % 2 for rank in range(1, world)):
        tensor = torch.zeros(3)
        sender = dist.recv(tensor, tag=tag)
        equal(tensor, torch.full((3,), float(sender)))
        senders.append(sender)
    assert sorted(senders) == list(range(1, world)), senders
    # Named receives, and one from any rank in between, which was submitted before the last.
    buffers = [torch.zeros(2) for _ in range(1, world)]
    works = [dist.irecv(buffers[0], tag=7)]
    works[0].wait()
    first = works[0]._source_rank()
    equal(buffers[0], torch.full((2,), 10.0 * first))
    others = [source for source in range(1, world) if source != first]
    for source, buffer in zip(others, buffers[1:], strict=True):
        assert dist.recv(buffer, source, tag=7) == source
        equal(buffer, torch.full((2,), 10.0 * source))


def check_batch_of_messages(rank, world):
    sent, received = torch.full((4,), float(rank)), torch.empty(4)
    before, after = (rank - 1) % world, (rank + 1) % world
    operations = [dist.P2POp(dist.isend, sent, after), dist.P2POp(dist.irecv, received, before)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    equal(received, torch.full((4,), float(before)))


# Groups.


def check_new_group(rank, world):
    pair = dist.new_group([0, 1])
    if rank < 2:
        tensor = torch.ones(2)
        dist.all_reduce(tensor, group=pair)
        equal(tensor, torch.full((2,), 2.0))
        dist.destroy_process_group(pair)
    alone = dist.new_group([1])
    if rank == 1:
        tensor = torch.ones(2)
        dist.all_reduce(tensor, group=alone)
        equal(tensor, torch.ones(2))


def check_split_group(rank, world):
    if on_gloo() or is_old_torch():  # They cannot split a group of CPUs.
        return
    part = dist.split_group(None, [[r] for r in range(world)])
    tensor = torch.ones(2)
    dist.all_reduce(tensor, group=part)
    equal(tensor, torch.ones(2))


def check_mesh(rank, world):
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("a", "b"))
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=mesh["b"].get_group())
    equal(tensor, torch.full((1,), float(world)))


# Data-parallel training: the same weights as of one process with all the data.


def check_ddp(rank, world):
    _train(rank, world)


def check_ddp_unused_parameters(rank, world):
    _train(rank, world, find_unused_parameters=True)


def check_ddp_static_graph(rank, world):
    _train(rank, world, static_graph=True)


def check_ddp_bucket_views(rank, world):
    _train(rank, world, gradient_as_bucket_view=True, bucket_cap_mb=0.0001)


def _train(rank, world, **options):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    reference = copy.deepcopy(model)
    replica = DistributedDataParallel(model, **options)
    ours, theirs = (torch.optim.SGD(m.parameters(), 0.1) for m in (replica, reference))
    for step in range(4):
        data = torch.randn(world, 6, 8, generator=torch.Generator().manual_seed(step))
        runs = ((replica, ours, data[rank]), (reference, theirs, data.flatten(0, 1)))
        for trained, optimizer, batch in runs:
            optimizer.zero_grad()
            trained(batch).pow(2).mean().backward()
            optimizer.step()
    for own, expected in zip(model.parameters(), reference.parameters(), strict=True):
        equal(own, expected)


def check_ddp_bits(rank, world):
    """The bits do not depend on the size of the buckets."""
    if on_gloo():
        return

    def weights(megabytes):
        torch.manual_seed(4)
        replica = DistributedDataParallel(
            nn.Sequential(nn.Linear(33, 65), nn.ReLU(), nn.Linear(65, 7)), bucket_cap_mb=megabytes
        )
        optimizer = torch.optim.SGD(replica.parameters(), 0.1)
        for step in range(3):
            optimizer.zero_grad()
            seed = torch.Generator().manual_seed(step * world + rank)
            replica(torch.randn(5, 33, generator=seed)).pow(2).mean().backward()
            optimizer.step()
        return nn.utils.parameters_to_vector(replica.parameters())

    first = weights(25)
    for megabytes in (0.0001, 0.003):
        assert torch.equal(first, weights(megabytes)), megabytes


def check_ddp_no_sync(rank, world):
    torch.manual_seed(1)
    replica = DistributedDataParallel(nn.Linear(4, 4))
    batch = torch.full((2, 4), float(rank))
    with replica.no_sync():
        replica(batch).sum().backward()
    replica(batch).sum().backward()
    _expect_same_everywhere(replica.module.weight.grad)


def check_ddp_hooks(rank, world):
    for hook in (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook):
        replica = DistributedDataParallel(nn.Linear(4, 4))
        replica.register_comm_hook(None, hook)
        replica(torch.full((2, 4), float(rank))).sum().backward()
        _expect_same_everywhere(replica.module.weight.grad)


def check_ddp_average(rank, world):
    """The hook that divides with the sum: the mean of what the ranks have by themselves."""
    if on_gloo():
        return
    torch.manual_seed(5)
    replica = DistributedDataParallel(nn.Linear(40, 30), gradient_as_bucket_view=True)
    unisono.torch.average(replica)
    batch = torch.randn(3, 40, generator=torch.Generator().manual_seed(rank))
    for _ in range(2):
        replica.zero_grad()
        with replica.no_sync():
            replica(batch).pow(2).mean().backward()
        means = [parameter.grad.clone() for parameter in replica.parameters()]
        for mean in means:
            dist.all_reduce(mean, dist.ReduceOp.AVG)
        replica.zero_grad()
        replica(batch).pow(2).mean().backward()
        for parameter, mean in zip(replica.parameters(), means, strict=True):
            assert torch.equal(parameter.grad, mean)
    # Of a group of its own, among its ranks alone.
    alone = [dist.new_group([member]) for member in range(world)][rank]
    replica = DistributedDataParallel(nn.Linear(2, 2), process_group=alone)
    unisono.torch.average(replica)
    replica(torch.full((1, 2), float(rank))).sum().backward()
    equal(replica.module.weight.grad, torch.full((2, 2), float(rank)))
    raises(unisono.InvalidCall, unisono.torch.average, nn.Linear(2, 2))


def check_ddp_powersgd(rank, world):
    replica = DistributedDataParallel(nn.Linear(64, 64))
    state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2)
    replica.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for _ in range(4):
        replica(torch.full((2, 64), float(rank))).sum().backward()
    _expect_same_everywhere(replica.module.weight.grad)


def check_ddp_sparse(rank, world):
    replica = DistributedDataParallel(nn.Embedding(10, 3, sparse=True))
    replica(torch.tensor([rank, rank + 1])).sum().backward()
    # Row 1 is looked up by ranks 0 and 1.
    equal(replica.module.weight.grad.to_dense()[1], torch.full((3,), 2.0 / world))
    with torch.profiler.profile():
        sparse = torch.eye(world).to_sparse()
        dist.all_reduce(sparse)
    equal(sparse.to_dense(), world * torch.eye(world))


def check_join(rank, world):
    replica = DistributedDataParallel(nn.Linear(4, 4))
    with replica.join():
        for _ in range(2 + rank):
            replica(torch.ones(2, 4)).sum().backward()


def check_zero_redundancy(rank, world):
    model = nn.Linear(8, 8)
    replica = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(replica.parameters(), torch.optim.Adam, lr=0.1)
    replica(torch.full((2, 8), float(rank))).sum().backward()
    optimizer.step()
    _expect_same_everywhere(model.weight.detach())
    optimizer.consolidate_state_dict()


def check_fsdp(rank, world):
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    reference = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (world,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    ours, theirs = (torch.optim.SGD(m.parameters(), 0.1) for m in (model, reference))
    data = torch.randn(world, 4, 8, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        runs = ((model, ours, data[rank]), (reference, theirs, data.flatten(0, 1)))
        for trained, optimizer, batch in runs:
            trained(batch).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    equal(model[0].weight.full_tensor(), reference[0].weight)


def check_tensor_parallel(rank, world):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 8 * world), nn.Linear(8 * world, 8))
    reference = copy.deepcopy(model)
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    parallelize_module(model, init_device_mesh("cpu", (world,)), plan)
    equal(model(torch.ones(2, 8)), reference(torch.ones(2, 8)))


def check_checkpoint(rank, world):
    directory = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(directory, 0)
    saved, restored = {"a": torch.arange(3.0)}, {"a": torch.zeros(3)}
    torch.distributed.checkpoint.save(saved, checkpoint_id=directory[0])
    torch.distributed.checkpoint.load(restored, checkpoint_id=directory[0])
    equal(restored["a"], saved["a"])


def _expect_same_everywhere(tensor):
    own, first = tensor.clone(), tensor.clone()
    dist.broadcast(first, 0)
    equal(own, first, rtol=0, atol=0)


# Mistakes that leave the group usable.


def check_refusals(rank, world):
    if on_gloo():
        return
    import unisono

    raises(unisono.InvalidCall, dist.all_reduce, torch.ones(2), op=dist.ReduceOp.BAND)
    raises(unisono.InvalidCall, dist.all_reduce, torch.ones(2, dtype=torch.int16))
    bools = torch.ones(2, dtype=torch.bool)
    raises(unisono.InvalidCall, dist.all_reduce, bools, op=dist.ReduceOp.AVG)
    error = raises(unisono.Unsupported, dist.broadcast, torch.ones(2, device="meta"), 0)
    assert isinstance(error, NotImplementedError), error
    # One that stands for parts on all ranks has no memory; Gloo refuses it too.
    parts = distribute_tensor(torch.ones(world, 2), init_device_mesh("cpu", (world,)), [Shard(0)])
    raises(unisono.Unsupported, dist.all_reduce, parts)
    raises(unisono.Unsupported, dist.broadcast, parts, 0)
    raises(unisono.InvalidCall, dist.all_reduce, torch.ones(1).expand(4))
    expanded = [torch.ones(1).expand(4) for _ in range(world)]
    raises(unisono.InvalidCall, dist.all_gather, expanded, torch.ones(4))
    raises(unisono.InvalidCall, dist.all_to_all, expanded, [torch.ones(4)] * world)
    # Of several tensors, none is reduced if one cannot be.
    tensors = [torch.ones(2), torch.ones(2, dtype=torch.int16)]
    raises(unisono.InvalidCall, dist.group.WORLD.allreduce_coalesced, tensors)
    equal(tensors[0], torch.ones(2))
    error = raises(unisono.InvalidCall, dist.group.WORLD.send, [torch.ones(1)], rank, 3)
    assert error.operation == f"send to rank {rank} with tag 3", error.operation
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    equal(tensor, torch.full((2,), float(world)))


def check_destroyed_groups(rank, world):
    """A group that was destroyed leaves neither threads nor descriptors behind, not for a while."""
    if on_gloo():
        return

    def held():
        return [len(os.listdir(f"/proc/self/{what}")) for what in ("task", "fd")]

    before = held()
    most = before
    for _ in range(40):
        group = dist.new_group()
        dist.all_reduce(torch.ones(2), group=group)
        dist.destroy_process_group(group)
        most = [max(*both) for both in zip(most, held())]
    # The last one or two may be about to end.
    assert all(now <= then + 8 for now, then in zip(most, before)), (before, most)


def check_forked_child(rank, world):
    """A child of fork, such as a loader of data, neither uses nor ends its parent's group."""
    if on_gloo():
        return
    import unisono

    dist.barrier()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            error = raises(unisono.Error, dist.all_reduce, torch.ones(2))
            dist.destroy_process_group()
            status = 0 if "forked" in str(error) else 2
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    equal(tensor, torch.full((2,), float(world)))
