"""What a group does besides collectives: messages, the monitored barrier, timeouts, and its end.

`group` makes a `ProcessGroup` of it for torch, and `mixed` a `Backend`.
"""

import functools
from datetime import timedelta

import torch
from torch._C._distributed_c10d import Backend, BarrierOptions

from unisono.torch._backend import barrier, device, rendezvous
from unisono.torch._backend.collectives import Collectives
from unisono.torch._backend.tensors import byte_count, check_copy_to, only, source_of, target_for, write
from unisono.torch._backend.work import Work, Works


# Of a barrier that is waited for.
_WAITING = BarrierOptions()
_WAITING.asyncOp = False


def _to_device(target: torch.Tensor, flat: torch.Tensor, begun: torch.cuda.Event, number: int) -> None:
    """Copies a message to where it was to be received, on the current stream, which may not be the one on which the
    program used that memory before."""
    device.wait_for(begun, number)
    write(target, flat)
    device.use_on_current([target], number)


class Calls(Collectives):
    """All calls of a group."""

    # Messages.  Those of a GPU's memory go through pinned memory of the host.

    def send(self, tensors, destination, tag=0):
        """Sends a tensor to a rank."""
        source = source_of(only(tensors))
        self._check_rank(destination)
        number = device.number_of(source)
        if number is not None:
            device.refuse_recording(self._rank)
            source = device.to_host(source)
        address, length = source.data_ptr(), byte_count(source)
        native = self._native.send(address, length, destination, tag, source.untyped_storage())
        return self._start_message(native, tensors, None, "send", number)

    def recv(self, tensors, source, tag=0):
        """Receives a tensor from a rank."""
        self._check_rank(source)
        return self._receive(tensors, source, tag, "recv")

    def recv_anysource(self, tensors, tag=0):
        """Receives a tensor from the rank that sends first; `source_rank` of the work says which."""
        return self._receive(tensors, None, tag, "recvAnySource")

    recvAnysource = recv_anysource

    def _receive(self, tensors, source: int | None, tag: int, name: str) -> Work:
        target = only(tensors)
        number = device.number_of(target)
        if number is None:
            flat, finish = target_for(target, keep=False)
        else:
            check_copy_to(target)
            device.refuse_recording(self._rank)
            flat = device.host_memory(target)
            finish = functools.partial(_to_device, target, flat, device.reached(number), number)
        address, length = flat.data_ptr(), byte_count(flat)
        native = self._native.receive(address, length, source, tag, flat.untyped_storage())
        return self._start_message(native, tensors, finish, name, number)

    def start_coalescing(self, device=None):
        """Begins to collect calls, which are started like any others."""
        self._collected = []

    def end_coalescing(self, device=None):
        """The calls since `start_coalescing`, as one."""
        works, self._collected = self._collected or [], None
        return Works(works, [work.result() for work in works])

    _start_coalescing = start_coalescing
    _end_coalescing = end_coalescing

    def monitored_barrier(self, timeout=None, wait_all_ranks=False, **_):
        """A barrier that says which ranks did not come; the group stays usable if some did not."""
        if self._native.has_ended():
            self.barrier(_WAITING)  # Says why.
        if not isinstance(timeout, timedelta):  # Some callers pass the options of a barrier.
            timeout = getattr(timeout, "timeout", None) or self._timeout
        if timeout < timedelta(0):
            timeout = self._timeout
        key = f"monitored-barrier/{self._barriers}"
        self._barriers += 1
        barrier.monitored(self._store, key, self._rank, self._size, timeout, wait_all_ranks)

    # What torch asks a backend.  A group is asked too, for it says that it is its own backend.

    supports_coalescing = False
    supports_splitting = True
    supports_shrinking = False

    def getBackendName(self):
        return "unisono"

    def supports_tensor_alloc(self, device):
        return False

    @property
    def options(self):
        return Backend.Options(self._listed_as, self._timeout)

    def set_timeout(self, timeout):
        """Sets the timeout of calls that have none of their own."""
        self._set_timeout(timeout)

    _set_default_timeout = set_timeout

    def eager_connect_single_device(self, device: torch.device):
        """Forms the group for memory of a GPU, which the first call would form."""
        if device.type == "cuda":
            self._native_for(torch.cuda.current_device() if device.index is None else device.index)

    def perform_nocolor_split(self, device: torch.device):
        """Nothing: ranks that are not in a new group take no part in making it."""

    def _get_sequence_number_for_group(self):
        return sum(native.calls() for native in self._natives())

    def _set_sequence_number_for_group(self):
        pass

    # The end.

    def shutdown(self):
        """Leaves the group, after the calls that were started."""
        self._close(self._seconds)
        if self._has_all:
            rendezvous.leave_store(self._store, self._rank, self._size)

    def abort(self, reason: str = "abort() was called"):
        """Ends this group, here and on the other ranks, which are told why. Other groups go on."""
        for native in self._natives():
            native.abort(reason)
