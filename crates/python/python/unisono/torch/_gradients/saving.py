"""What the engine remembers from step to step, as a `state_dict`.

The engine gathers it at rank 0, in a form that does not depend on which rank held which part, and
spreads it from there.  So the dictionaries of the other ranks hold only the number of steps, and a checkpoint
that rank 0 wrote can be loaded by all, or each rank loads its own.
"""

from typing import Any, Protocol

import torch

from unisono.errors import InvalidCall


class HasState(Protocol):
    """A native object whose state a checkpoint holds."""

    @property
    def steps(self) -> int: ...

    def save(self, seconds: float) -> dict[str, bytes]: ...

    def restore(self, steps: int, saved: dict[str, bytes], seconds: float) -> None: ...


def saved(native: HasState, seconds: float) -> dict[str, Any]:
    """All ranks call it."""
    tensors = {
        name: torch.frombuffer(bytearray(data), dtype=torch.float32) if data else torch.empty(0)
        for name, data in native.save(seconds).items()
    }
    return {"steps": native.steps, "tensors": tensors}


def restore(native: HasState, state: dict[str, Any], seconds: float) -> None:
    """All ranks call it; rank 0's tensors count, and the steps must be the same."""
    try:
        steps, tensors = int(state["steps"]), dict(state["tensors"])
    except (KeyError, TypeError) as error:
        text = "this is no state_dict of unisono.torch: it has no steps or tensors"
        raise InvalidCall(text) from error
    data = {name: tensor.to(torch.float32).numpy().tobytes() for name, tensor in tensors.items()}
    native.restore(steps, data, seconds)
