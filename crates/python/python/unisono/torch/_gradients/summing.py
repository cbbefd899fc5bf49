"""Gradients of a worker's shards, added up on their device.

The order is the one that the engine prescribes (`accumulate.rs` of the crate sync has the algorithm, and its names): a
stack of partial sums for every parameter, of which the maximal subtrees of the worker's shards remain.  A device adds
32-bit floats as a CPU does, so the bits are the same.  A sum is sent as soon as no later shard is added to it: with one
shard per worker, or with a codec, which wants the gradients of the shards apart, that is during each backward pass, and
otherwise during the last.
"""

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from unisono.errors import InvalidCall

#: What happens to the gradients of each shard: the slot, whether it is added to what is there, and how many slots are
#: merged after it.  And how many sums remain.
Plan = tuple[list[tuple[int, bool, int]], int]


@dataclass(slots=True)
class Flag:
    """Whether a gradient has numbers other than zero, which the device finds out."""

    is_set: bool = False

    def deliver(self, _at: int, address: int, _count: int) -> None:
        self.is_set = float_at(address) > 0


@dataclass(slots=True)
class Sum:
    """A sum of the gradients of neighbouring shards; without numbers, of shards that had none."""

    numbers: torch.Tensor | None
    #: Shards that had one.
    shards: int | Flag

    def plus(self, other: "Sum") -> "Sum":
        if self.numbers is None and other.numbers is None:
            return self
        # Zero has an effect: it turns −0 into +0.
        left = 0.0 if self.numbers is None else self.numbers
        right = 0.0 if other.numbers is None else other.numbers
        # Not in place: the program may have kept the gradient.
        return Sum(torch.add(left, right) if self.numbers is not None else right + left, self.shards + other.shards)


# Of a shard in which a parameter has no gradient.
NONE = Sum(None, 0)


class Summing(ABC):
    """Adds up gradients as they come; what becomes of the sums is up to those who inherit it."""

    def __init__(self, plan: Callable[[], Plan], parameters: int, on: Any):
        self._plan = plan
        self._device = on
        #: The devices whose random numbers belong to the model.
        self.seeded: Sequence[int] = on.seeded()
        self._stacks: list[list[Sum]] = [[] for _ in range(parameters)]
        # What happens to the gradients of each shard, and which sum is complete after it.
        self._leaves: list[tuple[int, bool, int]] = []
        self._complete: list[int | None] = []
        self._begun = 0
        self._seen: set[int] = set()

    @abstractmethod
    def gradient(self, index: int, gradient: torch.Tensor, may_be_unused: bool = False) -> None:
        """As of `HostRoute`."""

    def changed(self, index: int, buffers: Sequence[torch.Tensor], before: Sequence[torch.Tensor]) -> None:
        """As of `HostRoute`."""
        if not buffers:
            return
        differ = [(buffer != start).any() for buffer, start in zip(buffers, before, strict=True)]
        # Waits for the device, once: what did not change must not be touched, such as a mask of infinities.
        together = [one.to(self._device.device) for one in differ]
        for number, is_changed in enumerate(torch.stack(together).tolist()):
            if is_changed:
                self.gradient(index + number, buffers[number] - before[number])

    def end_bucket(self) -> None:
        """As of `HostRoute`."""

    @abstractmethod
    def _send_sum(self, index: int, number: int, whole: Sum) -> None:
        """A sum of a parameter is complete."""

    def _is_first(self) -> bool:
        """Whether the next shard is the first of a step."""
        return self._begun == len(self._leaves)

    def _begin_leaf(self) -> None:
        """Begins the next shard."""
        if self._is_first():
            self._begin_step()
        self._begun += 1
        self._seen = set()

    def _end_leaf(self) -> None:
        """Parameters that had no gradient in the shard have none."""
        for index in range(len(self._stacks)):
            if index not in self._seen:
                self._add(index, NONE)

    def _drop_step(self) -> None:
        """The next shard is the first of a step."""
        self._begun = len(self._leaves)

    def _begin_step(self) -> None:
        self._leaves, sums = self._plan()
        # After a shard, the top of the stack is the sum that it was added to.  That is complete if no later shard comes
        # as far down.
        tops = [slot - merges for slot, _, merges in self._leaves]
        self._complete = [
            top if all(other > top for other in tops[number + 1 :]) and top < sums else None
            for number, top in enumerate(tops)
        ]
        self._begun = 0
        for stack in self._stacks:
            stack.clear()

    def _add(self, index: int, leaf: Sum) -> None:
        """Adds the gradient of a shard; sends the sum that is complete by that, if one is."""
        if index in self._seen:
            raise InvalidCall(f"a second gradient of parameter {index} came in one shard")
        self._seen.add(index)
        _, is_added, merges = self._leaves[self._begun - 1]
        stack = self._stacks[index]
        if is_added:
            stack[-1] = stack[-1].plus(leaf)
        else:
            stack.append(leaf)
        for _ in range(merges):
            right = stack.pop()
            stack[-1] = stack[-1].plus(right)
        complete = self._complete[self._begun - 1]
        if complete is not None:
            whole, stack[complete] = stack[complete], NONE
            self._send_sum(index, complete, whole)


def float_at(address: int) -> float:
    """A float in this machine's memory."""
    return ctypes.c_float.from_address(address).value
