"""What a user is told when ranks disagree, are missing, or wait for each other."""

import multiprocessing
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from datetime import timedelta

import harness
import torch
import torch.distributed as dist
import unisono
import unisono.torch
from tools import raises
from torch.distributed import ReduceOp

_FILE = os.path.basename(__file__)


def _usual(rank, world):
    dist.reduce(torch.ones(4), 0)


# Each with a line of its own, which errors name.
def _other_kind(rank, world):
    dist.all_gather([torch.ones(4) for _ in range(world)], torch.ones(4))


def _other_type(rank, world):
    dist.reduce(torch.ones(4, dtype=torch.float64), 0)


def _other_count(rank, world):
    dist.reduce(torch.ones(5), 0)


def _other_reduction(rank, world):
    dist.reduce(torch.ones(4), 0, op=ReduceOp.MAX)


def _other_root(rank, world):
    dist.reduce(torch.ones(4), world - 1)


def _next(rank, world):
    dist.barrier()


# What the rank that differs calls, and how errors name it.
_DIFFERENCES = {
    _other_kind: "all_gather #1 of 4 float32 per rank",
    _other_type: "reduce #1 of 4 float64 by sum with root 0",
    _other_count: "reduce #1 of 5 float32 by sum with root 0",
    _other_reduction: "reduce #1 of 4 float32 by max with root 0",
    _other_root: "reduce #1 of 4 float32 by sum with root {last}",
    _next: "barrier #1",  # It has skipped a call.
}


def case_mismatch_lines() -> None:
    """Whichever rank differs, and in whatever: every rank is told every line and every call."""
    for world in (2, 3):
        for odd in range(world):
            for kind in _DIFFERENCES:
                codes = harness.run(_mismatch_lines, world, odd, kind)
                assert codes == [0] * world, (world, odd, kind.__name__, codes)


def _mismatch_lines(rank, world, odd, kind):
    def program():
        (kind if rank == odd else _usual)(rank, world)
        # A rank whose call waits for no other rank learns of it in the next.
        _next(rank, world)

    error = raises(unisono.Mismatch, program)
    text = str(error)
    assert odd in error.calls and len(error.calls) == 2, vars(error)
    for involved, (number, call) in error.calls.items():
        function = kind if involved == odd else _usual
        expected = _DIFFERENCES.get(function, "reduce #1 of 4 float32 by sum with root 0")
        expected = expected.format(last=world - 1)
        if number == 2:  # It was a call ahead.
            function, expected = _next, "barrier #2"
        assert call.startswith(expected), (call, expected)
        line = function.__code__.co_firstlineno + 1
        said = f"rank {involved} called {call} at "
        place = re.search(re.escape(said) + r"\S*?" + re.escape(f"{_FILE}:{line};"), text)
        assert place, (said, f"{_FILE}:{line}", text)


def case_mismatch_of_a_program_that_ends() -> None:
    """A rank that ends at once, and its store with it, does not take its line along."""
    world = 3
    with tempfile.TemporaryDirectory() as directory:
        port = _free_port()
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", __name__, "mismatch", str(rank), str(world), str(port)],
                stderr=subprocess.PIPE,
                text=True,
                cwd=directory,
            )
            for rank in range(world)
        ]
        for rank, process in enumerate(ranks):
            _, said = process.communicate(timeout=harness.HUNG)
            errors = [line for line in said.splitlines() if "Mismatch: " in line]
            assert process.returncode == 1 and len(errors) == 1, (rank, said)
            assert errors[0].count(f"{_FILE}:") == 2, (rank, errors)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def case_opposite_orders() -> None:
    """Ranks that use two groups in opposite orders are told so, with both calls and lines."""
    for started in (False, True):
        for world in (2, 3):
            codes = harness.run(_opposite_orders, world, started)
            assert codes == [0] * world, (started, world, codes)


