"""The engine. Addresses are those of memory that its owner keeps where it is."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypedDict

# Where an input or output is, 0 where there is none; or where the block of each rank is.
_Address = int | list[int]

# Where the 32-bit floats of a parameter are: address and count.
_Buffer = tuple[int, int]

# A bucket that travelled: bytes, begin and end, in nanoseconds of the Unix clock.
_Transfer = tuple[int, int, int]

class _CodecSettings(Protocol):
    """As `unisono.torch._gradients.codec.CodecSettings`."""

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
    """A new secret, which the ranks of a job know and no other process."""

def worker_from_env() -> tuple[int, int, list[str] | None, bytes | None]:
    """Which worker this process is, by its environment: its rank, how many workers there are, where
    their servers are, and the token of the job."""

def write_report(dir: str, info: str, steps: Sequence[str]) -> tuple[str, str]:
    """Makes the folder of a run from `run.toml` and the lines of `steps.jsonl`, both as JSON.

    The verdict in one sentence, and the path of the report's page.
    """

def shards_of(shards: int, worker: int, workers: int) -> tuple[int, int]:
    """The shards of a worker: the first, and the one after the last."""

def exchange(group: Group, numbers: Sequence[int], seconds: float) -> list[list[int]]:
    """The numbers of all ranks, by rank; each gives as many."""

def send_state(group: Group, to: Sequence[int], state: bytes, seconds: float) -> None:
    """Sends a state to these ranks, with its length and its hash."""

def receive_state(group: Group, source: int, seconds: float, /) -> bytes:
    """The state that a rank sends; an error if it does not have its hash."""

def hash_parts(buffers: Sequence[tuple[int, int]], part: int, of: int) -> bytes:
    """A hash of one of so many parts of each of these buffers, given by address and bytes."""

class Copies:
    """A head and the memory of tensors, as they were when this was made."""

    def __init__(self, head: bytes, buffers: Sequence[tuple[int, int]]) -> None:
        """Copies a head, and buffers that are given by address and bytes."""

class _Follower(Protocol):
    """A worker that joins, and follows a member until it is let in."""

    @property
    def fingerprint(self) -> bytes:
        """32 bytes, which it must have in common with the member."""

    def begin(self) -> None:
        """From now on its state is that of no step."""

    def take(self, vector: bytearray) -> None:
        """The next vector: first the head, with its length in 8 bytes before it, then the memory of the tensors."""

    def complete(self, steps: int) -> bool:
        """All of the state after so many steps was taken; whether it can follow from there."""

    def stepped(self, steps: int) -> bool:
        """All that the step with this number, from 1, has changed was taken; whether it can follow."""

class ElasticJob:
    """A worker's membership in a job whose workers may come and go."""

    @staticmethod
    def join(shards: int) -> ElasticJob | None:
        """Connects to the launcher; None if that did not make the job elastic."""

    def enter(self, follower: _Follower | None = None) -> Group | None:
        """Waits until this worker is in an epoch, and forms its group; None when the run is complete. A worker that
        was in none yet first follows a member."""

    def offer(self, fingerprint: bytes, bytes: int) -> None:
        """From now on workers that join may ask for the state of this one, of which a step changes so many bytes."""

    @property
    def joiner(self) -> tuple[bool, bool]:
        """Whether a worker that joins has asked for the state; and whether one follows."""

    def give_state(self, steps: int, copies: Copies) -> None:
        """Gives the worker that has asked the state after so many steps."""

    def give_step(self, steps: int, copies: Sequence[Copies]) -> None:
        """Gives the worker that follows what a step has changed."""

    def break_off(self) -> None:
        """The state of this worker is no longer what the worker that follows gets to."""

    @property
    def epoch(self) -> int:
        """The number of the epoch that this worker is in, or was in last."""

    def is_asked_to_regroup(self) -> bool:
        """Whether a worker waits to be let in."""

    def note_failure(self, group: Group, synchronizer: Synchronizer) -> bool:
        """Notes why one of them has failed; whether another group can follow."""

    def note_shard(self, shard: int | None) -> None:
        """Notes which shard this worker begins to compute; None if it has computed all of a step."""

    def stepped(
        self, step: int, compute: float, redone: bool, behind: int, from_checkpoint: bool
    ) -> None:
        """Tells the launcher that the first step of the epoch is complete, as rank 0."""

    def finish(self, result: bytes) -> None:
        """Hands in the result of the run, as rank 0, and waits until the launcher has it."""

