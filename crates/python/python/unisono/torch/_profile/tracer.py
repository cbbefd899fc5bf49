"""What torch's own profiler sees: calls of any backend, data loaders, and the work of devices.

Only named scopes are recorded (`USER_SCOPE`), in which every backend shows its calls, and not the
operators, of which a step has thousands: recording those would cost more than many steps.  Devices
report every kernel; there is no less to be had from them.

One recording lasts from the beginning to the end.  Torch forgets a recording when it stops; a scope
that was open then and ends in the next recording would write to memory that is gone.  So nothing is
recorded a second time, and what is kept is bounded by the number of steps.
"""

import os
import re

import torch
from torch._C._autograd import DeviceType
from torch._C._profiler import (
    ProfilerActivity,
    ProfilerConfig,
    ProfilerState,
    RecordScope,
    _ExperimentalConfig,
)

from unisono.errors import InvalidCall
from unisono.torch._profile import spans
from unisono.torch._profile.spans import Kind, Span

# Calls of the driver and its runtime, which launch kernels: "cudaLaunchKernel", "cuLaunchKernelEx".
_LAUNCH = re.compile(r"(cuda|cu|hip)[A-Z]")


# Shown to the profiler last: a recording without it was ended by another.
_LAST = "unisono.torch.profile"


class Tracer:
    """A recording of torch's profiler, which makes one at a time."""

    def __init__(self) -> None:
        if torch.autograd._profiler_enabled():
            raise InvalidCall(
                "torch's profiler is running, and would be ended by another recording; use "
                "`unisono.torch.profile` without it"
            )
        activities = {ProfilerActivity.CPU}
        if torch.cuda.is_available():
            activities.add(ProfilerActivity.CUDA)
        # Every thread: a backend ends its calls on threads of its own.
        everywhere = _ExperimentalConfig(profile_all_threads=True)
        # With the shapes of what is passed, and no memory, stacks, operations or modules.
        what = (True, False, False, False, False)
        config = ProfilerConfig(ProfilerState.KINETO, *what, everywhere)
        # It announces every start and stop on the terminal, unless told not to.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        torch.autograd._prepare_profiler(config, activities)
        torch.autograd._enable_profiler(config, activities, {RecordScope.USER_SCOPE})

    def stop(self) -> list[Span] | None:
        """Ends the recording; what was seen, or None if another recording has ended this one."""
        with torch.autograd.profiler.record_function(_LAST):
            pass
        try:
            events = torch.autograd._disable_profiler().events()
        except RuntimeError:  # There is none to be ended.
            return None
        if not any(event.name() == _LAST for event in events):
            return None
        return read(events)


def read(events) -> list[Span]:
    """The events that matter, of those that torch's profiler recorded."""
    events = list(events)
    launches = {
        event.correlation_id(): event.start_ns()
        for event in events
        if event.correlation_id() and _LAUNCH.match(event.name())
    }
    seen: list[Span] = []
    for event in events:
        name, begin, end = event.name(), event.start_ns(), event.end_ns()
        if event.device_type() != DeviceType.CPU:
            # Torch also draws the host's scopes onto the timeline of the device.
            if not event.is_user_annotation():
                launched = launches.get(event.correlation_id(), begin)
                seen.append(Span(spans.on_device(name), begin, end, name, launched=launched))
            continue
        what = spans.on_host(name)
        if what is not None:
            size = 0
            if what[0] is Kind.COMMUNICATION:
                size = spans.byte_count(event.shapes(), event.dtypes())
            seen.append(Span(what[0], begin, end, what[1], size))
    return seen
