"""From which line of the program a call came.

Ranks that call different operations are told which line of whose program made which call.  Every
call is noted with its number, as the engine counts them; when two ranks disagree about a number,
each puts its line into torch's store and reads the other's.
"""

import os
import sys
from datetime import timedelta

import torch

import unisono
from unisono.errors import Mismatch

# Calls remembered, as many as the engine remembers to compare.
_REMEMBERED = 64

# The engine's numbers of calls have 32 bits.
_WRAP = 1 << 32

# How long a rank waits for the line of another.  Longer: an error arrives later where the other
# never asks what became of its call.  Shorter: a busy machine leaves out a line.
_PATIENCE = timedelta(seconds=2)

# The code between a program and its call.
_BETWEEN = tuple(
    os.path.dirname(os.path.abspath(package.__file__)) + os.sep for package in (torch, unisono)
)


class Lines:
    """The lines of a group's last calls on this rank."""

    def __init__(self, store, rank: int):
        self._store = store
        self._rank = rank
        # Number of the call, code, line, and bucket in a backward pass.
        self._calls: list = [None] * _REMEMBERED
        self._told: dict[int, str] = {}

    def note(self, number: int, bucket: int | None) -> None:
        """Remembers who makes a call: the innermost frame that is neither torch's nor ours.

        There is none where torch makes the call on a thread of its own.
        """
        frame = sys._getframe(2)
        while frame is not None and frame.f_code.co_filename.startswith(_BETWEEN):
            frame = frame.f_back
        code, line = (frame.f_code, frame.f_lineno) if frame is not None else (None, 0)
        self._calls[number % _REMEMBERED] = (number % _WRAP, code, line, bucket)

    def explain(self, error: Mismatch) -> None:
        """Adds the lines to an error, if it is about two calls."""
        if not error.calls:
            return
        told = "; ".join(
            f"rank {rank} called {call}{self._place_on(rank, number)}"
            for rank, (number, call) in sorted(error.calls.items())
        )
        error.args = (
            f"rank {error.rank} in {error.operation}: {told};"
            " make both ranks issue the same call in the same order",
        )

    def _place_on(self, rank: int, number: int) -> str:
        """Where a rank made a call; empty if it does not say."""
        if rank not in self._told:
            key = f"line/{number}/"
            try:
                if rank == self._rank:
                    self._told[rank] = self._place(number)
                    self._store.set(f"{key}{rank}", self._told[rank].encode())
                else:
                    self._store.wait([f"{key}{rank}"], _PATIENCE)
                    self._told[rank] = bytes(self._store.get(f"{key}{rank}")).decode()
            except RuntimeError:  # The other rank, or the store, does not answer.
                self._told[rank] = self._told.get(rank, "")
        return self._told[rank]

    def _place(self, number: int) -> str:
        noted = self._calls[number % _REMEMBERED]
        if noted is None or noted[0] != number:
            return ""
        _, code, line, bucket = noted
        place = "" if code is None else f" at {_shortened(code.co_filename)}:{line}"
        return place if bucket is None else f"{place} in backward, bucket {bucket}"


def _shortened(path: str) -> str:
    here = os.getcwd() + os.sep
    return path.removeprefix(here)
