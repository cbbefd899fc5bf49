"""Optimizers of torch as those of the servers, where the two compute the same."""

import torch
from torch.optim import SGD, Adagrad, Adam, AdamW

from unisono.errors import InvalidCall

_SUPPORTED = (
    "servers have SGD (also with momentum, without dampening), Adagrad (without lr_decay and from "
    "a sum of 0), Adam (without weight decay) and AdamW (without amsgrad)"
)


def text_of(optimizer: str | torch.optim.Optimizer, parameters: list[torch.Tensor]) -> str:
    """The optimizer as the text that servers parse; a text is returned as it is."""
    if isinstance(optimizer, str):
        return optimizer
    groups = optimizer.param_groups
    own = ("params", "param_names")
    settings = {key: value for key, value in groups[0].items() if key not in own}
    for group in groups[1:]:
        if any(group[key] != value for key, value in settings.items()):
            raise InvalidCall("servers treat all parameters alike: give all groups equal settings")
    known = {id(parameter) for group in groups for parameter in group["params"]}
    if not all(id(parameter) in known for parameter in parameters):
        raise InvalidCall("the optimizer must have all parameters of the model that need gradients")
    if any(_was_used(state) for state in optimizer.state.values()):
        raise InvalidCall("the optimizer was used before, and servers begin without its state")
    if settings.get("maximize"):
        raise InvalidCall("servers minimize: negate the loss instead of maximize=True")
    spec = _spec(optimizer, settings)
    if spec is None:
        kind = type(optimizer).__name__
        raise InvalidCall(f"servers do not compute what this {kind} does; {_SUPPORTED}")
    return spec


def rates_of(optimizer: torch.optim.Optimizer | None) -> list[float]:
    """The learning rates of its groups."""
    return [] if optimizer is None else [float(group["lr"]) for group in optimizer.param_groups]


def expect_rates(optimizer: torch.optim.Optimizer | None, rates: list[float]) -> None:
    """Fails if the learning rates are not these any more: the servers would not learn of it."""
    if rates_of(optimizer) != rates:
        raise InvalidCall(
            "the learning rate of the optimizer has changed, and servers do not see schedulers; "
            'write it down from the beginning: "sgd:lr=0.1,cosine=1000,warmup=50,floor=0.001"'
        )


def _spec(optimizer: torch.optim.Optimizer, settings: dict) -> str | None:
    def text(name: str, **keys: float) -> str:
        # The shortest text that stands for exactly this number.
        return f"{name}:" + ",".join(f"{key}={float(value)!r}" for key, value in keys.items())

    # Not their subclasses, which may compute anything.
    kind = type(optimizer)
    lr, decay = settings["lr"], settings["weight_decay"]
    if kind is SGD:
        momentum = settings["momentum"]
        if momentum == 0:
            return text("sgd", lr=lr, weight_decay=decay)
        if settings["dampening"] == 0:
            nesterov = ",nesterov" if settings["nesterov"] else ""
            return text("momentum", lr=lr, momentum=momentum, weight_decay=decay) + nesterov
    elif kind is Adagrad:
        if settings["lr_decay"] == 0 and settings["initial_accumulator_value"] == 0:
            return text("adagrad", lr=lr, eps=settings["eps"], weight_decay=decay)
    elif kind in (Adam, AdamW) and not settings["amsgrad"]:
        decoupled = settings.get("decoupled_weight_decay", kind is AdamW)
        if decoupled or decay == 0:
            beta1, beta2 = settings["betas"]
            eps = settings["eps"]
            return text("adamw", lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=decay)
    return None


def _was_used(state: dict) -> bool:
    return float(state.get("step", 0)) > 0 or state.get("momentum_buffer") is not None
