"""What can go wrong, by what the caller can do next.

All are `RuntimeError`s, as every error of `torch.distributed` is, so that code written for another
backend catches them.  After any but `InvalidCall`, `Unsupported`, `FormError` and `CheckpointError` the group has
ended: every pending and later call of it fails, on every rank, and the outputs of the calls that
failed hold anything.  Other groups of the job go on, unless they have the same cause to fail.  Two
errors leave the group as it is because all ranks learn of them before data moves: a `Mismatch` of
the lengths of an all-to-all, and a `monitored_barrier` that has timed out.
"""

from collections.abc import Sequence


class Error(RuntimeError):
    """A call failed, or a group could not form."""

    #: The rank that raised this. In every error, ranks are numbered as in the job, also in those of a
    #: group of some ranks.
    rank: int | None
    #: What it was doing, such as ``"all_reduce"`` or ``"send to rank 1 with tag 0"``.
    operation: str | None
    #: The other rank that is the cause, where one is.
    peer: int | None
    #: Which call of a backward pass it was, from 0: the number of DDP's bucket, unless a
    #: communication hook makes several calls for each.
    bucket: int | None

    def __init__(
        self,
        text: str,
        *,
        rank: int | None = None,
        operation: str | None = None,
        peer: int | None = None,
    ) -> None:
        super().__init__(text)
        self.rank = rank
        self.operation = operation
        self.peer = peer
        self.bucket = None

    def __str__(self) -> str:
        text = super().__str__()
        return text if self.bucket is None else f"{text} (bucket {self.bucket} of a backward pass)"


class PeerLost(Error):
    """A rank died, was cut off, or left. Start the job again, from its last checkpoint.

    Also raised by `new_group`, where the group of all ranks has lost one.
    """


class Aborted(Error):
    """A rank gave the group up, and says why. Start the job again."""


class Mismatch(Error):
    """The ranks called different operations, or one operation differently, or made the calls of
    several groups in different orders. Fix the program.
    """

    #: What two ranks called in each other's place: by rank, the number of the call in its group,
    #: from 1, and what it was.  Where ranks wait for each other in different groups, the call in
    #: which each waits.  Empty if a message and its buffer differ in length.
    calls: dict[int, tuple[int, str]]

    def __init__(self, text: str, *, calls: dict[int, tuple[int, str]] | None = None, **fields):
        super().__init__(text, **fields)
        self.calls = calls or {}


class TimedOut(Error, TimeoutError):
    """A call took longer than its timeout. Find out what the other ranks do instead.

    After a `monitored_barrier` the group goes on.
    """

    #: The ranks that had not arrived, as far as is known.
    missing: tuple[int, ...]

    def __init__(self, text: str, *, missing: Sequence[int] = (), **fields):
        super().__init__(text, **fields)
        self.missing = tuple(missing)


class InvalidCall(Error, ValueError):
    """The call is wrong by itself. Nothing was sent, and the group goes on. Fix the call."""


class Diverged(InvalidCall):
    """The replicas are not equal: a worker changed its own by something that is not the same on all, or its
    machine computes wrongly. Find out which, and go on from a checkpoint of before.
    """


class Unsupported(Error, NotImplementedError):
    """Unisono cannot do this yet. Nothing was sent, and the group goes on."""


class FormError(Error):
    """The ranks did not find each other, or did not all make a group.

    Of `init_process_group`: fix how the job is started, and start it again. Of `new_group`: let all
    of its ranks make it; the group of all ranks goes on. Where that one has failed, `new_group` raises
    what ended it, a `PeerLost` for instance.
    """


class CheckpointError(Error):
    """A checkpoint cannot be written, or cannot be read. Make room, or name another file. A file that was there
    before is as it was.
    """

    #: The file.
    path: str | None

    def __init__(self, text: str, *, path: str | None = None, **fields):
        super().__init__(text, **fields)
        self.path = path
