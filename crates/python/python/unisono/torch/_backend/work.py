"""What a call returns: torch's `Work`, over the engine's.

C++ asks a `Work` that is defined in Python for two things only, `wait` and `get_future`; everything
else is asked by Python, which holds this very object because the group is defined in Python too.
"""

import threading
from datetime import timedelta

import torch
from torch._C._distributed_c10d import Work as C10dWork

from unisono import _native
from unisono.torch._backend import device
from unisono.torch._backend.tensors import Finish


class Work(C10dWork):
    """A call under way, or one that has ended."""

    def __init__(
        self,
        native: _native.Work | None,
        result,
        finish: Finish = None,
        seconds: float = 0.0,
    ):
        """For a call that fills `result`; without `native`, one that has ended well."""
        super().__init__()
        self._native = native
        self._result = result
        # What is left to do once the data is here: to copy it to where the caller wants it.
        self._finish = finish
        self._lock = threading.Lock() if finish is not None else None
        self._future = None
        # How long `wait` waits unless it is told otherwise.
        self._seconds = seconds
        # Set when the profiler has seen the end.
        self._recorded = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits until the call has ended; raises what went wrong."""
        native = self._native
        if native is not None:
            native.wait(timeout.total_seconds() if timeout else self._seconds)
            self._settle()
            if self._recorded is not None:
                self._recorded.wait()
        return True

    def is_completed(self) -> bool:
        """Whether the call has ended, well or not."""
        native = self._native
        if native is None:
            return True
        if not native.is_done():
            return False
        if native.error() is None:
            self._settle()
        return True

    def is_success(self) -> bool:
        """Whether the call has ended well."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        """What went wrong, if anything did."""
        return None if self._native is None else self._native.error()

    def result(self):
        """The tensors that the call fills."""
        return self._result

    def synchronize(self) -> None:
        """For devices with streams, which a CPU has not."""

    def source_rank(self) -> int | None:
        """Whose message was received."""
        return None if self._native is None else self._native.source()

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future:
        """A future of the tensors that the call fills."""
        if self._future is None:
            self._future = self._make_future()
        return self._future

    get_future_result = get_future

    def _make_future(self) -> torch.futures.Future:
        ended = torch.futures.Future()
        native = self._native
        if native is None or (native.is_done() and native.error() is None):
            self._settle()
            ended.set_result(self._result)
            return ended

        # An exception that is *set* on a future is a value to C++, and ends the process when
        # `backward` takes it for a tensor.  One that is raised in a callback arrives.
        def outcome(_):
            error = self.exception()
            if error is not None:
                raise error
            self._settle()
            return self._result

        future = ended.then(outcome)
        native.then(lambda: ended.set_result(None))
        # A program that waits for a future does not say for how long.
        native.end_within(self._seconds)
        return future

    def _settle(self) -> None:
        """Finishes the call, once; returns when that is done, on this thread or on another."""
        if self._lock is None:
            return
        with self._lock:
            if self._finish is not None:
                self._finish()
                self._finish = None


class DeviceWork(Work):
    """A call on memory of a GPU, or a message into it.

    It ends on the host when all of it was submitted, and later on the GPU.  `wait` waits for the former, and
    lets the current stream wait for the latter.
    """

    def __init__(
        self, native: _native.Work, result, finish: Finish, seconds: float, number: int
    ):
        super().__init__(native, result, finish, seconds)
        self._number = number
        # When a stream has finished the call, if there is something to finish.
        self._finished = None
        # What went wrong after the call had ended on the host.
        self._failure = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits until the call was submitted, and lets the current stream wait for it; raises what went wrong."""
        seconds = timeout.total_seconds() if timeout else self._seconds
        self._native.wait(seconds, device.stream_of(self._number))
        self._settle()
        if self._recorded is not None:
            self._recorded.wait()
        return True

    def synchronize(self) -> None:
        """Lets the current stream wait for the call."""
        self.wait()

    block_current_stream = synchronize

    def is_completed(self) -> bool:
        """Whether the call has ended on the GPU too, or has failed."""
        native = self._native
        if not native.is_done():
            return False
        if native.error() is not None:
            return True
        if self._lock is None:
            return native.has_landed()
        self.wait()
        return self._finished.query()

    def exception(self) -> Exception | None:
        """What went wrong, if anything did."""
        return self._failure or super().exception()

    def _make_future(self) -> torch.futures.Future:
        ended = device.future(self._number)

        def outcome(_):
            error = self.exception()
            if error is not None:
                raise error
            return self._result

        # As of other works, and the streams of those who use it wait for the stream of `aside`.
        future = ended.then(outcome)
        self._native.then(lambda: self._fulfil(ended))
        self._native.end_within(self._seconds)
        return future

    def _fulfil(self, ended: torch.futures.Future) -> None:
        """Completes a future of the call, which has ended on the host."""
        if self.exception() is not None:
            ended.set_result(None)
            return
        with device.aside(self._number):
            try:
                self._native.wait(self._seconds, device.stream_of(self._number))
                self._settle()
            except Exception as error:
                self._failure = error
                ended.set_result(None)
            else:
                ended.set_result(self._result)

    def _settle(self) -> None:
        if self._lock is None:
            return
        with self._lock:
            if self._finished is not None:
                device.wait_for(self._finished, self._number)
                return
            self._finish()
            self._finish = None
            self._finished = device.reached(self._number)


class Works(Work):
    """Several calls as one, which ends with the last of them."""

    def __init__(self, works: list[Work], result):
        super().__init__(None, result)
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits until the calls have ended; raises what went wrong first."""
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        """Whether the calls have ended, well or not."""
        return all(work.is_completed() for work in self._works)

    def synchronize(self) -> None:
        """Lets the current stream wait for those that are on a GPU."""
        for work in self._works:
            work.synchronize()

    def exception(self) -> Exception | None:
        """What went wrong first, if anything did."""
        errors = (work.exception() for work in self._works)
        return next((error for error in errors if error is not None), None)

    def _make_future(self) -> torch.futures.Future:
        on_device = [work for work in self._works if isinstance(work, DeviceWork)]
        if on_device:
            return self._make_device_future(on_device)

        def outcome(ended):
            for future in ended.wait():
                future.wait()
            return self._result

        return torch.futures.collect_all([work.get_future() for work in self._works]).then(outcome)

    def _make_device_future(self, works: list[DeviceWork]) -> torch.futures.Future:
        """A future whose users' streams wait for all calls; one that torch collects knows of no device."""
        number = works[0]._number
        ended = device.future(number)
        missing, lock = len(works), threading.Lock()

        def one_has_ended():
            nonlocal missing
            with lock:
                missing -= 1
                if missing > 0:
                    return
            if self.exception() is not None:
                ended.set_result(None)
                return
            with device.aside(number):
                try:
                    self.wait()
                except Exception as error:
                    works[-1]._failure = error
                    ended.set_result(None)
                else:
                    ended.set_result(self._result)

        def outcome(_):
            error = self.exception()
            if error is not None:
                raise error
            return self._result

        future = ended.then(outcome)
        for work in works:
            work._native.then(one_has_ended)
            work._native.end_within(work._seconds)
        return future
