"""Sums of a worker's shards that stay on their device until they are means.

The engine cuts the parameters into buckets, in an order that all ranks have in common: those of the model from the last
to the first, as backward produces their gradients, then what shards change of buffers, which is known after it.  A
bucket has a row for each of the worker's sums.  A sum is copied there when it is complete, on the stream that has
computed it.  When all of a bucket are, the engine exchanges it as soon as its turn comes, on a stream of its own that
waits for those, while backward goes on.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from unisono import _native
from unisono.torch._gradients import device
from unisono.torch._gradients.route import Outcome, number_of
from unisono.torch._gradients.summing import Sum, Summing


class ResidentRoute(Summing):
    """Gradients are added up and exchanged on their device."""

    def __init__(self, native: _native.DeviceSums, tensors: Sequence[torch.Tensor], on: Any):
        # The loss is added up as if it were one of the parameters.
        self._loss = len(tensors)
        super().__init__(native.plan, len(tensors) + 1, on)
        self._native = native
        _, rows = native.plan()
        layout, loss_at = native.layout()
        self._buckets: list[_Bucket] = []
        # The bucket of each parameter, and its place there.
        self._places: dict[int, tuple[_Bucket, int]] = {}
        for number, (length, gradients, listed) in enumerate(layout):
            spans = [(start, tensors[index].numel()) for index, start in listed]
            indices = [index for index, _ in listed]
            if number == 0:
                spans.append((loss_at, 1))
                indices.append(self._loss)
            bucket = _Bucket(number, rows, length, spans, (gradients, len(listed)), on)
            self._buckets.append(bucket)
            for place, index in enumerate(indices):
                self._places[index] = bucket, place
        native.hold([bucket.rows for bucket in self._buckets])

    def begin_shard(self) -> int:
        """As of `HostRoute`, and so are the others."""
        if self._is_first():
            self._native.begin()
            for bucket in self._buckets:
                bucket.start_over()
        self._begin_leaf()
        return self._native.shards[0] + self._begun - 1

    def begin_backward(self, loss: torch.Tensor | float) -> None:
        if isinstance(loss, torch.Tensor) and self._device.holds(loss):
            number = loss.detach().to(torch.float32).reshape(1)
        else:
            number = torch.full((1,), number_of(loss), dtype=torch.float32, device=self._device.device)
        self._add(self._loss, Sum(number, 1))

    def gradient(self, index: int, gradient: torch.Tensor, may_be_unused: bool = False) -> None:
        self._add(index, Sum(device.numbers_of(gradient), 1))

    def end_shard(self) -> None:
        self._end_leaf()

    def finish(self, wait: Callable[..., Any], means: Sequence[torch.Tensor]) -> Outcome:
        mean, used, _ = wait(self._native.finish, self._device.current_address())
        targets = [means[index] for index in used]
        if targets:
            places = [self._places[index] for index in used]
            sources = [bucket.mean(place).view(means[index].shape) for index, (bucket, place) in zip(used, places)]
            with torch.no_grad():
                torch._foreach_copy_(targets, sources)
        return mean, used, None

    def abandon(self) -> None:
        self._drop_step()

    def _send_sum(self, index: int, number: int, whole: Sum) -> None:
        bucket, place = self._places[index]
        stream = self._device.current_address()
        if bucket.take(number, place, whole, stream):
            self._native.bucket(bucket.number, *bucket.complete(stream))


class _Bucket:
    """Parameters whose sums travel together."""

    def __init__(
        self,
        number: int,
        rows: int,
        length: int,
        spans: Sequence[tuple[int, int]],
        counts: tuple[int, int],
        on: Any,
    ):
        self.number = number
        self.rows = torch.zeros((rows, length), dtype=torch.float32, device=on.device)
        self._sums = [[row[start : start + count] for start, count in spans] for row in self.rows]
        # In how many shards each had a gradient, which seldom changes: as the device knows it, and as it is.
        begin, parameters = counts
        self._counted = self.rows[:, begin : begin + parameters]
        self._counts = torch.zeros_like(self._counted)
        self._known = [[0] * parameters for _ in range(rows)]
        self._actual = [[0] * len(spans) for _ in range(rows)]
        self._missing = 0
        self._streams: set[int] = set()
        self.start_over()

    def start_over(self) -> None:
        """Nothing of the next step has come."""
        self._missing = sum(map(len, self._sums))
        self._streams.clear()

    def take(self, row: int, place: int, whole: Sum, stream: int) -> bool:
        """Takes a sum that the stream computes; whether that was the last."""
        into = self._sums[row][place]
        if whole.numbers is None:
            into.zero_()
        else:
            into.copy_(whole.numbers.view(-1))
        self._actual[row][place] = whole.shards
        self._streams.add(stream)
        self._missing -= 1
        return self._missing == 0

    def complete(self, stream: int) -> tuple[int, list[int]]:
        """Adds what the stream is to say about the sums; the address of the first row, and the streams that compute."""
        for row, known in enumerate(self._known):
            for place, (old, new) in enumerate(zip(known, self._actual[row])):
                if old != new:
                    self._counts[row, place].fill_(new)
                    known[place] = new
        self._counted.copy_(self._counts)
        self._streams.add(stream)
        return self.rows.data_ptr(), sorted(self._streams)

    def mean(self, place: int) -> torch.Tensor:
        """The mean of a parameter, after the exchange."""
        return self._sums[0][place]
