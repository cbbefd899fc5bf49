"""The parameter server: weights that workers push gradients to, and pull from."""

import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from unisono import _native
from unisono.errors import InvalidCall
from unisono.torch import _exit
from unisono.torch._gradients.ddp import refuse_ddp
from unisono.torch._gradients.floats import refuse_doubles
from unisono.torch._servers import locate
from unisono.torch._servers.optimizer import expect_rates, rates_of, text_of
from unisono.torch._servers.places import places_of

# How long to look for a server that is not there, in seconds.  Longer: its death is noticed later.
# Shorter: one that is being started again is given up.  One inside a worker is gone for good.
_RESTART = 60.0
_FOR_GOOD = 5.0

# The workers that have not left.  A worker is present until it leaves, or its program ends, and not
# only until the program drops its last reference: others may need the server in its process.
_present: "set[ParameterServer]" = set()


@dataclass(frozen=True)
class ServerStatistics:
    """What a worker has seen so far of the servers, and through them of the others."""

    #: Gradients that were pushed.
    pushes: int
    #: Pushes that the servers left out: too stale for `stale="drop:T"`, or too late at `bsp`.
    dropped: int
    #: Pushes by their staleness, in whole clocks, rounded down.
    staleness: dict[int, int]
    #: The mean staleness of a push, in clocks.
    mean_staleness: float
    #: By how many clocks this worker was ahead of the slowest, at most.
    max_lead: int
    #: Seconds in which this worker waited for servers and, through them, for others.
    blocked: float
    #: Bytes sent to the servers and received from them.
    bytes: int


class _Tally:
    """Counts what becomes of a worker's pushes."""

    def __init__(self) -> None:
        self.pushes = 0
        self.dropped = 0
        self.lead = 0
        self.max_lead = 0
        self.staleness = 0.0
        self.blocked = 0.0
        self._sum = 0.0
        self._histogram: Counter[int] = Counter()

    def count(self, applied: bool, lead: int, delay: int, present: int) -> None:
        """Counts a push whose weights were `delay` updates of `present` workers old."""
        self.pushes += 1
        self.dropped += not applied
        self.lead = lead
        self.max_lead = max(self.max_lead, lead)
        self.staleness = delay / max(present, 1)
        self._sum += self.staleness
        self._histogram[int(self.staleness)] += 1

    def statistics(self, bytes_moved: int) -> ServerStatistics:
        return ServerStatistics(
            pushes=self.pushes,
            dropped=self.dropped,
            staleness=dict(sorted(self._histogram.items())),
            mean_staleness=self._sum / max(self.pushes, 1),
            max_lead=self.max_lead,
            blocked=self.blocked,
            bytes=bytes_moved,
        )


