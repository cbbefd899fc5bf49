"""Models on a device: the bits are those of this machine's memory. The device is one of `late_device`."""

import gc
import threading
import time

import torch
import torch.distributed as dist
import unisono.torch
from jobs.sharded import Network
from late_device import late_device
from tools import raises
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from unisono.torch import ParameterServer
from unisono.torch._gradients import device as staging

from checks.compress import loss_of, network


def check_device_staging(rank, world):
    """All is delivered, in order, however tensors are cut; and what comes back is complete."""
    with late_device() as late:
        way = staging.Staging(late, chunk=10)
        sent = [torch.arange(1.0, n + 1) for n in (3, 0, 25, 10, 1, 200)]
        delivered, order = [torch.full_like(numbers, -1) for numbers in sent], []

        def into(number):
            def deliver(at, address, count):
                order.append((number, at))
                view = (staging.ctypes.c_float * count).from_address(address)
                delivered[number][at : at + count] = torch.tensor(list(view))

            return deliver

        for number, numbers in enumerate(sent):
            way.send(numbers.clone(), into(number), lambda number=number: order.append((number, "done")))
            way.then(lambda number=number: order.append((number, "then")))
        way.drain()
        assert all(map(torch.equal, sent, delivered)), delivered
        assert [number for number, _ in order] == sorted(number for number, _ in order), order
        assert [what for number, what in order if number == 1] == ["done", "then"], order
        back = [torch.zeros(n) for n in (3, 25, 100)] + [torch.zeros(8, dtype=torch.float64).view(2, 4).t()]
        values = [torch.randn(target.shape) for target in back]
        with way.returning() as returning:
            for target, value in zip(back, values, strict=True):
                returning.put(target, value.data_ptr(), value.numel())
                value.data.copy_(value.clone())  # The memory is the caller's again.
        assert all(torch.equal(target.float(), value) for target, value in zip(back, values)), back


def check_device_staging_fails(rank, world):
    """An error of a delivery is raised where it is waited for, once; and what is abandoned is not delivered."""
    with late_device() as late:
        way = staging.Staging(late, chunk=10)
        reached = []

        def fail(*_):
            raise ValueError("of a delivery")

        way.send(torch.ones(35), fail)
        way.then(lambda: reached.append("behind"))
        assert "of a delivery" in str(raises(ValueError, way.drain)) and not reached
        way.drain()
        hold = threading.Event()
        way.then(hold.wait)
        # In fewer chunks than there are: with more, this thread would wait for the one that it holds up.
        way.send(torch.ones(45), lambda *_: reached.append("abandoned"))
        threading.Timer(0.05, hold.set).start()
        way.abandon()
        assert not reached, reached
        way.send(torch.ones(25), lambda *_: reached.append("later"))
        way.drain()
        assert reached == ["later"] * len(reached) and reached
        threads = threading.active_count()
        del way
        gc.collect()
        end = time.monotonic() + 60
        while threading.active_count() >= threads and time.monotonic() < end:
            time.sleep(0.01)
        assert threading.active_count() < threads, "the thread outlives its staging"


def check_device_sharded(rank, world):
    """With dropout, statistics of batches and layers that some shards use, with codecs, and in 16 bits."""
    for codec in (None, "int8", "topk:10%", "powersgd:2"):
        for dtype in (torch.float32, torch.bfloat16):
            here = _sharded(codec, dtype)
            with late_device() as late:
                there = _sharded(codec, dtype)
                assert late.copies > 0
            assert _are_equal(here, there), (codec, dtype)


