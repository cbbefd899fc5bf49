"""How the ranks find each other: through torch's store, so that any launcher of torch will do."""

import os
import socket

import torch.distributed as dist

from unisono import _native
from unisono.errors import FormError

_TOKEN = "token"


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
