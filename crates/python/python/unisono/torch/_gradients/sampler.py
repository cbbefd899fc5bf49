"""Which samples belong to which shard of which step, whichever process computes it."""

import hashlib
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from unisono import _native
from unisono.errors import InvalidCall

Batch = TypeVar("Batch")


def drawn_from(*numbers: int) -> int:
    """A seed, of 63 bits, for what these numbers tell from everything else."""
    text = "/".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


class ShardedSampler(Sampler[list[int]]):
    """Cuts every batch into shards, and gives each process its own.

        sampler = unisono.torch.ShardedSampler(len(data), batch_size=64, shards=8)
        loader = DataLoader(data, batch_sampler=sampler)
        for epoch in range(sampler.epoch, 3):
            for batches in sampler.steps(loader):
                step(batches, loss)

    The samples of a shard follow from seed, epoch, step and the number of the shard alone.  How
    many processes there are only decides which shards each computes: a contiguous range for each, in
    order of the ranks.  `batch_size` counts the samples of one step of all processes, and is a
    multiple of `shards`; samples that do not fill a step are left out of the epoch.

    By itself the sampler yields lists of indices, one for each shard of this process, step by step;
    `steps` collects what a loader made of those of one step.
    """

    def __init__(
        self,
        dataset_len: int,
        batch_size: int,
        shards: int = 8,
        *,
        seed: int = 0,
        shuffle: bool = True,
        group: dist.ProcessGroup | None = None,
    ):
        if shards < 1 or batch_size < 1 or batch_size % shards:
            raise InvalidCall(f"a batch of {batch_size} does not divide into {shards} equal shards")
        if dataset_len < batch_size:
            raise InvalidCall(f"{dataset_len} samples do not fill a batch of {batch_size}")
        alone = not dist.is_initialized()
        rank = 0 if alone else dist.get_rank(group)
        world = 1 if alone else dist.get_world_size(group)
        self._own = range(*_native.shards_of(shards, rank, world))
        self._samples = dataset_len
        self._batch = batch_size
        self._shards = shards
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = 0
        self._step = 0

    @property
    def epoch(self) -> int:
        """The epoch under way, or the next."""
        return self._epoch

    @property
    def shards(self) -> int:
        """Shards that a batch is cut into, of all processes."""
        return self._shards

    @property
    def steps_per_epoch(self) -> int:
        """Steps that an epoch has."""
        return self._samples // self._batch

    def set_epoch(self, epoch: int, step: int = 0) -> None:
        """Goes to a step of an epoch. The epoch under way, without a step, goes on where it is."""
        if epoch != self._epoch or step:
            self._epoch, self._step = epoch, step

    def go_to(self, epoch: int, step: int, own: range) -> None:
        """Goes to a step of an epoch, for a process that has these shards from now on."""
        self._epoch, self._step, self._own = epoch, step, own

    def steps(self, loader: Iterable[Batch]) -> Iterator[list[Batch]]:
        """What the loader has for each step, one batch for each shard of this process.

        After the last step of an epoch the sampler is at the beginning of the next.
        """
        batches = iter(loader)
        while shards := list(islice(batches, len(self._own))):
            if len(shards) != len(self._own):
                raise InvalidCall("the loader ended within a step; give it this batch_sampler")
            self._step += 1
            yield shards
        self._epoch, self._step = self._epoch + 1, 0

    def indices(self, step: int, shard: int) -> list[int]:
        """The samples of a shard of a step of this epoch."""
        return self._part(self._order(), step, shard)

    def state_dict(self) -> dict[str, Any]:
        """Where training is: behind the step that `steps` gave out last."""
        return {"epoch": self._epoch, "step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a `state_dict`."""
        self._epoch, self._step = state["epoch"], state["step"]

    def __iter__(self) -> Iterator[list[int]]:
        # A loader runs ahead: where it began is decided now, and not when it is asked.
        return self._from(self._order(), self._step)

    def __len__(self) -> int:
        return (self.steps_per_epoch - self._step) * len(self._own)

    def _from(self, order: torch.Tensor, first: int) -> Iterator[list[int]]:
        for step in range(first, self.steps_per_epoch):
            for shard in self._own:
                yield self._part(order, step, shard)

    def _order(self) -> torch.Tensor:
        if not self._shuffle:
            return torch.arange(self._samples)
        generator = torch.Generator().manual_seed(drawn_from(self._seed, self._epoch))
        return torch.randperm(self._samples, generator=generator)

    def _part(self, order: torch.Tensor, step: int, shard: int) -> list[int]:
        each = self._batch // self._shards
        first = step * self._batch + shard * each
        return order[first : first + each].tolist()
