"""What ends a group: every other rank must raise, say why, and be able to end.

A function `case_…` runs a job of its own.  No time is required of a machine that may be busy; how
long it took to notice is printed.
"""

import logging
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from datetime import timedelta

import harness
import torch
import torch.distributed as dist
import unisono.torch
from tools import equal, is_old_torch, raises, tomllib
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from unisono import _native
from unisono.torch import _exit


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
    assert killed.value > 0, "no rank was killed"
    assert (error.rank, error.peer, error.operation) == (rank, world - 1, "all_reduce"), vars(error)
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


def case_killed_beside_workers() -> None:
    """A rank whose DataLoader has workers is missed at once: they do not keep its connections open.

    They hang, so that none of them ends by itself, and no timeout ends the group in time.
    """
    workers = multiprocessing.get_context("fork").Array("i", 2)
    os.environ["UNISONO_TIMEOUT"] = str(10 * harness.HUNG)
    try:
        codes = harness.run(_killed_beside_workers, 3, workers)
    finally:
        del os.environ["UNISONO_TIMEOUT"]
        for worker in filter(None, workers):
            os.kill(worker, signal.SIGKILL)
    assert codes == [0, 0, -signal.SIGKILL], codes


def _killed_beside_workers(rank, world, workers):
    dist.barrier()
    if rank == world - 1:
        data = _Hangs()
        loader = torch.utils.data.DataLoader(
            data, num_workers=len(workers), multiprocessing_context="fork"
        )
        loaded = iter(loader)
        for number, worker in enumerate(loaded._workers):
            workers[number] = worker.pid
        for _ in workers:
            data.started.acquire()
        os.kill(os.getpid(), signal.SIGKILL)
    error = raises(unisono.PeerLost, dist.barrier)
    assert error.peer == world - 1 and "connection closed" in str(error), error


class _Hangs(torch.utils.data.Dataset):
    """Data that never comes."""

    def __init__(self):
        self.started = multiprocessing.get_context("fork").Semaphore(0)

    def __len__(self):
        return 100

    def __getitem__(self, index):
        self.started.release()
        signal.pause()


def case_mismatch() -> None:
    """Ranks that call different operations are told who called what."""
    codes = harness.run(_mismatch, 2)
    assert codes == [0, 0], codes


def _mismatch(rank, world):
    raises(unisono.InvalidCall, dist.all_reduce, torch.ones(2, dtype=torch.int16))
    dist.barrier()
    call = _one_call if rank == 0 else _another_call
    error = raises(unisono.Mismatch, call, torch.ones(1000))
    assert error.rank == rank and error.peer == 1 - rank, vars(error)
    assert sorted(error.calls) == [0, 1], error.calls
    _expect_lines(error)
    raises(unisono.Mismatch, dist.barrier)
    raises(unisono.Mismatch, dist.group.WORLD.monitored_barrier)


def _one_call(tensor):
    dist.all_reduce(tensor)


def _another_call(tensor):
    dist.broadcast(tensor, 0)


def _expect_lines(error, where: str = "") -> None:
    """The error names both lines."""
    for rank, name, function in ((0, "all_reduce", _one_call), (1, "broadcast", _another_call)):
        line = function.__code__.co_firstlineno + 1
        place = f"{os.path.basename(__file__)}:{line}{where}"
        told = [part for part in str(error).split(";") if f"rank {rank} called {name}" in part]
        assert len(told) == 1 and told[0].endswith(place), (place, str(error))


def case_mismatch_started() -> None:
    """So are ranks that started their calls, and ranks in a backward pass."""
    codes = harness.run(_mismatch_started, 2)
    assert codes == [0, 0], codes
    codes = harness.run(_mismatch_in_backward, 2)
    assert codes == [0, 0], codes


