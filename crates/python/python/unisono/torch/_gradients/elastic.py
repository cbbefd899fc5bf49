"""Sharded training that goes on when workers are lost, and lets them in again.

A run is a sequence of epochs of the job's membership, each with a group of its own.  The mean gradient of a step
is a function of the weights, the step and the shards, whichever worker computes them.  So nothing is undone when
a group fails: a worker is either before the step or behind it, and the step is computed again in the next group,
with the shards divided anew, unless a worker had completed it.  Workers that are behind, or new, get the state
of one with the most steps.

A worker changes its weights only after it has the means of all parameters, in the program's own code between two
calls of this module; and it goes to another group only where it asks for the next step.  So the state that it
hands over there is that after a whole step, schedulers included.
"""

import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from unisono import _native
from unisono.errors import Error, InvalidCall, Unsupported
from unisono.torch import _exit
from unisono.torch._gradients import handover
from unisono.torch._gradients.engine import EngineGroup, engine_of
from unisono.torch._gradients.sampler import ShardedSampler
from unisono.torch._gradients.sharded import ShardedStep

Batch = TypeVar("Batch")

# Seconds that a worker waits for what is under way in a group that it leaves.  In a group that has failed that ends
# at once.  Longer: it waits longer if not.  Shorter: a call that would have ended is given up.
_PATIENCE = 5.0


class Stateful(Protocol):
    """Something that a run changes: a scheduler, an average of the weights, the place in the data."""

    def state_dict(self) -> Any:
        """What it has come to."""

    def load_state_dict(self, state: Any) -> None:
        """Goes on from there."""


class _GroupEnded(Exception):
    """The group has failed while this worker computed."""


