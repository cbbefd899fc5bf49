"""Sharded training that goes on when workers are lost, and lets them in again.

A run is a sequence of epochs of the job's membership, each with a group of its own.  The mean gradient of a step
is a function of the weights, the step and the shards, whichever worker computes them.  So nothing is undone when
a group fails: a worker is either before the step or behind it, and the step is computed again in the next group,
with the shards divided anew, unless a worker had completed it.  Workers that are behind, or new, get the state
of one with the most steps.

A worker changes its weights only after it has the means of all parameters, in the program's own code between two
calls of this module; and it goes to another group only where it asks for the next step.  So the state that it
hands over there is that after a whole step, schedulers included.

A worker that joins gets the state before, from a member that goes on training, and makes its steps after it
(`following`).  Where that does not work, it gets the state like one that is behind: in the group, while the others wait.
"""

import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext, suppress
from itertools import islice
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from unisono import _native
from unisono.errors import Diverged, Error, InvalidCall
from unisono.torch import _exit
from unisono.torch._gradients import following, handover
from unisono.torch._gradients.engine import EngineGroup, engine_of
from unisono.torch._gradients.sampler import ShardedSampler
from unisono.torch._gradients.sharded import ShardedStep
from unisono.torch._gradients.told import Told

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


class _Gathered(NamedTuple):
    """What codecs remembered, of all members of a group."""

    epoch: int
    steps: int
    codec: dict[str, bytes]


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

    A worker that joins is given the state by a member that goes on training, and makes its steps after it with its own
    optimizer: so step the optimizer once in every step, without a closure, and leave the weights to it.  A program that
    does otherwise works as well, but the others wait while a worker that joins is given the state.

    If no worker with the state of the run is left, the run goes on from the file `checkpoint`, if there is one,
    or from its beginning: so workers must build the same model, seeded or loaded.  `save_every` so many steps the
    run is saved to that file.  A codec that remembers something from step to step (all but fp16 and bf16) has it at
    the worker of each shard: then any loss of a worker takes the run back to its checkpoint, by itself, which
    costs the steps since then; a worker that is let in does not.  All of it is told on the standard error.

    A worker that is told to end by SIGTERM, as by a launcher that is itself, finishes its step; the run is saved
    to `checkpoint`, if there is one, and the worker exits with code 143 where the loop asks for the next step.  A
    program with a handler of its own for SIGTERM is left alone.

    Gradients of a CUDA model go by way of this machine's memory, for groups come and go.

    After the loop, `is_complete` says whether all steps were made: a worker of a machine that leaves the job is
    let go before, with the weights of that moment.

    A wrong call, replicas that differ and a checkpoint that cannot be written or read end a worker with exit code 64
    if the program does not catch the error, which a launcher takes for a failure that would be repeated.
    """

    # Groups come and go, and the engine of a device does not outlive its own.
    _stays_on_device = False

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
        self._job = _native.ElasticJob.join(max(shards, 0))
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
        # Whether this worker has the weights after all steps, and all members of its group have the same.
        self._is_final = False
        self._hands_in = False
        # Whether this worker hands in the result, or has.
        self._is_first = False
        # This worker's number in its last group, and the workers there.
        self._last_place = (-1, 0)
        # What codecs remembered, of all members, when they left their last group.
        self._gathered: _Gathered | None = None
        # What codecs remembered, of what was received.
        self._restored: dict[str, bytes] = {}
        # The steps after which this worker has what a member gave it, but for what codecs remember; until it is in its
        # first group.
        self._level: int | None = None
        self._told = Told()
        self._all_shards = shards
        super().__init__(model, optimizer, shards, codec=codec, **options)
        self._encodes = codec is not None or bool(options.get("rules"))
        # Weights change, and a codec may take the run back to these.
        self._initial = self._packed(0) if self._encodes else None
        self._run = following.Run(model, optimizer, self._objects)
        # What workers that join get from this one; and while this one joins, what it makes of that.
        self._donor: following.Donor | None = None
        self._joiner: following.Joiner | None = None
        if self._job is not None and following.can_follow(optimizer):
            self._donor = following.Donor(self._job, self._run)
            self._hooks.append(optimizer.register_step_pre_hook(self._note_optimizer))

    @property
    def rank(self) -> int:
        """This worker's number among those of the present group, or between two of the last one. It may have
        another in the next. -1 before the first; and after the loop at a worker that was 0 and does not hand in
        the result: after the loop, 0 is the one that does."""
        if self._group is None and self._job is None:
            return 0
        rank = self._last_place[0] if self._group is None else self._group.rank
        return -1 if rank == 0 and self._is_over and not self._is_first else rank

    @property
    def workers(self) -> int:
        """Workers in the present group, or between two in the last one; 0 before the first."""
        if self._group is None:
            return 1 if self._job is None else self._last_place[1]
        return self._group.size

    @property
    def is_complete(self) -> bool:
        """Whether the loop has come to its end with all steps made, and the model is what came of them. False at
        a worker that was let go before: because its machine leaves the job, or because it was not needed."""
        return self._is_over and self._is_final

    def until(self, total: int) -> Iterator[int]:
        """The number of every step, from 0, until so many are made; of one that failed, again.

        Ends when the run is complete: at rank 0 first, which hands in the result, and at the others when that is
        done.  Workers that are more than there are shards or places wait here.  A worker whose machine leaves the
        job is let go before: `is_complete` tells.
        """
        with self._told.listening() if self._job is not None else nullcontext():
            while not self._is_over:
                if self._donor is not None:
                    is_asked, _, is_stopped = self._native.last_step if self._has_just_stepped else (False, 0.0, False)
                    self._donor.give_step(self.steps, is_asked or is_stopped)
                if not self._enter():
                    break
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
        if sampler.shards != self._all_shards:
            text = f"the sampler cuts a batch into {sampler.shards} shards, and the step has {self._all_shards}"
            raise InvalidCall(f"{text}: samples would be left out; give both the same number")
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
            self._save(file)
        except Error as error:
            self._note(error)
            return False
        return True

    def state_dict(self) -> dict[str, Any]:
        """Refused: what a run needs to go on is more than this would have."""
        raise InvalidCall(
            "an ElasticStep saves the whole run by itself: give it checkpoint= and save_every=, or call save()"
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Refused: a run that was begun so would go on from its first step."""
        raise InvalidCall(
            "an ElasticStep goes on from the file checkpoint=, which save_every= or save() has written, by itself"
        )

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
        """Lets go of the model, after the end of the run. A worker of an elastic job that lives on cannot leave it
        before: the others would wait for it."""
        if self._job is not None and not self._is_over and _exit.reason() is None:
            raise InvalidCall(
                "the run is not over, and the others would wait for this worker: let the loop over its steps come to"
                " its end, or end the process, by exit or SIGTERM"
            )
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

    def _enter(self) -> bool:
        """Makes sure that this worker is in a group; whether the run goes on."""
        then, self._failed_with = self._failed_with, None
        if then is not None and then != handover.number_of(self._objects):
            names = ", ".join(self._objects)
            text = f"the state of {names} was changed after a step that failed because a worker was lost"
            raise InvalidCall(f"{text}; change it only if the step has returned a mean loss, not None")
        if self._job is not None and self._group is None:
            self._refuse_ddp()  # Here, where no other worker waits for this one: it looks at all objects there are.
            if self._donor is not None and self.epoch == 0:
                self._joiner = following.Joiner(self._run)
            with self._told.idle():
                self._group = self._job.enter(self._joiner)
            if self._joiner is not None:
                self._take_over(self._joiner)
                self._joiner = None
            self._is_over = self._group is None
            if self._group is not None:
                self._last_place = self._group.rank, self._group.size
        return not self._is_over

    def _take_over(self, joiner: following.Joiner) -> None:
        """Goes on from where a worker that joins has come to before it is in a group."""
        if joiner.steps is not None and joiner.is_certain:
            self._native.go_on_from(joiner.steps)
            self._has_state, self._level = True, joiner.steps
        elif joiner.initial is not None:
            # The model is that of no step. Should the run begin again, then not with that.
            self._initial = joiner.initial

    def _note_optimizer(self, _: torch.optim.Optimizer, arguments: tuple, options: dict) -> None:
        if self._joiner is not None:
            self._joiner.note_optimizer()
        elif self._donor is not None:
            self._donor.note_optimizer(arguments, options)

    def _begin(self, total: int) -> int | None:
        """The step to compute in the present group; None if there is none."""
        if not self._is_regrouped:
            self._regroup()
        made = self.steps
        has_stepped, self._has_just_stepped = self._has_just_stepped, False
        if made >= total:
            # Before it is saved: workers that begin again from there would all be equal.
            self._expect_equal_replicas()
        is_asked, _, is_stopped = self._native.last_step if has_stepped else (False, 0.0, False)
        is_due = has_stepped and self._save_every and made % self._save_every == 0
        if is_due or (is_stopped and self._file is not None):
            self._save(self._file)
        if made >= total:
            self._end()
            return None
        if self._job is None:
            return made
        if is_asked or is_stopped:
            self._leave_together()
            return None
        if self._job.is_asked_to_regroup():
            self._native.vote_to_regroup()
        if self._donor is not None:
            self._donor.attend(made)
        return made

    def _leave_together(self) -> None:
        """All members have agreed, in the last step, to leave the group."""
        if self._encodes:
            # For the next group: what a codec remembers is with the workers of this one, any of which may not be
            # in the next.
            self._gathered = _Gathered(self.epoch, self.steps, self._gather_at_all())
            self._exchange([0])  # None leaves before all have it.
        self._leave()

    def _regroup(self) -> None:
        """Goes on in the present group: finds out who has the state of the run, and gives it to all."""
        if not self._native.regroup(self._group, self._seconds):
            # What a codec remembers is gone on all workers: as if none had any state.
            self._has_state = False
        self._is_final = False
        all_ranks = self._exchange([self.steps if self._has_state else -1])
        most = max(all_ranks)[0]
        having = [rank for rank, steps in enumerate(all_ranks) if steps == [most]]
        has_gone_back = False
        if most >= 0:
            behind = self._hand_over(having, lambda: self._packed(most))
            self._native.go_on_from(most)
        else:
            has_gone_back, behind = self._begin_again()
        self._has_state = True
        self._gathered = self._level = None
        if not self._encodes:
            self._initial = None
        failed_after, self._failed_after = self._failed_after, None
        is_redone = failed_after is not None and failed_after >= self.steps
        if self._job is not None and self.rank == 0:
            self._first = is_redone, behind, has_gone_back
        if self._donor is not None:
            self._donor.offer()
        self._native.begin_step()
        self._is_regrouped = True

    def _exchange(self, numbers: list[int]) -> list[list[int]]:
        """These numbers of all workers of the group."""
        if self._group is None:
            return [numbers]
        return _native.exchange(self._group, numbers, self._seconds)

    def _hand_over(self, having: list[int], pack: Callable[[], bytes]) -> int:
        """Gives those that do not have it the state of the first that has; how many they are."""
        behind = [rank for rank in range(self.workers) if rank not in having]
        received = self._send(having[0], behind, pack)
        if received is not None:
            self._unpack(received, f"rank {having[0]}")
        return len(behind)

    def _send(self, sender: int, to: list[int], pack: Callable[[], bytes]) -> bytes | None:
        """Sends what one of the group packs to these; what this one has received, if it is one of them."""
        if self.rank == sender and to:
            _native.send_state(self._group, to, pack(), self._seconds)
        elif self.rank in to:
            return _native.receive_state(self._group, sender, self._seconds)
        return None

    def _begin_again(self) -> tuple[bool, int]:
        """No worker has the state of the run: goes on from what was gathered when its members left their group, else
        from what was saved last, or from the beginning. Whether steps may have been lost by that, and how many workers
        were given the state of another."""
        gathered, saved, steps = self._gathered, None, -1
        if gathered is not None:
            steps, source = gathered.steps, "what was gathered before its members changed"
        # Epochs that this worker was not in may have come further.
        if self.rank == 0 and (gathered is None or self.epoch > gathered.epoch + 1):
            saved = None if self._file is None else handover.read(self._file)
        if saved is not None:
            saved_source = f"the checkpoint {self._file}"
            saved_steps = handover.steps_of(saved, saved_source)
            if saved_steps > steps:
                gathered, steps, source = None, saved_steps, saved_source
            else:
                saved = None
        level = -1 if self._level is None else self._level
        all_ranks = self._exchange([steps, int(gathered is not None), level])
        best = max(other[:2] for other in all_ranks)
        having = [rank for rank, other in enumerate(all_ranks) if other[:2] == best]
        steps, is_gathered = best
        # Of those that have joined, those that need no more than what codecs remember.
        are_level = [
            rank
            for rank, other in enumerate(all_ranks)
            if is_gathered and rank not in having and other[2] == steps
        ]
        if steps < 0:
            # The weights that workers were built with are equal if their programs are: those of one are for sure.
            gathered, saved, source, having = None, self._initial, "its beginning", having[:1]
        if self.rank in having and gathered is not None:
            self._restored = gathered.codec
        elif self.rank in having and saved is not None:
            self._unpack(saved, source)
        if self.rank == having[0] and (steps >= 0 or self.epoch > 1):
            told = f"no worker has the state of the run: it goes on from {source}"
            after = f", after {steps} steps" if steps >= 0 else ""
            print(f"unisono: {told}{after}", file=sys.stderr, flush=True)
        behind = self._hand_over(
            having + are_level, lambda: saved or self._packed(max(steps, 0), self._restored)
        )
        if 0 in are_level:
            # All get that of rank 0.
            received = self._send(having[0], [0], lambda: handover.pack_codec(self._restored))
            if received is not None:
                self._restored = handover.unpack_codec(received)
        if steps >= 0:
            self._native.restore(steps, self._restored, self._seconds)
        else:
            self._native.go_on_from(0)
        self._restored = {}
        return not is_gathered, behind if is_gathered else len(all_ranks)

    @property
    def epoch(self) -> int:
        """The number of the present group among those of the job, from 1; 0 where the job is not elastic."""
        return 0 if self._job is None else self._job.epoch

    def _end(self) -> None:
        """All steps are made. From here on all workers have the final weights: if rank 0 is lost, another hands in
        the result."""
        self._is_final = True
        if self.rank == 0:
            self._is_over = self._hands_in = self._is_first = True
        elif self._job is None:
            self._is_over = True
        else:
            self._leave()  # Waits for the next epoch, or for the end.

    def _expect_equal_replicas(self) -> None:
        parts = {"model": self._model, "optimizer": self._optimizer, **self._objects}
        numbers = [number for (number,) in self._exchange([handover.number_of(parts)])]
        differing = [rank for rank, number in enumerate(numbers) if number != numbers[0]]
        if not differing:
            return
        # No worker leaves before all have seen it: one that is lost before is taken for a failure of the group.
        with suppress(Error):
            self._exchange([0])
        raise Diverged(
            f"the weights, the optimizer's state or that of other objects of rank {differing[0]} differ from rank 0's"
            f" after {self.steps} steps; a step must change them by what it is given alone",
            rank=self.rank,
            peer=differing[0],
        )

    def _save(self, file: str) -> None:
        """Saves the run, at rank 0."""
        codec = self._native.save(self._seconds)
        if self.rank == 0:
            handover.write(file, self._packed(self.steps, codec))

    def _gather_at_all(self) -> dict[str, bytes]:
        """What codecs remember, of all members, at each of them."""
        codec = self._native.save(self._seconds)
        others = list(range(1, self.workers))
        if self.rank == 0:
            _native.send_state(self._group, others, handover.pack_codec(codec), self._seconds)
            return codec
        return handover.unpack_codec(_native.receive_state(self._group, 0, self._seconds))

    def _packed(self, steps: int, codec: Mapping[str, bytes] | None = None) -> bytes:
        return handover.pack(steps, self._model, self._optimizer, self._objects, codec or {})

    def _unpack(self, packed: bytes, source: str) -> None:
        if self._donor is not None:
            self._donor.break_off()
        self._restored = handover.unpack(
            packed, source, self._model, self._optimizer, self._objects
        )

    @staticmethod
    def _is_group_lost(error: Exception) -> bool:
        return not isinstance(error, _exit.REPEATED)

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

    def _begin_shard(self) -> int:
        if self._job is None:
            return super()._begin_shard()
        if self._group is not None and self._group.has_ended():
            raise _GroupEnded  # What is computed for a group that has failed is in vain.
        if self._told.is_told:
            self._native.vote_to_stop()
        shard = super()._begin_shard()
        self._job.note_shard(shard)
        return shard

    def _finish(self, before: list[torch.Tensor]) -> float:
        if self._job is not None:
            self._job.note_shard(None)
        return super()._finish(before)

    def _close(self, seconds: float) -> None:
        if self._hands_in and _exit.reason() is None:
            self.finish()
        if self._job is not None and self._group is not None:
            self._group.close(seconds, _exit.reason())
        super()._close(seconds)
