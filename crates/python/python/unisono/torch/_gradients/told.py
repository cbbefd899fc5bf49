"""Whether this process was told to end.

A launcher that is told to stop passes SIGTERM on.  In the middle of a step that would end a worker at once, and
what the others computed with it would be lost: so a worker makes a note, and ends where the loop asks for the next
step.  Whoever asks twice does not want to wait, and ends it at once.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# As shells write it.
_EXIT_CODE = 128 + signal.SIGTERM


class Told:
    """Whether this process was told to end while it listened."""

    def __init__(self) -> None:
        self.is_told = False
        # Whether there is nothing to finish: then it ends at once.
        self._is_idle = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Makes a note of SIGTERM meanwhile. A program that handles it by itself is left alone, and so is one whose
        loop is not on its main thread, where Python handles no signals."""
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
            yield
            return
        signal.signal(signal.SIGTERM, self._hear)
        try:
            yield
        finally:
            if signal.getsignal(signal.SIGTERM) == self._hear:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Ends this process at once meanwhile, if it is told to."""
        self._is_idle = True
        try:
            if self.is_told:
                self.end()
            yield
        finally:
            self._is_idle = False

    def end(self) -> None:
        """Ends this process as one that was told to: not well, so that a launcher that goes on starts it again."""
        raise SystemExit(_EXIT_CODE)

    def _hear(self, number: int, _frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        self.is_told = True
        if self._is_idle:
            self.end()


# A child of `fork`, such as a worker of a data loader, has nothing to finish, and ends when it is told to.  Python
# forgets signals that a child gets before it runs: so they wait until it has the handler that it should have.

_before_fork = threading.local()


def _hold_signals() -> None:
    _before_fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _release_signals() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _before_fork.mask)


def _begin_child() -> None:
    if isinstance(getattr(signal.getsignal(signal.SIGTERM), "__self__", None), Told):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _release_signals()


os.register_at_fork(
    before=_hold_signals, after_in_parent=_release_signals, after_in_child=_begin_child
)
