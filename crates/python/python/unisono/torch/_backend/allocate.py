"""Tensors in memory that the other ranks of a machine read in place."""

import ctypes
import math

import torch
import torch.distributed as dist

from unisono.errors import InvalidCall
from unisono.torch._backend.core import Core


def allocate(
    *size: int, dtype: torch.dtype = torch.float32, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """A tensor of zeros that the other ranks of this machine can read, but not write.

        gradients = unisono.torch.allocate(sum(p.numel() for p in model.parameters()))
        for parameter, part in zip(model.parameters(), gradients.split([p.numel() for p in model.parameters()])):
            parameter.grad = part.view_as(parameter)
        for inputs, targets in batches:
            loss(model(inputs), targets).backward()
            dist.all_reduce(gradients, dist.ReduceOp.AVG)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)  # The gradients stay where they are.

    A ``broadcast`` of such a tensor, or of the same contiguous part of it on all ranks, and an ``all_reduce`` of 2 MiB or more, reads
    the other ranks' tensors where they are instead of copies of them.  The bits are the same; large ones take less time.  All ranks of the
    group call this, in the order of their other calls and with the same size, and then use it alike: a rank that hands over
    other memory in the same call is told so.  Where not all ranks share a machine, it is a tensor like any other.  It may outlive
    the group.  A forked child that writes to it, such as a loader of data, writes to its parent's tensor.
    """
    group = dist.group.WORLD if group is None else group
    if group is None:
        raise InvalidCall("call torch.distributed.init_process_group first")
    core = group._get_backend(torch.device("cpu"))
    if not isinstance(core, Core):
        raise InvalidCall("only a group of Unisono's has memory that its ranks read in place")
    if any(length < 0 for length in size):
        raise InvalidCall(f"a tensor has no size of {list(size)}")
    count = math.prod(size)
    memory = core._native.allocate(count * dtype.itemsize, core._seconds)
    if count == 0:
        return torch.zeros(size, dtype=dtype)
    array = (ctypes.c_char * (count * dtype.itemsize)).from_address(memory.address)
    array.memory = memory  # The tensor keeps the array, and the array keeps the memory.
    return torch.frombuffer(array, dtype=dtype, count=count).view(size)
