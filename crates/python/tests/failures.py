"""What ends a group: every other rank must raise, say why, and be able to end.

A function `case_…` runs a job of its own.  No time is required of a machine that may be busy; how
long it took to notice is printed.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from datetime import timedelta

import harness
import torch
import torch.distributed as dist
import unisono.torch
from tools import equal, raises
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def case_killed_in_backward() -> None:
    """A rank that is killed in the middle of a backward pass raises on all the others."""
    world, killed = 3, multiprocessing.get_context("fork").Value("d", 0.0)
    codes = harness.run(_killed_in_backward, world, killed)
    assert codes == [0] * (world - 1) + [-signal.SIGKILL], codes


def _killed_in_backward(rank, world, killed):
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)])
    replica = DistributedDataParallel(model, bucket_cap_mb=1)
    batch = torch.ones(64, 512)
    for _ in range(3):
        replica(batch).sum().backward()
    if rank == world - 1:

        def die(_):
            killed.value = time.time()
            os.kill(os.getpid(), signal.SIGKILL)

        list(model.parameters())[8].register_hook(die)
    error = raises(unisono.PeerLost, lambda: replica(batch).sum().backward())
    elapsed = time.time() - killed.value
    assert killed.value > 0, "nobody was killed"
    assert (error.rank, error.peer, error.operation) == (rank, world - 1, "all-reduce"), vars(error)
    assert error.bucket is not None and f"rank {world - 1}" in str(error), error
    print(f"     rank {rank} raised {elapsed * 1000:.0f} ms after the kill", flush=True)


def case_killed_under_codec() -> None:
    """So does one whose gradients travel encoded."""
    codes = harness.run(_killed_under_codec, 3)
    assert codes == [0, 0, -signal.SIGKILL], codes


def _killed_under_codec(rank, world):
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    replica = DistributedDataParallel(model, bucket_cap_mb=0.01)
    unisono.torch.compress(replica, "int8")
    batch = torch.ones(8, 64)
    for _ in range(3):
        replica(batch).sum().backward()
    if rank == world - 1:
        model[1].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    error = raises(unisono.PeerLost, lambda: replica(batch).sum().backward())
    assert (error.rank, error.peer) == (rank, world - 1), vars(error)


def case_mismatch() -> None:
    """Ranks that call different operations are told who called what."""
    codes = harness.run(_mismatch, 2)
    assert codes == [0, 0], codes


def _mismatch(rank, world):
    call = dist.all_reduce if rank == 0 else lambda tensor: dist.broadcast(tensor, 0)
    error = raises(unisono.Mismatch, call, torch.ones(1000))
    assert error.rank == rank and error.peer == 1 - rank, vars(error)
    assert "all-reduce" in str(error) and "broadcast" in str(error), error
    raises(unisono.Mismatch, dist.barrier)


def case_timeout() -> None:
    """A call that nobody answers ends with the group's timeout, waited for or started."""
    for asynchronous in (False, True):
        codes = harness.run(_timeout, 2, asynchronous)
        assert codes == [0, 0], codes


def _timeout(rank, world, asynchronous):
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        dist.group.WORLD.set_timeout(timedelta(seconds=1))

        def call():
            work = dist.all_reduce(torch.ones(3), async_op=asynchronous)
            if asynchronous:
                work.wait()

        error = raises(unisono.TimedOut, call)
        assert isinstance(error, TimeoutError) and error.operation == "all-reduce", error
        store.set("over", b"yes")
    else:
        store.wait(["over"])
        raises(unisono.Error, dist.barrier)


def case_abort() -> None:
    """A rank that gives up ends the waits of the others."""
    codes = harness.run(_abort, 2)
    assert codes == [0, 0], codes


def _abort(rank, world):
    work = dist.all_reduce(torch.ones(3), async_op=True) if rank == 0 else None
    dist.distributed_c10d._get_default_store().set(f"here/{rank}", b"yes")
    dist.distributed_c10d._get_default_store().wait(["here/0", "here/1"])
    if rank == 1:
        dist.group.WORLD.abort()
    else:
        raises(unisono.Error, work.wait)
        assert work.is_completed() and not work.is_success()
        raises(RuntimeError, work.get_future().wait)


def case_lost_behind_future() -> None:
    """A failure behind a future arrives as an exception, not as a value."""
    codes = harness.run(_lost_behind_future, 2)
    assert codes == [0, 9], codes


def _lost_behind_future(rank, world):
    if rank == 1:
        os._exit(9)
    future = dist.all_reduce(torch.ones(3), async_op=True).get_future()
    error = raises(RuntimeError, future.wait)
    assert "rank 1" in str(error), error


def case_exit() -> None:
    """A program that does not destroy its groups ends, whatever is under way."""
    for ending in ("plain", "pending", "raise"):
        codes = _programs(ending)
        assert codes == ([3, 0] if ending == "raise" else [0, 0]), (ending, codes)


def _programs(ending: str) -> list[int]:
    """Runs two ranks as programs of their own: a fork does not end as a program does."""
    with tempfile.TemporaryDirectory() as directory:
        store = os.path.join(directory, "store")
        ranks = [
            subprocess.Popen([sys.executable, __file__, ending, str(rank), store])
            for rank in range(2)
        ]
        codes = []
        for rank, process in enumerate(ranks):
            try:
                codes.append(process.wait(harness.HUNG))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise AssertionError(f"hung: rank {rank} at the end of {ending!r}") from None
        return codes


def _program(ending: str, rank: int, store: str) -> None:
    dist.init_process_group("unisono", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    replica = DistributedDataParallel(nn.Linear(4, 4))
    replica(torch.ones(1, 4)).sum().backward()
    loaded = torch.utils.data.DataLoader(list(range(8)), num_workers=2)
    equal(torch.cat(list(loaded)), torch.arange(8))
    if ending == "pending" and rank == 0:
        work = dist.all_reduce(torch.ones(3), async_op=True)
        work.get_future().then(lambda _: None)
    if ending == "raise" and rank == 0:
        raise SystemExit(3)


ALL = {
    name.removeprefix("case_"): value
    for name, value in globals().items()
    if name.startswith("case_")
}

if __name__ == "__main__":
    _program(sys.argv[1], int(sys.argv[2]), sys.argv[3])
