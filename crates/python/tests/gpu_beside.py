#!/usr/bin/env python3
"""Unisono beside another backend on a machine with a GPU, which the other checks do not need.

    torchrun --standalone --nproc-per-node 2 gpu_beside.py [--other gloo|nccl]

CPU tensors go to Unisono and CUDA tensors to the other backend, in calls and in DDP, in the group of
all and in others.  NCCL wants a GPU for every rank of a host: where there are fewer, the ranks say that they
are on different hosts.  Imports nothing of ours: torch finds the backend by its name.
"""

import argparse
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--other", choices=("gloo", "nccl"), default="gloo")
    other = parser.parse_args().other
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    if int(os.environ.get("LOCAL_WORLD_SIZE", 1)) > torch.cuda.device_count():
        os.environ.setdefault("NCCL_HOSTID", f"host {os.environ['RANK']}")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    for backend in (f"cpu:unisono,cuda:{other}", f"cuda:{other},cpu:unisono"):
        dist.init_process_group(backend)
        rank, world = dist.get_rank(), dist.get_world_size()
        for group in (dist.group.WORLD, dist.new_group(), dist.new_group(list(range(world)))):
            check_calls(group, device, rank, world)
        for place in (torch.device("cpu"), device):
            check_ddp(place, rank, world)
        dist.destroy_process_group()
        if rank == 0:
            print(f"ok   {backend} with {world} processes, torch {torch.__version__}", flush=True)


def check_calls(group, device, rank: int, world: int) -> None:
    ours = group._get_backend(torch.device("cpu"))
    theirs = group._get_backend(device)
    assert type(ours).__module__.startswith("unisono."), ours
    assert not type(theirs).__module__.startswith("unisono."), theirs
    for place in (torch.device("cpu"), device):
        before = ours._sent()
        for asynchronous in (False, True):
            tensor = torch.full((1000,), rank + 1.0, device=place)
            work = dist.all_reduce(tensor, group=group, async_op=asynchronous)
            if work is not None:
                work.wait()
            expect(tensor, world * (world + 1) / 2)
        tensor = torch.full((1000,), rank + 1.0, device=place)
        dist.broadcast(tensor, world - 1, group=group)
        expect(tensor, world)
        outputs = [torch.empty(10, device=place) for _ in range(world)]
        dist.all_gather(outputs, torch.full((10,), float(rank), device=place), group=group)
        for source, output in enumerate(outputs):
            expect(output, source)
        total = functional.all_reduce(torch.ones(4, device=place), "sum", group)
        expect(total + 0, world)
        moved = ours._sent() - before
        assert (moved > 0) == (place.type == "cpu" and world > 1), (place, moved)
        dist.barrier(group)


def check_ddp(place, rank: int, world: int) -> None:
    torch.manual_seed(0)
    replica = DistributedDataParallel(nn.Linear(8, 8).to(place))
    for _ in range(3):
        replica(torch.full((2, 8), rank + 1.0, device=place)).sum().backward()
    # Three times the mean over ranks of the sum over samples.
    expect(replica.module.weight.grad, 3 * (world + 1.0))


def expect(tensor: torch.Tensor, value: float) -> None:
    assert torch.allclose(tensor, torch.full_like(tensor, value)), (tensor, value)


if __name__ == "__main__":
    sys.exit(main())