def check_device_sharded_zeros(rank, world):
    """A shard without a gradient counts as zero, which turns a −0 of another into 0."""

    def gradients():
        model = nn.ParameterList([torch.zeros(3), torch.zeros(3), torch.zeros(3)])
        step = unisono.torch.ShardedStep(model, None)

        def loss(shard):
            total = (model[0] * -0.0).sum()
            if shard in (0, 4, 5):
                total = total + (model[1] * torch.tensor([-0.0, 1.0, 0.0])).sum()
            return total

        step.gradients(step.shards, loss)
        step.close()
        assert model[2].grad is None
        return [model[0].grad, model[1].grad]

    here = gradients()
    assert here[0].signbit().all() and not here[1].signbit().any(), here
    with late_device():
        assert _are_equal(here, gradients())


def check_device_sharded_goes_on(rank, world):
    """A loss that raises is raised; the step cannot be finished, as in this machine's memory."""
    with late_device():
        model = network()
        step = unisono.torch.ShardedStep(model, torch.optim.SGD(model.parameters(), lr=0.1))

        def loss(batch):
            if rank == 0 and batch == step.shards[-1]:
                raise ValueError("of the program")
            return loss_of(model, 4, batch)

        if rank == 0:
            raises(ValueError, step, step.shards, loss)
            raises(unisono.InvalidCall, step, step.shards, lambda batch: loss_of(model, 4, batch))
        dist.barrier()
        step._native.close(0.0)


def check_device_compress(rank, world):
    for codec in ("none", "int8", "topk:10%", "powersgd:2"):
        for options in ({}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}):
            here = _compressed(rank, codec, options)
            with late_device() as late:
                there = _compressed(rank, codec, options)
                assert late.copies > 0
            assert _are_equal(here, there), (codec, options)


def check_device_local(rank, world):
    def sgd(model):
        return unisono.torch.LocalSGD(torch.optim.SGD(model.parameters(), lr=0.1), 2)

    def diloco(model):
        inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return unisono.torch.DiLoCo(inner, 4, fragments=2, codec="int8")

    for wrap in (sgd, diloco):
        here = _local(rank, wrap)
        with late_device() as late:
            there = _local(rank, wrap)
            assert late.copies > 0
        assert _are_equal(here, there), wrap.__name__


def check_device_server(rank, world):
    for level in ("bsp", "downpour:1,1"):
        if level != "bsp" and world > 1:
            continue  # What a worker reads depends on when the others push.
        here = _served(rank, level)
        with late_device() as late:
            there = _served(rank, level)
            assert late.copies > 0
        assert _are_equal(here, there), level


def _sharded(codec, dtype):
    torch.manual_seed(3)
    model = Network().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = unisono.torch.ShardedStep(model, optimizer, 8, codec=codec, buckets=(100, 5000))
    losses = []

    def loss(batch):
        inputs = torch.randn(4, 16, generator=torch.Generator().manual_seed(batch)).to(dtype)
        return nn.functional.mse_loss(model(inputs), inputs[:, :4].sin())

    for number in range(4):
        losses.append(step([100 * number + shard for shard in step.shards], loss))
    assert model.unused.weight.grad is None
    step.close()
    return [*(tensor.reshape(-1) for tensor in model.state_dict().values()), torch.tensor(losses)]


def _compressed(rank, codec, options):
    replica = DistributedDataParallel(network(), bucket_cap_mb=0.01, **options)
    compression = unisono.torch.compress(replica, codec)
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.2)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(replica, 8, 1000 * step + rank).backward()
        optimizer.step()
    assert compression.steps == 4
    return list(replica.module.state_dict().values())


def _local(rank, wrap):
    model = network()
    optimizer = wrap(model)
    for step in range(9):
        optimizer.zero_grad()
        loss_of(model, 8, 1000 * step + rank).backward()
        optimizer.step()
    optimizer.settle()
    return list(model.state_dict().values())


def _served(rank, level):
    model = network()
    with ParameterServer(model, "momentum:lr=0.05", level) as server:
        for step in range(5):
            loss_of(model, 8, 1000 * step + rank).backward()
            server.step()
    return list(model.state_dict().values())


def _are_equal(here, there) -> bool:
    """To the bit: −0 is not 0."""
    return all(torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for one, other in zip(here, there, strict=True))
