"""Tensors as the synchronizer takes them: contiguous 32-bit floats in this machine's memory.

A tensor that is that already is used as it is.  Others, such as halves or channels-last weights,
are copied on the way in and on the way out.
"""

from collections.abc import Mapping, Sequence

import torch

from unisono.errors import Unsupported
from unisono.torch._backend.tensors import check_memory
from unisono.torch._gradients import device
from unisono.torch._gradients.device import Mirror, numbers_of


def floats(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers of a tensor: itself, or a copy."""
    if not tensor.is_cpu:
        raise Unsupported(f"a tensor is on {tensor.device}, and was on a CPU when this was made; move it back")
    if tensor.layout is torch.strided:
        check_memory(tensor)
    return numbers_of(tensor)


def refuse_doubles(weights: Mapping[str, torch.Tensor]) -> None:
    """Refuses weights that would come back with fewer digits than they had.

    A gradient may lose some on its way, as with any codec.  Weights must not: a program
    that chose float64 counts on them from step to step.
    """
    for name, tensor in weights.items():
        if tensor.dtype == torch.float64:
            raise Unsupported(
                f"parameter {name!r} is float64, and would be rounded to 32-bit floats; "
                "use model.float()"
            )


class Floats:
    """The numbers of several tensors, where the engine reads and writes them."""

    def __init__(self, tensors: Sequence[torch.Tensor]):
        self._tensors = tensors
        self._floats = [floats(tensor) for tensor in tensors]
        #: Address and count of each.
        self.buffers = [(numbers.data_ptr(), numbers.numel()) for numbers in self._floats]

    def write_back(self) -> None:
        """Brings what the engine wrote to the tensors."""
        with torch.no_grad():
            for tensor, numbers in zip(self._tensors, self._floats, strict=True):
                if tensor.data_ptr() != numbers.data_ptr():
                    tensor.copy_(numbers)


class Mirrored:
    """As `Floats`, of tensors that are on a device, at least in part: in memory that is allocated once."""

    def __init__(self, tensors: Sequence[torch.Tensor], on: object):
        self._tensors = tensors
        self._mirror = Mirror(on, [tensor.numel() for tensor in tensors])
        self.buffers = self._mirror.buffers

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> "Mirrored | None":
        """For these tensors; None if all are in this machine's memory."""
        found = device.device_of(tensors)
        return None if found is None else cls(tensors, found)

    def read(self) -> "Mirrored":
        """Itself, with the numbers that the tensors have now."""
        self._mirror.read(self._tensors)
        return self

    def write_back(self) -> None:
        """Brings what the engine wrote to the tensors."""
        self._mirror.write(self._tensors)
