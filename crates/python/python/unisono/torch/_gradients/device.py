"""Numbers on their way between a device and the engine, which reads and writes this machine's memory.

The computation is asynchronous: a gradient that a hook is given is one that the device will have computed when it
comes so far.  So nothing here waits for the device on the program's thread.

**Out.**  `send` notes tensors until a chunk of pinned memory is full.  Then one event is recorded on each stream on
which they are computed, a stream of our own waits for it and copies them into the chunk, and a last event says when
that has happened.  A thread waits for that event, without the interpreter's lock, and delivers what is in the chunk,
in the order in which it was sent.  Calls that belong between two deliveries go the same way, by `then`.  Tensors are
kept until they are copied: the memory of one that the program drops could be given to the next.

**Back.**  `Return.put` copies into chunks of its own and from there to the device, on our stream, and the program's
stream waits for that before whatever it does next.

Chunks are few and allocated once.  When all of them are on their way, the one who sends waits for the first.
"""

import ctypes
import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import TracebackType
from typing import Any

import torch

from unisono.errors import Unsupported

# Floats of a chunk.  More: a gradient waits longer for others before it is copied.  Fewer: more events, and more
# turns of the thread, for the same bytes.
_CHUNK = 1 << 20

# Chunks that are filled or delivered at the same time, and those on their way back.  More: more pinned memory, of 4 MiB
# each.  Fewer: backward waits for the engine sooner.
_CHUNKS_OUT = 8
_CHUNKS_BACK = 4

#: Called with the place of the first number in its tensor, its address, and how many follow.
Deliver = Callable[[int, int, int], object]


