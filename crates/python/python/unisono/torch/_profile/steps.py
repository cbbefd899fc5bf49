"""From what was seen of a rank to the record of its steps. Pure: no torch, no clock.

A step ends when an optimizer's step ends, so that the passes of an accumulated gradient are in one
step.  Several optimizers make one cycle, which ends with the one that was seen last for the first
time: after D, D, G, D, D, G there are two steps.  If the program itself says where steps end, that
holds instead.

Insight knows four instants of a step: `begin`, `computed`, `reduced`, `end`.  From `computed` to
`reduced` a rank only waits.  Programs also wait earlier and later, for the parameters of FSDP or in
a sharded optimizer.  Here all waiting is moved to the end of the computation: `computed` is when
the rank would have computed all if it had not waited, and `reduced` is as much later as it waited
in all.  The parts of a step then are what they were, and `computed` compares the ranks' own work,
whose difference is what Insight charges to the last of them.  With DDP nothing has to be moved.

**On a host**, a rank computes from the first forward pass (or the last backward pass, if none was
seen) until the backward pass has computed its last gradient, without the time it waited for data.
It waits for communication in `wait`, and in the backward pass after the last gradient.

**On a device**, what counts is the device's own timeline, for the host only asks for the work and
is elsewhere when it is done.  Work belongs to the step in which the host asked for it; a step ends
with the last of its work.  The device computes while any kernel runs that the host asked for before
the end of backward, and waits while only communication runs.  Communication is a kernel of it; what
the host does for gradients that it was sent; and the copies by which they come and go, which are those
that were asked for while the host was staging.
"""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import pairwise

from unisono.torch._profile.spans import Interval, Kind, Span, length, union, within, without


