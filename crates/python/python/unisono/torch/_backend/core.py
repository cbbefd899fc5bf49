"""Starts calls on the engine, for the group that torch sees.

A call that is waited for at once (`asyncOp` is false) runs on the caller's thread and returns None,
which torch takes for "has ended".  Others are started and return a `Work`.

Calls on memory of a GPU go to a group of their own, of the same ranks, which forms with the first of them.
"""

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

import torch

from unisono import _native
from unisono.errors import Error, InvalidCall
from unisono.torch import _exit
from unisono.torch._backend import device, lines
from unisono.torch._backend.tensors import Finish
from unisono.torch._backend.work import DeviceWork, Work, Works


class Prepared(NamedTuple):
    """A call that was checked, and can be started."""

    call: _native.Call
    #: Torch's options; `asyncOp` in them is false for a call that is waited for at once.
    opts: object
    #: What the profiler sees, besides `shown`; without a name, nothing.
    name: str | None
    #: The tensors that the call fills.
    result: object
    shown: Sequence
    #: Whose memory the call uses.
    keep: tuple[torch.Tensor, ...]
    finish: Finish
    #: The timeout; 0 for the group's.
    seconds: float = 0.0


class Core:
    """A group that can run calls, and does not know which there are, nor what torch takes it for."""

    def __init__(self, listed_as: str, native: _native.Group, store, timeout: timedelta):
        self._native = native
        # The same ranks for memory of a GPU, once the first call with such memory was made.
        self._on_gpu: _native.Group | None = None
        self._forming = threading.Lock()
        self._store = store
        # The name in torch's list, by which its users and its profiler know the backend.
        self._listed_as = listed_as
        self._rank = native.rank
        self._size = native.size
        self._set_timeout(timeout)
        self._barriers = 0
        # Whether it is the group of all ranks, which were brought together by the store.
        self._has_all = False
        # Calls that were started since `start_coalescing`, unless that is over.
        self._collected: list[Work] | None = None
        # Calls that were started during a backward pass, by its number.
        self._backward: dict[int, list[Work]] = {}
        _exit.watch(self)

    def _set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._seconds = timeout.total_seconds()

    def _natives(self) -> list[_native.Group]:
        """The engine's groups: that for memory of a GPU, if there is one, and that of the host."""
        return [self._native] if self._on_gpu is None else [self._on_gpu, self._native]

    def _close(self, seconds: float) -> None:
        for native in self._natives():
            native.close(seconds, _exit.reason())

    def _sent(self) -> int:
        return sum(native.sent_bytes() or 0 for native in self._natives())

    def _native_for(self, number: int | None) -> _native.Group:
        """The engine's group for memory of this GPU, or of the host."""
        if number is None:
            return self._native
        with self._forming:
            if self._on_gpu is None:
                device.refuse_recording(self._rank)
                origin = lines.here(None, None)
                self._on_gpu = self._native.on_device(number, origin, self._seconds)
        device.check(number, self._on_gpu.device, self._rank)
        return self._on_gpu

    def _start(self, prepared: Prepared) -> Work | None:
        """Runs a call, or starts it."""
        call, opts, name, result, shown, keep, finish, seconds = prepared
        seconds = seconds or self._seconds
        number = device.number_of_all(keep)
        group = self._native_for(number)
        stream = None if number is None else device.stream_of(number)
        profiled = torch.autograd._profiler_enabled()
        if opts is not None and not getattr(opts, "asyncOp", True) and not profiled:
            group.run(call, lines.here(_dtype_of(prepared), None), seconds, stream)
            if finish is not None:
                finish()
            return None
        task = torch._C._current_graph_task_id()
        bucket = None if task == -1 else len(self._backward.get(task, ()))
        origin = lines.here(_dtype_of(prepared), bucket)
        # A tensor can be given other memory, by `tensor.data = …`; its storage is the memory.
        memory = [tensor.untyped_storage() for tensor in keep]
        native = group.submit(call, origin, memory, stream)
        if number is None:
            work = Work(native, result, finish, seconds)
        else:
            work = DeviceWork(native, result, finish and _tracked(finish, keep, number, stream), seconds, number)
        if profiled and name is not None:
            self._record(work, name, shown)
        if task != -1:
            self._watch_backward(task, work)
        if self._collected is not None:
            self._collected.append(work)
        return work

    def _start_all(self, calls: list[Prepared], result, name: str, shown) -> Work | None:
        """Starts several calls, all of which were checked before the first one starts."""
        works = [work for call in calls if (work := self._start(call)) is not None]
        if calls and not works:
            return None  # All were waited for.
        if works and torch.autograd._profiler_enabled():
            self._record(works[-1], name, shown)
        return Works(works, result)

    def _start_message(
        self, native: _native.Work, tensors, finish: Finish, name: str, number: int | None
    ) -> Work:
        if number is None:
            work = Work(native, tensors, finish, self._seconds)
        else:
            work = DeviceWork(native, tensors, finish, self._seconds, number)
        if torch.autograd._profiler_enabled():
            self._record(work, name, tensors)
        if self._collected is not None:
            self._collected.append(work)
        return work

    def _record(self, work: Work, name: str, shown) -> None:
        """Shows a call to torch's profiler, from now until its end, which is another thread's."""
        title = f"{self._listed_as}:{name}"
        record = torch.autograd._record_function_with_args_enter(title, *shown)
        recorded = threading.Event()

        def ended():
            torch.autograd._record_function_with_args_exit(record)
            recorded.set()

        work._native.then(ended)
        work._recorded = recorded

    def _watch_backward(self, task: int, work: Work) -> None:
        """Lets a failure end `backward` as the exception that it is.

        DDP waits for futures, and what fails behind a future arrives as a `RuntimeError` with a
        text.  A callback at the end of `backward` that was queued before DDP's own comes first, and
        what it raises stays what it is.
        """
        pending = self._backward.get(task)
        if pending is None:
            self._backward.clear()  # Of a backward pass that failed.
            pending = self._backward[task] = []

            def finish():
                for bucket, work in enumerate(self._backward.pop(task, ())):
                    try:
                        work.wait()
                    except Error as error:
                        error.bucket = bucket
                        raise

            torch.autograd.Variable._execution_engine.queue_callback(finish)
        pending.append(work)

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self._size:
            text = f"rank {rank} is not in a group of {self._size}"
            raise InvalidCall(text, rank=self._rank, peer=rank)


def _tracked(finish: Finish, keep, number: int, stream: int) -> Finish:
    """A `finish` that may run in the order of another stream than the one that its memory was allocated for."""

    def finish_here():
        finish()
        if device.stream_of(number) != stream:
            device.use_on_current(keep, number)

    return finish_here


def _dtype_of(prepared: Prepared) -> torch.dtype | None:
    """The type of the tensors that the caller handed over; a barrier has none."""
    for tensors in (prepared.shown, prepared.result):
        while isinstance(tensors, Sequence) and tensors:
            tensors = tensors[0]
        if isinstance(tensors, torch.Tensor):
            return tensors.dtype
    return None
