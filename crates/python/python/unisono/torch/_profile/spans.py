"""What was seen of a rank: spans of time, by what they are, and arithmetic on them.

Instants are whole nanoseconds of the Unix clock, which torch's profiler uses for the host and for
its devices.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

#: A stretch of time, from and until.
Interval = tuple[int, int]


class Kind(Enum):
    """What a span is."""

    #: A call of `torch.distributed`, or its kernel on a device.
    COMMUNICATION = auto()
    #: Any other work of a device.
    KERNEL = auto()
    #: A copy between a device and this machine's memory.
    COPY = auto()
    #: On the host: copies are asked for that carry gradients, means or weights. They are communication.
    STAGING = auto()
    #: The first forward pass after a backward pass began. Has no length.
    FORWARD = auto()
    #: A call of `backward`, waiting for communication included.
    BACKWARD = auto()
    #: Inside a backward pass: the last gradient was computed. Has no length.
    COMPUTED = auto()
    #: The program waited for a call of `torch.distributed`.
    WAIT = auto()
    #: The step of an optimizer; `what` numbers optimizers by when they were first seen.
    OPTIMIZER = auto()
    #: The program waited for a `DataLoader`.
    DATA = auto()
    #: The program said that a step has ended. Has no length.
    STEP = auto()


@dataclass(frozen=True, slots=True)
class Span:
    """One thing that was seen."""

    kind: Kind
    begin: int
    end: int
    what: str = ""
    #: Of the tensors that a call was given.
    bytes: int = 0
    #: For the work of a device: when the host asked for it.
    launched: int | None = None

    @property
    def on_device(self) -> bool:
        """Whether this is the work of a device."""
        return self.launched is not None

    @property
    def asked(self) -> int:
        """When the host was at it."""
        return self.begin if self.launched is None else self.launched


# "gloo:all_reduce", "nccl:_all_gather_base", "nccl:send 0->1".
_CALL = re.compile(
    r"[a-z]\w*:(_?(?:sparse_)?(?:all_?reduce|all_?gather|all_?to_?all|broadcast|reduce|gather"
    r"|scatter|barrier|send|recv|coalesced).*)",
    re.IGNORECASE,
)
_DATA = "enumerate(DataLoader)"
# Kernels of libraries, our own reductions and our codecs: "fold_f32_sum_2", "quantize_encode_int8".  Those of PyTorch
# have names of C++, or of its compiler.
_FOLDS = r"fold_[a-z]*\d+_[a-z]+_(?:\d+|any)|list_inputs"
_CODECS = r"(?:cast|quantize|sign|topk|randk|powersgd|scale)_[a-z0-9_]+"
_DEVICE_CALLS = re.compile(rf"nccl|rccl|oneccl|(?:{_FOLDS}|{_CODECS})\b", re.IGNORECASE)
# "Memcpy DtoH (Device -> Pinned)".  A copy within a device is work as any other.
_COPIES = re.compile(r"memcpy (dtoh|htod)", re.IGNORECASE)


def on_host(name: str) -> tuple[Kind, str] | None:
    """What an event of the host is, by its name; None if it does not matter here."""
    if call := _CALL.fullmatch(name):
        return Kind.COMMUNICATION, call[1]
    return (Kind.DATA, "") if name.startswith(_DATA) else None


def on_device(name: str) -> Kind:
    """What a device did, by its name."""
    if _DEVICE_CALLS.match(name):
        return Kind.COMMUNICATION
    return Kind.COPY if _COPIES.match(name) else Kind.KERNEL


_SIZES = {
    "bool": 1, "unsigned char": 1, "signed char": 1, "short int": 2, "int": 4, "long int": 8,
    "c10::Half": 2, "c10::BFloat16": 2, "float": 4, "double": 8,
    "c10::complex<c10::Half>": 4, "c10::complex<float>": 8, "c10::complex<double>": 16,
}  # fmt: skip


def byte_count(shapes: Sequence, types: Sequence[str]) -> int:
    """Bytes of tensors, from their shapes and their types as torch's profiler spells them.

    A list of tensors has a list of shapes, and no type: its elements count as four bytes.
    """
    total = 0
    for position, shape in enumerate(shapes):
        name = types[position] if position < len(types) else ""
        if shape and isinstance(shape[0], (list, tuple)):
            total += byte_count(shape, [name] * len(shape))
        elif name or shape:  # Neither: an argument that is no tensor.
            total += math.prod(shape) * _SIZES.get(name, 1 if "8" in name else 4)
    return total


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time in intervals that neither touch nor overlap, in order."""
    joined: list[Interval] = []
    for begin, end in sorted(interval for interval in intervals if interval[0] < interval[1]):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return joined


def within(intervals: Iterable[Interval], begin: int, end: int) -> list[Interval]:
    """What of the intervals lies between two instants."""
    return [(max(a, begin), min(b, end)) for a, b in intervals if max(a, begin) < min(b, end)]


def without(intervals: Iterable[Interval], others: Iterable[Interval]) -> list[Interval]:
    """What of the intervals is in none of the others."""
    left: list[Interval] = []
    holes = union(others)
    for begin, end in union(intervals):
        for a, b in within(holes, begin, end):
            if begin < a:
                left.append((begin, a))
            begin = b
        if begin < end:
            left.append((begin, end))
    return left


def length(intervals: Iterable[Interval]) -> int:
    """How long intervals are that do not overlap."""
    return sum(end - begin for begin, end in intervals)