@dataclass(frozen=True, slots=True)
class DeviceTimes:
    """How a device spent a step. What it computed, what was exposed and what it was idle are all of it."""

    compute: int
    #: With what it was communicating, whether it computed meanwhile or not.
    communication: int
    #: It communicated or copied, and computed nothing.
    exposed: int
    #: Of all copies between it and this machine's memory.
    copies: int
    idle: int

    def record(self) -> dict:
        """As Insight's `DeviceTimes`."""
        return {name: getattr(self, name) / 1e9 for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Step:
    """One step of this rank."""

    begin: int
    computed: int
    reduced: int
    end: int
    compute: int
    backward: int
    #: Its calls: bytes, ready, started, ended.
    buckets: list[tuple[int, int, int, int]]
    #: Operation and bytes of its calls.
    calls: list[tuple[str, int]]
    #: Which ends of an optimizer's step, or which ends that the program declared, it holds, of all
    #: that were counted: from, and up to but without.
    counted: tuple[int, int]
    #: Whether a call began before all was computed.
    overlaps: bool
    device: DeviceTimes | None = None

    def record(self, ahead: float) -> dict:
        """As Insight's `RankStep`, on a clock that this rank's is so many seconds ahead of."""

        def at(instant: int) -> float:
            return instant / 1e9 - ahead

        return {
            "begin": at(self.begin),
            "computed": at(self.computed),
            "reduced": at(self.reduced),
            "end": at(self.end),
            "compute": self.compute / 1e9,
            "backward": self.backward / 1e9,
            "buckets": [
                {"bytes": size, "ready": at(ready), "started": at(started), "ended": at(ended)}
                for size, ready, started, ended in self.buckets
            ],
            **({} if self.device is None else {"device": self.device.record()}),
        }


def steps(spans: list[Span], start: int) -> list[Step]:
    """The complete steps among what was seen since `start`."""
    spans = sorted(spans, key=lambda span: span.asked)
    ends = _ends(spans)
    instants = [start, *(instant for instant, _ in ends)]
    counts = [0, *(count for _, count in ends)]
    asked = [span.asked for span in spans]
    device = any(span.on_device and span.kind is Kind.KERNEL for span in spans)
    measured: list[Step] = []
    for (begin, end), counted in zip(pairwise(instants), pairwise(counts), strict=True):
        own = _Seen(spans[bisect_left(asked, begin) : bisect_left(asked, end)])
        if device:
            since = measured[-1].end if measured else begin
            measured.append(_on_device(since, own, counted))
        else:
            measured.append(_on_host(begin, end, own, counted))
    return measured


def _ends(spans: list[Span]) -> list[tuple[int, int]]:
    """Where steps end, and how many of what ends them were counted until then."""
    said = [span.end for span in spans if span.kind is Kind.STEP]
    if said:
        return [(instant, count) for count, instant in enumerate(said, 1)]
    updates = [span for span in spans if span.kind is Kind.OPTIMIZER]
    times: dict[str, int] = {}
    for update in updates:
        times[update.what] = times.get(update.what, 0) + 1
    # One that was used a single time is no part of a cycle, if there is any.
    cycle = [name for name, count in times.items() if count > 1] or list(times)
    return [(u.end, count) for count, u in enumerate(updates, 1) if u.what == cycle[-1]]


class _Seen:
    """The spans of one step, by kind."""

    def __init__(self, spans: list[Span]):
        self.spans = spans

    def of(self, kind: Kind, on_device: bool = False) -> list[Span]:
        return [span for span in self.spans if span.kind is kind and span.on_device is on_device]

    def intervals(self, kind: Kind, on_device: bool = False) -> list[Interval]:
        return [(span.begin, span.end) for span in self.of(kind, on_device)]

    def computed(self, backward: Span) -> int:
        """When a backward pass had computed its last gradient."""
        marks = [
            mark.begin
            for mark in self.of(Kind.COMPUTED)
            if backward.begin <= mark.begin <= backward.end
        ]
        return max(marks, default=backward.end)


def _on_host(begin: int, end: int, seen: _Seen, counted: tuple[int, int]) -> Step:
    calls = seen.of(Kind.COMMUNICATION)
    forwards = [mark.begin for mark in seen.of(Kind.FORWARD)]
    busy: list[Interval] = []
    waits = seen.intervals(Kind.WAIT)
    since, last = begin, (begin, begin)
    for backward in seen.of(Kind.BACKWARD):
        computed = seen.computed(backward)
        passes = [mark for mark in forwards if since <= mark <= backward.begin]
        busy.append((min(passes, default=since), computed))
        # What comes after the last call has arrived is bookkeeping.
        arrived = max((call.end for call in calls if call.begin < backward.end), default=computed)
        waits.append((computed, min(arrived, backward.end)))
        since, last = backward.end, (backward.begin, computed)
    computed = last[1]
    if not busy:
        # No backward pass: all but data, waiting and the optimizer is computation.
        computed = min((update.begin for update in seen.of(Kind.OPTIMIZER)), default=end)
        busy.append((begin, computed))
    blocked = within(union(waits), begin, end)
    idle = [*blocked, *seen.intervals(Kind.DATA)]
    return _step(
        (begin, computed, end),
        compute=length(without(busy, idle)),
        backward=length(without([last], blocked)),
        blocked=blocked,
        buckets=[_seen_by_host(call, blocked) for call in calls],
        calls=[(call.what, call.bytes) for call in calls],
        counted=counted,
    )


def _on_device(begin: int, seen: _Seen, counted: tuple[int, int]) -> Step:
    asked_for = seen.of(Kind.COMMUNICATION)
    kernels = seen.of(Kind.KERNEL, on_device=True)
    own_calls, copies = seen.of(Kind.COMMUNICATION, on_device=True), seen.of(Kind.COPY, on_device=True)
    staging = union(seen.intervals(Kind.STAGING))
    staged = [copy for copy in copies if _lies_in(copy.asked, staging)]
    # Where no call ran on the device (Gloo takes its tensors, a codec takes copies), the host saw them.
    calls = own_calls or asked_for
    end = max([begin, *(span.end for span in (*kernels, *calls, *copies))])
    backwards = seen.of(Kind.BACKWARD)
    last = backwards[-1] if backwards else None
    optimizers = [update.begin for update in seen.of(Kind.OPTIMIZER)]
    until = seen.computed(last) if last else min(optimizers, default=end)
    passes = [kernel for kernel in kernels if kernel.asked <= until]
    computed = max((kernel.end for kernel in passes), default=begin)
    going_back = [k for k in passes if last is not None and k.asked >= last.begin]
    since = min((kernel.begin for kernel in going_back), default=computed)
    running = [(kernel.begin, kernel.end) for kernel in kernels]
    moving = [(span.begin, span.end) for span in (*calls, *staged)]
    blocked = within(without(moving, running), begin, end)
    return _step(
        (begin, max(computed, begin), end),
        compute=length(union(within([(k.begin, k.end) for k in passes], begin, end))),
        backward=length(without([(since, computed)], blocked)),
        blocked=blocked,
        buckets=[_seen_by_device(call, asked_for) for call in calls],
        calls=[(call.what, call.bytes) for call in asked_for],
        counted=counted,
        device=_device_times(begin, end, kernels, own_calls, copies, staged),
    )


def _device_times(
    begin: int, end: int, kernels: list[Span], calls: list[Span], copies: list[Span], staged: list[Span]
) -> DeviceTimes:
    def time_of(spans: list[Span]) -> list[Interval]:
        return union(within([(span.begin, span.end) for span in spans], begin, end))

    compute = time_of(kernels)
    exposed = without(time_of([*calls, *copies]), compute)
    return DeviceTimes(
        compute=length(compute),
        communication=length(time_of([*calls, *staged])),
        exposed=length(exposed),
        copies=length(time_of(copies)),
        idle=end - begin - length(compute) - length(exposed),
    )


def _lies_in(instant: int, intervals: list[Interval]) -> bool:
    """Whether one of these, which are in order, has the instant in it."""
    after = bisect_right(intervals, instant, key=lambda interval: interval[0])
    return after > 0 and instant <= intervals[after - 1][1]


def _seen_by_host(call: Span, blocked: list[Interval]) -> tuple[int, int, int, int]:
    """A call of the host, which does not tell when it queued from when it moved.

    Some backends show it from when they were asked, others from when a thread of theirs took it up.
    A program that waited for it by then says that it had asked before.
    """
    waits = (begin for begin, end in blocked if begin <= call.begin < end)
    begin = min(waits, default=call.begin)
    return call.bytes, begin, begin, call.end


def _seen_by_device(call: Span, asked_for: list[Span]) -> tuple[int, int, int, int]:
    """A call on the device; the host's last before its launch says when it was ready, of what."""
    before = [asked for asked in asked_for if asked.begin <= call.asked]
    if not call.on_device or not before:
        return call.bytes, call.asked, call.begin, call.end
    return before[-1].bytes, before[-1].begin, call.begin, call.end


def _step(
    instants: tuple[int, int, int],
    compute: int,
    backward: int,
    blocked: list[Interval],
    buckets: list[tuple[int, int, int, int]],
    calls: list[tuple[str, int]],
    counted: tuple[int, int],
    device: DeviceTimes | None = None,
) -> Step:
    """Moves all waiting to the end of the computation."""
    begin, computed, end = instants
    computed = min(computed, end)  # An optimizer may be inside of the backward pass.
    early = length(within(blocked, begin, computed))
    return Step(
        begin=begin,
        computed=computed - early,
        reduced=computed - early + length(blocked),
        end=end,
        compute=compute,
        backward=backward,
        buckets=buckets,
        calls=calls,
        counted=counted,
        overlaps=any(started < computed for _, _, started, _ in buckets),
        device=device,
    )


# What a rank sends for a call, by the usual algorithms: this many times its bytes, of world n.
_SENT = (
    ("barrier", lambda n: 0),
    ("all_reduce", lambda n: 2 * (n - 1) / n),
    ("allreduce", lambda n: 2 * (n - 1) / n),
    ("all_gather", lambda n: n - 1),
    ("allgather", lambda n: n - 1),
    ("recv", lambda n: 0),
    ("send", lambda n: 1),
    ("", lambda n: (n - 1) / n),
)


def sent(calls: list[tuple[str, int]], world: int) -> int:
    """About how many bytes this rank sent for its calls, if all were of the whole world."""

    def factor(operation: str) -> float:
        return next(of(world) for name, of in _SENT if name in operation.lower())

    return round(sum(size * factor(operation) for operation, size in calls))
