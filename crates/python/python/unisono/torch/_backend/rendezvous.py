"""How the ranks find each other: through torch's store, so that any launcher of torch will do."""

import os
import socket
from datetime import timedelta

import torch.distributed as dist

from unisono import _native
from unisono.errors import FormError

_TOKEN = "token"
_LEFT = "left"

# How long leaving the group of all waits for rank 0 to leave, and then for the server of the store to
# end.  Longer: where they stay, the others end later.  Shorter: on a busy machine, one that makes a
# new group at once may find the old server.
_UNTIL_LEFT = timedelta(seconds=1)
_UNTIL_ENDED = timedelta(seconds=0.1)


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


def part_after_rank_0(store, rank: int) -> None:
    """Lets rank 0 be the first to leave the group of all.

    The store's server is in its process, unless torchrun has it, and ends with its group.  A program
    that makes a new group at once would find the old server if it came back before.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return
    try:
        if rank == 0:
            store.set(_LEFT, b"yes")
        else:
            store.wait([_LEFT], _UNTIL_LEFT)
            store.wait(["nothing"], _UNTIL_ENDED)
    except RuntimeError:  # The server is gone, as it should be, or stays.
        pass


def _address_of(rank: int) -> str:
    return f"address/{rank}"


def own_address(store) -> str:
    """The address by which the others reach this rank: the one that leads to the store's server."""
    master = os.environ.get("MASTER_ADDR") or _host_of(store)
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


def _host_of(store) -> str | None:
    """Where a store's server is, as `init_method="tcp://…"` named it; None of other stores."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store.host if isinstance(store, dist.TCPStore) else None