class Endpoint:
    """Where a rank listens before it knows the others."""

    def __init__(self, ip: str) -> None:
        """Listens on a free port of `ip`, or of the interface that UNISONO_INTERFACE names."""

    def address(self) -> bytes:
        """What the others need to know, to be passed on as it is."""

    def open(self, rank: int, token: bytes, addresses: Sequence[bytes],
             computing: int | None = None) -> Group:
        """Forms the group of the ranks with these addresses, of which this is number `rank` and
        computes with so many threads while calls run."""

class Group:
    """A group of ranks."""

    @property
    def rank(self) -> int:
        """This rank, as the group numbers it."""

    @property
    def size(self) -> int:
        """Ranks in the group."""

    @property
    def device(self) -> int | None:
        """The number of the device whose memory its calls are on, if they are on one."""

    def run(
        self, call: Call, origin: Origin, seconds: float, stream: int | None = None
    ) -> None:
        """Runs a call and waits for it. The caller keeps its memory to itself meanwhile.

        On a device it runs in the order of a stream, and may have ended on the host only.
        """

    def submit(
        self, call: Call, origin: Origin, keep: object, stream: int | None = None
    ) -> Work:
        """Starts a call on memory that `keep` owns; on a device, once a stream has come to where it is now."""

    def on_device(self, number: int, origin: Origin, seconds: float) -> Group:
        """The group of the same ranks for calls on the memory of a device of each. All call it."""

    def send(self, address: int, length: int, to: int, tag: int, keep: object) -> Work:
        """Starts to send `length` bytes, which `keep` owns."""

    def receive(
        self, address: int, length: int, source: int | None, tag: int, keep: object, /
    ) -> Work:
        """Starts to receive `length` bytes of a rank, or of any, which `keep` owns."""

    def subgroup(self, members: Sequence[int]) -> Group:
        """The group of these ranks, in this order. Only they call it, all with the same list."""

    def allocate(self, bytes: int, seconds: float) -> Allocated:
        """Memory, at first 0, that the other ranks of the host read in place. All call it."""

    def calls(self) -> int:
        """The number of the last call, also of one that waits in line; 0 before the first."""

    def has_ended(self) -> bool:
        """Whether the group has ended, by a failure or because it was closed."""

    def sent_bytes(self) -> int | None:
        """Bytes that this rank's collective calls have handed to others; None once closed."""

    def abort(self, reason: str) -> None:
        """Ends the group, here and on the other ranks, which are told why."""

    def close(self, seconds: float, reason: str | None = None) -> None:
        """Leaves the group, after the calls that were started, waiting `seconds` at most.

        Ranks that still need this one are told the reason, if there is one.
        """

class Allocated:
    """Memory of this rank that calls of its group read in place."""

    @property
    def address(self) -> int:
        """Where it begins."""

class Call:
    """A collective call: what to do, by the codes of `unisono.torch._backend.codes`, and with what."""

    @staticmethod
    def moving(
        op: int, input: _Address, output: _Address, count: int, root: int | None = None
    ) -> Call:
        """Moves `count` bytes, of the buffer or of a block."""

    @staticmethod
    def reducing(
        op: int,
        dtype: int,
        reduction: int,
        input: _Address,
        output: _Address,
        count: int,
        root: int | None = None,
    ) -> Call:
        """Reduces `count` elements, of the buffer or of a block."""

    @staticmethod
    def unequal(input: int, sent: list[int], output: int, received: list[int]) -> Call:
        """Gives each rank its block of every rank's input: so many bytes to and from each."""

    @staticmethod
    def barrier() -> Call:
        """Waits for all ranks."""

class Origin:
    """The line of the program that made a call, and the type of its tensors."""

    def __init__(self, line: str | None, dtype: str | None) -> None: ...

class Stamp:
    """When an operation ended."""

    def __init__(self, work: Work) -> None:
        """Notes when an operation ends, well or not."""

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

