"""One step from several small batches."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import nn

from unisono.errors import InvalidCall

Batch = TypeVar("Batch")


def accumulate(
    model: nn.Module,
    batches: Iterable[Batch],
    loss: Callable[[Batch], torch.Tensor],
    *,
    size: Callable[[Batch], int] | None = None,
) -> float:
    """Adds up the gradients of several batches as if they were one, and synchronizes once.

        optimizer.zero_grad()
        mean = unisono.torch.accumulate(model, parts, lambda part: criterion(model(part.x), part.y))
        optimizer.step()

    `loss` computes the mean loss of a batch, by calling the model; the backward passes are made
    here.  All but the last are made without synchronization (`no_sync` of DDP; FSDP2 has its own
    switch; a model of neither kind is left as it is).  Every batch counts alike; if they differ in
    size, `size` says how large one is, such as ``lambda part: len(part.x)``.  Returns the mean loss
    of this rank.  If the loss raises, gradients of earlier batches stay in the parameters.
    """
    parts = list(batches)
    if not parts:
        raise InvalidCall("there is no batch to accumulate; give one at least")
    sizes = [1 if size is None else size(part) for part in parts]
    if min(sizes) < 0 or sum(sizes) == 0:
        raise InvalidCall(f"batches of sizes {sizes} have no mean")
    mean = 0.0
    for number, (part, own) in enumerate(zip(parts, sizes, strict=True), start=1):
        with _synchronizing(model, number == len(parts)):
            value = loss(part) * (own / sum(sizes))
            value.backward()
        mean += value.item()
    return mean


@contextmanager
def _synchronizing(model: nn.Module, wanted: bool) -> Iterator[None]:
    """Within this, backward passes synchronize gradients, or do not; after it they do."""
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(wanted)
        try:
            yield
        finally:
            # Also where the loss raised: later steps of the program are to synchronize.
            model.set_requires_gradient_sync(True)
    elif hasattr(model, "no_sync") and not wanted:
        with model.no_sync():
            yield
    else:
        yield
