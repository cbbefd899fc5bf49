"""How the ranks find each other: through torch's store, so that any launcher of torch will do."""

import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from unisono import _native
from unisono.errors import FormError

_TOKEN = "token"

# How often, in seconds, a rank looks whether the others have come.  Longer: the group forms later.
# Shorter: the store's server has more to answer.
_PAUSE = 0.1

# After how many ranks a rank asks in one go.  More: more to answer.  Fewer: a large group forms later.
_AT_ONCE = 64

# How long to wait for news of a rank that may have died.  Longer: where none comes, the error comes
# later.  Shorter: on a busy machine, the error does not know which rank it was.
_NEWS = timedelta(seconds=2)

# How long the ranks wait for each other when they leave the group of all.  Longer: where one stays, the
# others end later.  Shorter: on a busy machine, one that makes a new group at once may find the old
# server of the store.
_LEAVING = timedelta(seconds=0.5)


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
    store.set(_key_of(rank), endpoint.address())
    missing = list(range(size))
    try:
        _await(store, missing, timeout)
    except RuntimeError as error:
        late = _suspects(store, missing)
        text = f"torch's store is gone ({error}); before, {_have_not_come(late)}"
        raise FormError(text, peer=late[0]) from error
    if missing:
        late = _suspects(store, missing)
        raise FormError(_have_not_come(late, f" within {timeout}"), peer=late[0])
    token = bytes(store.get(_TOKEN))
    addresses = [bytes(store.get(_key_of(r))) for r in range(size)]
    return endpoint.open(rank, token, addresses, _computing(size))


def _computing(size: int) -> int | None:
    """The threads with which this rank computes while calls of a group of so many ranks run.

    The engine divides the cores of a host among those of its ranks that are in the group.  Where others
    are not, it is told that none is idle.
    """
    if dist.is_initialized() and size < dist.get_world_size():
        return os.cpu_count()
    return torch.get_num_threads()


def _await(
    store,
    missing: list[int],
    timeout: timedelta,
    came: Callable[[int], None] = lambda rank: None,
    has_ended: Callable[[], bool] = lambda: False,
) -> None:
    """Waits until the ranks have set their keys, or it has ended; leaves in `missing` those that
    have not.

    It asks now and then: torch warns, at length, of each wait that runs out.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    pause = 0.001
    while not has_ended():
        # A few at a time: the store's server has all ranks to answer.
        for rank in missing[:_AT_ONCE]:
            if store.check([_key_of(rank)]):
                missing.remove(rank)
                came(rank)
        if not missing or time.monotonic() > deadline:
            return
        time.sleep(pause)
        pause = min(2 * pause, _PAUSE)


def _suspects(store, missing: list[int]) -> list[int]:
    """The ranks that keep the others waiting: rank 0, if it serves the store, itself waits for the
    rest."""
    serves = _server_of(store) is not None and not _has_agent()
    return [rank for rank in missing if rank] if serves and missing != [0] else missing


def _have_not_come(ranks: list[int], within: str = "") -> str:
    late = _listed(ranks)
    return (
        f"{late} did not call init_process_group{within}; see what {late} printed, check that every"
        " rank is started, and start the job again"
    )


def _listed(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks}"


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
    except FormError:
        raise
    except RuntimeError as error:
        # The process that served the store is gone, and if it was a rank, the parent learns which.
        deadline = time.monotonic() + _NEWS.total_seconds()
        while not parent.has_ended() and time.monotonic() < deadline:
            time.sleep(0.01)
        if not parent.has_ended():
            text = f"torch's store is gone ({error}); find out why its server ended"
            raise FormError(text, rank=parent.rank, operation="new_group") from error
    return parent.subgroup(ranks), store  # Says why, if the parent has failed.


def _meet(parent: _native.Group, ranks: list[int], store, timeout: timedelta) -> dist.Store:
    """Waits until all ranks have come to make this very group; the part of the store that it has."""
    store = own_part(store, parent.rank)
    members = str(ranks)
    store.set(_key_of(parent.rank), members)

    def failed(peer: int, text: str) -> FormError:
        text = (
            f"rank {parent.rank} in new_group({ranks}): {text}; let all ranks make the same groups and"
            " calls in the same order"
        )
        return FormError(text, rank=parent.rank, operation="new_group", peer=peer)

    def came(rank: int) -> None:
        theirs = bytes(store.get(_key_of(rank))).decode(errors="replace")
        if theirs != members:
            raise failed(rank, f"rank {rank} makes the group of ranks {theirs} in its place")

    missing = list(ranks)
    _await(store, missing, timeout, came, parent.has_ended)
    if missing and not parent.has_ended():
        text = f"{_listed(missing)} did not come to make the group within {timeout}"
        raise failed(missing[0], text)
    return store


def making_timeout(timeout: timedelta, parent: timedelta) -> timedelta:
    """How long the ranks of a new group wait for each other.

    Where the program gives no timeout torch passes its default, which is not what the program may
    have given for the group of all ranks: that holds then.
    """
    return parent if timeout == default_pg_timeout else timeout


def leave_store(store, rank: int, size: int) -> None:
    """Lets rank 0 be the last to use the store, and the first to leave.

    The store's server is in its process, unless torchrun has it, and ends with its group.  A program
    that makes a new group at once would find the old server if it came back before; and torch
    complains at length about a server that ends while a rank waits for an answer.
    """
    server = _server_of(store)
    if server is None or _has_agent():
        return
    try:
        if rank == 0:
            store.set("left", b"yes")
            store.wait([f"left/{other}" for other in range(1, size)], _LEAVING)
        elif _listens(server):
            store.wait(["left"], _LEAVING)
            store.set(f"left/{rank}", b"yes")
            deadline = time.monotonic() + _LEAVING.total_seconds() / 5
            while _listens(server) and time.monotonic() < deadline:
                time.sleep(0.01)
    except RuntimeError:  # A rank stays, or is gone already.
        pass


def _has_agent() -> bool:
    """Whether torchrun serves the store, and not rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _listens(server: tuple[str, int]) -> bool:
    try:
        socket.create_connection(server, timeout=_LEAVING.total_seconds()).close()
    except OSError:
        return False
    return True


def _key_of(rank: int) -> str:
    return f"rank/{rank}"


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
