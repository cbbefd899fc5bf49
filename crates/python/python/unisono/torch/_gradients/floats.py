"""Tensors as the synchronizer takes them: contiguous 32-bit floats in this machine's memory.

A tensor that is that already is used as it is.  Others, such as halves or channels-last weights,
are copied on the way in and on the way out.
"""

from collections.abc import Mapping, Sequence

import torch

from unisono.errors import Unsupported
from unisono.torch._backend.tensors import check_memory


def floats(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers of a tensor: itself, or a copy."""
    if not tensor.is_cpu:
        raise Unsupported(f"unisono synchronizes tensors of CPUs, not of {tensor.device}")
    if tensor.layout is not torch.strided:
        raise Unsupported("sparse gradients have no codec; build the layer with sparse=False")
    if not tensor.is_floating_point():
        raise Unsupported(f"unisono synchronizes floats, not {tensor.dtype}")
    check_memory(tensor)
    # The memory of a negated view holds the numbers it is a view of.
    return tensor.detach().to(torch.float32).resolve_neg().contiguous()


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