class Cuda:
    """A device, as far as the staging needs one; tests have another."""

    def __init__(self, device: torch.device):
        self.device = device

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is in memory of this device."""
        return tensor.device == self.device

    def number(self) -> int | None:
        """Its number in this process, by which the engine uses its memory; None if the engine cannot."""
        return torch.cuda.current_device() if self.device.index is None else self.device.index

    def current_address(self) -> int:
        """The driver's name of the stream on which the calling thread computes."""
        return torch._C._cuda_getCurrentRawStream(self.number())

    def stream(self) -> torch.cuda.Stream:
        """A stream of our own."""
        return torch.cuda.Stream(self.device)

    def current(self) -> torch.cuda.Stream:
        """The stream on which the calling thread computes."""
        return torch.cuda.current_stream(self.device)

    def event(self) -> torch.cuda.Event:
        """Something to wait for: for the host, asleep."""
        return torch.cuda.Event(blocking=True)

    def pinned(self, count: int) -> torch.Tensor:
        """So many floats in this machine's memory that the device can reach by itself."""
        with torch.cuda.device(self.device):
            return torch.empty(count, dtype=torch.float32, pin_memory=True)

    def empty(self, count: int) -> torch.Tensor:
        """So many floats in memory of the device."""
        return torch.empty(count, dtype=torch.float32, device=self.device)

    def copy(self, stream: torch.cuda.Stream, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copies, from the second of each pair to the first, when the stream comes to it."""
        with torch.cuda.stream(stream), torch.no_grad():
            for target, source in pairs:
                target.copy_(source, non_blocking=True)

    def seeded(self) -> list[int]:
        """The devices whose random numbers belong to the model."""
        return [self.number()]


def device_of(tensors: Iterable[torch.Tensor]) -> Cuda | None:
    """The device that has the tensors, or some of them; None if this machine's memory has all."""
    devices = {tensor.device for tensor in tensors if not tensor.is_cpu}
    for device in devices:
        if device.type != "cuda":
            raise Unsupported(f"unisono synchronizes tensors of CPUs and of CUDA, not of {device}")
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise Unsupported(f"parameters are on {names}; unisono synchronizes those of one device per process")
    return Cuda(devices.pop()) if devices else None


class Staging:
    """What is under way between a device and the engine."""

    def __init__(self, device: Any, chunk: int = _CHUNK):
        self.device = device
        self._stream = device.stream()
        self._free: queue.SimpleQueue[_Chunk] = queue.SimpleQueue()
        for _ in range(_CHUNKS_OUT):
            self._free.put(_Chunk(device, chunk))
        self._back = [_Chunk(device, chunk) for _ in range(_CHUNKS_BACK)]
        self._filling: _Chunk | None = None
        # Hooks of a model that is in part on this machine are called by several threads.
        self._lock = threading.Lock()
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # Why nothing more is delivered.
        self._error: BaseException | None = None
        # The thread knows only the queue, and ends with this object: at the end of the program, what is under
        # way may still have to be waited for.
        threading.Thread(target=_make_calls, args=[self._work], name="unisono staging", daemon=True).start()
        weakref.finalize(self, self._work.put, None).atexit = False

    def send(self, numbers: torch.Tensor, deliver: Deliver, done: Callable[[], object] | None = None) -> None:
        """Has contiguous floats delivered, in parts, and then calls `done`.

        They are those that the calling thread's stream has computed when it comes to here.
        """
        flat = numbers.view(-1)
        with self._lock:
            at = 0
            while at < flat.numel():
                chunk = self._chunk()
                at += chunk.add(self.device.current(), flat, at, deliver)
                if chunk.is_full():
                    self._flush()
            if done is not None:
                self._then(done)

    def then(self, call: Callable[[], object]) -> None:
        """Makes a call when all that was sent before is delivered."""
        with self._lock:
            self._then(call)

    def flush(self) -> None:
        """Lets what was sent go, without waiting for more."""
        with self._lock:
            self._flush()

    def drain(self) -> None:
        """Waits until all is delivered; raises what went wrong meanwhile."""
        self.flush()
        idle = threading.Event()
        self._work.put(idle.set)
        idle.wait()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def abandon(self) -> None:
        """Drops what is not delivered yet, and what went wrong."""
        self._error = self._error or _Abandoned()
        try:
            self.drain()
        except BaseException:
            return

    def returning(self) -> "Return":
        """The way back, within a `with` block: behind it, the calling thread's stream has what was put."""
        return Return(self.device, self._stream, self._back)

    def _chunk(self) -> "_Chunk":
        if self._filling is None:
            # Waits here if all are on their way.
            self._filling = self._free.get()
        return self._filling

    def _then(self, call: Callable[[], object]) -> None:
        if self._filling is None:
            self._work.put(partial(self._attempt, [call]))
        else:
            self._filling.calls.append(call)

    def _flush(self) -> None:
        chunk, self._filling = self._filling, None
        if chunk is not None:
            chunk.let_go(self._stream)
            self._work.put(partial(self._deliver, chunk))

    def _deliver(self, chunk: "_Chunk") -> None:
        try:
            # Also where nothing is delivered any more: the device still reads and writes.
            chunk.wait()
        except BaseException as error:
            self._error = self._error or error
        self._attempt(chunk.calls)
        chunk.clear()
        self._free.put(chunk)

    def _attempt(self, calls: Sequence[Callable[[], object]]) -> None:
        if self._error is None:
            try:
                for call in calls:
                    call()
            except BaseException as error:
                self._error = error


class Return:
    """Numbers on their way to the device."""

    def __init__(self, device: Any, stream: Any, chunks: Sequence["_Chunk"]):
        self._device, self._stream = device, stream
        # The one that was used longest ago comes first.
        self._chunks = list(chunks)
        self._converted: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __enter__(self) -> "Return":
        # What the program's stream still reads must not be overwritten.
        _order(self._device, [self._device.current()], self._stream)
        self._chunks[0].reuse()
        return self

    def put(self, target: torch.Tensor, address: int, count: int) -> None:
        """Copies floats, which may change as soon as this returns, to a tensor of as many elements."""
        if not self._device.holds(target):
            flat = torch.empty(count)
            ctypes.memmove(flat.data_ptr(), address, 4 * count)
            self._converted.append((target, flat))
            return
        if target.dtype == torch.float32 and target.is_contiguous() and not target.is_neg():
            flat = target.detach().view(-1)
        else:
            flat = self._device.empty(count)
            # With deterministic algorithms, the program's stream fills new memory.
            _order(self._device, [self._device.current()], self._stream)
            self._converted.append((target, flat))
        at = 0
        while at < count:
            chunk = self._chunks[0]
            if chunk.is_full():
                chunk.let_come(self._stream)
                self._chunks.append(self._chunks.pop(0))
                chunk = self._chunks[0]
                chunk.reuse()
            part = min(chunk.room(), count - at)
            self._device.copy(self._stream, [(flat[at : at + part], chunk.fill(address + 4 * at, part))])
            at += part

    def __exit__(self, kind: type[BaseException] | None, _error: BaseException | None, _at: TracebackType | None) -> None:
        self._chunks[0].let_come(self._stream)
        _order(self._device, [self._stream], self._device.current())
        if kind is None:
            with torch.no_grad():
                for target, flat in self._converted:
                    target.copy_(flat.view(target.shape))


class Mirror:
    """Pinned memory with the numbers of tensors, where the engine reads and writes all of them at once."""

    def __init__(self, device: Any, counts: Sequence[int]):
        self._device = device
        self._stream = device.stream()
        self._event = device.event()
        memory = device.pinned(sum(counts))
        self._floats = list(memory.split(list(counts)))
        #: Address and count of each.
        self.buffers = [(numbers.data_ptr(), numbers.numel()) for numbers in self._floats]

    def read(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Fetches the numbers of tensors, in any type and place. Of None, they stay as they are."""
        here = [(into, of) for into, of in zip(self._floats, tensors, strict=True) if of is not None]
        # Converted on their own device, by the program's stream; kept until they are copied.
        flat = [(into, numbers_of(of).view(-1)) for into, of in here]
        _order(self._device, [self._device.current()], self._stream)
        self._device.copy(self._stream, flat)
        self._event.record(self._stream)
        self._event.synchronize()

    def write(self, tensors: Sequence[torch.Tensor]) -> None:
        """Brings the numbers to the tensors; the calling thread's stream has them from here on."""
        converted: list[tuple[torch.Tensor, torch.Tensor]] = []
        pairs = []
        for tensor, numbers in zip(tensors, self._floats, strict=True):
            is_plain = tensor.dtype == torch.float32 and tensor.is_contiguous() and not tensor.is_neg()
            if not self._device.holds(tensor):
                converted.append((tensor, numbers))
            elif is_plain:
                pairs.append((tensor.detach().view(-1), numbers))
            else:
                flat = self._device.empty(numbers.numel())
                pairs.append((flat, numbers))
                converted.append((tensor, flat))
        # What the program's stream still reads must not be overwritten.
        _order(self._device, [self._device.current()], self._stream)
        self._device.copy(self._stream, pairs)
        _order(self._device, [self._stream], self._device.current())
        with torch.no_grad():
            for tensor, flat in converted:
                tensor.copy_(flat.view(tensor.shape))


def numbers_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as contiguous 32-bit floats, where it is: itself, or a copy."""
    if tensor.layout is not torch.strided:
        raise Unsupported("sparse gradients have no codec; build the layer with sparse=False")
    if not tensor.is_floating_point():
        raise Unsupported(f"unisono synchronizes floats, not {tensor.dtype}")
    # The memory of a negated view holds the numbers it is a view of.
    return tensor.detach().to(torch.float32).resolve_neg().contiguous()


def _make_calls(work: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
    """Makes the calls of a queue until one is None."""
    while (call := work.get()) is not None:
        call()
        del call  # It may be the last to know whose it is.


class _Abandoned(Exception):
    """What was sent is not wanted any more."""


class _Chunk:
    """Pinned memory, what fills it, and when the device is done with it."""

    def __init__(self, device: Any, size: int):
        self._device = device
        self._memory = device.pinned(size)
        self._address = self._memory.data_ptr()
        self._event = device.event()
        self._is_waited_for = True
        self._filled = 0
        #: To be made when the numbers are there.
        self.calls: list[Callable[[], object]] = []
        # What is to be copied here, which is also what keeps it alive; and the streams that compute it.
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._streams: list[Any] = []

    def room(self) -> int:
        return self._memory.numel() - self._filled

    def is_full(self) -> bool:
        return self.room() == 0

    def add(self, stream: Any, flat: torch.Tensor, at: int, deliver: Deliver) -> int:
        """Notes numbers from a place on, as many as there is room for; how many."""
        count = min(self.room(), flat.numel() - at)
        begin, self._filled = self._filled, self._filled + count
        self._copies.append((self._memory[begin : self._filled], flat[at : at + count]))
        if stream not in self._streams:
            self._streams.append(stream)
        self.calls.append(partial(deliver, at, self._address + 4 * begin, count))
        return count

    def let_go(self, stream: Any) -> None:
        """Has the device copy what was noted."""
        _order(self._device, self._streams, stream)
        self._device.copy(stream, self._copies)
        self._event.record(stream)

    def wait(self) -> None:
        """Waits until it is here."""
        self._event.synchronize()

    def clear(self) -> None:
        """Forgets all, for the next time."""
        self.calls, self._copies, self._streams, self._filled = [], [], [], 0

    def fill(self, address: int, count: int) -> torch.Tensor:
        """Takes numbers of this machine's memory; where they are."""
        begin, self._filled = self._filled, self._filled + count
        ctypes.memmove(self._address + 4 * begin, address, 4 * count)
        return self._memory[begin : self._filled]

    def let_come(self, stream: Any) -> None:
        """Notes when the device has taken what was filled in."""
        self._event.record(stream)
        self._is_waited_for = False

    def reuse(self) -> None:
        """Waits until the device has taken it."""
        if not self._is_waited_for:
            self._event.synchronize()
            self._is_waited_for = True
        self._filled = 0


def _order(device: Any, before: Sequence[Any], after: Any) -> None:
    """What the last stream does from here on comes after what the others do so far."""
    for stream in before:
        event = device.event()
        event.record(stream)
        after.wait_event(event)
