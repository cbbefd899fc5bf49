"""From which line of the program a call came.

Ranks that call different operations are told which line of which rank made which call.  Every
call carries its line, and the type of its tensors, into the engine, which tells the other ranks if
it comes to that.
"""

import os
import sys

import torch

import unisono
from unisono._native import Origin

# Origins kept: lines that make calls, times the types of their tensors, times buckets.  More: more
# memory where lines are made up without end.  Fewer: they are made anew.
_KEPT = 4096

# The code between a program and its call.
_BETWEEN = tuple(
    os.path.dirname(os.path.abspath(package.__file__)) + os.sep for package in (torch, unisono)
)

# By code, line, type and bucket.  The code is kept with its origin, so that no other gets its address.
_origins: dict[tuple, tuple[object, Origin]] = {}


def here(dtype: torch.dtype | None, bucket: int | None) -> Origin:
    """The innermost frame that is neither torch's nor ours.

    There is none where torch makes the call on a thread of its own.
    """
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        frame = frame.f_back
    code, line = (frame.f_code, frame.f_lineno) if frame is not None else (None, 0)
    key = (id(code), line, dtype, bucket)
    known = _origins.get(key)
    if known is None:
        if len(_origins) >= _KEPT:
            _origins.clear()
        name = None if dtype is None else str(dtype).removeprefix("torch.")
        known = _origins[key] = (code, Origin(_location(code, line, bucket), name))
    return known[1]


def _location(code, line: int, bucket: int | None) -> str | None:
    location = None if code is None else f"{_shortened(code.co_filename)}:{line}"
    if bucket is None:
        return location
    backward = f"backward, bucket {bucket}"
    return backward if location is None else f"{location} in {backward}"


def _shortened(path: str) -> str:
    here = os.getcwd() + os.sep
    return path.removeprefix(here)