class ElasticStep(ShardedStep):
    """A `ShardedStep` whose run goes on when workers are lost, and lets them in again.

        torch.manual_seed(0)
        model = ...
        step = unisono.torch.ElasticStep(model, optimizer, shards=8, scheduler=scheduler)
        for batches in step.batches(loader, epochs=3):  # a loader of a `ShardedSampler`
            step(batches, lambda batch: criterion(model(batch[0]), batch[1]))
        step.finish(f"weights {hash_of(model)}")

    Start it by ``unisono run --elastic 1:4 -n 4 -- python train.py``, without `init_process_group`.  Kill, stop or
    add workers: the weights, the optimizer's state and the loss have the bits of the undisturbed run, which are
    those of one process.  Under other launchers, or none, the same program has the workers that it was started
    with, and the loss of one is an error.

    A step that fails because a worker is lost returns None instead of the mean loss, and the loop gets the
    batches of the shards that this worker has in the next group: the same step again, or a later one if the
    others had completed it.  So whatever the program does after a step, it does if the step was made:

        for number in step.until(1000):
            mean = step([batch_of(number, shard) for shard in step.shards], loss)
            if mean is not None and number % 100 == 0:
                print(number, mean)

    What workers that are new or behind are given: the model's `state_dict` and its other buffers, the optimizer's,
    that of the `scheduler`, which is stepped once after each step of the optimizer, and those of the objects in
    `state`, by name, which the program changes itself after a step that was made.  It is read by
    ``torch.load(weights_only=True)``: tensors, numbers, texts, lists and dictionaries.  Whatever else decides about
    the weights must follow from the number of the step: torch's random numbers within the loss do, Python's and
    NumPy's do not.

    If no worker with the state of the run is left, the run goes on from the file `checkpoint`, if there is one,
    or from its beginning: so workers must build the same model, seeded or loaded.  `save_every` so many steps the
    run is saved to that file.  A codec that remembers something from step to step (all but fp16 and bf16) has it at
    the worker of each shard: then any loss of a worker takes the run back to its checkpoint, by itself, which
    costs the steps since then; a worker that is let in does not.  All of it is told on the standard error.

    A wrong call ends a worker with exit code 64 if the program does not catch it, which a launcher takes for a
    failure that would be repeated.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        shards: int = 8,
        *,
        scheduler: Stateful | None = None,
        state: Mapping[str, Stateful] | None = None,
        checkpoint: str | os.PathLike | None = None,
        save_every: int = 0,
        codec: str | None = None,
        **options: Any,
    ):
        # None if no elastic launcher has started this process.
        self._job = _native.ElasticJob.join()
        if self._job is not None:
            _exit.tell_mistakes()
        if save_every < 0 or save_every and checkpoint is None:
            raise InvalidCall("save_every is a number of steps, and needs the file of a checkpoint")
        self._model = model
        self._scheduler = scheduler
        self._objects = dict(state or {})
        if scheduler is not None:
            if not hasattr(scheduler, "step"):
                raise InvalidCall("a scheduler has a method step; give other objects as state")
            if scheduler in self._objects.values() or "scheduler" in self._objects:
                raise InvalidCall("the scheduler is part of the state already, under that name")
            self._objects["scheduler"] = scheduler
        self._file = None if checkpoint is None else os.fspath(checkpoint)
        self._save_every = save_every
        for name, part in {"optimizer": optimizer, **self._objects}.items():
            handover.expect_plain(name, part)
        self._group: _native.Group | None = None
        # Whether this worker goes on in the present group.
        self._is_regrouped = False
        # Whether the model and all else are those after so many steps of the run.
        self._has_state = False
        # Whether the loop has asked for a step that was not begun.
        self._is_asked = False
        # Whether the last step was made in the present group.
        self._has_just_stepped = False
        # The steps after which this worker was in the middle of another when its group failed.
        self._failed_after: int | None = None
        # A number for the objects that the program changes, as they were when a step failed.
        self._failed_with: int | None = None
        # At rank 0, until the first step of an epoch: redone, behind, from a checkpoint.
        self._first: tuple[bool, int, bool] | None = None
        self._is_over = False
        self._hands_in = False
        # At rank 0, what was gathered before members left their group.
        self._gathered: bytes | None = None
        # What codecs remembered, of what was received.
        self._restored: dict[str, bytes] = {}
        super().__init__(model, optimizer, shards, codec=codec, **options)
        self._encodes = codec is not None or bool(options.get("rules"))
        # Weights change, and a codec may take the run back to these.
        self._initial = self._packed(0) if self._encodes else None

    @property
    def rank(self) -> int:
        """This worker's number among those of the present group. It may have another in the next."""
        return 0 if self._group is None else self._group.rank

    @property
    def workers(self) -> int:
        """Workers in the present group."""
        return 1 if self._group is None else self._group.size

    def until(self, total: int) -> Iterator[int]:
        """The number of every step, from 0, until so many are made; of one that failed, again.

        Ends when the run is complete: at rank 0 first, which hands in the result, and at the others when that is
        done.  Workers that are more than there are shards or places wait here.
        """
        while not self._is_over and self._enter(total):
            try:
                number = self._begin(total)
            except Error as error:
                self._note(error)
                continue
            if number is not None:
                self._is_asked = True
                yield number

    def batches(self, loader: DataLoader, epochs: int) -> Iterator[list[Any]]:
        """What a loader has for each step of so many passes over the data, one batch for each shard of this
        worker. Its `batch_sampler` is a `ShardedSampler`, which is told where the run is."""
        sampler = getattr(loader, "batch_sampler", None)
        if not isinstance(sampler, ShardedSampler):
            raise InvalidCall("give a loader whose batch_sampler is a ShardedSampler, or use until()")
        each = sampler.steps_per_epoch
        # The step that the iterator comes to next, and for which shards.
        at, batches = None, iter(())
        for number in self.until(epochs * each):
            if at != (number, self.shards) or number % each == 0:
                sampler.go_to(number // each, number % each, self.shards)
                batches = iter(loader)
            at = number + 1, self.shards
            yield list(islice(batches, len(self.shards)))

    def __call__(
        self, batches: Iterable[Batch], loss: Callable[[Batch], torch.Tensor]
    ) -> float | None:
        """Makes a step: the gradients, then the optimizer and the scheduler. The mean loss of all shards; None if
        a worker was lost: then nothing has changed, and the loop says which step to compute."""
        mean = self.gradients(batches, loss)
        if mean is not None:
            self._optimizer.step()
            if self._scheduler is not None:
                self._scheduler.step()
        return mean

    def gradients(
        self, batches: Iterable[Batch], loss: Callable[[Batch], torch.Tensor]
    ) -> float | None:
        """As `ShardedStep.gradients`; None if a worker was lost: then leave the optimizer alone. Else step the
        optimizer, and the scheduler if there is one, before the loop goes on."""
        if not self._is_asked:
            text = "a step has a number of its own: make one in every turn of a loop over until() or batches()"
            raise InvalidCall(text)
        self._is_asked = False
        if not self._is_regrouped:
            return None
        try:
            mean = super().gradients(batches, loss)
        except (Error, _GroupEnded) as error:
            self._note(error)
            self._failed_with = handover.number_of(self._objects)
            return None
        self._has_just_stepped = True
        if self._first is not None:
            self._job.stepped(self.steps, self._native.last_step[1], *self._first)
            self._first = None
        return mean

    def save(self, path: str | os.PathLike | None = None) -> bool:
        """Saves the run, at rank 0, to this file or to the `checkpoint`. All workers call it, after the same step
        and its optimizer's. False if a worker was lost meanwhile: then the file is as before."""
        file = self._file if path is None else os.fspath(path)
        if file is None:
            raise InvalidCall("there is no checkpoint; give a path")
        if not self._is_regrouped:
            return False
        try:
            packed = self._gather()
        except Error as error:
            self._note(error)
            return False
        if packed is not None:
            handover.write(file, packed)
        return True

    def finish(self, result: str | bytes | Callable[[], str | bytes] = "") -> None:
        """Ends the run. At rank 0, hands in its result, which the elastic launcher prints, once; under other
        launchers rank 0 prints it. At other workers the result is of no interest."""
        for _ in self.until(self.steps):
            text = "the run was left early, and then all workers with its state were lost"
            raise InvalidCall(f"{text}: let the loop over its steps come to its end")
        if not self._hands_in:
            return
        self._hands_in = False
        told = result() if callable(result) else result
        data = told.encode() if isinstance(told, str) else bytes(told)
        if data and not data.endswith(b"\n"):
            data += b"\n"
        if self._job is not None:
            self._job.finish(data)
        else:
            sys.stdout.flush()
            sys.stdout.buffer.write(data)
            sys.stdout.flush()

    def close(self) -> None:
        """Leaves the job, and lets go of the model."""
        super().close()
        self._leave()

    def _find_engine(self, group: dist.ProcessGroup | None) -> EngineGroup:
        if self._job is not None:
            if group is not None or dist.is_initialized():
                raise InvalidCall(
                    "an elastic job has no process group of torch: a worker that is started again would wait for"
                    " the others in init_process_group; leave it out, and the group"
                )
            return EngineGroup(None, 0, 1, math.inf)
        if group is None and not dist.is_initialized() and "RANK" in os.environ:
            dist.init_process_group("unisono")
        engine = engine_of(group)
        self._group = engine.group
        return engine

    def _enter(self, total: int) -> bool:
        """Makes sure that this worker is in a group; whether the run goes on."""
        then, self._failed_with = self._failed_with, None
        if then is not None and then != handover.number_of(self._objects):
            names = ", ".join(self._objects)
            text = f"the state of {names} was changed after a step that failed because a worker was lost"
            raise InvalidCall(f"{text}; change it only if the step has returned a mean loss, not None")
        if self._is_leaving() and self.steps < total:
            try:
                # For the next group: what a codec remembers is with the workers of this one.
                self._gathered = self._gather() if self._encodes else None
            except Error as error:
                self._note(error)
            else:
                self._leave()
        if self._job is not None and self._group is None:
            self._group = self._job.enter()
            self._is_over = self._group is None
        return not self._is_over

    def _is_leaving(self) -> bool:
        """Whether all members have agreed, in the last step, to leave the group."""
        return self._job is not None and self._has_just_stepped and self._native.last_step[0]

    def _begin(self, total: int) -> int | None:
        """The step to compute in the present group; None if there is none."""
        if not self._is_regrouped:
            self._regroup()
        made = self.steps
        if self._has_just_stepped and self._save_every and made % self._save_every == 0:
            packed = self._gather()
            if packed is not None:
                handover.write(self._file, packed)
        self._has_just_stepped = False
        if made >= total:
            self._end()
            return None
        if self._job is not None and self._job.is_asked_to_regroup():
            self._native.vote_to_regroup()
        return made

    def _regroup(self) -> None:
        """Goes on in the present group: finds out who has the state of the run, and gives it to all."""
        if not self._native.regroup(self._group, self._seconds):
            # What a codec remembers is gone on all workers: as if none had any state.
            self._has_state = False
        all_ranks = self._exchange([self.steps if self._has_state else -1])
        most = max(all_ranks)[0]
        having = [rank for rank, steps in enumerate(all_ranks) if steps == [most]]
        behind = len(all_ranks) - len(having)
        if most >= 0:
            self._hand_over(having, lambda: self._packed(most))
            self._native.go_on_from(most)
        else:
            behind = len(all_ranks)
            self._begin_again()
        self._has_state = True
        self._gathered = None
        is_redone, self._failed_after = self._failed_after == self.steps, None
        if self._job is not None and self.rank == 0:
            self._first = is_redone, behind, most < 0
        self._native.begin_step()
        self._is_regrouped = True

    def _exchange(self, numbers: list[int]) -> list[list[int]]:
        """These numbers of all workers of the group."""
        if self._group is None:
            return [numbers]
        return _native.exchange(self._group, numbers, self._seconds)

    def _hand_over(self, having: list[int], pack: Callable[[], bytes]) -> None:
        """Gives those that do not have it the state of the first that has."""
        behind = [rank for rank in range(self.workers) if rank not in having]
        if self.rank == having[0] and behind:
            _native.send_state(self._group, behind, pack(), self._seconds)
        elif self.rank in behind:
            received = _native.receive_state(self._group, having[0], self._seconds)
            self._unpack(received, f"rank {having[0]}")

    def _begin_again(self) -> None:
        """No worker has the state of the run: goes on from what was saved last, or from the beginning."""
        found = self._gathered
        source = "what was gathered before its members changed"
        if self.rank == 0 and self._file is not None and os.path.exists(self._file):
            if found is None:
                source = f"the checkpoint {self._file}"
                with open(self._file, "rb") as file:
                    found = file.read()
        steps = -1 if found is None else handover.steps_of(found, source)
        all_ranks = self._exchange([steps])
        best = max(all_ranks)[0]
        donor = all_ranks.index([best])
        if found is None:
            source, found = "its beginning", self._initial
        if self.rank == donor:
            if found is not None:
                self._unpack(found, source)
            if best >= 0 or self.epoch > 1:
                told = f"no worker has the state of the run: it goes on from {source}"
                steps = f", after {best} steps" if best >= 0 else ""
                print(f"unisono: {told}{steps}", file=sys.stderr, flush=True)
        self._hand_over([donor], lambda: self._packed(max(best, 0)) if found is None else found)
        if best >= 0:
            self._native.restore(best, self._restored, self._seconds)
        else:
            self._native.go_on_from(0)
        self._restored = {}

    @property
    def epoch(self) -> int:
        """The number of the present group among those of the job, from 1; 0 where the job is not elastic."""
        return 0 if self._job is None else self._job.epoch

    def _end(self) -> None:
        """All steps are made. From here on all workers have the final weights: if rank 0 is lost, another hands in
        the result."""
        self._expect_equal_replicas()
        if self.rank == 0:
            self._is_over = self._hands_in = True
        elif self._job is None:
            self._is_over = True
        else:
            self._leave()  # Waits for the next epoch, or for the end.

    def _expect_equal_replicas(self) -> None:
        parts = {"model": self._model, "optimizer": self._optimizer, **self._objects}
        numbers = self._exchange([handover.number_of(parts)])
        for rank, (other,) in enumerate(numbers):
            if other != numbers[0][0]:
                raise Error(
                    f"the weights, the optimizer's state or that of other objects of rank {rank} differ from rank 0's"
                    f" after {self.steps} steps; a step must change them by what it is given alone",
                    rank=self.rank,
                    peer=rank,
                )

    def _gather(self) -> bytes | None:
        """All there is of the run, at rank 0; None at others."""
        codec = self._native.save(self._seconds)
        return self._packed(self.steps, codec) if self.rank == 0 else None

    def _packed(self, steps: int, codec: Mapping[str, bytes] | None = None) -> bytes:
        return handover.pack(steps, self._model, self._optimizer, self._objects, codec or {})

    def _unpack(self, packed: bytes, source: str) -> None:
        self._restored = handover.unpack(
            packed, source, self._model, self._optimizer, self._objects
        )

    @staticmethod
    def _is_group_lost(error: Exception) -> bool:
        return not isinstance(error, (InvalidCall, Unsupported))

    def _note(self, error: Exception) -> None:
        """Takes note of an error after which another group can follow; raises others."""
        follows = self._job is not None and self._group is not None and self._is_group_lost(error)
        if not (follows and self._job.note_failure(self._group, self._native)):
            raise error
        self._failed_after = self.steps
        self._leave()

    def _leave(self) -> None:
        """Leaves the present group."""
        if self._job is not None and self._group is not None:
            self._group.close(_PATIENCE)
            self._group = None
        self._is_regrouped = self._has_just_stepped = False
        self._first = None

    def _shard(self, before: list[torch.Tensor]):
        if self._job is not None and self._group is not None and self._group.has_ended():
            raise _GroupEnded  # What is computed for a group that has failed is in vain.
        return super()._shard(before)

    def _close(self, seconds: float) -> None:
        if self._hands_in and _exit.reason() is None:
            self.finish()
        if self._job is not None and self._group is not None:
            self._group.close(seconds, _exit.reason())
        super()._close(seconds)
