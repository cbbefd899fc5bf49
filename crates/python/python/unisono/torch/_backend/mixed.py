"""Unisono beside another backend: ``"cpu:unisono,cuda:nccl"``.

Torch then makes a group of its own, which asks one backend per kind of device.  It wraps what a
backend written in Python returns, and the wrapper knows `wait` and `get_future` only: there,
`is_completed` is false for ever, and a receiver would not learn which rank sent a message.  `holding`
is for an older torch.
"""

from datetime import timedelta

from torch._C._distributed_c10d import Backend as C10dBackend

from unisono import _native
from unisono.errors import Unsupported
from unisono.torch._backend.calls import Calls
from unisono.torch._backend.work import Work


class Backend(Calls, C10dBackend):
    """The part of a mixed group that moves tensors of CPUs."""

    # Torch would ask us to split the whole group, of which we are a part.
    supports_splitting = False

    def __init__(self, listed_as: str, native: _native.Group, store, timeout: timedelta):
        C10dBackend.__init__(self, native.rank, native.size)
        Calls.__init__(self, listed_as, native, store, timeout)

    def recv_anysource(self, tensors, tag=0):
        """Refused: torch would not say which rank sent, once the message is here."""
        raise Unsupported(
            "beside another backend unisono cannot receive from any rank; name the one that sends,"
            ' or make a group of its own: new_group(backend="unisono")',
            rank=self._rank,
            operation=f"receive from any rank with tag {tag}",
        )

    def _start(self, prepared):
        # Torch wants a handle, also of a call that has ended.
        return super()._start(prepared) or Work(None, prepared.result)
