"""Runs a function on several ranks, each a process of its own."""

import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import warnings

import torch
import torch.distributed as dist

# After this long, ranks that have not ended have hung.  Longer than anything here takes on a busy
# machine.
HUNG = 900


def run(function, world: int, *arguments, backend: str = "unisono") -> list[int]:
    """Calls `function(rank, world, *arguments)` on every rank of a new group; their exit codes.

    The processes are forked: importing torch takes longer than most checks, and nothing has started
    threads here yet.
    """
    with tempfile.TemporaryDirectory() as directory:
        context = multiprocessing.get_context("fork")
        ranks = [
            context.Process(
                target=_rank, args=(function, rank, world, arguments, backend, directory)
            )
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + HUNG
        # A join with a time limit would wait for the children of a rank as well, which keep its end of
        # a pipe open.
        while any(process.is_alive() for process in ranks) and time.monotonic() < deadline:
            time.sleep(0.005)
        hung = [rank for rank, process in enumerate(ranks) if process.is_alive()]
        for rank in hung:
            ranks[rank].kill()
            ranks[rank].join()
        if hung:
            print(f"hung: ranks {hung} of {world} in {function.__name__}", flush=True)
        return [process.exitcode for process in ranks]


def _rank(function, rank, world, arguments, backend, directory):
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    try:
        store = dist.FileStore(os.path.join(directory, "store"), world)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world)
        function(rank, world, *arguments)
        dist.destroy_process_group()
    except BaseException:
        print(f"rank {rank} of {world} failed in {function.__name__}:", file=sys.stderr)
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
