"""The engine. Addresses are those of memory that its owner keeps where it is."""

from collections.abc import Callable, Sequence
from typing import TypedDict

# As in `unisono.torch._codes`.
_Address = int | list[int]
_Call = (
    tuple[int, int, int, _Address, _Address, int, int | None]
    | tuple[int, list[int], int, list[int]]
)

def new_token() -> bytes:
    """A new secret, which all ranks of a job know and nobody else."""

def write_report(dir: str, info: str, steps: Sequence[str]) -> tuple[str, str, str]:
    """Makes the folder of a run from `run.toml` and the lines of `steps.jsonl`, both as JSON.

    The verdict in one sentence, the report for a terminal, and the path of its page.
    """

class Endpoint:
    """Where a rank listens before it knows the others."""

    def __init__(self, ip: str) -> None:
        """Listens on a free port of `ip`, or of the interface that UNISONO_INTERFACE names."""

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

    @property
    def first_call(self) -> int:
        """The number of its first call."""

    def run(self, call: _Call, seconds: float) -> None:
        """Runs a call and waits for it. The caller keeps its memory to itself meanwhile."""

    def submit(self, call: _Call, keep: object) -> Work:
        """Starts a call on memory that `keep` owns."""

    def send(self, address: int, length: int, to: int, tag: int, keep: object) -> Work:
        """Starts to send `length` bytes, which `keep` owns."""

    def receive(
        self, address: int, length: int, source: int | None, tag: int, keep: object, /
    ) -> Work:
        """Starts to receive `length` bytes of a rank, or of any, which `keep` owns."""

    def subgroup(self, members: Sequence[int]) -> Group:
        """The group of these ranks, in this order. Only they call it, all with the same list."""

    def sent_bytes(self) -> int | None:
        """Bytes that this rank's collective calls have handed to others; None once closed."""

    def abort(self, reason: str) -> None:
        """Ends the group, here and on the other ranks, which are told why."""

    def close(self, seconds: float) -> None:
        """Leaves the group, after the calls that were started, waiting `seconds` at most."""

class Stamp:
    """When an operation ended."""

    def __init__(self, work: Work) -> None:
        """Waits for the end of an operation, well or not, from aside."""

    def ended(self) -> int | None:
        """When it ended, in nanoseconds of the Unix clock; None while it has not."""

class ServerSettings(TypedDict):
    """What a run with servers is, and how a worker reaches them."""

    names: list[str]
    shapes: list[list[int]]
    optimizer: str
    level: str
    stale: str
    codec: str | None
    codec_rules: list[str]
    warm_up: int
    error_feedback: bool
    steps: int | None
    seed: int
    workers: int
    worker: int
    servers: list[str]
    token: bytes
    patience: float

class ServerShard:
    """A server of a part of the weights, on threads of this process."""

    def __init__(self, ip: str, number: int, token: bytes) -> None:
        """Serves the part of this number at a free port of this machine's address `ip`."""

    @property
    def address(self) -> str:
        """Where it listens: HOST:PORT."""

    def close(self) -> None:
        """Ends it; whoever needs it has lost it."""

class ServerClient:
    """A worker of a run with servers. Weights and gradients are 32-bit floats at addresses."""

    def __init__(self, settings: ServerSettings, weights: Sequence[int]) -> None:
        """Joins a run, which begins with the weights of worker 0."""

    def step(
        self,
        weights: Sequence[int],
        gradients: Sequence[int | None],
        loss: float,
        samples: int,
    ) -> tuple[tuple[bool, int, int, int] | None, bool, float]:
        """Takes a step, and puts the weights that follow where the old ones are.

        Of the push, if there was one, whether it was applied, its lead, its delay in updates, and
        the workers present; whether the run is over; seconds of waiting.
        """

    def pull(self, weights: Sequence[int]) -> float:
        """Puts the weights of the servers where the old ones are; seconds of waiting."""

    def state(self) -> tuple[int, int] | None:
        """The worker's clock, and bytes sent and received; None after it has left."""

    def optimizer(self) -> str:
        """The optimizer as the servers apply it, in words."""

    def leave(self) -> None:
        """Leaves the run, so that nobody waits for this worker."""

    def wait_for_others(self, seconds: float) -> bool:
        """Waits until no worker is present; whether that is so after `seconds` at most."""

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
        """Whose message this is, if it is one that was received."""
