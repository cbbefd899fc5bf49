"""The group, as torch sees it.

Why it is a `ProcessGroup` and not a `Backend`: torch wraps what a Python `Backend` returns, and the
wrapper knows `wait` and `get_future` only, so that `is_completed` is false for ever and a receiver
does not learn which rank a message came from.  A Python `ProcessGroup` is called without that, and
without the dispatcher, which saves most of the time.  C++ (the reducer of DDP, the functional
collectives) reaches it too.

From the caller to the engine: this file has what torch asks about a group, and other groups;
`calls` messages and the end; `collectives` the collectives; `core` starts calls; `work` is what
they return.  `mixed` is what a group is where torch has other backends beside it.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup

from unisono import _native
from unisono.torch._backend import rendezvous
from unisono.torch._backend.calls import Calls
from unisono.torch._backend.mixed import Backend

_DEVICES = [torch.device("cpu"), torch.device("cuda")]


class Group(Calls, ProcessGroup):
    """A group of ranks on Unisono's engine."""

    def __init__(self, listed_as: str, native: _native.Group, store, timeout: timedelta):
        ProcessGroup.__init__(self, native.rank, native.size)
        Calls.__init__(self, listed_as, native, store, timeout)
        self._group_name = ""
        self._group_desc = ""

    # What torch asks about the group.  The base class would ask a backend that is not there.  The
    # name is always ours: for a group called "gloo", DDP's C++ looks for that backend.

    name = _get_backend_name = Calls.getBackendName

    def getRank(self):
        return self._rank

    rank = getRank

    def getSize(self):
        return self._size

    size = getSize

    def getGroupName(self):
        return self._group_name

    def setGroupName(self, name):
        self._group_name = name

    def getGroupDesc(self):
        return self._group_desc

    def setGroupDesc(self, description):
        self._group_desc = description

    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    @property
    def _device_types(self):
        return list(_DEVICES)

    def _get_backend(self, device):
        return self

    get_backend = _get_backend

    def _has_hooks(self):
        return False

    # Other groups.

    def split_group(
        self, ranks, timeout=None, opts=None, group_name=None, group_desc=None, device_types=None
    ):
        """The group of some of the ranks; None for the others. Torch registers it."""
        if self._rank not in ranks:
            return None
        ranks = list(ranks)
        store = dist.PrefixStore(f"{group_name}/", self._store)
        timeout = timeout or self._timeout
        limit = rendezvous.making_timeout(timeout, self._timeout)
        native, store = rendezvous.subgroup(self._native, ranks, store, limit)
        group = Group(self._listed_as, native, store, timeout)
        group._group_name, group._group_desc = group_name or "", group_desc or ""
        return group


def create(listed_as: str, options) -> Group | Backend:
    """Called by torch on every member of a new group."""
    ranks = list(options.global_ranks_in_group)  # Empty for the group of all.
    world = dist.group.WORLD if dist.is_initialized() else None
    rank, size, timeout = options.group_rank, options.group_size, options.timeout
    if ranks and isinstance(world, Group):
        limit = rendezvous.making_timeout(timeout, world._timeout)
        native, store = rendezvous.subgroup(world._native, ranks, options.store, limit)
    else:
        store = rendezvous.own_part(options.store, rank)
        native = rendezvous.form(store, rank, size, timeout)
    group = _for_torch(listed_as, native, store, options)
    group._has_all = not ranks
    return group


def _for_torch(listed_as: str, native: _native.Group, store, options) -> Group | Backend:
    """What torch is to take the group for: all of it, or a part beside other backends."""
    # Needs this module to be whole.
    from unisono.torch._backend.holding import Holding, asked_for, others_beside

    asked = asked_for(listed_as)
    if asked is None:
        return Group(listed_as, native, store, options.timeout)
    if getattr(options, "process_group", None) is not None:
        return Backend(listed_as, native, store, options.timeout)
    return Holding(listed_as, native, store, options.timeout, others_beside(*asked))
