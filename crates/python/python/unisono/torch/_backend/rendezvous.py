"""How the ranks find each other: through torch's store, so that any launcher of torch will do."""

import os
import socket

from unisono import _native
from unisono.errors import FormError

_TOKEN = "unisono/token"


def form(store, rank: int, size: int) -> _native.Group:
    """The engine's group of all ranks that share the store."""
    endpoint = _native.Endpoint(own_address())
    # The token goes through the store, which every rank trusts with the addresses anyway.
    if rank == 0:
        store.set(_TOKEN, _native.new_token())
    store.set(_address_of(rank), endpoint.address())
    token = bytes(store.get(_TOKEN))
    addresses = [bytes(store.get(_address_of(r))) for r in range(size)]
    return endpoint.open(rank, token, addresses)


def _address_of(rank: int) -> str:
    return f"unisono/address/{rank}"


def own_address() -> str:
    """The address by which the others reach this rank: the one that leads to the master."""
    master = os.environ.get("MASTER_ADDR")
    if not master:
        return "127.0.0.1"
    try:
        found = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # Sends nothing; the system chooses the route.
            return probe.getsockname()[0]
    except OSError as error:
        text = f"no way to MASTER_ADDR={master}: {error}; name a machine that can be reached"
        raise FormError(text) from error