def _opposite_orders(rank, world, started):
    # The ranks differ in number between the job and these groups.
    members = [world - 1, world - 2]
    one, another = dist.new_group(members), dist.new_group(members)
    if rank in members:
        order = (one, another) if rank == world - 1 else (another, one)
        error = raises(unisono.Mismatch, _in_order, order, started)
        text = str(error)
        assert sorted(error.calls) == sorted(members), vars(error)
        for member in members:
            said = f"rank {member} waits in all_reduce #1 of 4 float32 by sum of the group of ranks"
            assert said in text, (said, text)
        line = _in_order.__code__.co_firstlineno + 2
        assert text.count(f"{_FILE}:{line}") == 2 and "same order" in text, text
        # Both groups have ended.
        raises(unisono.Mismatch, _in_order, order[::-1], False)
    # The group of all goes on.
    dist.barrier()


def _in_order(groups, started):
    works = [
        dist.all_reduce(torch.ones(4), group=group, async_op=started) for group in groups[:1]
    ]
    for work in filter(None, works):
        work.wait()
    dist.all_reduce(torch.ones(4), group=groups[1])


def case_opposite_orders_that_are_right() -> None:
    """Calls that were started leave their program free to make the others."""
    assert harness.run(_opposite_orders_that_are_right, 2) == [0, 0]


def _opposite_orders_that_are_right(rank, world):
    one, another = dist.new_group(), dist.new_group()
    first, second = (one, another) if rank == 0 else (another, one)
    tensor = torch.ones(4)
    work = dist.all_reduce(tensor, group=first, async_op=True)
    # Long enough for both to have told that their calls wait.
    time.sleep(1)
    dist.all_reduce(torch.ones(4), group=second)
    work.wait()
    assert tensor.tolist() == [float(world)] * 4


def case_numbers() -> None:
    """The first call of a program is its first, also after calls that the engine makes of one."""
    assert harness.run(_numbers, 2) == [0, 0]


def _numbers(rank, world):
    splits = [1, 3] if rank == 0 else [3, 1]
    dist.all_to_all_single(torch.empty(4), torch.ones(4), [1, 3] if rank == 0 else [3, 1], splits)
    raises(unisono.InvalidCall, dist.all_reduce, torch.ones(2, dtype=torch.int16))
    dist.barrier()
    dist.group.WORLD.set_timeout(timedelta(seconds=1))
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        error = raises(unisono.TimedOut, dist.broadcast, torch.ones(4), 1)
        assert "broadcast #3 of 4 float32 with root 1" in str(error), error
        assert error.operation == "broadcast", error
        store.set("over", b"yes")
    else:
        store.wait(["over"])
        raises(unisono.Aborted, dist.barrier)


def case_types() -> None:
    """A call is named by the caller's type and count, however it travels."""
    dtypes = [torch.bool, torch.int16, torch.float16, torch.float8_e4m3fn]
    for dtype in dtypes:
        codes = harness.run(_types, 2, dtype)
        assert codes == [0, 0], (dtype, codes)


def _types(rank, world, dtype):
    tensor = torch.zeros(6, dtype=dtype)
    if rank == 0:
        call, name = lambda: dist.broadcast(tensor, 0), "broadcast"
    elif dtype in (torch.int16, torch.float8_e4m3fn):
        call, name = lambda: dist.all_gather([tensor, tensor.clone()], tensor), "all_gather"
    else:
        call, name = lambda: dist.all_reduce(tensor), "all_reduce"

    def program():
        call()
        dist.barrier()

    error = raises(unisono.Mismatch, program)
    own = error.calls[rank][1]
    kind = str(dtype).removeprefix("torch.")
    assert own.startswith(f"{name} #1 of 6 {kind}") or own == "barrier #2", (own, error)


def case_moved_as_another_type() -> None:
    """Data that only moves must have one type on all ranks, as what is reduced must."""
    assert harness.run(_moved_as_another_type, 2) == [0, 0]


def _moved_as_another_type(rank, world):
    dtype = torch.float32 if rank == 0 else torch.int32

    def program():
        dist.broadcast(torch.ones(4, dtype=dtype), 0)
        dist.barrier()

    error = raises(unisono.Mismatch, program)
    assert "4 float32" in str(error) or "barrier #2" in str(error), error
    assert "4 int32" in str(error), error


