"""Local steps: workers that train by themselves and agree now and then.

The wrappers are optimizers.  A step of one is a step of the optimizer that it wraps, on this
worker's own gradients; after some steps the workers synchronize what they have come to.  No DDP is
around the model.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from unisono import _native
from unisono.errors import InvalidCall
from unisono.torch._gradients.codec import codec_of
from unisono.torch._gradients.ddp import refuse_ddp
from unisono.torch._gradients.engine import engine_of
from unisono.torch._gradients.floats import Floats, Mirrored, refuse_doubles
from unisono.torch._gradients.member import Member


class _LocalSteps(Member, torch.optim.Optimizer):
    """An optimizer whose steps are local, and now and then agreed on.

    The agreed weights have the same bits on all ranks.  Buffers, such as the statistics of batch
    norms, stay each worker's own.  Workers agree on 32-bit floats: weights in 16 bits are rounded
    once, after the mean, and those in float64 are refused.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        strategy: str,
        codec: str | None,
        rules: Mapping[str, str | None] | None,
        group: dist.ProcessGroup | None,
    ):
        # The base class is not initialized: groups and state are those of the inner optimizer.
        self._inner = inner
        named = _named_parameters(inner)
        refuse_doubles(named)
        self._parameters = list(named.values())
        self._has_stepped = False
        self._refuse_ddp()
        settings = codec_of(codec, rules, named)
        engine = engine_of(group)
        shapes = [(name, list(parameter.shape)) for name, parameter in named.items()]
        # Of a model on a device; the memory is used again and again.
        self._mirror = Mirrored.of(self._parameters)
        weights = self._weights()
        native = _native.LocalSteps(
            engine.group, shapes, strategy, settings, weights.buffers, engine.seconds
        )
        weights.write_back()
        self._join(native, engine.seconds)

    def __getattr__(self, name: str) -> Any:
        # What the base class would have set, such as `param_groups` and the hooks of steps.
        if name == "_inner":
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._inner!r})"

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Makes a step of the inner optimizer, and synchronizes if that is due after it.

        All ranks make the same number of steps.
        """
        if not self._has_stepped:
            self._refuse_ddp()  # The program may have wrapped the model since.
            self._has_stepped = True
        loss = self._inner.step(closure)
        if self._native.is_due():
            self._agree(self._native.step)
        else:
            self._native.skip()
        return loss

    def settle(self) -> None:
        """Makes the weights of all ranks equal: their mean. All ranks call it, after training."""
        self._agree(self._native.settle)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of the inner optimizer."""
        self._inner.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: the workers have agreed on the parameters."""
        raise InvalidCall(
            "parameters cannot be added to local steps; add them to the inner optimizer before"
        )

    def state_dict(self) -> dict[str, Any]:
        """The state of the inner optimizer and of the agreement, and this rank's weights.

        All ranks call it after the same step, and each keeps its own.  The weights are those of the
        model, not copies: saved together with it, they take no more room.
        """
        agreement = super().state_dict()
        weights = [parameter.detach() for parameter in self._parameters]
        return {"inner": self._inner.state_dict(), "agreement": agreement, "weights": weights}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from a `state_dict`, with the weights that this rank had then. All ranks call it.

        Between two agreements every rank has weights of its own, which the beginning has replaced
        by rank 0's: so they are restored here, whether the model is loaded before or after.  The
        agreement is rank 0's.  All give a state of the same step.
        """
        missing = {"inner", "agreement", "weights"} - state_dict.keys()
        if missing:
            text = f"this is no state_dict of local steps: it has no {', '.join(sorted(missing))}"
            raise InvalidCall(text)
        weights = state_dict["weights"]
        if [w.shape for w in weights] != [p.shape for p in self._parameters]:
            raise InvalidCall("the state_dict has the weights of another model; load the right one")
        self._inner.load_state_dict(state_dict["inner"])
        super().load_state_dict(state_dict["agreement"])
        with torch.no_grad():
            for parameter, saved in zip(self._parameters, weights, strict=True):
                parameter.copy_(saved)

    def _refuse_ddp(self) -> None:
        refuse_ddp(self._parameters, f"{type(self).__name__} would save nothing")

    def _agree(self, call: Callable[..., Any]) -> None:
        weights = self._weights()
        self._wait(call, weights.buffers)
        weights.write_back()

    def _weights(self) -> Floats | Mirrored:
        """The weights, where the engine reads and writes them."""
        return Floats(self._parameters) if self._mirror is None else self._mirror.read()


