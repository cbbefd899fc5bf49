"""Where servers read a worker's gradients and put its weights: this machine's memory, as 32-bit floats.

Tensors that are that are used where they are.  Others are converted; those of a device go by way of pinned memory,
which is allocated once.
"""

from collections.abc import Sequence

import torch

from unisono.errors import InvalidCall
from unisono.torch._gradients import device
from unisono.torch._gradients.device import Mirror


def places_of(parameters: Sequence[torch.Tensor]) -> "HostPlaces | DevicePlaces":
    """Those of a model's parameters."""
    found = device.device_of(parameters)
    return HostPlaces(parameters) if found is None else DevicePlaces(parameters, found)


class HostPlaces:
    """Of a model in this machine's memory."""

    def __init__(self, parameters: Sequence[torch.Tensor]):
        self._parameters = parameters
        self._lengths = [parameter.numel() for parameter in parameters]
        # Kept until they are of no use any more: servers get addresses only.
        self._weights: list[torch.Tensor] = []
        self._gradients: list[torch.Tensor | None] = []

    def weights(self) -> list[int]:
        """Memory for the weights of every parameter, with those that it has."""
        both = zip(self._parameters, self._lengths, strict=True)
        self._weights = [_plain(parameter, length) for parameter, length in both]
        return [weights.data_ptr() for weights in self._weights]

    def gradients(self, gradients: Sequence[torch.Tensor | None]) -> list[int | None]:
        """The gradients, where there are some."""
        both = zip(gradients, self._lengths, strict=True)
        self._gradients = [None if one is None else _plain(one, length) for one, length in both]
        return [None if gradient is None else gradient.data_ptr() for gradient in self._gradients]

    def take_over(self) -> None:
        """Has the parameters take over the weights that were put there."""
        for parameter, pulled in zip(self._parameters, self._weights, strict=True):
            if pulled is not parameter:
                parameter.detach().copy_(pulled)
        self._weights, self._gradients = [], []


class DevicePlaces:
    """Of a model on a device."""

    def __init__(self, parameters: Sequence[torch.Tensor], on: object):
        self._parameters = parameters
        self._lengths = [parameter.numel() for parameter in parameters]
        self._weights = Mirror(on, self._lengths)
        self._gradients = Mirror(on, self._lengths)

    def weights(self) -> list[int]:
        """As of `HostPlaces`, and so are the others."""
        for parameter, length in zip(self._parameters, self._lengths, strict=True):
            _expect_length(parameter, length)
        self._weights.read(self._parameters)
        return [address for address, _ in self._weights.buffers]

    def gradients(self, gradients: Sequence[torch.Tensor | None]) -> list[int | None]:
        dense = [None if gradient is None else _dense(gradient) for gradient in gradients]
        for gradient, length in zip(dense, self._lengths, strict=True):
            if gradient is not None:
                _expect_length(gradient, length)
        self._gradients.read(dense)
        both = zip(dense, self._gradients.buffers, strict=True)
        return [None if gradient is None else address for gradient, (address, _) in both]

    def take_over(self) -> None:
        self._weights.write(self._parameters)


def _plain(tensor: torch.Tensor, length: int) -> torch.Tensor:
    """The tensor as servers want it: dense 32-bit floats, contiguous, in this machine's memory.

    Itself, if it is that, so that nothing is copied.
    """
    _expect_length(tensor, length)
    is_plain = (
        tensor.dtype == torch.float32
        and tensor.is_cpu
        and tensor.layout == torch.strided
        and tensor.is_contiguous()
        and not tensor.is_neg()
    )
    if is_plain:
        return tensor
    return _dense(tensor).to("cpu", torch.float32).resolve_neg().contiguous()


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


def _expect_length(tensor: torch.Tensor, length: int) -> None:
    """It must have as many elements as when the worker joined, since the servers do."""
    if tensor.numel() != length:
        text = f"a parameter or gradient has {tensor.numel()} elements now, and had {length} before"
        raise InvalidCall(f"{text}: make another ParameterServer when the model changes")
