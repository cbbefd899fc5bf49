"""How the ranks find each other: through torch's store, so that any launcher of torch will do."""

import os
import socket
import time
from datetime import timedelta

import torch.distributed as dist

from unisono import _native
from unisono.errors import FormError

_TOKEN = "token"

# How often a wait for the ranks of a sub-group looks whether the group that they are of has failed.
# Longer: it is noticed later.  Shorter: more of nothing.
_LOOK = timedelta(seconds=0.5)

# How often, in seconds, a rank looks whether the others have come.  Longer: the group forms later.
# Shorter: the store's server has more to answer.
_PAUSE = 0.1

# After how many ranks a rank asks in one go.  More: more to answer.  Fewer: a large group forms later.
_AT_ONCE = 64

# How long to wait for news of a rank that may have died.  Longer: where none comes, the error comes
# later.  Shorter: on a busy machine, the error does not know who it was.
_NEWS = timedelta(seconds=2)

# How long the ranks wait for each other when they leave the group of all.  Longer: where one stays, the
# others end later.  Shorter: on a busy machine, one that makes a new group at once may find the old
# server of the store.
_FAREWELL = timedelta(seconds=0.5)


def own_part(store, rank: int) -> dist.Store:
    """A part of the store in which no earlier group has left anything.

    A program may destroy a group and make another under the same name.  Each rank counts how often
    it has come, which is the same number on all of them.
    """
    times = store.add(f"unisono/times/{rank}", 1)
    return dist.PrefixStore(f"unisono/{times}", store)


def form(store, rank: int, size: int, timeout: timedelta) -> _native.Group:
    """The engine's group of all ranks that share the store, in which nothing may be yet."""
    endpoint = _native.Endpoint(own_address(store))
    # The token goes through the store, which every rank trusts with the addresses anyway.
    if rank == 0:
        store.set(_TOKEN, _native.new_token())
    store.set(_address_of(rank), endpoint.address())
    _await_all(store, size, timeout)
    token = bytes(store.get(_TOKEN))
    addresses = [bytes(store.get(_address_of(r))) for r in range(size)]
    return endpoint.open(rank, token, addresses)


def _await_all(store, size: int, timeout: timedelta) -> None:
    """Waits until every rank has come to make the group, or says who has not.

    It asks now and then: torch warns, at length, of each wait that runs out.
    """
    missing = list(range(size))
    deadline = time.monotonic() + timeout.total_seconds()
    pause = 0.001
    while True:
        try:
            # A few at a time: the store's server has all ranks to answer.
            for rank in missing[:_AT_ONCE]:
                if store.check([_address_of(rank)]):
                    missing.remove(rank)
        except RuntimeError as error:
            who = _suspects(store, missing)
            text = f"torch's store is gone ({error}); before, {_have_not_come(who)}"
            raise FormError(text, peer=who[0]) from error
        if not missing:
            return
        if time.monotonic() > deadline:
            who = _suspects(store, missing)
            raise FormError(_have_not_come(who, f" within {timeout}"), peer=who[0])
        time.sleep(pause)
        pause = min(2 * pause, _PAUSE)


def _suspects(store, missing: list[int]) -> list[int]:
    """Who keeps the others waiting: rank 0, where it serves the store, waits for the rest first."""
    serves = _server_of(store) is not None and not _has_agent()
    return [rank for rank in missing if rank] if serves and missing != [0] else missing


def _have_not_come(ranks: list[int], within: str = "") -> str:
    who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks}"
    return (
        f"{who} did not call init_process_group{within}; see what {who} printed, check that every"
        " rank is started, and start the job again"
    )


def subgroup(
    parent: _native.Group, ranks: list[int], store, timeout: timedelta
) -> tuple[_native.Group, dist.Store]:
    """The engine's group of some of the parent's ranks, which call this within the timeout; and its
    own part of the store.

    The engine wants its ranks to come together soon, and a program may keep one of them for long.
    So they wait for each other in the store, or until the parent fails.
    """
    try:
        if not parent.has_ended():
            store = _meet(parent, ranks, store, timeout)
    except dist.DistNetworkError as error:
        # Whoever served the store is gone, and if it was a rank, the parent learns which.
        deadline = time.monotonic() + _NEWS.total_seconds()
        while not parent.has_ended() and time.monotonic() < deadline:
            time.sleep(0.01)
        if not parent.has_ended():
            text = f"torch's store is gone ({error}); find out why its server ended"
            raise FormError(text, rank=parent.rank, operation="new_group") from error
    return parent.subgroup(ranks), store  # Says why, if the parent has failed.


def _meet(parent: _native.Group, ranks: list[int], store, timeout: timedelta) -> dist.Store:
    store = own_part(store, ranks.index(parent.rank))
    store.set(_here(ranks.index(parent.rank)), b"yes")
    deadline = time.monotonic() + timeout.total_seconds()
    for other in range(len(ranks)):
        while not parent.has_ended():
            try:
                store.wait([_here(other)], _LOOK)
                break
            except dist.DistNetworkError:
                raise
            except RuntimeError as error:  # Not yet.
                if time.monotonic() > deadline:
                    text = (
                        f"rank {ranks[other]} did not make the group within {timeout}; let all of"
                        " its ranks make the same groups in the same order"
                    )
                    fields = {"rank": parent.rank, "operation": "new_group"}
                    raise FormError(text, peer=ranks[other], **fields) from error
    return store


def part(store, rank: int, size: int) -> None:
    """Lets rank 0 be the last to use the store, and the first to be gone.

    The store's server is in its process, unless torchrun has it, and ends with its group.  A program
    that makes a new group at once would find the old server if it came back before; and torch
    complains at length about a server that ends while somebody waits for an answer.
    """
    server = _server_of(store)
    if server is None or _has_agent():
        return
    try:
        if rank == 0:
            store.set("left", b"yes")
            store.wait([f"left/{other}" for other in range(1, size)], _FAREWELL)
        elif _listens(server):
            store.wait(["left"], _FAREWELL)
            store.set(f"left/{rank}", b"yes")
            deadline = time.monotonic() + _FAREWELL.total_seconds() / 5
            while _listens(server) and time.monotonic() < deadline:
                time.sleep(0.01)
    except RuntimeError:  # Somebody stays, or is gone already.
        pass


def _has_agent() -> bool:
    """Whether torchrun serves the store, and not rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _listens(server: tuple[str, int]) -> bool:
    try:
        socket.create_connection(server, timeout=_FAREWELL.total_seconds()).close()
    except OSError:
        return False
    return True


def _here(rank: int) -> str:
    return f"here/{rank}"


def _address_of(rank: int) -> str:
    return f"address/{rank}"


def own_address(store) -> str:
    """The address by which the others reach this rank: the one that leads to the store's server."""
    server = _server_of(store)
    master = os.environ.get("MASTER_ADDR") or (server and server[0])
    if not master:
        return "127.0.0.1"
    try:
        found = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # Sends nothing; the system chooses the route.
            return probe.getsockname()[0]
    except OSError as error:
        text = f"no way to the master, {master}: {error}; name a machine that can be reached"
        raise FormError(text) from error


def _server_of(store) -> tuple[str, int] | None:
    """Where a store's server is, as `init_method="tcp://…"` named it; None of other stores."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return (store.host, store.port) if isinstance(store, dist.TCPStore) else None
