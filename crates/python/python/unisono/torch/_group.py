"""The group, as torch sees it.

Why it is a `ProcessGroup` and not a `Backend`: torch wraps what a Python `Backend` returns, and the
wrapper knows `wait` and `get_future` only, so that `is_completed` is false for ever and nobody
learns from whom a message came.  A Python `ProcessGroup` is called without that, and without the
dispatcher, which saves most of the time.  C++ (the reducer of DDP, the functional collectives)
reaches it too.

From the caller to the engine: this file has what torch asks about a group, messages, and other
groups; `_collectives` the collectives; `_core` starts calls; `_work` is what they return.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend as C10dBackend

from unisono.errors import Unsupported
from unisono.torch import _barrier, _rendezvous
from unisono.torch._collectives import Collectives
from unisono.torch._tensors import byte_count, only, place_for, source_of
from unisono.torch._work import Work

_CPU = torch.device("cpu")


class Group(Collectives):
    """A group of ranks on Unisono's engine."""

    def __init__(self, listed_as: str, native, store, timeout: timedelta):
        super().__init__(listed_as, native, store, timeout)
        self._group_name = ""
        self._group_desc = ""
        self._barriers = 0

    # What torch asks about the group.  The base class would ask a backend that is not there.  The
    # name is always ours: for a group called "gloo", DDP's C++ looks for that backend.

    def getBackendName(self):
        return "unisono"

    name = _get_backend_name = getBackendName

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
        return [_CPU]

    def _get_backend(self, device):
        return self

    get_backend = _get_backend

    def _has_hooks(self):
        return False

    def _get_sequence_number_for_group(self):
        return self._calls

    def _set_sequence_number_for_group(self):
        pass

    # What torch asks a backend, which the group is too.

    supports_coalescing = False
    supports_splitting = True
    supports_shrinking = False

    def supports_tensor_alloc(self, device):
        return False

    @property
    def options(self):
        return C10dBackend.Options(self._listed_as, self._timeout)

    def set_timeout(self, timeout):
        """Sets the timeout of calls that have none of their own."""
        self._set_timeout(timeout)

    _set_default_timeout = set_timeout

    def eager_connect_single_device(self, device):
        pass

    # Messages.

    def send(self, tensors, destination, tag=0):
        """Sends a tensor to a rank."""
        source = source_of(only(tensors))
        self._check_rank(destination)
        native = self._native.send(source.data_ptr(), byte_count(source), destination, tag, source)
        return self._start_message(native, tensors, None, "send")

    def recv(self, tensors, source, tag=0):
        """Receives a tensor from a rank."""
        flat, finish = place_for(only(tensors), keep=False)
        self._check_rank(source)
        native = self._native.receive(flat.data_ptr(), byte_count(flat), source, tag, flat)
        return self._start_message(native, tensors, finish, "recv")

    def recv_anysource(self, tensors, tag=0):
        """Not there yet."""
        raise Unsupported(
            "unisono cannot receive from any source yet; name the rank that sends",
            rank=self._rank,
            operation=f"receive from any rank with tag {tag}",
        )

    recvAnysource = recv_anysource

    # Calls between these two are started like any others.

    def start_coalescing(self, device=None):
        pass

    def end_coalescing(self, device=None):
        return Work(None, [])

    _start_coalescing = start_coalescing
    _end_coalescing = end_coalescing

    def monitored_barrier(self, timeout=None, wait_all_ranks=False, **_):
        """A barrier that says who did not come, and leaves the group usable if somebody did not."""
        if not isinstance(timeout, timedelta):  # Some callers pass the options of a barrier.
            timeout = getattr(timeout, "timeout", None) or self._timeout
        if timeout < timedelta(0):
            timeout = self._timeout
        key = f"monitored-barrier/{self._barriers}"
        self._barriers += 1
        _barrier.monitored(self._store, key, self._rank, self._size, timeout, wait_all_ranks)

    # Other groups, and the end.

    def split_group(
        self, ranks, timeout=None, opts=None, group_name=None, group_desc=None, device_types=None
    ):
        """The group of some of the ranks; None for the others. Torch registers it."""
        if self._rank not in ranks:
            return None
        store = dist.PrefixStore(f"{group_name}/", self._store)
        native = self._native.subgroup(list(ranks))
        group = Group(self._listed_as, native, store, timeout or self._timeout)
        group._group_name, group._group_desc = group_name or "", group_desc or ""
        return group

    def shutdown(self):
        """Leaves the group, after the calls that were started."""
        self._close(self._seconds)

    def abort(self):
        """Ends all groups of the job, here and on the other ranks."""
        self._native.abort()


def create(listed_as: str, options) -> Group:
    """Called by torch on every member of a new group."""
    ranks = list(options.global_ranks_in_group)  # Empty for the group of all.
    world = dist.group.WORLD if dist.is_initialized() else None
    if ranks and isinstance(world, Group):
        native = world._native.subgroup(ranks)
    else:
        native = _rendezvous.form(options.store, options.group_rank, options.group_size)
    return Group(listed_as, native, options.store, options.timeout)
