"""Keeps Dynamo out of this package.

`torch.compile` follows a program into what it calls.  Here it would find addresses, threads and
Rust, nothing of which belongs into a graph; and what it may know of a process group is a short list
of names, beyond which it fails.  A function that is marked runs as it is, with everything that it
calls, and what comes before and after it is compiled.

The marks are those of `torch.compiler.disable`, which would import Dynamo to set them: that takes
longer than the rest of this package, also in programs that compile nothing, and its wrappers cost
every call a little.
"""

import inspect
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType

from torch._C._dynamo import eval_frame

# What Dynamo does with a frame, and with those below it.
_LEAVES_ALONE = eval_frame._FrameExecStrategy(
    eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP
)


def mark(package: str) -> None:
    """Marks the functions of all modules of a package that are imported."""
    for name, module in list(sys.modules.items()):
        if name == package or name.startswith(f"{package}."):
            for function in _functions(module):
                # Also of those that torch calls, such as hooks.
                _mark_code(function.__code__)


def _mark_code(code: CodeType) -> None:
    eval_frame.set_code_exec_strategy(code, _LEAVES_ALONE)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):  # A function in a function.
            _mark_code(constant)


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    """The functions that a module defines, in its classes too."""
    for value in vars(module).values():
        members = [value]
        if isinstance(value, type) and value.__module__ == module.__name__:
            members = list(vars(value).values())
        for member in members:
            for part in _parts(member):
                # A decorator's wrapper is not the module's, what it wraps is.
                function = inspect.unwrap(part) if callable(part) else part
                if isinstance(function, FunctionType) and function.__globals__ is vars(module):
                    yield function


def _parts(member: object) -> tuple[object, ...]:
    if isinstance(member, property):
        return member.fget, member.fset, member.fdel
    return (getattr(member, "__func__", member),)  # Of a class method or a static one.
