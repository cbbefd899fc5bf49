"""Brings what all ranks measured together, through torch's Store.

The Store is there with every backend and for tensors of every device, and still works when a group
has failed.  All of it happens after the program: nothing travels while steps are measured.

1. Every rank names its machine.  Ranks of one running kernel have one clock.
2. Rank 0 names those whose clock is another, and they ask it what time it is, one after the other.
   The exchange with the shortest round trip decides, and half of it bounds the error: see
   `clock.rs` of Insight.
3. Every rank hands in its records, on the clock of rank 0.

A rank that does not come is left out after a while.
"""

import json
import socket
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

#: How many times a rank asks for the time.  More: a better chance of an undisturbed answer.
QUESTIONS = 20

#: What is assumed of clocks that could not be compared.  Larger: slow ranks go unnamed.  Smaller:
#: clocks that are wrong are taken for slow ranks.
UNKNOWN_CLOCK_ERROR = 0.1


@dataclass(frozen=True)
class Machine:
    """The machine of a rank."""

    host: str
    #: What makes its clock one: the running kernel.
    kernel: str

    @staticmethod
    def here() -> "Machine":
        boot = Path("/proc/sys/kernel/random/boot_id")
        kernel = boot.read_text().strip() if boot.exists() else ""
        return Machine(socket.gethostname(), kernel or socket.gethostname())


@dataclass(frozen=True)
class Offset:
    """How far a rank's clock is ahead of rank 0's, in seconds, and how wrong that may be."""

    seconds: float = 0.0
    error: float = 0.0


class Exchange:
    """The ranks of a job after their program, over a store of which nothing is known but that."""

    def __init__(self, store, rank: int, world: int, patience: timedelta) -> None:
        """Waits for the other ranks for `patience` at most, whenever it does."""
        self._store = store
        self._rank = rank
        self._world = world
        self._patience = patience

    def meet(self, machine: Machine) -> dict[int, Machine]:
        """The machines of the ranks; at rank 0, of all that came, elsewhere only of this one."""
        self._set(f"machine/{self._rank}", asdict(machine))
        if self._rank != 0:
            return {self._rank: machine}
        found = {rank: self._get(f"machine/{rank}") for rank in range(self._world)}
        return {rank: Machine(**there) for rank, there in found.items() if there is not None}

    def compare_clocks(
        self, machines: dict[int, Machine], now: Callable[[], float] = time.time
    ) -> Offset:
        """This rank's clock against rank 0's."""
        if self._rank == 0:
            own = machines[0].kernel
            far = [rank for rank, machine in machines.items() if machine.kernel != own]
            self._set("far", far)
            for rank in far:
                self._answer(rank, now)
            return Offset()
        far = self._get("far")
        if far is None:
            return Offset(error=UNKNOWN_CLOCK_ERROR)
        return self._ask(now) if self._rank in far else Offset()

    def hand_in(self, records) -> dict[int, object] | None:
        """The records of the ranks that handed them in; None at all but rank 0."""
        self._set(f"records/{self._rank}", records)
        if self._rank != 0:
            return None
        found = {rank: self._get(f"records/{rank}") for rank in range(self._world)}
        return {rank: theirs for rank, theirs in found.items() if theirs is not None}

    def _answer(self, rank: int, now: Callable[[], float]) -> None:
        for question in range(QUESTIONS):
            if self._get(f"ask/{rank}/{question}") is None:
                return
            self._set(f"answer/{rank}/{question}", now())

    def _ask(self, now: Callable[[], float]) -> Offset:
        best = Offset(error=UNKNOWN_CLOCK_ERROR)
        for question in range(QUESTIONS):
            # The answer to the first question may come late: rank 0 asks others before.
            sent = now()
            self._set(f"ask/{self._rank}/{question}", 0)
            remote = self._get(f"answer/{self._rank}/{question}")
            received = now()
            if remote is None:
                return best
            error = (received - sent) / 2
            if question == 0 or error < best.error:
                best = Offset((sent + received) / 2 - remote, error)
        return best

    def _set(self, key: str, value) -> None:
        self._store.set(key, zlib.compress(json.dumps(value).encode()))

    def _get(self, key: str):
        """The value, or None if it does not come."""
        try:
            self._store.wait([key], self._patience)
        except (RuntimeError, dist.DistStoreError):
            return None
        return json.loads(zlib.decompress(self._store.get(key)))