class ParameterServer:
    """Trains a model whose weights live on servers, with workers that need not wait for each other.

        server = unisono.torch.ParameterServer(model, "momentum:lr=0.1", "ssp:3")
        for batch, target in loader:
            loss_of(model(batch), target).backward()
            server.step()
        server.leave()

    It takes the place of the optimizer, which the servers have.  The run begins with the weights of
    rank 0.  Parameters that need no gradient, and buffers, stay as every worker has them.  Servers
    keep 32-bit floats: weights in 16 bits are rounded from those, and float64 is refused.  Those of a
    CUDA device go by way of this machine's memory.

    `optimizer` is a text, ``NAME[:KEY=VALUE,…]``, or one of `torch.optim` that was not used yet:

    ============  ====================================  =============================
    name          keys                                  of `torch.optim`
    ============  ====================================  =============================
    ``sgd``       ``lr weight_decay``                   `SGD`
    ``momentum``  and ``momentum nesterov``             `SGD` with momentum
    ``adagrad``   ``lr weight_decay eps``               `Adagrad`
    ``adam``      ``lr beta1 beta2 eps``                `Adam` without weight decay
    ``adamw``     and ``weight_decay``                  `AdamW`
    ============  ====================================  =============================

    All take ``cosine=STEPS``, with ``floor`` and ``warmup``, for a learning rate that rises during
    the warm-up and then falls to the floor, in steps of a worker.  A learning rate means the same
    at every level: where every worker's gradient is an update by itself, at `ssp` and `async`, each
    gets its share of it.  Servers do not see schedulers of `torch.optim`: a step after one has
    changed the rate is refused.

    `level` says how far workers may drift apart: ``bsp`` (lock-step), ``ssp:S`` (no worker is more
    than S clocks ahead of the slowest), ``ssp:auto``, ``async``, or ``downpour:PUSH,FETCH``
    (``downpour`` alone: every 5 steps).
    `stale` is what becomes of gradients of old weights: ``keep``, ``scale``, ``drop:T`` or
    ``compensate``.

    `codec` encodes gradients on their way to the servers, such as ``int8``; `codec_rules` are
    exceptions for parameters by name, such as ``"embed*=none"``.  It begins at clock `warm_up`.
    What encodings leave out is sent later, unless `error_feedback` is false.

    `servers` are addresses, ``["host:port", …]``, of `unisono serve`, or the number of workers,
    from rank 0 on, in whose processes the servers are.  By default they are those that
    `unisono run --servers S` has started, and else one, in the process of rank 0.  `token` is what
    servers and workers of a job have in common, 64 hexadecimal digits; by default
    ``UNISONO_TOKEN``.

    With `steps` the servers end the run, see `finished`, after so many steps times the number of
    workers, whichever worker makes them.  `patience` is for how many seconds a server that is gone is
    looked for: 60 by default, and 5 if it is inside a worker.  All settings but that must be equal for all
    workers.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: str | torch.optim.Optimizer,
        level: str,
        *,
        stale: str = "keep",
        codec: str | None = None,
        codec_rules: Sequence[str] = (),
        warm_up: int = 0,
        error_feedback: bool = True,
        servers: Sequence[str] | int | None = None,
        token: str | None = None,
        steps: int | None = None,
        seed: int = 0,
        patience: float | None = None,
    ) -> None:
        named = _trainable(model)
        self._parameters = list(named.values())
        self._places = places_of(self._parameters)
        self._needs_loss = level == "ssp:auto"
        counts = [("steps", steps, 1), ("warm_up", warm_up, 0), ("seed", seed, 0)]
        for name, number, least in counts:
            if number is not None and number < least:
                raise InvalidCall(f"{name} is {number}: give a number from {least} on")
        text = text_of(optimizer, self._parameters)
        self._optimizer = None if isinstance(optimizer, str) else optimizer
        self._rates = rates_of(self._optimizer)
        # A child of fork has the connections of its parent, and must not leave in its place.
        self._process = os.getpid()
        self._has_stepped = False
        self._left = False
        self._finished = False
        self._tally = _Tally()
        # The clock, and bytes moved, when they were last looked at.
        self._last = (0, 0)

        self._servers = found = locate.find(servers, token)
        if patience is None:
            patience = _FOR_GOOD if found.is_inside else _RESTART
        settings: _native.ServerSettings = {
            "names": list(named),
            "shapes": [list(parameter.shape) for parameter in self._parameters],
            "optimizer": text,
            "level": level,
            "stale": stale,
            "codec": codec,
            "codec_rules": list(codec_rules),
            "warm_up": warm_up,
            "error_feedback": error_feedback,
            "steps": steps,
            "seed": seed,
            "workers": found.world,
            "worker": found.rank,
            "servers": found.addresses,
            "token": found.token,
            "patience": patience,
        }
        try:
            self._native = _native.ServerClient(settings, self._places.weights())
        except BaseException:
            found.close()
            raise
        _present.add(self)
        _exit.watch(self)
        try:
            self.pull()
            found.meet()
        except BaseException:
            self._leave(0.0)
            raise

    def step(self, loss: float | torch.Tensor | None = None, samples: int = 0) -> None:
        """Pushes the gradients, and pulls the weights for the next step into the parameters.

        Waits as the level says.  The gradients are taken: `.grad` is None after it.  A parameter
        without a gradient is left out of the push; if no worker has one for it, it stays as it is, and
        at `bsp`, where another worker has one, it counts as zero.

        The loss is needed at `ssp:auto`, which goes by it.  Elsewhere loss and samples are for the
        records of the servers.
        """
        gradients = [parameter.grad for parameter in self._parameters]
        if all(gradient is None for gradient in gradients):
            raise InvalidCall("no parameter has a gradient: call backward() before each step()")
        if loss is None and self._needs_loss:
            raise InvalidCall("ssp:auto goes by the loss: call step(loss)")
        expect_rates(self._optimizer, self._rates)
        if not self._has_stepped:
            refuse_ddp(self._parameters, "workers would wait for each other at every level")
            self._has_stepped = True
        loss = 0.0 if loss is None else float(torch.as_tensor(loss).detach())
        if not math.isfinite(loss):
            raise InvalidCall(f"the loss is {loss}; nothing was pushed: lower the learning rate")
        push, self._finished, blocked = self._wait(
            self._native.step,
            self._places.weights(),
            self._places.gradients(gradients),
            loss,
            max(samples, 0),
        )
        self._tally.blocked += blocked
        if push is not None:
            self._tally.count(*push)
        self._places.take_over()
        for parameter in self._parameters:
            parameter.grad = None

    def pull(self) -> None:
        """Pulls the weights of the servers into the parameters, as they are now.

        Waits until this worker may read, as in `step`.  At `downpour` the replica's own steps since
        the last fetch are gone then.
        """
        self._tally.blocked += self._wait(self._native.pull, self._places.weights())
        self._places.take_over()

    def leave(self) -> None:
        """Leaves the run, so that the other workers do not wait for this one.

        If there is a server in this process, waits until the others have left as well, since they
        need it.
        """
        self._leave(float("inf"))

    @property
    def clock(self) -> int:
        """Steps that this worker has finished, as the servers count: at `downpour`, pushes."""
        return self._state()[0]

    @property
    def finished(self) -> bool:
        """Whether the run is over: all the `steps` are made."""
        return self._finished

    @property
    def lead(self) -> int:
        """By how many clocks this worker was ahead of the slowest when it read the weights of its
        last push."""
        return self._tally.lead

    @property
    def staleness(self) -> float:
        """How many clocks old the weights of the last push were: how often every worker has updated
        them since they were read."""
        return self._tally.staleness

    @property
    def optimizer(self) -> str:
        """The optimizer as the servers apply it, in words."""
        return self._native.optimizer()

    def statistics(self) -> ServerStatistics:
        """What this worker has seen so far."""
        return self._tally.statistics(self._state()[1])

    def __enter__(self) -> "ParameterServer":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_) -> None:
        # The others may be waiting for a worker that has failed, for longer than a user would.
        self._leave(float("inf") if kind is None else 0.0)

    def _leave(self, patience: float) -> None:
        if self._left or os.getpid() != self._process:
            return
        self._left = True
        _present.discard(self)
        self._state()
        self._native.leave()
        try:
            if self._servers.own is not None and not self._native.wait_for_others(patience):
                locate.warn_of_end(self._servers.rank)
        finally:
            self._servers.close()

    def _close(self, seconds: float) -> None:
        """At the end of a program that did not leave."""
        self._leave(seconds)

    def _wait(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Makes a call that waits for servers. A profile looks at it."""
        return call(*arguments)

    def _sent(self) -> int:
        """What servers sent counts here too: no other rank counts it."""
        return self._state()[1]

    def _state(self) -> tuple[int, int]:
        self._last = self._native.state() or self._last
        return self._last


def _trainable(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters that need gradients, by name, if servers can keep all of them."""
    if isinstance(model, DistributedDataParallel):
        text = "give the model itself, not wrapped in DDP: it is the servers that average gradients"
        raise InvalidCall(text)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not named:
        raise InvalidCall("the model has no parameter that needs a gradient")
    names: dict[int, str] = {}
    for name, parameter in named.items():
        if not parameter.is_floating_point():
            kind = str(parameter.dtype).removeprefix("torch.")
            text = f"parameter {name!r} is {kind}: servers keep real numbers, as 32-bit floats"
            raise InvalidCall(text)
        if is_traceable_wrapper_subclass(parameter):
            kind = type(parameter).__name__
            text = f"parameter {name!r} is a {kind}, and servers want whole tensors"
            raise InvalidCall(f"{text}: do not shard the model")
        other = names.setdefault(parameter.data_ptr(), name)
        if other != name and parameter.numel():
            text = f"parameters {other!r} and {name!r} share memory: make them one Parameter"
            raise InvalidCall(text)
    refuse_doubles(named)
    return named