def _mismatch_started(rank, world):
    if rank == 0:
        work = dist.all_reduce(torch.ones(3), async_op=True)
    else:
        work = dist.broadcast(torch.ones(3), 0, async_op=True)
    error = raises(unisono.Mismatch, work.wait)
    lines = [line for line in str(error).split(";") if os.path.basename(__file__) in line]
    assert len(lines) == 2, error
    assert isinstance(work.exception(), unisono.Mismatch)
    assert os.path.basename(__file__) in str(raises(RuntimeError, work.get_future().wait))


def _mismatch_in_backward(rank, world):
    replica = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))
    for _ in range(2):  # In the second, DDP has made its buckets anew.
        replica(torch.ones(2, 64)).sum().backward()

    def call():
        if rank == 0:
            replica(torch.ones(2, 64)).sum().backward()
        else:
            dist.broadcast(torch.ones(3), 0)

    error = raises(unisono.Mismatch, call)
    assert "in backward, bucket 0" in str(error), error
    assert str(error).count(os.path.basename(__file__)) == 2, error


def case_timeout() -> None:
    """A call that no other rank makes ends with the group's timeout, waited for or started."""
    for asynchronous in (False, True):
        codes = harness.run(_timeout, 2, asynchronous)
        assert codes == [0, 0], codes


def _timeout(rank, world, asynchronous):
    store = dist.distributed_c10d._get_default_store()
    other = dist.new_group()
    if rank == 0:
        dist.group.WORLD.set_timeout(timedelta(seconds=1))

        def call():
            work = dist.all_reduce(torch.ones(3), async_op=asynchronous)
            if asynchronous:
                work.wait()

        error = raises(unisono.TimedOut, call)
        assert isinstance(error, TimeoutError) and error.operation == "all_reduce", error
        assert error.missing == (1,) and "rank 1 has not arrived" in str(error), error
        store.set("over", b"yes")
    else:
        store.wait(["over"])
        error = raises(unisono.Aborted, dist.barrier)
        assert error.peer == 0 and "timeout" in str(error), error
    _expect_usable(other, world)


def _expect_usable(group, world):
    tensor = torch.ones(2)
    dist.all_reduce(tensor, group=group)
    equal(tensor, torch.full((2,), float(world)))


def case_timeout_behind_future() -> None:
    """So does one that only its future waits for."""
    codes = harness.run(_timeout_behind_future, 2)
    assert codes == [0, 0], codes


def _timeout_behind_future(rank, world):
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        dist.group.WORLD.set_timeout(timedelta(seconds=0.5))
        future = dist.all_reduce(torch.ones(3), async_op=True).get_future()
        error = raises(RuntimeError, future.wait)
        assert "rank 1 has not arrived" in str(error), error
        store.set("over", b"yes")
    else:
        store.wait(["over"])
        raises(unisono.Aborted, dist.barrier)


def case_timeout_of_message() -> None:
    """So does a message that no rank sends."""
    codes = harness.run(_timeout_of_message, 2)
    assert codes == [0, 0], codes


def _timeout_of_message(rank, world):
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        work = dist.irecv(torch.ones(3), 1, tag=4)
        error = raises(unisono.TimedOut, work.wait, timedelta(seconds=0.5))
        assert error.missing == (1,) and error.peer == 1, vars(error)
        store.set("over", b"yes")
    else:
        store.wait(["over"])
        error = raises(unisono.Aborted, dist.barrier)
        assert "receive from rank 1 with tag 4" in str(error), error


def case_abort() -> None:
    """A rank that gives up ends the waits of the others."""
    codes = harness.run(_abort, 2)
    assert codes == [0, 0], codes


def _abort(rank, world):
    other = dist.new_group()
    work = dist.all_reduce(torch.ones(3), async_op=True) if rank == 0 else None
    dist.distributed_c10d._get_default_store().set(f"here/{rank}", b"yes")
    dist.distributed_c10d._get_default_store().wait(["here/0", "here/1"])
    if rank == 1:
        dist.group.WORLD.abort("the loss is not a number")
    else:
        error = raises(unisono.Aborted, work.wait)
        assert error.peer == 1 and "the loss is not a number" in str(error), error
        assert work.is_completed() and not work.is_success()
        raises(RuntimeError, work.get_future().wait)
    raises(unisono.Aborted, dist.barrier)
    _expect_usable(other, world)