class InProcessServer:
    """A server of a part of the weights, on threads of this process."""

    def __init__(self, ip: str, number: int, token: bytes) -> None:
        """Serves the part of this number at a free port of this machine's address `ip`."""

    @property
    def address(self) -> str:
        """Where it listens: HOST:PORT."""

    def close(self) -> None:
        """Ends it; workers that still need it lose it."""

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
        """Leaves the run, so that the other workers do not wait for this one."""

    def wait_for_others(self, seconds: float) -> bool:
        """Waits until no worker is present; whether that is so after `seconds` at most."""

class _Replica:
    """What all have in common that keep replicas in step."""

    @property
    def steps(self) -> int:
        """Steps that this worker has finished."""

    @property
    def sent(self) -> int:
        """Bytes this rank has sent so far."""

    @property
    def transfers(self) -> list[_Transfer]:
        """The buckets of the last step, or of the last agreement."""

    def save(self, seconds: float) -> dict[str, bytes]:
        """What must be remembered besides the weights, at rank 0."""

    def restore(self, steps: int, saved: Mapping[str, bytes], seconds: float) -> None:
        """Goes on after so many steps, on all ranks the same, from what rank 0 saved."""

    def close(self, seconds: float) -> None:
        """Leaves the replicas."""

class LocalSteps(_Replica):
    """Synchronizes the weights of workers that train by themselves."""

    def __init__(
        self,
        group: Group | None,
        parameters: Sequence[tuple[str, Sequence[int]]],
        strategy: str,
        codec: _CodecSettings,
        buffers: Sequence[_Buffer],
        seconds: float,
    ) -> None:
        """Joins the workers of a group. The weights in `buffers` become rank 0's."""

    def is_due(self) -> bool:
        """Whether the workers' weights are read or changed after the next step."""

    def skip(self) -> None:
        """This worker has finished a step after which nothing is due."""

    def step(self, buffers: Sequence[_Buffer], seconds: float) -> bool:
        """This worker has finished a step: does what is due. Whether something was agreed on."""

    def settle(self, buffers: Sequence[_Buffer], seconds: float) -> None:
        """Makes the weights of all workers equal, at the end of training."""

class Synchronizer(_Replica):
    """Takes the gradients of a worker's shards, and gives back the mean of all workers'."""

    def __init__(
        self,
        group: Group | None,
        parameters: Sequence[tuple[str, Sequence[int]]],
        shards: int,
        codec: _CodecSettings,
        buckets: tuple[int, int] | None,
        seconds: float,
    ) -> None:
        """Joins the replicas of a group; without one, this process is the only one."""

    @property
    def shards(self) -> tuple[int, int]:
        """The shards of this worker: the first, and the one after the last."""

    @property
    def last_step(self) -> tuple[bool, float, bool]:
        """Whether all ranks agreed in the last step to leave the group; the seconds it took this one to compute;
        whether a rank asked to stop."""

    def regroup(self, group: Group | None, seconds: float) -> bool:
        """Goes on in another group; False if what a codec remembered is lost, on all ranks."""

    def go_on_from(self, steps: int) -> None:
        """So many steps have been made."""

    def vote_to_regroup(self) -> None:
        """Asks the ranks to leave the group after the next step."""

    def vote_to_stop(self) -> None:
        """Asks the ranks to stop after the step under way, or after the next."""

    def begin_step(self) -> None:
        """The next step begins now."""

    def begin_shard(self) -> int:
        """Begins the next of this worker's shards; which one."""

    def begin_backward(self, loss: float) -> None:
        """The loss of the shard is known; gradients come next."""

    def gradient(self, parameter: int, address: int, count: int) -> None:
        """Takes a parameter's gradient in the shard under way, and is done with its memory."""

    def end_shard(self) -> None:
        """Ends the shard under way. Parameters that got no gradient have none in it."""

    def finish(
        self, buffers: Sequence[_Buffer], seconds: float
    ) -> tuple[float, list[int], tuple[str, str] | None]:
        """Ends the step, and writes the mean of every parameter to its buffer.

        Returns the mean loss; the parameters that had a gradient anywhere; the codec that was
        chosen after this step and why, if one was.
        """

