"""Unisono beside another backend, for a torch that has no place for a backend written in Python.

Where torch does not show a backend the group that it is to be a part of, it cannot hold one that is
written in Python either: it takes our group for the whole, and drops the other backends that the
program asked for, so that tensors of GPUs would come to us.  There the roles change: our group
holds a group of torch's with the other backends, and passes on to it what is not of a CPU.
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
    """A group that moves tensors of CPUs, and has others move the others."""

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
        if others.bound_device_id is not None:
            self.bound_device_id = others.bound_device_id

    @property
    def _device_types(self):
        return [*super()._device_types, *self._others._device_types]

    def _get_backend(self, device):
        return self if torch.device(device).type == "cpu" else self._others._get_backend(device)

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
        if _is_elsewhere([*arguments, *options.values()]):
            return getattr(self._others, name)(*arguments, **options)
        return ours(self, *arguments, **options)

    call.__name__, call.__doc__ = name, ours.__doc__
    return call


for _name in _CALLS:
    setattr(Holding, _name, _passing_on(_name))
Holding.recvAnysource = Holding.recv_anysource


def _is_elsewhere(arguments: Iterable) -> bool | None:
    """Whether the first tensor or device of a call is not of a CPU; None if there is none."""
    for argument in arguments:
        if isinstance(argument, (list, tuple)):
            found = _is_elsewhere(argument)
            if found is not None:
                return found
        else:
            # Of a tensor, and of the options of a barrier.
            device = getattr(argument, "device", argument)
            if isinstance(device, torch.device):
                return device.type != "cpu"
    return None


def others_beside(listed_as: str) -> ProcessGroup | None:
    """A group of the backends that torch is asked for beside ours, in the call that is under way.

    Torch tells a backend neither; so this looks at what its function knows.
    """
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_name != "_new_process_group_helper":
        frame = frame.f_back
    if frame is None:
        return None
    known = frame.f_locals
    names = known["backend_config"].get_device_backend_map()
    others = {device: name for device, name in names.items() if name != listed_as}
    if not others:
        return None
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
