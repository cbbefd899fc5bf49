"""How gradients travel in fewer bytes, as the engine reads it."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Codec:
    """A codec and its settings. The engine reads the fields by their names."""

    codec: str
    rules: list[str]
    warm_up: int
    error_feedback: bool
    seed: int


def codec_of(
    codec: str | None,
    rules: Mapping[str, str | None] | None = None,
    *,
    warm_up: int = 0,
    error_feedback: bool = True,
    seed: int = 0,
) -> Codec:
    """The codec of parameters that are worth it, and exceptions by the pattern of their names."""
    exceptions = [f"{pattern}={_text(exception)}" for pattern, exception in (rules or {}).items()]
    return Codec(_text(codec), exceptions, warm_up, error_feedback, seed)


def _text(codec: str | None) -> str:
    return "none" if codec is None else codec
