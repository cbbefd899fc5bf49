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


def form(store, rank: int, size: int) -> _native.Group:
    """The engine's group of all ranks that share the store, in which nothing may be yet."""
    endpoint = _native.Endpoint(own_address(store))
    # The token goes through the store, which every rank trusts with the addresses anyway.
    if rank == 0:
        store.set(_TOKEN, _native.new_token())
    store.set(_address_of(rank), endpoint.address())
    token = bytes(store.get(_TOKEN))
    addresses = [bytes(store.get(_address_of(r))) for r in range(size)]
    return endpoint.open(rank, token, addresses)


def subgroup(parent: _native.Group, ranks: list[int], store, timeout: timedelta) -> _native.Group:
    """The engine's group of some of the parent's ranks, which call this within the timeout.

    The engine wants its ranks to come together soon, and a program may keep one of them for long.
    So they wait for each other in the store, in which nothing may be yet, or until the parent fails.
    """
    rank = ranks.index(parent.rank)
    store.set(_here(rank), b"yes")
    deadline = time.monotonic() + timeout.total_seconds()
    for other in range(len(ranks)):
        while not parent.has_ended():
            try:
                store.wait([_here(other)], _LOOK)
                break
            except dist.DistNetworkError as error:
                raise FormError(f"the store is gone: {error}; a rank has ended") from error
            except RuntimeError as error:  # Not yet.
                if time.monotonic() > deadline:
                    text = f"rank {ranks[other]} did not make the group within {timeout}"
                    raise FormError(f"{text}; all of its ranks must, in the same order") from error
    return parent.subgroup(ranks)


def part(store, rank: int, size: int) -> None:
    """Lets rank 0 be the last to use the store, and the first to be gone.

    The store's server is in its process, unless torchrun has it, and ends with its group.  A program
    that makes a new group at once would find the old server if it came back before; and torch
    complains at length about a server that ends while somebody waits for an answer.
    """
    server = _server_of(store)
    if server is None or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
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
