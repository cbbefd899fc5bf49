"""What the backend asks of PyTorch about a GPU: whose memory a tensor is, and in what order work is done.

A group's calls on CUDA tensors go over an engine, and connections, of their own, which are there once the
first such call is made.  A call that is waited for is ordered with the current stream, as a kernel would
be; one that is started begins when the current stream has come so far, and `wait` lets the stream that is
current then wait for its end.  CUDA is touched when a CUDA tensor comes, and not before.
"""

from contextlib import AbstractContextManager

import torch

from unisono.errors import InvalidCall


def number_of(tensor: torch.Tensor) -> int | None:
    """The number of the GPU that has the tensor's memory; None if the host has it."""
    return tensor.get_device() if tensor.is_cuda else None


def number_of_all(tensors) -> int | None:
    """The number of the GPU that has the memory of all of them."""
    if not tensors:
        return None
    number = number_of(tensors[0])
    for other in map(number_of, tensors[1:]):
        if other != number:
            text = f"the tensors of a call are on different devices, {_name(number)} and {_name(other)}"
            raise InvalidCall(f"{text}; move them to one")
    return number


def check(number: int, groups: int, rank: int) -> None:
    """Refuses memory of another GPU than the group has."""
    if number != groups:
        raise InvalidCall(
            f"rank {rank} made the first call of this group with memory of {_name(groups)}, and the tensor is on"
            f" {_name(number)}; a process has one GPU in a group: move the tensor, or make another group",
            rank=rank,
        )


def stream_of(number: int) -> int:
    """The driver's name of the current stream."""
    return torch._C._cuda_getCurrentRawStream(number)


def refuse_recording(rank: int) -> None:
    """Refuses what cannot be recorded for a graph."""
    if torch.cuda.is_current_stream_capturing():
        text = "the current stream records for a CUDA graph, of which this call cannot be a part; make it outside"
        raise InvalidCall(text, rank=rank)


def reached(number: int) -> torch.cuda.Event:
    """An event that happens when the current stream has done what it was given so far."""
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(number))
    return event


def wait_for(event: torch.cuda.Event, number: int) -> None:
    """Lets the current stream wait for an event."""
    torch.cuda.current_stream(number).wait_event(event)


def use_on_current(tensors, number: int) -> None:
    """Keeps memory that was allocated for one stream from being used again before the current one is done."""
    stream = torch.cuda.current_stream(number)
    for tensor in tensors:
        tensor.record_stream(stream)


def drain(place: torch.device) -> None:
    """Waits until the current stream has done what it was given."""
    torch.cuda.current_stream(place).synchronize()


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in pinned memory of the host, complete when this returns."""
    copy = host_memory(tensor)
    copy.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return copy


def host_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Pinned memory of the host for as much as the tensor has."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)


def future(number: int) -> torch.futures.Future:
    """A future whose result is on a GPU: it carries what its users' streams are to wait for."""
    return torch.futures.Future(devices=[torch.device("cuda", number)])


def aside(number: int) -> AbstractContextManager:
    """Makes a stream current that no computation of the program uses."""
    stream = _asides.get(number)
    if stream is None:
        stream = _asides[number] = torch.cuda.Stream(torch.device("cuda", number))
    return torch.cuda.stream(stream)


_asides: dict[int, torch.cuda.Stream] = {}


def _name(number: int | None) -> str:
    return "the host" if number is None else f"cuda:{number}"
