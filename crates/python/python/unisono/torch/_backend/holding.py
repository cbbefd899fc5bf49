"""Unisono beside another backend, for a torch that has no place for a backend written in Python.

Where torch does not show a backend the group that it is to be a part of, it cannot hold one that is
written in Python either: it takes our group for the whole, and drops the other backends that the
program asked for, so that tensors of GPUs would come to us.  There the roles change: our group
holds a group of torch's with the other backends, and passes on to it what is of their devices.
"""

import sys
from collections.abc import Callable, Iterable
from datetime import timedelta

import torch
from torch._C._distributed_c10d import ProcessGroup, _unregister_process_group
from torch.distributed import distributed_c10d as c10d

from unisono import _native
from unisono.torch._backend.group import Group

# Of both groups.  Those of ours that are not here ask nothing of a device.
_CALLS = (
    "allreduce", "allreduce_coalesced", "reduce", "broadcast", "barrier",
    "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced",
    "allgather", "_allgather_base", "allgather_coalesced", "allgather_into_tensor_coalesced",
    "gather", "scatter", "alltoall", "alltoall_base",
    "send", "recv", "recv_anysource", "_start_coalescing", "_end_coalescing",
)


class Holding(Group):
    """A group that moves tensors of some devices, and has others move the others."""

    # Torch would ask us to split the whole.
    supports_splitting = False

    def __init__(
        self,
        listed_as: str,
        native: _native.Group,
        store,
        timeout: timedelta,
        others: ProcessGroup,
    ):
        super().__init__(listed_as, native, store, timeout)
        self._others = others
        self._theirs = {device.type for device in others._device_types}
        if others.bound_device_id is not None:
            self.bound_device_id = others.bound_device_id

    @property
    def _device_types(self):
        ours = [device for device in super()._device_types if device.type not in self._theirs]
        return [*ours, *self._others._device_types]

    def _get_backend(self, device):
        is_theirs = torch.device(device).type in self._theirs
        return self._others._get_backend(device) if is_theirs else self

    get_backend = _get_backend

    def set_timeout(self, timeout):
        """Sets the timeout of calls that have none of their own, of all backends."""
        super().set_timeout(timeout)
        for device in self._others._device_types:
            self._others._get_backend(device)._set_default_timeout(timeout)

    _set_default_timeout = set_timeout

    def shutdown(self):
        """Leaves the group, after the calls that were started."""
        self._others.shutdown()  # First: it may need the store.
        super().shutdown()

    def abort(self, reason: str = "abort() was called"):
        """Ends this group, here and on the other ranks, which are told why."""
        super().abort(reason)
        self._others.abort()


def _passing_on(name: str) -> Callable:
    ours = getattr(Group, name)

    def call(self, *arguments, **options):
        if _kind([*arguments, *options.values()]) in self._theirs:
            return getattr(self._others, name)(*arguments, **options)
        return ours(self, *arguments, **options)

    call.__name__, call.__doc__ = name, ours.__doc__
    return call


for _name in _CALLS:
    setattr(Holding, _name, _passing_on(_name))
Holding.recvAnysource = Holding.recv_anysource


def _kind(arguments: Iterable) -> str | None:
    """The kind of device of the first tensor, or device, of a call; None if there is none."""
    for argument in arguments:
        if isinstance(argument, (list, tuple)):
            found = _kind(argument)
            if found is not None:
                return found
        else:
            # Of a tensor, and of the options of a barrier.
            device = getattr(argument, "device", argument)
            if isinstance(device, torch.device):
                return device.type
    return None


def asked_for(listed_as: str) -> tuple[dict[str, str], dict] | None:
    """The backends that torch is asked for beside ours, by device, in the call that is under way, and what its
    function knows; None if there are no others.

    Torch tells a backend neither; so this looks at that function.
    """
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_name != "_new_process_group_helper":
        frame = frame.f_back
    if frame is None:
        return None
    known = frame.f_locals
    names = known["backend_config"].get_device_backend_map()
    others = {device: name for device, name in names.items() if name != listed_as}
    return (others, known) if others else None


def others_beside(others: dict[str, str], known: dict) -> ProcessGroup:
    """A group of torch's with these backends."""
    made = known["pg"]  # Has those that were named before ours.
    if {device.type for device in made._device_types} != set(others):
        made = _made(",".join(f"{device}:{name}" for device, name in others.items()), known)
    made._set_group_name(known["group_name"])
    return made


def _made(backends: str, known: dict) -> ProcessGroup:
    """A group that torch makes, and that it does not list."""
    name = f"{known['group_name']}/others"
    made, _ = c10d._new_process_group_helper(
        known["group_size"],
        known["group_rank"],
        known["global_ranks_in_group"],
        backends,
        known["store"],
        name,
        backend_options=known["backend_options"],
        timeout=known["timeout"],
        device_id=known["device_id"],
    )
    world = c10d._world
    for listed in (world.pg_map, world.pg_names, world.pg_backend_config):
        del listed[made]
    for tag in ("", world.pg_to_tag.pop(made)):
        world.tags_to_pg[tag].remove(made)
    _unregister_process_group(name)
    return made
