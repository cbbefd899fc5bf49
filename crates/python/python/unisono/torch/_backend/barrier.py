"""A barrier that says which ranks did not come.

It goes through torch's store, where waiting can end without spoiling the group: rank 0 collects a
key of every rank and answers with one.  The texts are those that programs written for Gloo look
for.
"""

import time
from datetime import timedelta

from unisono.errors import TimedOut

_GO = b"go"


def monitored(
    store, key: str, rank: int, size: int, timeout: timedelta, wait_for_all: bool
) -> None:
    """Waits for all ranks; `key` is a name that no barrier had before."""
    if rank == 0:
        _collect(store, key, size, timeout, wait_for_all)
    else:
        _appear(store, key, rank, timeout)


def _appear(store, key: str, rank: int, timeout: timedelta) -> None:
    store.set(f"{key}/{rank}", b"here")
    answer = f"{key}/answer"
    try:
        # Rank 0 may answer when its own time has passed.
        store.wait([answer], timeout + timedelta(seconds=1))
        verdict = bytes(store.get(answer))
    except RuntimeError as error:
        verdict = str(error).encode()
    if verdict != _GO:
        raise TimedOut(
            f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting"
            f" for send/recv from rank 0: {verdict.decode(errors='replace')}",
            rank=rank,
            operation="monitored barrier",
            peer=0,
        )


def _collect(store, key: str, size: int, timeout: timedelta, wait_for_all: bool) -> None:
    deadline = time.monotonic() + timeout.total_seconds()
    milliseconds = int(timeout.total_seconds() * 1000)
    missing = []
    for rank in range(1, size):
        left = deadline - time.monotonic()
        if left <= 0 and not missing:
            text = f"Rank 0 timed out in monitoredBarrier after {milliseconds} ms."
            _refuse(store, key, text, [])
        try:
            # A rank that was late left no time for the others, but they may be here already.
            store.wait([f"{key}/{rank}"], timedelta(seconds=max(left, 0.001)))
        except RuntimeError:
            missing.append(rank)
            if not wait_for_all:
                break
    if missing:
        late = f"Ranks {', '.join(map(str, missing))}" if wait_for_all else f"Rank {missing[0]}"
        text = f"{late} failed to pass monitoredBarrier in {milliseconds} ms"
        _refuse(store, key, text, missing)
    store.set(f"{key}/answer", _GO)


def _refuse(store, key: str, text: str, missing: list[int]) -> None:
    store.set(f"{key}/answer", text.encode())
    peer = missing[0] if missing else None
    raise TimedOut(text, rank=0, operation="monitored barrier", peer=peer, missing=missing)
