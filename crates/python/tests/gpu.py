#!/usr/bin/env python3
"""The backend on CUDA tensors, against itself on CPU tensors, to the last bit.

    torchrun --standalone --nproc-per-node N gpu.py [--pretend] [--seconds S] [NAME…]

Several processes may share a GPU.  Prints a line for every check, and with NAMEs makes only those whose
names contain one of them.  A check that fails, or takes longer than S seconds, ends the run on all ranks.
`--pretend` needs no GPU: `pretend.py` says what it does, and checks of streams are left out.
"""

import argparse
import contextlib
import datetime
import faulthandler
import importlib
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings

import pretend
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import unisono

_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_INTS = (torch.int8, torch.uint8, torch.int32, torch.int64)
_MOVED = (*_FLOATS, *_INTS, torch.bool, torch.int16, torch.complex64)
_ARITHMETIC = (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MIN, dist.ReduceOp.MAX)
_BITWISE = (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR)

# Of a rank's part: none, one, fewer than ranks could share, no power of two, several segments.
_COUNTS = (0, 1, 5, 1000, 70_001)

# About a tenth of a second of a GPU.
_SLOW = 150_000_000


class Place:
    """Where tensors are, and how long that takes."""

    def __init__(self, device: torch.device, is_pretended: bool):
        self.device = device
        self.is_pretended = is_pretended

    def calls(self):
        """Calls are on memory of this place."""
        return pretend.on_device() if self.is_pretended else contextlib.nullcontext()

    def settle(self):
        if not self.is_pretended:
            torch.cuda.synchronize(self.device)


