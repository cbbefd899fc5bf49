"""Marks where a program is, while it trains: forward, backward, optimizer, waiting.

Nothing here needs the program's help.  The hooks are those that torch offers, and where it offers
none, a function is wrapped for the duration: `torch.autograd.backward`, through which every
`loss.backward()` goes, `wait` of what a call returns, and where Unisono starts its calls, which it
shows here by itself because the ends that its threads report would be lost in torch's profiler.
Codecs, local steps, shards and parameter servers exchange without the backend, and are asked when.

A mark is a look at the clock and an entry in a list: less than a microsecond.
"""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from unisono import _native
from unisono.torch import _exit
from unisono.torch._backend import work
from unisono.torch._backend.core import Core
from unisono.torch._backend.tensors import byte_count
from unisono.torch._gradients.device import Cuda
from unisono.torch._gradients.local import _LocalSteps
from unisono.torch._gradients.member import Member
from unisono.torch._profile.spans import Kind, Span
from unisono.torch._servers.server import ParameterServer

_now = time.time_ns


@dataclass(frozen=True, slots=True)
class Note:
    """What was learnt about the step under way, when this many updates and declared steps were counted."""

    updates: int
    declared: int
    loss: object = None
    samples: int = 0


class Hooks:
    """The marks of this process, from when it is made until `stop`."""

    def __init__(self, update_ended: Callable[[], None]) -> None:
        """Calls `update_ended` after every update of an optimizer."""
        self.notes: list[Note] = []
        self.updates = 0
        #: Steps of which the program declared the end, by `Profile.step`.
        self.declared = 0
        #: What Unisono had sent after each update, and after each declared step.
        self.sent_after_update = [_sent()]
        self.sent_after_declared = [_sent()]
        self._update_ended = update_ended
        self._spans: list[Span] = []
        self._stamped: list[tuple[int, str, int, _native.Stamp]] = []
        self._optimizers: dict[int, str] = {}
        self._updating: list[int] = []
        self._step_began = _now()
        self._backwards = 0
        self._forward_seen = False
        self._stopped = False
        self._model_hooks: list = []
        self._wrapped: list[tuple[object, str, object]] = []
        self._hooked: set[int] = set()
        self._install()

    def declare(self, loss, samples: int) -> None:
        """The program declares that a step has ended."""
        self._note(loss, samples)
        self.declared += 1
        self._mark(Kind.STEP)
        self._step_began = _now()
        self.sent_after_declared.append(_sent())

    def stop(self) -> list[Span]:
        """Marks nothing any more; what was seen.

        May be called by the hook of an optimizer, whose list must not change then: those hooks stay
        until `remove`.
        """
        self._stopped = True
        for handle in self._model_hooks:
            handle.remove()
        for owner, name, original in reversed(self._wrapped):
            setattr(owner, name, original)
        stamped = [(b, what, size, stamp.ended()) for b, what, size, stamp in self._stamped]
        calls = [
            Span(Kind.COMMUNICATION, begin, end, what, size)
            for begin, what, size, end in stamped
            if end is not None
        ]
        return self._spans + calls

    def remove(self) -> None:
        """Takes away what `stop` has left."""
        for handle in self._optimizer_hooks:
            handle.remove()

    def _install(self) -> None:
        self._optimizer_hooks = [
            register_optimizer_step_pre_hook(self._before_update),
            register_optimizer_step_post_hook(self._after_update),
        ]
        self._wrap(torch.autograd, "backward", self._backward)
        self._wrap(torch._C._distributed_c10d.Work, "wait", self._waiting)
        self._wrap(work.Work, "wait", self._waiting)
        self._wrap(Core, "_start", self._call)
        self._wrap(Core, "_start_message", self._message)
        self._wrap(Member, "_wait", self._member_waiting)
        self._wrap(Cuda, "copy", self._staging)
        self._wrap(ParameterServer, "_wait", self._worker_waiting)
        # They are optimizers, to the program; torch does not know.
        self._wrap(_LocalSteps, "step", self._update)
        self._wrap(ParameterServer, "step", self._update)
        self._watch_models()

    def _wrap(self, owner, name: str, wrapper: Callable) -> None:
        original = getattr(owner, name)
        self._wrapped.append((owner, name, original))
        setattr(owner, name, wrapper(original))

    def _mark(self, kind: Kind, begin: int | None = None, what: str = "") -> None:
        now = _now()
        self._spans.append(Span(kind, now if begin is None else begin, now, what))

    def _note(self, loss=None, samples: int = 0) -> None:
        self.notes.append(Note(self.updates, self.declared, loss, samples))

    # Forward.

    def _watch_models(self) -> None:
        for model in models():
            # Inside a compiled call, a hook would be compiled too.
            if id(model) in self._hooked or getattr(model, "_compiled_call_impl", None):
                continue
            self._hooked.add(id(model))
            hook = model.register_forward_pre_hook(self._forward, prepend=True, with_kwargs=True)
            self._model_hooks.append(hook)

    def _forward(self, _model, args: tuple, kwargs: dict) -> None:
        if not torch.is_grad_enabled():
            return  # It is being judged, not trained.
        if not self._forward_seen:
            self._mark(Kind.FORWARD)
            self._note(samples=_batch((*args, *kwargs.values())))
        self._forward_seen = True

    # Backward.

    def _backward(self, original: Callable) -> Callable:
        def backward(tensors, *args, **kwargs):
            self._backwards += 1
            if self._backwards > 1:  # Inside another: a checkpoint computes again.
                try:
                    return original(tensors, *args, **kwargs)
                finally:
                    self._backwards -= 1
            self._updating.clear()  # Of an update that failed.
            roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
            hooks = self._watch_end(roots)
            begin = _now()
            try:
                return original(tensors, *args, **kwargs)
            finally:
                self._mark(Kind.BACKWARD, begin)
                self._backwards -= 1
                self._forward_seen = False
                for hook in hooks:
                    hook.remove()
                if len(roots) == 1 and roots[0].numel() == 1:
                    self._note(roots[0].detach())

        return backward

    def _watch_end(self, roots: list[torch.Tensor]) -> list:
        """Marks when the last gradient is computed.

        The engine calls what was queued during a backward pass at its end, in order.  What is
        queued before its first node comes before DDP's wait for its buckets.
        """
        first = next((root.grad_fn for root in roots if root.grad_fn is not None), None)
        if first is None:
            return []

        def begin(_gradients) -> None:
            queue = torch.autograd.Variable._execution_engine.queue_callback
            queue(lambda: self._mark(Kind.COMPUTED))

        return [first.register_prehook(begin)]

    # Optimizer.  One may be inside another: a sharded one has a local one, and local steps too.

    def _update(self, original: Callable) -> Callable:
        def step(optimizer, *args, **kwargs):
            self._before_update(optimizer, args, kwargs)
            outcome = original(optimizer, *args, **kwargs)
            self._after_update(optimizer, args, kwargs)
            return outcome

        return step

    def _before_update(self, optimizer, _args, _kwargs) -> None:
        if not self._stopped:
            self._updating.append(_now())

    def _after_update(self, optimizer, _args, _kwargs) -> None:
        if self._stopped or not self._updating:
            return
        begin = self._updating.pop()
        if self._updating:
            return
        name = self._optimizers.setdefault(id(optimizer), str(len(self._optimizers)))
        self.updates += 1
        self._mark(Kind.OPTIMIZER, begin, name)
        self._step_began = _now()
        self.sent_after_update.append(_sent())
        if self.updates == 1 and not any(s.kind is Kind.FORWARD for s in self._spans):
            self._watch_models()  # The model was made after we looked.
        self._update_ended()

    # Calls.

    def _waiting(self, original: Callable) -> Callable:
        def wait(work, *args, **kwargs):
            begin = _now()
            try:
                return original(work, *args, **kwargs)
            finally:
                self._mark(Kind.WAIT, begin)

        return wait

    def _staging(self, original: Callable) -> Callable:
        """Has copies made by a device, which shows them to torch's profiler as it does any others."""

        def copy(device, *args):
            begin = _now()
            original(device, *args)
            self._mark(Kind.STAGING, begin)

        return copy

    def _member_waiting(self, original: Callable) -> Callable:
        """Waits for buckets of the engine's own, which may have begun to travel before."""

        def wait(member, *args):
            asked = _now()
            outcome = original(member, *args)
            for size, begin, end in member._transfers():
                if begin < self._step_began < end:
                    begin = self._step_began  # What was waited for belongs to this step.
                self._spans.append(Span(Kind.COMMUNICATION, begin, end, "synchronize", size))
                if asked < end:  # After the last has arrived, it waits for no rank.
                    self._spans.append(Span(Kind.WAIT, asked, end))
            return outcome

        return wait

    def _worker_waiting(self, original: Callable) -> Callable:
        """Waits for parameter servers, and for others through them."""
        waiting = self._waiting(original)

        def wait(worker, *args):
            begin, before = _now(), worker._sent()
            outcome = waiting(worker, *args)
            size = worker._sent() - before
            self._spans.append(Span(Kind.COMMUNICATION, begin, _now(), "push_pull", size))
            return outcome

        return wait

    def _call(self, original: Callable) -> Callable:
        def start(group, prepared):
            begin = _now()
            work = original(group, prepared)
            what = prepared.name or "all_reduce"
            size = sum(byte_count(tensor) for tensor in prepared.shown)
            if work is None:
                self._spans.append(Span(Kind.COMMUNICATION, begin, _now(), what, size))
                self._mark(Kind.WAIT, begin)
            else:
                self._stamped.append((begin, what, size, _native.Stamp(work._native)))
            return work

        return start

    def _message(self, original: Callable) -> Callable:
        def start(group, native, tensors, finish, name, number):
            size = sum(byte_count(tensor) for tensor in tensors)
            self._stamped.append((_now(), name, size, _native.Stamp(native)))
            return original(group, native, tensors, finish, name, number)

        return start


def models() -> list[nn.Module]:
    """The models of this process that can be trained: no module holds them, largest first."""
    # By type: asked for its class, a lazy object may import what it stands for.
    modules = [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module)]
    inside = {id(child) for module in modules for child in module.children()}
    outer = [module for module in modules if id(module) not in inside]
    return sorted((m for m in outer if trainable(m)), key=trainable, reverse=True)


def trainable(model: nn.Module) -> int:
    """Numbers that training changes, of those that are there already."""
    parameters = (p for p in model.parameters() if not nn.parameter.is_lazy(p))
    return sum(parameter.numel() for parameter in parameters if parameter.requires_grad)


def _batch(values: tuple) -> int:
    """How many samples a model is given: rows of its first tensor."""
    tensors = (value for value in values if isinstance(value, torch.Tensor) and value.dim() > 0)
    first = next(tensors, None)
    return 0 if first is None else first.shape[0]


def _sent() -> int:
    """What Unisono has sent for this process."""
    return sum(group._sent() for group in _exit.watched())