def case_interrupted() -> None:
    """Ctrl-C ends a call that waits for others, and the others learn of it."""
    for behind in (False, True):
        codes = harness.run(_interrupted, 2, behind)
        assert codes == [0, 0], codes


def _interrupted(rank, world, behind):
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        handled = []
        signal.signal(signal.SIGUSR1, lambda *_: handled.append("a handler that does not raise"))
        other = _press_control_c()
        if behind:  # The call waits in line, not on the wire.
            dist.all_reduce(torch.ones(3), async_op=True)
        raises(KeyboardInterrupt, dist.all_reduce, torch.ones(3))
        other.wait()
        assert handled, "the first signal was not handled while the call waited"
        raises(unisono.Aborted, dist.barrier)
        store.set("over", b"yes")
    else:
        store.wait(["over"])
        error = raises(unisono.Aborted, dist.barrier)
        assert error.peer == 0 and "interrupted" in str(error), error


def case_interrupted_in_exchange() -> None:
    """So it does where gradients or weights do not travel by calls of the backend."""
    for kind in ("codec", "shards", "local steps"):
        codes = harness.run(_interrupted_in_exchange, 2, kind)
        assert codes == [0, 0], (kind, codes)


def _interrupted_in_exchange(rank, world, kind):
    store = dist.distributed_c10d._get_default_store()
    member, step = _synchronized(kind)
    for _ in range(2):  # In the second, DDP makes its buckets anew, by calls of the backend.
        step()
    if rank == 0:
        handled = []

        def handle(*_):
            # A handler may look at the counts, and is refused what it would wait for for ever.
            assert member.steps == 2 and member.sent_bytes > 0
            error = raises(unisono.InvalidCall, member.state_dict)
            assert "handler of a signal" in str(error), error
            handled.append(True)

        signal.signal(signal.SIGUSR1, handle)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        other = _press_control_c()
        raises(KeyboardInterrupt, step)
        other.wait()
        assert handled, "the first signal was not handled while the step waited"
        raises(RuntimeError, step)  # There is no going on; DDP may be the first to say so.
        store.set("over", b"yes")
    else:
        store.wait(["over"])
        error = raises(unisono.Aborted, step)
        assert error.peer == 0 and "interrupted" in str(error), error
    # The group of the program knows nothing of it.
    _expect_usable(dist.group.WORLD, world)


