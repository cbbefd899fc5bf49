"""How gradients travel in fewer bytes, as the engine reads it."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from unisono.errors import InvalidCall

# Names of parameters in an error.  More: too long to read.  Fewer: the right one is missing.
_LISTED = 12


@dataclass(frozen=True)
class CodecSettings:
    """A codec and its settings. The engine reads the fields by their names."""

    codec: str
    rules: list[str]
    warm_up: int
    error_feedback: bool
    seed: int

    @property
    def is_none(self) -> bool:
        """Whether all travels as it is."""
        return self.codec == "none" and not self.rules


def codec_of(
    codec: str | None,
    rules: Mapping[str, str | None] | None,
    names: Iterable[str],
    *,
    warm_up: int = 0,
    error_feedback: bool = True,
    seed: int = 0,
) -> CodecSettings:
    """The codec of parameters that are worth it, and exceptions by the pattern of their names.

    Refuses an exception for none of the parameters: it would be no exception at all.
    """
    _refuse_useless(rules or {}, list(names))
    exceptions = [f"{pattern}={_text(exception)}" for pattern, exception in (rules or {}).items()]
    return CodecSettings(_text(codec), exceptions, warm_up, error_feedback, seed)


def _refuse_useless(rules: Mapping[str, str | None], names: list[str]) -> None:
    for pattern in rules:
        # As the engine reads it: `*` stands for any text.
        text = re.compile(".*".join(map(re.escape, pattern.split("*"))), re.DOTALL)
        if not any(map(text.fullmatch, names)):
            others = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
            raise InvalidCall(
                f"no parameter fits the rule {pattern!r}; they are called"
                f" {', '.join(map(repr, names[:_LISTED]))}{others}"
            )


def _text(codec: str | None) -> str:
    return "none" if codec is None else codec