def case_missing_before_init() -> None:
    """A rank that dies before `init_process_group` is named, whichever it is."""
    world = 3
    for dead in range(world):
        for kind in ("file", "tcp"):
            with tempfile.TemporaryDirectory() as directory:
                # No rank of the job has the server, as with torchrun.
                master = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
                where = os.path.join(directory, "store") if kind == "file" else master.port
                codes = _forked(_missing_before_init, world, dead, where)
                assert codes == [9 if rank == dead else 0 for rank in range(world)], (dead, codes)


def _missing_before_init(rank, world, dead, where):
    if rank == dead:
        os._exit(9)
    brief = timedelta(seconds=2)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    if isinstance(where, int):
        store = dist.TCPStore("127.0.0.1", where, is_master=False, timeout=brief)
    else:
        store = dist.FileStore(where, world)
    options = {"store": store, "rank": rank, "world_size": world, "timeout": brief}
    error = raises(unisono.FormError, dist.init_process_group, "unisono", **options)
    assert f"rank {dead} did not call init_process_group within" in str(error), error
    assert error.peer == dead, vars(error)


def _forked(function, world, *arguments) -> list[int]:
    """Runs a function in processes that are in no group."""

    def body(rank):
        try:
            function(rank, world, *arguments)
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=body, args=(rank,)) for rank in range(world)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(harness.HUNG)
    return [process.exitcode for process in ranks]


def case_new_group_after_a_death() -> None:
    """A group that cannot be made because a rank died raises what a call would."""
    for dead in (0, 1):
        codes = harness.run(_new_group_after_a_death, 2, dead)
        assert codes == [9 if rank == dead else 0 for rank in range(2)], codes


def _new_group_after_a_death(rank, world, dead):
    if rank == dead:
        os._exit(9)
    error = raises(unisono.PeerLost, dist.new_group)
    assert error.peer == dead and f"rank {dead} died" in str(error), error
    assert error.operation == "new_group" and "restart the job" in str(error), error
    assert not isinstance(error, unisono.FormError)
    # And again, now that it is known.
    raises(unisono.PeerLost, dist.new_group)


def case_new_group_after_the_store_died() -> None:
    """So does one whose rank that died served the store."""
    port = _free_port()
    codes = _forked(_new_group_after_the_store_died, 2, port)
    assert codes == [9, 0], codes


def _new_group_after_the_store_died(rank, world, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("unisono", rank=rank, world_size=world)
    if rank == 0:
        os._exit(9)
    error = raises(unisono.PeerLost, dist.new_group)
    assert error.peer == 0, vars(error)


def case_a_rank_that_raises() -> None:
    """The others are told what a rank raised that ended by it, and where to look."""
    for ending in ("raise", "finally", "exit"):
        with tempfile.TemporaryDirectory() as directory:
            store = os.path.join(directory, "store")
            ranks = [
                subprocess.Popen(
                    [sys.executable, "-m", __name__, ending, str(rank), "2", store],
                    stderr=subprocess.PIPE,
                    text=True,
                )
                for rank in range(2)
            ]
            said = [process.communicate(timeout=harness.HUNG)[1] for process in ranks]
            lost = [line for line in said[0].splitlines() if "PeerLost: " in line]
            assert len(lost) == 1 and "see what rank 1 printed" in lost[0], said[0]
            if ending == "exit":
                assert "rank 1 left the group" in lost[0] and "program ended" in lost[0], lost
            else:
                assert "rank 1 failed and left" in lost[0], lost
                assert "ValueError: the data is gone" in lost[0], lost


def _program(kind: str, rank: int, world: int, where: str) -> None:
    if kind == "mismatch":
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=where)
        dist.init_process_group("unisono", rank=rank, world_size=world)
        (_other_count if rank == 1 else _usual)(rank, world)
        _next(rank, world)
        return
    store = dist.FileStore(where, world)
    dist.init_process_group("unisono", store=store, rank=rank, world_size=world)
    if rank == 0:
        dist.all_reduce(torch.ones(4))
        return
    if kind == "exit":
        sys.exit(3)
    if kind == "raise":
        raise ValueError("the data is gone\nand more")
    try:
        raise ValueError("the data is gone")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    _program(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
