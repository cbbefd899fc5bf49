"""Leaves the groups that a program did not destroy before the interpreter ends.

Their threads call back into Python, which gives no thread its lock once it is ending.
"""

import atexit
import logging
import os
import sys
import weakref
from typing import Protocol

from unisono.errors import CheckpointError, InvalidCall, Unsupported

# What another life of a worker, or another group, would meet again.
REPEATED = (InvalidCall, Unsupported, CheckpointError)

# How long a program that ends waits for its calls that were started and not waited for.  Longer:
# one that the other ranks never make keeps it for longer.  Shorter: it fails if they are late.
PATIENCE = 10.0


class Closes(Protocol):
    """A group, or something else with connections of its own."""

    def _close(self, seconds: float) -> None:
        """Leaves the others, after waiting so long at most for what is under way."""

    def _sent(self) -> int:
        """Bytes that it has moved so far."""


_open: "weakref.WeakSet[Closes]" = weakref.WeakSet()


def watch(group: Closes) -> None:
    """Closes the group at the end of the program, if it is still there."""
    _open.add(group)


def watched() -> list[Closes]:
    """All that is still there."""
    return list(_open)


def reason() -> str | None:
    """Why this rank leaves, if not because it is done: the exception that ends it."""
    error = sys.exc_info()[1]
    # The one that the program did not catch.  At a prompt, the session goes on after it.
    if error is None and _ending and not hasattr(sys, "ps1"):
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if error is None:
        return None
    text = str(error).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


# Whether the interpreter is about to end.
_ending = False

# By which a program says that another attempt would end like this one.
_WRONG_CALL = 64
_tells_mistakes = False


def tell_mistakes() -> None:
    """Ends a program with an exit code that says so, if what ends it would be repeated."""
    global _tells_mistakes
    _tells_mistakes = True


def _end_as_mistake() -> None:
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if _tells_mistakes and isinstance(error, REPEATED):
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_WRONG_CALL)


@atexit.register
def _close_all() -> None:
    global _ending
    _ending = True
    for group in watched():
        try:
            group._close(PATIENCE)
        except BaseException as error:  # Ctrl-C too: it ends this wait, and others follow.
            kind = type(group).__name__
            text = "%s was not left as it should be at the end of the program: %r"
            logging.getLogger("unisono").warning(text, kind, error)
    _end_as_mistake()