def _synchronized(kind: str):
    """What synchronizes a model in this way, and a function that makes a step."""
    model = nn.Linear(64, 64)
    batch = torch.ones(2, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if kind == "codec":
        replica = DistributedDataParallel(model)
        compression = unisono.torch.compress(replica, "int8")
        return compression, lambda: replica(batch).sum().backward()
    if kind == "shards":
        sharded = unisono.torch.ShardedStep(model, optimizer)
        own = [batch] * len(sharded.shards)
        return sharded, lambda: sharded(own, lambda part: model(part).sum())
    local = unisono.torch.LocalSGD(optimizer, every=1)

    def step():
        model(batch).sum().backward()
        local.step()

    return local, step


def _press_control_c() -> subprocess.Popen:
    """Sends this process a signal that it handles, and then SIGINT. Not from a fork, which may inherit a held lock."""
    return subprocess.Popen(["sh", "-c", 'sleep 0.6; kill -USR1 "$0"; sleep 0.3; kill -INT "$0"', str(os.getpid())])


def case_mixed() -> None:
    """Beside another backend: collectives, DDP, other groups, and a rank that dies."""
    codes = harness.run(_mixed, 2, backend="cpu:unisono,cuda:gloo")
    assert codes == [0, 9], codes


def _mixed(rank, world):
    assert type(dist.group.WORLD._get_backend(torch.device("cpu"))).__module__.startswith("unisono")
    _expect_usable(dist.group.WORLD, world)
    tensor = torch.ones(2)
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    equal(tensor, torch.full((2,), float(world)))
    outputs = [torch.empty(2) for _ in range(world)]
    dist.all_gather(outputs, torch.full((2,), float(rank)))
    equal(torch.stack(outputs)[:, 0], torch.arange(float(world)))
    gathered = [None] * world
    dist.all_gather_object(gathered, rank)
    assert gathered == list(range(world)), gathered
    if rank == 0:
        dist.send(torch.ones(3), 1)
    else:
        tensor = torch.zeros(3)
        dist.recv(tensor, 0)
        equal(tensor, torch.ones(3))
    _expect_usable(dist.new_group(backend="unisono"), world)
    dist.barrier()
    if not is_old_torch():  # There, messages are ours, and monitored barriers Gloo's.
        raises(unisono.Unsupported, dist.recv, torch.zeros(3))
        dist.monitored_barrier()
    _expect_usable(dist.new_group(), world)
    torch.manual_seed(rank)
    replica = DistributedDataParallel(nn.Linear(8, 8))
    for _ in range(3):
        replica(torch.full((2, 8), float(rank))).sum().backward()
    gradient = replica.module.weight.grad.clone()
    dist.broadcast(gradient, 0)
    equal(gradient, replica.module.weight.grad)
    if rank == 1:
        os._exit(9)
    error = raises(unisono.PeerLost, lambda: replica(torch.ones(2, 8)).sum().backward())
    assert error.peer == 1, error
    raises(RuntimeError, dist.barrier)


def case_made_again() -> None:
    """A program may destroy its group and make it again at once, at the same address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    codes = harness.run(_made_again, 3, port)
    assert codes == [0, 0, 0], codes


def _made_again(rank, world, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    for _ in range(3):
        dist.destroy_process_group()
        dist.init_process_group("unisono", rank=rank, world_size=world)
        _expect_usable(dist.group.WORLD, world)


def case_late_for_group() -> None:
    """How long ranks wait for each other to make a group is torch's timeout, not the engine's."""
    os.environ["UNISONO_TIMEOUT"] = "1"
    try:
        assert harness.run(_late_for_group, 2) == [0, 0]
        assert harness.run(_never_in_group, 2) == [0, 0]
        assert harness.run(_dead_before_group, 2) == [0, 9]
    finally:
        del os.environ["UNISONO_TIMEOUT"]


def _late_for_group(rank, world):
    if rank == 1:
        time.sleep(2)
    _expect_usable(dist.new_group(), world)
    replica = DistributedDataParallel(nn.Linear(4, 4))
    if rank == 1:
        time.sleep(2)
    unisono.torch.compress(replica, "fp16")
    error = raises(unisono.InvalidCall, unisono.torch.compress, replica, "fp16")
    assert "hook" in str(error), error


def _never_in_group(rank, world):
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        brief = timedelta(seconds=1)
        error = raises(unisono.FormError, dist.new_group, timeout=brief)
        text = "rank 0 in new_group([0, 1]): rank 1 did not come to make the group within 0:00:01"
        assert text in str(error) and (error.rank, error.peer) == (0, 1), error
        store.set("over", b"yes")
    else:
        store.wait(["over"])


def case_group_beside_a_call() -> None:
    """A rank that makes a group while others make a call waits for no longer than the timeout of the
    group of all ranks, and says which ranks did not come. That group goes on."""
    with tempfile.TemporaryDirectory() as directory:
        codes = harness.run(_group_beside_a_call, 3, os.path.join(directory, "store"))
    assert codes == [0, 0, 0], codes


def _group_beside_a_call(rank, world, path):
    dist.destroy_process_group()
    brief = timedelta(seconds=2) if rank == 0 else timedelta(seconds=harness.HUNG)
    store = dist.FileStore(path, world)
    dist.init_process_group("unisono", store=store, rank=rank, world_size=world, timeout=brief)
    if rank == 0:
        error = raises(unisono.FormError, dist.new_group)
        text = "rank 0 in new_group([0, 1, 2]): ranks [1, 2] did not come to make the group"
        assert text in str(error) and "in the same order" in str(error), error
    _expect_usable(dist.group.WORLD, world)


def case_groups_in_opposite_orders() -> None:
    """Ranks that make groups in opposite orders are told so at once, with both groups."""
    assert harness.run(_groups_in_opposite_orders, 3) == [0, 0, 0]


def _groups_in_opposite_orders(rank, world):
    own, theirs, other = ([0, 2], [0, 1, 2], 0) if rank == 2 else ([0, 1, 2], [0, 2], 2)
    error = raises(unisono.FormError, dist.new_group, own)
    said = f"makes the group of ranks {theirs} in its place"
    assert f"rank {rank} in new_group({own}): rank {other} {said}" in str(error), error
    dist.barrier()


def _dead_before_group(rank, world):
    if rank == 1:
        os._exit(9)
    error = raises(unisono.PeerLost, dist.new_group)
    assert "rank 1" in str(error), error


def case_interface() -> None:
    """`UNISONO_INTERFACE` says where a rank listens, and one that is not there is refused."""
    os.environ["UNISONO_INTERFACE"] = "lo"
    try:
        assert harness.run(_expect_world, 2) == [0, 0]
        os.environ["UNISONO_INTERFACE"] = "no-such-interface"
        error = raises(unisono.FormError, _native.Endpoint, "127.0.0.1")
        assert "no-such-interface" in str(error) and "127.0.0.1" in str(error), error
    finally:
        del os.environ["UNISONO_INTERFACE"]


def _expect_world(rank, world):
    _expect_usable(dist.group.WORLD, world)


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
            subprocess.Popen([sys.executable, "-m", __name__, ending, str(rank), store])
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


def case_exit_of_several() -> None:
    """At the end of a program, a group that cannot be left does not keep the others open."""

    class Stubborn:
        def __init__(self, error):
            self.error = error

        def _close(self, seconds):
            closed.append(self.error)
            raise self.error

    closed, real = [], _exit._open
    others = [Stubborn(error) for error in (ValueError("one"), KeyboardInterrupt(), OSError())]
    _exit._open = weakref.WeakSet(others)
    try:
        with CapturedLog() as log:
            _exit._close_all()
    finally:
        _exit._open = real
    assert len(closed) == 3 and len(log) == 3, (closed, log)
    assert any("Stubborn" in line and "one" in line for line in log), log


class CapturedLog(logging.Handler):
    """What the package logs within this, line by line."""

    def __enter__(self):
        self.lines: list[str] = []
        logging.getLogger("unisono").addHandler(self)
        return self.lines

    def __exit__(self, *_):
        logging.getLogger("unisono").removeHandler(self)

    def emit(self, record):
        self.lines.append(record.getMessage())


def case_profile_of_a_killed_rank() -> None:
    """What the others measured is reported, and no rank waits for the dead one for long."""
    with tempfile.TemporaryDirectory() as folder:
        codes = harness.run(_profile_of_a_killed_rank, 3, os.path.join(folder, "run"))
        assert codes == [0, -signal.SIGKILL, 0], codes


def _profile_of_a_killed_rank(rank, world, folder):
    replica = DistributedDataParallel(nn.Linear(16, 16))
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.1)

    def train():
        with unisono.torch.profile(folder):
            for number in range(20):
                if rank == 1 and number == 12:
                    os.kill(os.getpid(), signal.SIGKILL)
                replica(torch.ones(2, 16)).sum().backward()
                optimizer.step()

    raises(unisono.PeerLost, train)
    if rank == 0:
        with open(os.path.join(folder, "run.toml"), "rb") as file:
            info = tomllib.load(file)
        assert info["settings"]["missing_ranks"] == [1], info
        assert info["workers"] == 2 and info["hosts"][1].endswith("(rank 2)"), info
        with open(os.path.join(folder, "steps.jsonl")) as file:
            assert len(file.readlines()) == 12, info


if __name__ == "__main__":
    _program(sys.argv[1], int(sys.argv[2]), sys.argv[3])
