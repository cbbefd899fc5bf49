"""What all have in common that synchronize by the engine's own threads and not call by call."""

from collections.abc import Callable
from typing import Any

from unisono import _native
from unisono.torch import _exit


class Member:
    """A rank among those that it synchronizes with, until the end of the program."""

    _native: _native.Synchronizer | _native.LocalSteps
    #: How long a call may take.
    _seconds: float

    def _join(self, native: _native.Synchronizer | _native.LocalSteps, seconds: float) -> None:
        self._native, self._seconds = native, seconds
        _exit.watch(self)

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank has sent so far for this."""
        return self._native.sent

    @property
    def steps(self) -> int:
        """Steps so far."""
        return self._native.steps

    def _wait(self, call: Callable[..., Any], buffers: list[tuple[int, int]]) -> Any:
        """Makes a call that waits for the others. A profile looks at it."""
        return call(buffers, self._seconds)

    def _sent(self) -> int:
        return self.sent_bytes

    def _transfers(self) -> list[tuple[int, int, int]]:
        """Bytes, begin and end of what the last call waited for."""
        return self._native.transfers

    def _close(self, seconds: float) -> None:
        self._native.close(seconds)
