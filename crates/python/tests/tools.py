"""What checks and jobs have in common."""

import importlib
import pkgutil
from collections.abc import Callable
from functools import partial
from types import ModuleType

import torch
import torch.distributed as dist

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10 has none of its own, and pip has brought one.
    from pip._vendor import tomli as tomllib

__all__ = [
    "assert_replicas_equal",
    "equal",
    "functions_of",
    "is_old_torch",
    "on_gloo",
    "raises",
    "tomllib",
]

equal = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)


def is_old_torch() -> bool:
    """Whether this torch neither looks for backends among packages nor holds one of Python's."""
    return not hasattr(dist.Backend, "_ensure_backend_registered")


def on_gloo() -> bool:
    return dist.get_backend() == "gloo"


def raises(kind, call, *arguments, **options):
    """The exception of this kind that the call raises."""
    try:
        call(*arguments, **options)
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__} was raised")


def assert_replicas_equal(model) -> None:
    """Fails if the weights of a rank differ from those of rank 0 by a bit."""
    weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    first = weights.clone()
    dist.broadcast(first, 0)
    assert torch.equal(weights, first), (weights - first).abs().max()


def functions_of(package: ModuleType, prefix: str) -> dict[str, Callable]:
    """The functions of a package whose names begin like this, by the rest of their names."""
    return {
        name.removeprefix(prefix): value
        for module in sorted(found.name for found in pkgutil.iter_modules(package.__path__))
        for name, value in vars(importlib.import_module(f"{package.__name__}.{module}")).items()
        if name.startswith(prefix)
    }
