"""The engine's group behind a group of torch, whichever backend that has."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from unisono import _native
from unisono.torch._backend import lines, rendezvous
from unisono.torch._backend.codes import BROADCAST
from unisono.torch._backend.core import Core
from unisono.torch._backend.tensors import byte_count, target_for


class EngineGroup(NamedTuple):
    """This rank among those it synchronizes with."""

    #: None for a process by itself.
    group: _native.Group | None
    rank: int
    size: int
    #: How long a call may take.
    seconds: float

    def spread(self, tensors: Iterable[torch.Tensor]) -> None:
        """Gives all ranks the tensors of rank 0."""
        if self.group is None:
            return
        for tensor in tensors:
            here = tensor.detach().to("cpu")  # Itself, if it is there.
            flat, finish = target_for(here, keep=True)
            address = flat.data_ptr()
            call = _native.Call.moving(BROADCAST, address, address, byte_count(flat), root=0)
            self.group.run(call, lines.here(tensor.dtype, None), self.seconds)
            if finish is not None:
                finish()
            if not tensor.is_cpu:
                tensor.detach().copy_(here)


def engine_of(group: dist.ProcessGroup | None = None) -> EngineGroup:
    """The engine's group of the same ranks; by default those of the whole job.

    Where the group is another backend's, the ranks form one of the engine's through torch's store:
    codecs and local steps do not need the program to change its backend.  All ranks call this.
    A program that has not called `init_process_group` is a process by itself.
    """
    if group is None:
        if not dist.is_initialized():
            return EngineGroup(None, 0, 1, default_pg_timeout.total_seconds())
        group = dist.group.WORLD
    if isinstance(group, Core):
        # One of its own: the calls of the program are numbered, and these are not among them.
        store = dist.PrefixStore("engine", group._store)
        ranks = list(range(group._size))
        native, _ = rendezvous.subgroup(group._native, ranks, store, group._timeout)
        return EngineGroup(native, group._rank, group._size, group._seconds)
    rank, size, name = dist.get_rank(group), dist.get_world_size(group), group.group_name
    store = dist.PrefixStore(f"unisono/{name}", dist.distributed_c10d._get_default_store())
    own = rendezvous.own_part(store, rank)
    native = rendezvous.form(own, rank, size, default_pg_timeout)
    return EngineGroup(native, rank, size, default_pg_timeout.total_seconds())
