"""How gradients get from a model to the engine, and their means back.

From this machine's memory the engine takes every gradient as it comes, adds up those of a worker's shards by itself,
and writes the means to where they belong.

On a device they are added up there (`summing.py`), and only the sums travel: by way of this machine's memory in
`DeviceRoute`, and from the device itself in `resident.py`, where the engine can.

By way of this machine's memory, all calls of the engine are made by the thread that delivers, in the order in which the
program would have made them.

Gradients of DDP whose codecs have kernels stay on their device: the engine encodes, exchanges and decodes each of DDP's
buckets there, and the means come to where the gradients were.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from unisono import _native
from unisono.torch._gradients import device
from unisono.torch._gradients.floats import Floats, floats
from unisono.torch._gradients.summing import Flag, Sum, Summing, float_at

#: What came of a step: the mean loss; parameters that had a gradient anywhere; the codec that was chosen, and why.
Outcome = tuple[float, list[int], tuple[str, str] | None]


def route_for(native: _native.Synchronizer, tensors: Sequence[torch.Tensor]) -> "HostRoute | DeviceRoute":
    """The way of these parameters' gradients."""
    found = device.device_of(tensors)
    return HostRoute(native) if found is None else DeviceRoute(native, len(tensors), found)


class HostRoute:
    """The engine reads gradients where they are."""

    #: The devices whose random numbers belong to the model.
    seeded: Sequence[int] = ()

    def __init__(self, native: _native.Synchronizer):
        self._native = native

    def begin_shard(self) -> int:
        """Begins the next of this worker's shards; which one."""
        return self._native.begin_shard()

    def begin_backward(self, loss: torch.Tensor | float) -> None:
        """The loss is computed; gradients come next."""
        self._native.begin_backward(number_of(loss))

    def gradient(self, index: int, gradient: torch.Tensor, may_be_unused: bool = False) -> None:
        """Hands a gradient over, which does not change before the end of the step.  One that is zero everywhere counts
        as none if its parameter `may_be_unused`."""
        if not (may_be_unused and not gradient.any()):
            numbers = floats(gradient)
            self._native.gradient(index, numbers.data_ptr(), numbers.numel())

    def changed(self, index: int, buffers: Sequence[torch.Tensor], before: Sequence[torch.Tensor]) -> None:
        """Hands over what the shard has changed of buffers, whose numbers begin with this."""
        for number, (buffer, start) in enumerate(zip(buffers, before, strict=True), start=index):
            if not torch.equal(buffer, start):
                self.gradient(number, buffer - start)

    def end_shard(self) -> None:
        """The shard is computed."""
        self._native.end_shard()

    def finish(self, wait: Callable[..., Any], means: Sequence[torch.Tensor]) -> Outcome:
        """Ends the step: lets `wait` make the call that waits, and writes the means to these tensors."""
        places = Floats(means)
        outcome = wait(self._native.finish, places.buffers)
        places.write_back()
        return outcome

    def end_bucket(self) -> None:
        """All gradients of a bucket of DDP were handed over."""

    def abandon(self) -> None:
        """The step has failed."""


