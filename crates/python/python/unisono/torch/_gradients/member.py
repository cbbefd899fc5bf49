"""What all have in common that synchronize by the engine's own threads and not call by call."""

from collections.abc import Callable
from typing import Any

import torch

from unisono import _native
from unisono.errors import InvalidCall
from unisono.torch import _exit

_Native = _native.Synchronizer | _native.DeviceExchange | _native.DeviceSums | _native.LocalSteps


class Member:
    """A rank among those that it synchronizes with, until the end of the program."""

    _native: _Native
    #: How long a call may take.
    _seconds: float

    def _join(self, native: _Native, seconds: float) -> None:
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

    def state_dict(self) -> dict[str, Any]:
        """The number of the step, and what codecs owe. All ranks call it, between steps.

        The engine gathers it at rank 0, in a form that does not depend on which rank held which part.
        So the dictionaries of the other ranks hold only the number of steps, and a checkpoint that
        rank 0 wrote can be loaded by all, or each rank loads its own.
        """
        tensors = {
            name: torch.frombuffer(bytearray(data), dtype=torch.float32) if data else torch.empty(0)
            for name, data in self._native.save(self._seconds).items()
        }
        return {"steps": self.steps, "tensors": tensors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a `state_dict`, of which rank 0's tensors count. All ranks call it, between
        steps, with a state of the same step. The model and the codec must be what they were."""
        try:
            steps, tensors = int(state["steps"]), dict(state["tensors"])
        except (KeyError, TypeError) as error:
            text = "this is no state_dict of unisono.torch: it has no steps or tensors"
            raise InvalidCall(text) from error
        data = {name: t.to(torch.float32).numpy().tobytes() for name, t in tensors.items()}
        self._native.restore(steps, data, self._seconds)

    def _wait(self, call: Callable[..., Any], buffers: Any) -> Any:
        """Makes a call that waits for the others. A profile looks at it."""
        return call(buffers, self._seconds)

    def _sent(self) -> int:
        return self.sent_bytes

    def _transfers(self) -> list[tuple[int, int, int]]:
        """Bytes, begin and end of what the last call waited for."""
        return self._native.transfers

    def _close(self, seconds: float) -> None:
        self._native.close(seconds)