CPU = Place(torch.device("cpu"), False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--pretend", action="store_true")
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("names", nargs="*", metavar="NAME")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    store, rank, world = next(dist.rendezvous("env://"))
    if arguments.pretend:
        import unisono.torch  # noqa: F401

        folder = os.environ.get("PRETEND_FOLDER", os.path.join(tempfile.gettempdir(), "unisono-pretend"))
        if rank == 0:
            pretend.driver(folder)
            store.set("driver", b"made")
        store.wait(["driver"], datetime.timedelta(seconds=600))
        pretend.begin(pretend.driver(folder))
        place = Place(torch.device("cpu"), True)
    else:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
        torch.cuda.set_device(device)
        place = Place(device, False)
    wanted = {
        name.removeprefix("check_"): check
        for name, check in globals().items()
        if name.startswith("check_") and (not arguments.names or any(word in name for word in arguments.names))
    }
    ran, start = 0, time.monotonic()
    for number, (name, check) in enumerate(wanted.items()):
        if arguments.pretend and getattr(check, "needs_gpu", False):
            continue
        faulthandler.dump_traceback_later(arguments.seconds, exit=True)
        began = time.monotonic()
        part = dist.PrefixStore(f"check/{number}", store)
        if not attempt(name, check, part, rank, world, place):
            return 1
        ran += 1
        faulthandler.cancel_dump_traceback_later()
        if rank == 0:
            print(f"ok   {name} on {world} processes ({time.monotonic() - began:.1f} s)", flush=True)
    if rank == 0:
        device = "no GPU" if arguments.pretend else torch.cuda.get_device_name()
        took = time.monotonic() - start
        print(f"{ran} run, all passed in {took:.0f} s (torch {torch.__version__}, {device})", flush=True)
    return 0 if ran else 1


def attempt(name: str, check, store, rank: int, world: int, place: Place) -> bool:
    """Makes a check in a group of its own; whether it passed on all ranks."""
    failed = b"0"
    try:
        if getattr(check, "forms_groups", False):
            check(store, rank, world, place)
        else:
            with process_group("unisono", dist.PrefixStore("group", store), rank, world):
                check(rank, world, place)
    except BaseException:
        print(f"FAIL {name} on rank {rank} of {world}\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        failed = b"1"
    store.set(f"ended/{rank}", failed)
    ended = [bytes(store.get(f"ended/{other}")) for other in range(world)]
    if b"1" not in ended:
        return True
    if rank == 0:
        print(f"FAIL {name}: ranks {[other for other in range(world) if ended[other] == b'1']}", flush=True)
    return False


@contextlib.contextmanager
def process_group(backend: str, store, rank: int, world: int, **options):
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, **options)
    try:
        yield
    except BaseException as error:
        # The others may wait for this rank.
        abort = getattr(dist.group.WORLD, "abort", None)
        if abort is not None:
            with contextlib.suppress(Exception):
                abort(f"{type(error).__name__}: {error}")
        raise
    finally:
        dist.destroy_process_group()


def needs_gpu(check):
    check.needs_gpu = True
    return check


def forms_groups(check):
    check.forms_groups = True
    return check


# Every call, on both kinds of memory.


def random(shape, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Numbers of any kind, the same wherever they are made."""
    made = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=made).bool()
    if dtype.is_complex or dtype.is_floating_point:
        return torch.randn(shape, generator=made, dtype=torch.float32).to(dtype)
    return torch.randint(0, 100, shape, generator=made).to(dtype)


def same(ours, expected, what) -> None:
    """Refuses a difference in any bit."""
    ours, expected = flat(ours), flat(expected)
    assert len(ours) == len(expected), (what, len(ours), len(expected))
    for one, other in zip(ours, expected, strict=True):
        one, other = one.detach().cpu().contiguous(), other.detach().cpu().contiguous()
        assert one.dtype == other.dtype and one.shape == other.shape, (what, one.shape, other.shape)
        bits = [tensor.reshape(-1).view(torch.uint8) for tensor in (one, other)]
        if not torch.equal(*bits):
            raise AssertionError(f"{what}: {one.flatten()[:8]} is not {other.flatten()[:8]}")


def flat(tensors) -> list[torch.Tensor]:
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    return [tensor for each in tensors for tensor in flat(each)]


def on_both(call, place: Place, what) -> None:
    """Makes a call on CPU tensors and on those of the place, waited for and started, on two streams."""
    expected = call(CPU.device, False)
    for asynchronous in (False, True):
        with place.calls():
            ours = call(place.device, asynchronous)
        place.settle()
        same(ours, expected, (what, f"async={asynchronous}"))
    if place.is_pretended:
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for asynchronous in (False, True):
            same(call(place.device, asynchronous), expected, (what, f"stream, async={asynchronous}"))


def done(work) -> None:
    if work is not None:
        work.wait()


def check_all_reduce(rank, world, place):
    cases = itertools.chain(
        itertools.product(_FLOATS + _INTS, _ARITHMETIC + (dist.ReduceOp.PRODUCT,), (1000,)),
        itertools.product(_INTS, _BITWISE, (1000,)),
        itertools.product((torch.bool,), (dist.ReduceOp.SUM, dist.ReduceOp.MIN), (1000,)),
        itertools.product((torch.complex64,), (dist.ReduceOp.SUM, dist.ReduceOp.AVG), (1000,)),
        itertools.product((torch.float32, torch.bfloat16), (dist.ReduceOp.SUM,), (*_COUNTS, 3_000_001)),
    )
    for dtype, op, count in cases:

        def call(device, asynchronous):
            tensor = random((count,), dtype, rank).to(device)
            done(dist.all_reduce(tensor, op, async_op=asynchronous))
            return tensor

        on_both(call, place, ("all_reduce", dtype, op, count))


def check_reduce(rank, world, place):
    for dtype, count, root in itertools.product((torch.float32, torch.float16, torch.int64), _COUNTS, range(world)):

        def call(device, asynchronous):
            tensor = random((count,), dtype, rank).to(device)
            done(dist.reduce(tensor, root, dist.ReduceOp.SUM, async_op=asynchronous))
            return tensor

        on_both(call, place, ("reduce", dtype, count, root))


def check_broadcast(rank, world, place):
    for dtype, count in itertools.product(_MOVED, _COUNTS):

        def call(device, asynchronous):
            tensor = random((count,), dtype, rank).to(device)
            done(dist.broadcast(tensor, world - 1, async_op=asynchronous))
            return tensor

        on_both(call, place, ("broadcast", dtype, count))


def check_all_gather(rank, world, place):
    for dtype, count in itertools.product((torch.float32, torch.bool, torch.int16, torch.complex64), _COUNTS):

        def listed(device, asynchronous):
            outputs = [torch.empty(count, dtype=dtype, device=device) for _ in range(world)]
            done(dist.all_gather(outputs, random((count,), dtype, rank).to(device), async_op=asynchronous))
            return outputs

        def together(device, asynchronous):
            output = torch.empty(world * count, dtype=dtype, device=device)
            source = random((count,), dtype, rank).to(device)
            done(dist.all_gather_into_tensor(output, source, async_op=asynchronous))
            return output

        on_both(listed, place, ("all_gather", dtype, count))
        on_both(together, place, ("all_gather_into_tensor", dtype, count))


def check_reduce_scatter(rank, world, place):
    for dtype, op, count in itertools.product((torch.float32, torch.bfloat16), _ARITHMETIC[:2], _COUNTS):

        def listed(device, asynchronous):
            inputs = [random((count,), dtype, 10 * rank + i).to(device) for i in range(world)]
            output = torch.empty(count, dtype=dtype, device=device)
            done(dist.reduce_scatter(output, inputs, op, async_op=asynchronous))
            return output

        def together(device, asynchronous):
            output = torch.empty(count, dtype=dtype, device=device)
            source = random((world * count,), dtype, rank).to(device)
            done(dist.reduce_scatter_tensor(output, source, op, async_op=asynchronous))
            return output

        on_both(listed, place, ("reduce_scatter", dtype, op, count))
        on_both(together, place, ("reduce_scatter_tensor", dtype, op, count))

    def unequal(device, asynchronous):
        inputs = [random((3 + i,), torch.float32, 10 * rank + i).to(device) for i in range(world)]
        output = torch.empty(3 + rank, device=device)
        done(dist.reduce_scatter(output, inputs, async_op=asynchronous))
        return output

    on_both(unequal, place, "reduce_scatter of unequal parts")


def check_gather_and_scatter(rank, world, place):
    for dtype, count, root in itertools.product((torch.float32, torch.int16), _COUNTS, range(world)):

        def gathered(device, asynchronous):
            outputs = [torch.empty(count, dtype=dtype, device=device) for _ in range(world)]
            outputs = outputs if rank == root else None
            source = random((count,), dtype, rank).to(device)
            done(dist.gather(source, outputs, dst=root, async_op=asynchronous))
            return outputs or []

        def scattered(device, asynchronous):
            inputs = [random((count,), dtype, 10 * rank + i).to(device) for i in range(world)]
            output = torch.empty(count, dtype=dtype, device=device)
            inputs = inputs if rank == root else None
            done(dist.scatter(output, inputs, src=root, async_op=asynchronous))
            return output

        on_both(gathered, place, ("gather", dtype, count, root))
        on_both(scattered, place, ("scatter", dtype, count, root))


def check_all_to_all(rank, world, place):
    for dtype, count in itertools.product((torch.float32, torch.int16), _COUNTS):

        def listed(device, asynchronous):
            inputs = [random((count + i,), dtype, 10 * rank + i).to(device) for i in range(world)]
            outputs = [torch.empty(count + rank, dtype=dtype, device=device) for _ in range(world)]
            done(dist.all_to_all(outputs, inputs, async_op=asynchronous))
            return outputs

        def equal(device, asynchronous):
            source = random((world * count, 2), dtype, rank).to(device)
            output = torch.empty_like(source)
            done(dist.all_to_all_single(output, source, async_op=asynchronous))
            return output

        def split(device, asynchronous):
            # Rank r sends i + 1 rows to rank i.
            sent = [i + 1 for i in range(world)]
            source = random((sum(sent), count), dtype, rank).to(device)
            output = torch.empty(world * (rank + 1), count, dtype=dtype, device=device)
            received = [rank + 1] * world
            done(dist.all_to_all_single(output, source, received, sent, async_op=asynchronous))
            return output

        on_both(listed, place, ("all_to_all", dtype, count))
        on_both(equal, place, ("all_to_all_single", dtype, count))
        on_both(split, place, ("all_to_all_single with splits", dtype, count))


def check_strided_tensors(rank, world, place):
    def columns(device, asynchronous):
        tensor = random((40, 30), torch.float32, rank).to(device).t()
        done(dist.all_reduce(tensor, async_op=asynchronous))
        return tensor

    def every_other(device, asynchronous):
        whole = torch.zeros(world * 20, device=device)
        source = random((20,), torch.float32, rank).to(device)[::2]
        done(dist.all_gather_into_tensor(whole[::2], source, async_op=asynchronous))
        return whole

    def lists(device, asynchronous):
        outputs = [torch.zeros(7, 5, device=device).t() for _ in range(world)]
        done(dist.all_gather(outputs, random((5, 7), torch.float32, rank).to(device), async_op=asynchronous))
        return outputs

    def negated(device, asynchronous):
        tensor = random((9,), torch.complex64, rank).to(device).conj().imag  # A view that negates.
        done(dist.all_reduce(tensor, async_op=asynchronous))
        return tensor.resolve_neg()

    for call in (columns, every_other, lists, negated):
        on_both(call, place, call.__name__)


def check_coalesced(rank, world, place):
    def several(device, asynchronous):
        tensors = [random((count,), torch.float32, rank).to(device) for count in (3, 1000, 70_001)]
        with dist._coalescing_manager(async_ops=asynchronous) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor)
        if asynchronous:
            manager.wait()
        return tensors

    def tensors(device, asynchronous):
        made = [random((count,), torch.float32, rank).to(device) for count in (3, 1000)]
        done(dist.all_reduce_coalesced(made, async_op=asynchronous))
        return made

    on_both(tensors, place, "all_reduce_coalesced")
    on_both(several, place, "a coalescing manager")


def check_premultiplied_sum(rank, world, place):
    make = getattr(dist, "_make_nccl_premul_sum", None)
    if make is None:
        return

    def reduced(device, asynchronous):
        tensor = random((1000,), torch.float32, rank).to(device)
        done(dist.all_reduce(tensor, make(0.25), async_op=asynchronous))
        return tensor

    def scattered(device, asynchronous):
        source = random((world * 1000,), torch.float32, rank).to(device)
        kept, output = source.clone(), torch.empty(1000, device=device)
        done(dist.reduce_scatter_tensor(output, source, make(0.25), async_op=asynchronous))
        same(source, kept, "the input stays as it is")
        return output

    on_both(reduced, place, "all_reduce")
    on_both(scattered, place, "reduce_scatter_tensor")


def check_messages(rank, world, place):
    following, preceding = (rank + 1) % world, (rank - 1) % world
    if world == 1:
        return

    def ring(device, asynchronous):
        source = random((1000,), torch.float32, rank).to(device)
        output = torch.zeros(2000, device=device)[::2]
        if asynchronous:
            works = [dist.isend(source, following), dist.irecv(output, preceding)]
            for work in works:
                work.wait()
        elif rank % 2:
            dist.recv(output, preceding)
            dist.send(source, following)
        else:
            work = dist.isend(source, following)
            dist.recv(output, preceding)
            work.wait()
        return output

    def batch(device, asynchronous):
        source = random((1000,), torch.bfloat16, rank).to(device)
        output = torch.zeros(1000, dtype=torch.bfloat16, device=device)
        pairs = [dist.P2POp(dist.isend, source, following), dist.P2POp(dist.irecv, output, preceding)]
        for work in dist.batch_isend_irecv(pairs):
            work.wait()
        return output

    on_both(ring, place, "send and recv")
    on_both(batch, place, "batch_isend_irecv")


def check_other_calls(rank, world, place):
    def sparse(device, asynchronous):
        where = torch.tensor([[rank, 5]], device=device)
        tensor = torch.sparse_coo_tensor(where, random((2,), torch.float32, rank).to(device), (8 + world,))
        done(dist.all_reduce(tensor, async_op=asynchronous))
        return tensor.to_dense()

    on_both(sparse, place, "a sparse tensor")
    dist.barrier()
    if not place.is_pretended:
        dist.barrier(device_ids=[place.device.index])
    everything = [None] * world
    dist.all_gather_object(everything, {"rank": rank})
    assert everything == [{"rank": other} for other in range(world)], everything
    with place.calls():
        total = functional.all_reduce(torch.ones(1000, device=place.device), "sum", dist.group.WORLD)
        same(total + 0, torch.full((1000,), float(world)), "functional all_reduce")
        part = functional.reduce_scatter_tensor(
            torch.ones(8 * world, device=place.device), "avg", 0, dist.group.WORLD
        )
        same(part + 0, torch.ones(8), "functional reduce_scatter")


def check_groups(rank, world, place):
    groups = [dist.new_group([0, world - 1] if world > 1 else [0]), dist.new_group(), dist.new_group([0])]
    for group in groups:
        if group is dist.GroupMember.NON_GROUP_MEMBER or dist.get_rank(group) < 0:
            continue
        for _ in range(2):

            def call(device, asynchronous):
                tensor = random((1000,), torch.float32, rank).to(device)
                done(dist.all_reduce(tensor, group=group, async_op=asynchronous))
                return tensor

            on_both(call, place, ("new_group", dist.get_world_size(group)))
    dist.barrier()
    dist.destroy_process_group(groups[1])
    with place.calls():
        tensor = torch.ones(10, device=place.device)
        dist.all_reduce(tensor)
        same(tensor, torch.full((10,), float(world)), "after a group was destroyed")


# Order and memory.


@needs_gpu
def check_order_on_streams(rank, world, place):
    expected = torch.full((1 << 20,), world * (world + 1) / 2)
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream(priority=-1)):
        for asynchronous, slow in itertools.product((False, True), (0, _SLOW)):
            with torch.cuda.stream(stream):
                tensor = torch.zeros(1 << 20, device=place.device)
                torch.cuda._sleep(slow)
                tensor.fill_(rank + 1)
                done(dist.all_reduce(tensor, async_op=asynchronous))
                used = tensor * 1
                tensor.fill_(-1)  # After it was read.
                same(used, expected, ("order", asynchronous, slow))
    # Started in the order of one stream, waited for by another.
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    for _ in range(5):
        with torch.cuda.stream(first):
            torch.cuda._sleep(_SLOW // 10)
            tensor = torch.full((1 << 20,), rank + 1.0, device=place.device)
            work = dist.all_reduce(tensor, async_op=True)
        with torch.cuda.stream(second):
            work.wait()
            used = tensor * 1
            same(used, expected, "two streams")
    torch.cuda.synchronize()


@needs_gpu
def check_input_reused_and_freed(rank, world, place):
    for step in range(20):
        output = torch.empty(world << 18, device=place.device)
        source = torch.full((1 << 18,), float(rank + step), device=place.device)
        work = dist.all_gather_into_tensor(output, source, async_op=True)
        if step % 2:
            del source
            junk = [torch.full((1 << 18,), -7.0, device=place.device) for _ in range(4)]
            work.wait()
            del junk
        else:
            work.wait()
            source.fill_(-1)
        expected = torch.cat([torch.full((1 << 18,), float(other + step)) for other in range(world)])
        same(output, expected, ("reused", step))
    # Started, and neither waited for nor kept.
    for step in range(20):
        dist.all_reduce(torch.ones(1 << 18, device=place.device), async_op=True)
    last = torch.ones(1 << 18, device=place.device)
    dist.all_reduce(last)
    same(last, torch.full((1 << 18,), float(world)), "after works that were dropped")


@needs_gpu
def check_overlap(rank, world, place):
    """A call that was started does not wait for what is submitted after it."""
    tensor = torch.ones(1 << 20, device=place.device)
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    after = torch.cuda.Event()
    work = dist.all_reduce(tensor, async_op=True)
    torch.cuda._sleep(20 * _SLOW)
    after.record()
    while not work.is_completed():
        assert not after.query(), "the call ended after what was submitted later"
        time.sleep(0.001)
    assert not after.query(), "the call ended after what was submitted later"
    work.wait()
    torch.cuda.synchronize()


def check_futures(rank, world, place):
    with place.calls():
        tensor = torch.full((70_001,), rank + 1.0, device=place.device)
        future = dist.all_reduce(tensor, async_op=True).get_future()
        doubled = future.then(lambda ended: [2 * each for each in ended.value()])
        tripled = doubled.then(lambda ended: 1.5 * ended.value()[0])
        total = world * (world + 1) / 2
        same(tripled.wait(), torch.full((70_001,), 3 * total), "then")
        same(future.wait()[0], torch.full((70_001,), total), "a future")
        works = [dist.all_reduce(torch.ones(10, device=place.device), async_op=True) for _ in range(40)]
        ended = torch.futures.wait_all([work.get_future() for work in works])
        for value in ended:
            same(value[0], torch.full((10,), float(world)), "wait_all")
        place.settle()
        assert all(work.is_completed() and work.is_success() for work in works)
        transposed = torch.ones(30, 20, device=place.device).t()
        value = dist.all_reduce(transposed, async_op=True).get_future().wait()
        same(value[0], torch.full((20, 30), float(world)), "a future of a strided tensor")


# Training.


def model(place: Place) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 8)]
    return nn.Sequential(*layers).to(place.device)


def batch(rank: int, step: int, place: Place) -> torch.Tensor:
    return random((16, 64), torch.float32, 1000 * step + rank).to(place.device)


def check_ddp(rank, world, place):
    """The gradients are the sum, in the order of the ranks, of what each rank computes."""
    hashes = []
    for megabytes in (25, 0.01):
        with place.calls():
            replica = DistributedDataParallel(model(place), bucket_cap_mb=megabytes)
            optimizer = torch.optim.SGD(replica.parameters(), lr=0.1)
            for step in range(4):
                optimizer.zero_grad()
                with replica.no_sync():
                    replica(batch(rank, step, place)).square().mean().backward()
                own = [parameter.grad.mul(1.0 / world) for parameter in replica.parameters()]
                optimizer.zero_grad()
                replica(batch(rank, step, place)).square().mean().backward()
                means = [parameter.grad.clone() for parameter in replica.parameters()]
                place.settle()
                optimizer.step()
                own = [gradient.cpu() for gradient in own]
                means = [gradient.cpu() for gradient in means]
                weights = [parameter.detach().cpu() for parameter in replica.parameters()]
        for gradient in own:
            dist.all_reduce(gradient)
        same(means, own, ("DDP", megabytes))
        hashes.append(torch.cat([weight.flatten() for weight in weights]))
    same(hashes[1], hashes[0], "DDP with other buckets")
    everywhere = [torch.empty_like(hashes[0]) for _ in range(world)]
    dist.all_gather(everywhere, hashes[0])
    for other in everywhere:
        same(other, hashes[0], "replicas")


@needs_gpu
def check_fsdp2(rank, world, place):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cuda", (world,))
    results = []
    for _ in range(2):
        sharded = model(place)
        for layer in sharded:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            sharded(batch(rank, step, place)).square().mean().backward()
            optimizer.step()
        results.append([parameter.full_tensor() for parameter in sharded.parameters()])
    same(results[1], results[0], "FSDP2 twice")
    plain = model(place)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        plain(batch(rank, step, place)).square().mean().backward()
        for parameter in plain.parameters():
            dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)
        optimizer.step()
    for ours, other in zip(results[0], plain.parameters(), strict=True):
        torch.testing.assert_close(ours, other.detach(), rtol=1e-5, atol=1e-6)


@needs_gpu
def check_compiled(rank, world, place):
    def step(tensor):
        total = functional.all_reduce(tensor * 2, "sum", dist.group.WORLD)
        return total + 1

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    tensor = torch.full((1000,), rank + 1.0, device=place.device)
    same(compiled(tensor), torch.full((1000,), world * (world + 1) + 1.0), "compiled")


# What is refused.


@needs_gpu
def check_graphs_are_refused(rank, world, place):
    tensor = torch.ones(100, device=place.device)
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    refused, graph = 0, torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tensor.mul_(2)
        for call in (
            lambda: dist.all_reduce(tensor),
            lambda: dist.all_reduce(tensor, async_op=True),
            lambda: dist.isend(tensor, (rank + 1) % world),
            lambda: dist.irecv(tensor, (rank - 1) % world),
        ):
            try:
                call()
            except unisono.InvalidCall:
                refused += 1
    assert refused == 4, refused
    graph.replay()
    dist.all_reduce(tensor)
    same(tensor, torch.full((100,), 2.0 * world * world), "after the graph")


@needs_gpu
def check_mixed_devices(rank, world, place):
    for there, here in ((torch.device("cpu"), place.device), (place.device, torch.device("cpu"))):
        try:
            dist.all_gather([torch.empty(3, device=there) for _ in range(world)], torch.ones(3, device=here))
        except unisono.InvalidCall as error:
            assert "device" in str(error), error
        else:
            raise AssertionError("not refused")
    tensor = torch.ones(3, device=place.device)
    dist.all_reduce(tensor)
    same(tensor, torch.full((3,), float(world)), "after a refusal")


@forms_groups
def check_disagreement(store, rank, world, place):
    """A rank that calls with another kind of memory is told so, and so are the others."""
    if world == 1:
        return
    for number, calls_before in enumerate((0, 2)):
        part = dist.PrefixStore(f"disagree/{number}", store)
        try:
            with process_group("unisono", part, rank, world, timeout=datetime.timedelta(seconds=40)):
                tensor = torch.ones(10, device=place.device)
                for _ in range(calls_before):
                    with place.calls():
                        dist.all_reduce(tensor)
                    dist.all_reduce(torch.ones(10))
                place.settle()
                with place.calls() if rank else contextlib.nullcontext():
                    dist.all_reduce(tensor if rank else torch.ones(10))
        except unisono.Mismatch as error:
            assert {0, 1} <= set(error.calls) or len(error.calls) >= 2, (error, error.calls)
            assert os.path.basename(__file__) in str(error), error
        else:
            raise AssertionError("not noticed")


@forms_groups
def check_eager(store, rank, world, place):
    """With `device_id`, the ranks come together at once."""
    if place.is_pretended:
        return
    with process_group("unisono", store, rank, world, device_id=place.device):
        assert dist.group.WORLD._on_gpu is not None
        tensor = torch.ones(10, device=place.device)
        dist.all_reduce(tensor)
        group = dist.new_group([0])
        if rank == 0:
            dist.all_reduce(tensor, group=group)
        same(tensor, torch.full((10,), float(world)), "with device_id")
        dist.barrier()


@forms_groups
def check_killed(store, rank, world, place):
    """Rank 0 starts a job of as many processes; one of them kills itself, and the others say which."""
    if rank or world == 1:
        return
    with tempfile.TemporaryDirectory() as folder:
        workers = []
        for worker in range(world):
            environment = dict(os.environ, KILL_RANK=str(worker), KILL_WORLD=str(world), KILL_STORE=folder)
            environment["KILL_PRETEND"] = os.environ.get("UNISONO_CUDA_DRIVER", "") if place.is_pretended else ""
            program = [sys.executable, os.path.abspath(__file__)]
            workers.append(subprocess.Popen(program, env=environment, stdout=subprocess.PIPE, text=True))
        said = [worker.communicate(timeout=80)[0] for worker in workers]
    codes = [worker.returncode for worker in workers]
    assert codes[-1] == -signal.SIGKILL, (codes, said)
    for code, text in zip(codes[:-1], said[:-1], strict=True):
        assert code == 0 and "lost" in text, (codes, said)


def worker_that_may_be_killed() -> int:
    rank, world = int(os.environ["KILL_RANK"]), int(os.environ["KILL_WORLD"])
    store = dist.FileStore(os.path.join(os.environ["KILL_STORE"], "store"), world)
    place = CPU
    if os.environ["KILL_PRETEND"]:
        importlib.import_module("unisono.torch")
        pretend.begin(os.environ["KILL_PRETEND"])
        place = Place(torch.device("cpu"), True)
    else:
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        place = Place(device, False)
    dist.init_process_group("unisono", store=store, rank=rank, world_size=world)
    with place.calls():
        tensor = torch.zeros(1 << 20, device=place.device)
        for _ in range(3):
            dist.all_reduce(tensor)
        works = [dist.all_reduce(tensor, async_op=True) for _ in range(3)]
        if rank == world - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        works += [dist.all_reduce(tensor, async_op=True) for _ in range(3)]
        start, lost = time.monotonic(), 0
        for work in works:
            try:
                work.wait()
            except unisono.PeerLost as error:
                assert error.peer == world - 1, error
                lost += 1
        assert lost >= 3 and time.monotonic() - start < 20, (lost, time.monotonic() - start)
        try:
            dist.all_reduce(tensor)
        except unisono.PeerLost as error:
            assert error.peer == world - 1, error
        else:
            raise AssertionError("a later call did not fail")
    place.settle()
    print("lost", flush=True)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(worker_that_may_be_killed() if "KILL_RANK" in os.environ else main())