class DeviceRoute(Summing):
    """Gradients are added up on their device and staged in pinned memory."""

    def __init__(self, native: _native.Synchronizer, parameters: int, on: Any):
        self._native = native
        self._sums = _native.Sums(native)
        self._staging = device.Staging(on)
        super().__init__(self._sums.plan, parameters, on)

    def begin_shard(self) -> int:
        """As of `HostRoute`, and so are the others."""
        self._begin_leaf()
        self._staging.then(self._native.begin_shard)
        self._staging.flush()
        return self._native.shards[0] + self._begun - 1

    def begin_backward(self, loss: torch.Tensor | float) -> None:
        if not isinstance(loss, torch.Tensor) or not self._device.holds(loss):
            self._staging.then(partial(self._native.begin_backward, number_of(loss)))
            return
        begin = self._native.begin_backward
        number = loss.detach().to(torch.float32).reshape(1)
        self._staging.send(number, lambda _at, address, _count: begin(float_at(address)))
        self._staging.flush()

    def gradient(self, index: int, gradient: torch.Tensor, may_be_unused: bool = False) -> None:
        numbers = device.numbers_of(gradient)
        shards: int | Flag = 1
        if may_be_unused:
            shards = Flag()
            self._send(numbers.any().to(torch.float32).reshape(1), shards.deliver)
        self._add(index, Sum(numbers, shards))

    def end_shard(self) -> None:
        self._end_leaf()
        self._staging.then(self._native.end_shard)
        self._staging.flush()

    def finish(self, wait: Callable[..., Any], means: Sequence[torch.Tensor]) -> Outcome:
        self._staging.drain()
        with self._staging.returning() as back:
            outcome = wait(self._sums.finish, lambda index, *mean: back.put(means[index], *mean))
        return outcome

    def abandon(self) -> None:
        self._staging.abandon()
        self._drop_step()

    def _send_sum(self, index: int, number: int, whole: Sum) -> None:
        part, end = partial(self._sums.part, index, number), partial(self._sums.end, index, number)
        numbers, shards = whole.numbers, whole.shards
        if numbers is None:
            self._staging.then(partial(end, 0))
        elif isinstance(shards, Flag):
            self._send(
                numbers,
                lambda *where: part(*where) if shards.is_set else None,
                lambda: end(int(shards.is_set)),
            )
        else:
            self._send(numbers, part, partial(end, shards))

    def _send(self, numbers: torch.Tensor, deliver: device.Deliver, done: Callable[[], object] | None = None) -> None:
        if self._device.holds(numbers):
            self._staging.send(numbers, deliver, done)
        else:
            self._staging.then(lambda: deliver(0, numbers.data_ptr(), numbers.numel()))
            if done is not None:
                self._staging.then(done)


class EncodedRoute:
    """Gradients are encoded and exchanged on their device, a bucket of DDP at a time."""

    def __init__(self, native: _native.DeviceExchange, on: Any):
        self._native = native
        self._device = on
        # Of the bucket under way: numbers of parameters, their gradients, and whether each has numbers other than zero.
        self._bucket: list[tuple[int, torch.Tensor]] = []
        self._flags: list[torch.Tensor] = []
        # Until the end of the step: the engine reads and writes this memory on a stream that torch does not know.
        self._kept: list[torch.Tensor] = []
        # Gradients that were converted, by the number of their parameter.
        self._converted: dict[int, torch.Tensor] = {}

    def begin_shard(self) -> int:
        self._native.begin()
        self._bucket, self._flags, self._kept, self._converted = [], [], [], {}
        return 0

    def begin_backward(self, loss: torch.Tensor | float) -> None:
        pass

    def gradient(self, index: int, gradient: torch.Tensor, may_be_unused: bool = False) -> None:
        if gradient.numel() == 0:
            return
        numbers = device.numbers_of(gradient)
        if numbers.data_ptr() != gradient.data_ptr():
            self._converted[index] = numbers
        if may_be_unused:
            self._flags.append(numbers.any())
        self._bucket.append((index, numbers))

    def end_bucket(self) -> None:
        used = None
        if self._flags:
            flags = torch.stack(self._flags).to(torch.float32)
            self._kept.append(flags)
            used = flags.data_ptr()
        self._kept += [numbers for _, numbers in self._bucket]
        if self._bucket:
            listed = [(index, numbers.data_ptr(), numbers.numel()) for index, numbers in self._bucket]
            self._native.bucket(listed, used, self._device.current_address())
        self._bucket, self._flags = [], []

    def end_shard(self) -> None:
        pass

    def finish(self, wait: Callable[..., Any], means: Sequence[torch.Tensor]) -> Outcome:
        used = wait(self._native.finish, self._device.current_address())
        with torch.no_grad():
            for index in used:
                if index in self._converted:
                    means[index].copy_(self._converted[index].view(means[index].shape))
        self._kept, self._converted = [], {}
        return 0.0, used, None


def number_of(loss: torch.Tensor | float) -> float:
    """A loss on the host."""
    return loss.item() if isinstance(loss, torch.Tensor) else loss
