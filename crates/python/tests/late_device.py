"""A device that does everything as late as it may, for machines that have none.

Its memory is this machine's.  Tensors of the program are computed at once; a copy on a stream happens when something
waits for an event behind it, and not before.  So what is read too early is not there yet (it is NaN), and what is
changed or dropped too early is copied wrong, which `copy` notices.
"""

import contextlib
import threading
from collections import deque

import torch
from unisono.torch._gradients import device as staging


class LateDevice:
    def __init__(self):
        self.device = torch.device("cpu")
        self.copies = 0
        self._program = ProgramStream()

    def holds(self, tensor):
        return True

    def number(self):
        # No driver knows it: gradients go through the host.
        return None

    def stream(self):
        return LateStream()

    def current(self):
        return self._program

    def event(self):
        return LateEvent()

    def pinned(self, count):
        return torch.full((count,), torch.nan)

    def empty(self, count):
        return torch.full((count,), torch.nan)

    def copy(self, stream, pairs):
        for target, source in pairs:
            assert target.dtype == source.dtype and target.shape == source.shape, (target, source)
            self.copies += target.numel()
            stream.put(target, source)

    def seeded(self):
        return []


class ProgramStream:
    """On which all is done as soon as it is asked for."""

    def wait_event(self, event):
        event.synchronize()

    def put(self, target, source):
        target.copy_(source)

    def run(self, _until):
        pass

    asked = 0


class LateStream:
    def __init__(self):
        self.asked = 0
        self._done = 0
        self._pending = deque()
        self._lock = threading.Lock()

    def wait_event(self, event):
        # What the program's stream was asked for is done.
        assert isinstance(event.stream, ProgramStream), "our streams wait for none but the program's"

    def put(self, target, source):
        self.asked += 1
        self._pending.append((target, source, source._version))

    def run(self, until):
        with self._lock:
            while self._done < until:
                target, source, version = self._pending.popleft()
                assert source._version == version, "a tensor was changed before it was copied"
                with torch.no_grad():
                    target.copy_(source)
                self._done += 1


class LateEvent:
    stream = None

    def record(self, stream):
        self.stream, self._until = stream, stream.asked

    def synchronize(self):
        assert self.stream is not None, "the event was not recorded"
        self.stream.run(self._until)


@contextlib.contextmanager
def late_device(chunk=1000):
    """Within this, models are on such a device. Chunks are small, so that tensors are cut."""
    device = LateDevice()
    find, size = staging.device_of, staging.Staging.__init__.__defaults__
    staging.device_of = lambda tensors: device
    staging.Staging.__init__.__defaults__ = (chunk,)
    try:
        yield device
    finally:
        staging.device_of, staging.Staging.__init__.__defaults__ = find, size
