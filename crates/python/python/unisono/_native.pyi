"""The engine. Addresses are those of memory that its owner keeps where it is."""

from collections.abc import Callable, Sequence

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
