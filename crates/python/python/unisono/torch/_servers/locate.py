"""Where the servers of a run are, and which of its workers this process is.

Servers are processes that were started before, here or elsewhere, and whose addresses are known; or
they are threads inside workers, which tell each other their addresses through torch's store.
"""

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from unisono import _native
from unisono.errors import FormError, InvalidCall
from unisono.torch._backend.rendezvous import own_address

# Every ParameterServer of a program has keys of its own in the store: all workers make them in the
# same order.
_numbers = itertools.count()


@dataclass
class Servers:
    """The servers of a run, as one of its workers reaches them."""

    #: The worker's rank, and how many workers there are.
    rank: int
    world: int
    addresses: list[str]
    token: bytes
    #: Whether the servers are inside workers.
    is_inside: bool = False
    #: The one inside this worker.
    own: _native.InProcessServer | None = None
    #: By which the workers find each other, where there are others and servers are inside.
    store: dist.Store | None = None

    def meet(self) -> None:
        """Waits until all workers have joined and read, if servers are inside workers: such a worker
        would else take the others for gone, and end, before they have come."""
        if self.store is not None:
            self.store.set(f"joined/{self.rank}", b"yes")
            _get_all(self.store, "joined", self.world)

    def close(self) -> None:
        """Ends the server inside this worker."""
        if self.own is not None:
            self.own.close()


def find(servers: Sequence[str] | int | None, token: str | None) -> Servers:
    """Finds the servers, or starts the one that belongs into this worker."""
    rank, world, named, secret = _native.worker_from_env()
    if dist.is_available() and dist.is_initialized():
        rank, world = dist.get_rank(), dist.get_world_size()
    if servers is None:
        servers = named
    if isinstance(servers, str):
        servers = servers.split(",")
    if servers is not None and not isinstance(servers, int):
        if not servers:
            raise InvalidCall('servers is empty: name them, ["host:port", …], or leave it out')
        return Servers(rank, world, list(servers), _token(token, secret))
    return _inside(rank, world, 1 if servers is None else servers)


def warn_of_end(rank: int) -> None:
    """Says that a server ends while others need it."""
    logging.getLogger("unisono").warning(
        "rank %d ends, and with it the server in its process, while other workers need it; "
        "call leave() at the end of the program",
        rank,
    )


def _inside(rank: int, world: int, hosts: int) -> Servers:
    """Servers inside the first so many workers."""
    if not 1 <= hosts <= world:
        text = f"{hosts} servers cannot be inside {world} workers: give a number from 1 to {world}"
        raise InvalidCall(text)
    if world == 1:
        token = _native.new_token()
        own = _native.InProcessServer("127.0.0.1", 0, token)
        return Servers(rank, world, [own.address], token, True, own)
    store = dist.PrefixStore(f"unisono/server/{next(_numbers)}", _store(world))
    if rank == 0:
        store.set("token", _native.new_token())
    token = _get(store, "token", 0)
    own = None
    if rank < hosts:
        own = _native.InProcessServer(own_address(store), rank, token)
        store.set(f"address/{rank}", own.address)
    addresses = [address.decode() for address in _get_all(store, "address", hosts)]
    return Servers(rank, world, addresses, token, True, own, store)


def _token(text: str | None, secret: bytes | None) -> bytes:
    if not text:
        if secret is not None:
            return secret
        raise InvalidCall(
            "the token is missing: give servers and workers the same 64 hexadecimal digits, by "
            "UNISONO_TOKEN or token="
        )
    try:
        token = bytes.fromhex(text.strip())
    except ValueError:
        token = b""
    if len(token) != 32:
        raise InvalidCall("the token must be 64 hexadecimal digits, as of `openssl rand -hex 32`")
    return token


def _store(world: int) -> dist.Store:
    """That of torch's default group, or without one, that of the launcher."""
    if dist.is_initialized():
        return dist.distributed_c10d._get_default_store()
    try:
        return next(dist.rendezvous("env://"))[0]
    except (ValueError, RuntimeError) as error:
        raise FormError(
            f"the {world} workers cannot find each other: {error}; call init_process_group first, "
            "or start them by `unisono run` or torchrun"
        ) from error


def _get(store: dist.Store, key: str, rank: int) -> bytes:
    try:
        return bytes(store.get(key))
    except RuntimeError as error:
        text = f"rank {rank} did not make its ParameterServer in time: {error}"
        raise FormError(f"{text}; let all workers make it", peer=rank) from error


def _get_all(store: dist.Store, what: str, count: int) -> list[bytes]:
    return [_get(store, f"{what}/{rank}", rank) for rank in range(count)]