class DeviceExchange(_Replica):
    """Replaces the gradients of a step by the means of all ranks, on a device."""

    @staticmethod
    def join(
        group: Group | None,
        number: int,
        parameters: Sequence[tuple[str, Sequence[int]]],
        codec: _CodecSettings,
        seconds: float,
    ) -> DeviceExchange | None:
        """Joins the replicas of a group with a device of each, by its number; None, on all ranks, where gradients
        have to go through the host."""

    @property
    def engine(self) -> str:
        """The name of the engine that moves encodings."""

    def begin(self) -> None:
        """Begins a step."""

    def bucket(self, gradients: Sequence[tuple[int, int, int]], used: int | None, stream: int) -> None:
        """Starts to exchange gradients, each by its number, address and count. `used` is the address of a float for
        each of them, 0 where this rank has none. The memory is left alone until the step is finished."""

    def finish(self, stream: int, seconds: float) -> list[int]:
        """Ends the step, and lets a stream wait for the means; the parameters that had a gradient anywhere."""

class DeviceSums(_Replica):
    """Makes the means over shards of what workers have added up, on their devices."""

    @staticmethod
    def join(
        group: Group | None,
        number: int | None,
        parameters: Sequence[tuple[str, Sequence[int]]],
        late: int,
        shards: int,
        buckets: tuple[int, int] | None,
        seconds: float,
    ) -> DeviceSums | None:
        """Joins the workers of a group with a device of each, by its number. The last of the parameters, so many, come
        after backward. None, on all ranks, where gradients have to go through the host."""

    @property
    def shards(self) -> tuple[int, int]:
        """The shards of this worker: the first, and the one after the last."""

    @property
    def engine(self) -> str:
        """The name of the engine that moves sums."""

    def plan(self) -> tuple[list[tuple[int, bool, int]], int]:
        """As `Sums.plan`."""

    def layout(self) -> tuple[list[tuple[int, int, list[tuple[int, int]]]], int]:
        """The buckets: the floats of a row; of those, the floats of parameters, behind which is for each in how many
        shards it had a gradient; its parameters, and where each begins. And where the loss is in the first."""

    def hold(self, memory: object) -> None:
        """Keeps the memory of all buckets alive until this is closed."""

    def begin(self) -> None:
        """Begins a step."""

    def bucket(self, number: int, address: int, streams: Sequence[int]) -> None:
        """A bucket is complete when streams come to where they are now; a row for each sum begins at an address. The
        memory is left alone until the step is finished."""

    def finish(self, stream: int, seconds: float) -> tuple[float, list[int], None]:
        """Ends the step, and lets a stream wait for the means, in the first rows; the mean loss, and the parameters
        that had a gradient anywhere."""

class Sums:
    """The sums of a worker's own gradients, which it hands over instead of those of every shard."""

    def __init__(self, synchronizer: Synchronizer) -> None:
        """From the next step on, the synchronizer takes sums."""

    def plan(self) -> tuple[list[tuple[int, bool, int]], int]:
        """What happens to the gradients of each shard: the slot they go into, whether they are added to what is there,
        and how many slots are merged after it; and how many sums remain, in the lowest slots."""

    def part(self, parameter: int, sum: int, at: int, address: int, count: int) -> None:
        """Takes a part of the next sum of a parameter, from an element on, and is done with its memory."""

    def end(self, parameter: int, sum: int, shards: int) -> None:
        """The next sum is complete: so many of its shards had a gradient. Of none, it is zero."""

    def finish(
        self, each: Callable[[int, int, int], object], seconds: float
    ) -> tuple[float, list[int], tuple[str, str] | None]:
        """As `Synchronizer.finish`, but calls `each` with a parameter, and the address and count of its mean."""

class Work:
    """An operation that was started."""

    def wait(self, seconds: float, stream: int | None = None) -> None:
        """Waits until the operation has ended, and raises its error.

        A call on a device may have ended on the host only: from then on the stream waits for its end.
        """

    def is_done(self) -> bool:
        """Whether the operation has ended, well or not; a call on a device, on the host."""

    def has_landed(self) -> bool:
        """Whether the operation has ended, on the device too if it is a call on one."""

    def error(self) -> Exception | None:
        """What went wrong, if the operation has ended and something did."""

    def then(self, callback: Callable[[], object]) -> None:
        """Calls `callback` when the operation has ended, on another thread."""

    def end_within(self, seconds: float) -> None:
        """Ends the group if the operation has not ended within `seconds` from now."""

    def source(self) -> int | None:
        """Whose message this is, if it is one that was received."""
