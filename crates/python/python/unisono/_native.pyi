"""The engine. Addresses are those of memory that its owner keeps where it is."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

# As in `unisono.torch._codes`.
_Call = tuple[int, int, int, int, int, int, int | None]

# Where the 32-bit floats of a parameter are: address and count.
_Place = tuple[int, int]

class _Codec(Protocol):
    """As `unisono.torch._codec.Codec`."""

    @property
    def codec(self) -> str: ...
    @property
    def rules(self) -> list[str]: ...
    @property
    def warm_up(self) -> int: ...
    @property
    def error_feedback(self) -> bool: ...
    @property
    def seed(self) -> int: ...

def new_token() -> bytes:
    """A new secret, which all ranks of a job know and nobody else."""

def shards_of(shards: int, worker: int, workers: int) -> tuple[int, int]:
    """The shards of a worker: the first, and the one after the last."""

class Endpoint:
    """Where a rank listens before it knows the others."""

    def __init__(self, ip: str) -> None:
        """Listens on a free port of this machine's address `ip`."""

    def address(self) -> bytes:
        """What the others need to know, to be passed on as it is."""

    def open(self, rank: int, token: bytes, addresses: Sequence[bytes]) -> Group:
        """Forms the group of the ranks with these addresses, of which this is number `rank`."""

class Group:
    """A group of ranks."""

    @property
    def rank(self) -> int:
        """This rank, as the group numbers it."""

    @property
    def size(self) -> int:
        """Ranks in the group."""

    def run(self, call: _Call, seconds: float) -> None:
        """Runs a call and waits for it. The caller keeps its memory to itself meanwhile."""

    def submit(self, call: _Call, keep: object) -> Work:
        """Starts a call on memory that `keep` owns."""

    def all_to_all_unequal(
        self,
        input: int,
        sent: Sequence[int],
        output: int,
        received: Sequence[int],
        seconds: float,
    ) -> None:
        """Exchanges blocks of these many bytes, and waits for it."""

    def send(self, address: int, length: int, to: int, tag: int, keep: object) -> Work:
        """Starts to send `length` bytes, which `keep` owns."""

    def receive(self, address: int, length: int, source: int, tag: int, keep: object, /) -> Work:
        """Starts to receive `length` bytes, which `keep` owns."""

    def subgroup(self, members: Sequence[int]) -> Group:
        """The group of these ranks, in this order. Only they call it, all with the same list."""

    def abort(self) -> None:
        """Ends all groups of the job, here and on the other ranks."""

    def close(self, seconds: float) -> None:
        """Leaves the group, after the calls that were started, waiting `seconds` at most."""

class LocalSteps:
    """Synchronizes the weights of workers that train by themselves."""

    def __init__(
        self,
        group: Group | None,
        parameters: Sequence[tuple[str, Sequence[int]]],
        strategy: str,
        codec: _Codec,
        places: Sequence[_Place],
        seconds: float,
    ) -> None:
        """Joins the workers of a group. The weights in `places` become rank 0's."""

    @property
    def steps(self) -> int:
        """Steps that this worker has finished."""

    @property
    def sent(self) -> int:
        """Bytes this rank has sent so far."""

    def is_due(self) -> bool:
        """Whether the workers' weights are looked at after the next step."""

    def skip(self) -> None:
        """This worker has finished a step after which nothing is due."""

    def step(self, places: Sequence[_Place], seconds: float) -> bool:
        """This worker has finished a step: does what is due. Whether something was agreed on."""

    def settle(self, places: Sequence[_Place], seconds: float) -> None:
        """Makes the weights of all workers equal, at the end of training."""

    def save(self, seconds: float) -> dict[str, bytes]:
        """What must be remembered besides the workers' own weights, at rank 0."""

    def restore(self, steps: int, saved: Mapping[str, bytes], seconds: float) -> None:
        """Goes on after so many steps from what was saved, of which rank 0's counts."""

    def close(self, seconds: float) -> None:
        """Leaves the workers."""

class Synchronizer:
    """Takes the gradients of a worker's shards, and gives back the mean of all workers'."""

    def __init__(
        self,
        group: Group | None,
        parameters: Sequence[tuple[str, Sequence[int]]],
        shards: int,
        codec: _Codec,
        buckets: tuple[int, int] | None,
        overlap: bool,
        seconds: float,
    ) -> None:
        """Joins the replicas of a group; without one, there is nobody to wait for."""

    @property
    def shards(self) -> tuple[int, int]:
        """The shards of this worker: the first, and the one after the last."""

    @property
    def steps(self) -> int:
        """Steps that have ended."""

    @property
    def sent(self) -> int:
        """Bytes this rank has sent so far."""

    def begin_shard(self) -> int:
        """Begins the next of this worker's shards; which one."""

    def begin_backward(self, loss: float) -> None:
        """The loss of the shard is known; gradients come next."""

    def gradient(self, parameter: int, address: int, count: int) -> None:
        """Takes a parameter's gradient in the shard under way, and is done with its memory."""

    def end_shard(self) -> None:
        """Ends the shard under way. Parameters that got no gradient have none in it."""

    def finish(
        self, places: Sequence[_Place], seconds: float
    ) -> tuple[float, list[int], tuple[str, str] | None]:
        """Ends the step, and writes the mean of every parameter to its place.

        Returns the mean loss; the parameters that had a gradient anywhere; the codec that was chosen
        after this step and why, if one was.
        """

    def save(self, seconds: float) -> dict[str, bytes]:
        """What must be remembered besides the weights, at rank 0."""

    def restore(self, steps: int, saved: Mapping[str, bytes], seconds: float) -> None:
        """Goes on after so many steps from what was saved, of which rank 0's counts."""

    def close(self, seconds: float) -> None:
        """Leaves the replicas."""

class Work:
    """An operation that was started."""

    def wait(self, seconds: float) -> None:
        """Waits until the operation has ended, and raises its error."""

    def is_done(self) -> bool:
        """Whether the operation has ended, well or not."""

    def error(self) -> Exception | None:
        """What went wrong, if the operation has ended and something did."""

    def then(self, callback: Callable[[], object]) -> None:
        """Calls `callback` when the operation has ended, on another thread."""

    def source(self) -> int | None:
        """Whose message this is, if it is one that is received."""
