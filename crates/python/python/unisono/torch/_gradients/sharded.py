"""Training whose weights do not depend on the number of processes.

The batch of a step is cut into a fixed number of shards.  A process computes the gradient of each
of its shards by itself and hands every parameter's over as backward produces it; the sum of all
shards is one fixed tree, whichever process computed which.  Nothing may be carried from one shard
to the next, or the result would depend on which process computes both: so every shard begins with
no gradients, with the buffers as they were before the step, and with a random generator of its own.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from unisono import _native
from unisono.errors import InvalidCall
from unisono.torch._gradients import device
from unisono.torch._gradients.codec import CodecSettings, codec_of
from unisono.torch._gradients.ddp import refuse_ddp
from unisono.torch._gradients.engine import EngineGroup, engine_of
from unisono.torch._gradients.member import Member
from unisono.torch._gradients.resident import ResidentRoute
from unisono.torch._gradients.route import DeviceRoute, HostRoute, route_for
from unisono.torch._gradients.sampler import drawn_from

Batch = TypeVar("Batch")


class ShardedStep(Member):
    """Makes steps that give the same weights, to the bit, on any number of processes.

        torch.manual_seed(0)
        model = ...
        step = unisono.torch.ShardedStep(model, optimizer, shards=8)
        for batches in sampler.steps(loader):  # of a `ShardedSampler`
            mean = step(batches, lambda batch: criterion(model(batch[0]), batch[1]))

    There may be as many processes as shards, or fewer, evenly or not; a process by itself needs no
    `init_process_group`.  The weights, the optimizer's state and the loss have the same bits for
    all of them, and for every size of buckets, transport and algorithm, with any codec (but
    ``auto``, which looks at the clock and is refused here).

    The model is not wrapped.  Its parameters, also frozen ones, and its buffers become rank 0's at
    the beginning: seed torch before making it, or load them, for a run that can be repeated.  Which
    parameters need gradients is decided then: to thaw some, make another step.

    The loss is a function of the weights, the batch and torch's random generator, which is seeded
    here for every shard of every step, so dropout is the same on any number of processes.  What a
    shard changes of a buffer, such as the statistics of a batch norm, is averaged like a gradient.
    All that is averaged is rounded to 32-bit floats, also where it is float64.

    A model may be on a CUDA device: gradients of a process's shards are added up there, and only
    the sums travel, while backward goes on: from device to device, by the engine that `engine`
    names; with a codec, or where the ranks have no engine in common, by way of this machine's
    memory.

    What can still change bits: the number of threads (`torch.set_num_threads`; processes of one job
    on one machine often get fewer each, so set it), another type of CPU, another version of torch
    or of its linear algebra, and random numbers from elsewhere than torch; on a CUDA device, another
    type of device, and algorithms that are not deterministic
    (`torch.use_deterministic_algorithms`).

    `buckets` are the bytes of the first and of the other buckets, which are otherwise found while
    training, or 1 MiB and 25 MiB on devices; `codec`, `rules`, `warm_up` and `error_feedback` are those of
    `unisono.torch.compress`.  A `state_dict` is for any number of processes, and the same shards.
    """

    #: Whether gradients may stay on their device, for as long as the group lasts.
    _stays_on_device = True

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        shards: int = 8,
        *,
        codec: str | None = None,
        rules: Mapping[str, str | None] | None = None,
        warm_up: int = 0,
        error_feedback: bool = True,
        seed: int = 0,
        buckets: tuple[int, int] | None = None,
        group: dist.ProcessGroup | None = None,
    ):
        if isinstance(model, DistributedDataParallel):
            raise InvalidCall("a sharded step synchronizes by itself; give it the model, not DDP")
        if codec == "auto":
            raise InvalidCall("auto looks at the clock and would give other bits; name a codec")
        parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        buffers = {n: b for n, b in model.named_buffers() if b.is_floating_point()}
        others = [b for b in model.buffers() if not b.is_floating_point()]
        exact = {name: None for name in buffers}
        named = parameters | buffers
        settings = codec_of(
            codec,
            exact | dict(rules or {}) if codec or rules else None,
            named,
            warm_up=warm_up,
            error_feedback=error_feedback,
            seed=seed,
        )
        engine = self._find_engine(group)
        native, self._route = self._way_of(engine, named, len(buffers), shards, settings, buckets)
        engine.spread([*model.parameters(), *model.buffers()])
        self._optimizer = optimizer
        self._seed = seed
        self._parameters = list(parameters.values())
        self._frozen = {n: p for n, p in model.named_parameters() if not p.requires_grad}
        self._buffers = list(buffers.values())
        self._kept = self._buffers + others
        self._means = [torch.zeros_like(tensor) for tensor in named.values()]
        self._has_stepped = False
        self._in_backward = False
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(index))
            for index, parameter in enumerate(self._parameters)
        ]
        self._join(native, engine.seconds)

    @property
    def shards(self) -> range:
        """The shards that this process computes."""
        return range(*self._native.shards)

    @property
    def engine(self) -> str | None:
        """The engine that exchanges gradients on their device, by its name; None if this machine's memory is on their
        way."""
        return self._native.engine if isinstance(self._native, _native.DeviceSums) else None

    def __call__(self, batches: Iterable[Batch], loss: Callable[[Batch], torch.Tensor]) -> float:
        """Makes a step: the gradients, then the optimizer. The mean loss of all shards."""
        mean = self.gradients(batches, loss)
        self._optimizer.step()
        return mean

    def gradients(self, batches: Iterable[Batch], loss: Callable[[Batch], torch.Tensor]) -> float:
        """Sets the gradients to the means of all shards, and leaves the step to the caller.

        `batches` has one for every shard of this process, in order; `loss` gives the mean loss of
        one.  For what comes between gradients and optimizer, such as clipping.  Parameters that no
        shard used have no gradient.  Returns the mean loss of all shards.
        """
        self._refuse_ddp()
        shards = list(batches)
        if len(shards) != len(self.shards):
            raise InvalidCall(f"{len(shards)} batches for {len(self.shards)} shards; give each one")
        for name, parameter in self._frozen.items():
            if parameter.requires_grad:
                text = f"{name} was frozen before, and its gradient would not be averaged"
                raise InvalidCall(f"{text}: make another ShardedStep")
        before = [buffer.clone() for buffer in self._kept]
        for parameter in self._parameters:
            parameter.grad = None
        try:
            for batch in shards:
                with self._shard(before):
                    value = loss(batch)
                    self._route.begin_backward(value)
                    self._in_backward = True
                    value.backward()
            return self._finish(before)
        except BaseException:
            self._route.abandon()
            self._set_buffers(before)
            raise

    def close(self) -> None:
        """Lets go of the model."""
        for hook in self._hooks:
            hook.remove()
        self._close(self._seconds)

    @contextmanager
    def _shard(self, before: list[torch.Tensor]) -> Iterator[None]:
        """One shard: begins as every shard of the step does, and hands over what it changed."""
        shard = self._begin_shard()
        self._set_buffers(before)
        with torch.random.fork_rng(devices=self._route.seeded):
            torch.manual_seed(drawn_from(self._seed, self.steps, shard))
            try:
                yield
            finally:
                self._in_backward = False
        self._route.changed(len(self._parameters), self._buffers, before[: len(self._buffers)])
        self._route.end_shard()

    def _refuse_ddp(self) -> None:
        """Before the first step, refuses a model that the program has wrapped."""
        if not self._has_stepped:
            refuse_ddp(self._parameters, "the mean over shards would depend on the processes")
            self._has_stepped = True

    def _begin_shard(self) -> int:
        """Begins the next shard; which one."""
        return self._route.begin_shard()

    def _finish(self, before: list[torch.Tensor]) -> float:
        mean, used, _ = self._route.finish(self._wait, self._means)
        first = len(self._parameters)
        with torch.no_grad():
            for buffer, start in zip(self._buffers, before):
                buffer.copy_(start)
            for index in used:
                if index < first:
                    self._parameters[index].grad = self._means[index]
                else:
                    self._buffers[index - first].add_(self._means[index])
        return mean

    def _set_buffers(self, values: list[torch.Tensor]) -> None:
        with torch.no_grad():
            for buffer, value in zip(self._kept, values, strict=True):
                buffer.copy_(value)

    def _way_of(
        self,
        engine: EngineGroup,
        named: Mapping[str, torch.Tensor],
        buffers: int,
        shards: int,
        settings: CodecSettings,
        buckets: tuple[int, int] | None,
    ) -> tuple[_native.Synchronizer | _native.DeviceSums, HostRoute | DeviceRoute | ResidentRoute]:
        """What synchronizes these tensors, of which the last are buffers, and how they get there: they stay on their
        device if the engine can exchange them there, on all ranks."""
        tensors = list(named.values())
        shapes = [(name, list(tensor.shape)) for name, tensor in named.items()]
        if self._stays_on_device and settings.is_none:
            found = device.device_of(tensors)
            is_there = found is not None and all(map(found.holds, tensors))
            resident = _native.DeviceSums.join(
                engine.group, found.number() if is_there else None, shapes, buffers, shards, buckets, engine.seconds
            )
            if resident is not None:
                return resident, ResidentRoute(resident, tensors, found)
        native = _native.Synchronizer(engine.group, shapes, shards, settings, buckets, engine.seconds)
        return native, route_for(native, tensors)

    def _find_engine(self, group: dist.ProcessGroup | None) -> EngineGroup:
        """The processes that compute the shards."""
        return engine_of(group)

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        def hand_over(parameter: torch.Tensor) -> None:
            if self._in_backward:
                gradient, parameter.grad = parameter.grad, None
                self._route.gradient(index, gradient)

        return hand_over

    def _close(self, seconds: float) -> None:
        self._route.abandon()
        super()._close(seconds)