class LocalSGD(_LocalSteps):
    """Workers make `every` steps by themselves; then the weights become the mean of all workers'.

        optimizer = unisono.torch.LocalSGD(torch.optim.SGD(model.parameters(), lr=0.1), every=8)
        ...
        optimizer.settle()

    With `longest`, every period is one step longer than the one before it, from `every` up to that
    many: early in training weights move fast, and later workers can be left to themselves.

    The weights become rank 0's at the beginning.  The state of the inner optimizer stays each
    worker's own.  `codec` and `rules` are those of `unisono.torch.compress`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        every: int,
        *,
        longest: int | None = None,
        codec: str | None = None,
        rules: Mapping[str, str | None] | None = None,
        group: dist.ProcessGroup | None = None,
    ):
        longest = every if longest is None else longest
        _expect(every >= 1, f"every={every}: give a number of steps, from 1")
        _expect(longest >= every, f"longest={longest} is less than every={every}")
        strategy = f"local:{every}..{longest}"
        super().__init__(optimizer, strategy, codec, rules, group)


class DiLoCo(_LocalSteps):
    """As `LocalSGD`, with an outer optimizer that takes the workers' mean progress for a gradient.

        inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
        optimizer = unisono.torch.DiLoCo(inner, every=20, codec="int8")
        ...
        optimizer.settle()

    The outer optimizer is gradient descent with Nesterov momentum: where successive rounds agree,
    its steps gain speed.

    With several `fragments`, parts of the model synchronize at different steps of a period: as many
    bytes, but never all at once.  With a `delay` the workers go on for so many steps while a
    fragment travels, and keep the progress of that time; it is one step by default if there are
    several fragments, and none otherwise.

    The weights become rank 0's at the beginning.  The state of the inner optimizer stays each
    worker's own.  `codec` and `rules` are those of `unisono.torch.compress`.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        every: int,
        *,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        fragments: int = 1,
        delay: int | None = None,
        codec: str | None = None,
        rules: Mapping[str, str | None] | None = None,
        group: dist.ProcessGroup | None = None,
    ):
        if delay is None:
            delay = 1 if fragments > 1 else 0
        _expect(every >= 1, f"every={every}: give a number of steps, from 1")
        text = f"fragments={fragments}: give 1 to every={every}, for each has a step of its own"
        _expect(1 <= fragments <= every, text)
        text = f"delay={delay}: give less than every={every}, or it is not over by the next time"
        _expect(0 <= delay < every, text)
        _expect(outer_lr > 0, f"outer_lr={outer_lr}: give a number above 0")
        text = f"outer_momentum={outer_momentum}: give a number from 0, below 1"
        _expect(0 <= outer_momentum < 1, text)
        strategy = (
            f"diloco:{every},streams={fragments},delay={delay}"
            f",rate={outer_lr!r},momentum={outer_momentum!r}"
        )
        super().__init__(inner, strategy, codec, rules, group)


def _expect(condition: bool, text: str) -> None:
    if not condition:
        raise InvalidCall(text)


def _named_parameters(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The parameters, by the names that the optimizer was given, or else by their places."""
    named = {}
    for number, group in enumerate(optimizer.param_groups):
        names = group.get("param_names") or [f"{number}.{i}" for i in range(len(group["params"]))]
        named.update(zip(names, group["params"], strict=True))
    return named
