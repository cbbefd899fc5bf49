"""Jobs with a parameter server in which a process dies, is interrupted, or is refused.

A function `case_server_…` runs a job of its own.  Two need the program `unisono`, which is looked
for in UNISONO_PROGRAM and in the PATH; without it they say SKIPPED.
"""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

import harness
import torch
import torch.distributed as dist
import unisono
from tools import equal, raises
from torch import nn
from unisono.torch import ParameterServer


def case_server_worker_killed() -> None:
    """A worker that is killed has left: the others go on without it, beyond where it held them."""
    codes = harness.run(_worker_killed, 3)
    assert codes == [0, 0, -signal.SIGKILL], codes


def _worker_killed(rank, world):
    bound, last = 2, 5
    model = _model()
    with ParameterServer(model, "sgd:lr=0.3", f"ssp:{bound}") as server:
        losses = []
        for step in range(60):
            if rank == 2 and step == last:
                os.kill(os.getpid(), signal.SIGKILL)
            losses.append(_learn(model, server, rank, step))
        statistics = server.statistics()
        # Held at first, by the one that was killed; it was let go at its death.
        assert server.clock == 60 > last + bound and statistics.max_lead <= bound, statistics
        assert losses[-1] < 0.1 * losses[0], losses


def case_server_killed() -> None:
    """Workers whose server is gone for good say so."""
    codes = harness.run(_server_killed, 2)
    assert codes == [-signal.SIGKILL, 0], codes


def _server_killed(rank, world):
    model = _model()
    server = ParameterServer(model, "sgd:lr=0.1", "bsp", patience=1.0)
    for step in range(3):
        _learn(model, server, rank, step)
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        store.wait(["ready"])
        os.kill(os.getpid(), signal.SIGKILL)
    store.set("ready", b"yes")
    error = raises(unisono.PeerLost, _learn, model, server, rank, 3)
    assert error.rank == rank and "server 0 at" in str(error), error
    server.leave()


def case_server_interrupted() -> None:
    """Ctrl-C ends a wait for servers, and with it the worker's part in the run."""
    codes = harness.run(_interrupted, 2)
    assert codes == [0, 0], codes


def _interrupted(rank, world):
    model = _model()
    store = dist.distributed_c10d._get_default_store()
    server = ParameterServer(model, "sgd:lr=0.1", "bsp")
    if rank == 1:
        store.wait(["interrupted"])
        server.leave()
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=_interrupt_main_thread).start()
    raises(KeyboardInterrupt, _learn, model, server, rank, 0)
    assert "interrupted" in str(raises(unisono.Error, server.pull))
    store.set("interrupted", b"yes")
    server.leave()


def _interrupt_main_thread() -> None:
    """Presses Ctrl-C when the main thread has waited in a step for a while."""
    main = threading.main_thread().ident
    while sys._current_frames()[main].f_code.co_name != "_wait":
        time.sleep(0.01)
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGINT)


def case_server_refusals() -> None:
    """A worker that does not belong to a run is told why."""
    codes = harness.run(_refusals, 1)
    assert codes == [0], codes


def _refusals(rank, world):
    model = _model()
    server = ParameterServer(model, "sgd:lr=0.1", "async")
    there = {"servers": server._servers.addresses, "token": server._servers.token.hex()}

    def join(level="async", **changes):
        return ParameterServer(model, "sgd:lr=0.1", level, **(there | {"patience": 1.0} | changes))

    error = raises(unisono.FormError, join, token=secrets.token_hex(32))
    assert "UNISONO_TOKEN" in str(error), error
    error = raises(unisono.FormError, join, servers=[f"127.0.0.1:{_free_port()}"])
    assert "cannot be reached" in str(error), error
    error = raises(unisono.Mismatch, join, "ssp:3")
    assert "same model, optimizer, level" in str(error), error
    _learn(model, server, rank, 0)

    later = join()
    assert later.clock == 1
    error = raises(unisono.Aborted, _learn, model, server, rank, 1)
    assert "later start" in str(error), error
    _learn(model, later, rank, 1)
    later.leave()
    server.leave()


def case_server_exit() -> None:
    """A program that does not leave does so at its end, and serves until the others are done."""
    with tempfile.TemporaryDirectory() as directory:
        arguments = [sys.executable, "-m", __name__, os.path.join(directory, "store")]
        ranks = [subprocess.Popen([*arguments, str(rank)]) for rank in range(2)]
        codes = [process.wait(harness.HUNG) for process in ranks]
        assert codes == [0, 0], codes


def _program(path: str, rank: int) -> None:
    store = dist.FileStore(path, 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    model = _model()
    server = ParameterServer(model, "sgd:lr=0.1", "async")
    loaded = torch.utils.data.DataLoader(list(range(8)), num_workers=2)
    equal(torch.cat(list(loaded)), torch.arange(8))  # The ends of forked processes disturb no rank.
    if rank == 1:
        store.wait(["done"])
    for step in range(3):
        _learn(model, server, rank, step)
    store.set("done", b"yes")


def case_server_forked() -> None:
    """A forked process that ends does not leave in the place of its parent."""
    codes = harness.run(_forked, 2)
    assert codes == [0, 0], codes


def _forked(rank, world):
    model = _model()
    server = ParameterServer(model, "sgd:lr=0.1", "async")
    child = os.fork()
    if child == 0:
        # A worker that leaves with a server inside waits until the others have left, too.
        server.leave()
        os._exit(0)
    deadline = time.monotonic() + harness.HUNG / 5
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    if ended[0] == 0:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ended == (child, 0), "the child waited for others to leave"
    dist.barrier()
    for step in range(3):
        _learn(model, server, rank, step)
    server.leave()


def case_server_without_groups() -> None:
    """Workers need no group of torch: a launcher's variables will do; one alone needs nothing."""
    for world in (1, 2):
        place = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}
        place["MASTER_PORT"] = str(_free_port())
        environments = [os.environ | place | {"RANK": str(rank)} for rank in range(world)]
        if world == 1:
            environments = [dict(os.environ)]
        command = [sys.executable, "-m", __name__]
        ranks = [subprocess.Popen(command, env=environment) for environment in environments]
        codes = [process.wait(harness.HUNG) for process in ranks]
        assert codes == [0] * world, codes


def _bare_program() -> None:
    model = _model()
    with ParameterServer(model, "sgd:lr=0.1", "bsp") as server:
        losses = [_learn(model, server, 0, step) for step in range(10)]
        assert server.clock == 10 and losses[-1] < losses[0], losses
    assert not dist.is_initialized()


def case_server_restarted() -> None:
    """A server that is killed and started again with its journal goes on, and nothing is lost."""
    _with_program(_restarted, journal=True)


def case_server_forgot() -> None:
    """A server that is started again without a journal has lost the weights, and workers say so."""
    _with_program(_forgot, journal=False)


def _with_program(job, journal: bool) -> None:
    program = os.environ.get("UNISONO_PROGRAM") or shutil.which("unisono")
    if program is None:
        print("SKIPPED: there is no program unisono; name it in UNISONO_PROGRAM", flush=True)
        return
    address, token = f"127.0.0.1:{_free_port()}", secrets.token_hex(32)
    os.environ.update(UNISONO_SERVERS=address, UNISONO_TOKEN=token)
    with tempfile.TemporaryDirectory() as directory:
        command = [program, "serve", "--listen", address]
        command += ["--journal", os.path.join(directory, "journal")] if journal else []
        server = subprocess.Popen(command)
        try:
            codes = harness.run(job, 2, command, server.pid)
            assert codes == [0, 0], codes
            assert server.wait(harness.HUNG) == -signal.SIGKILL, "no server was killed"
        finally:
            server.kill()
            del os.environ["UNISONO_SERVERS"], os.environ["UNISONO_TOKEN"]


def _restarted(rank, world, command, pid):
    model, reference = _model(), _model()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    restarted = None
    with ParameterServer(model, "momentum:lr=0.1", "bsp") as server:
        for step in range(20):
            if rank == 0 and step == 10:
                restarted = _restart(command, pid)
            _learn(model, server, rank, step)
            _loss(reference, rank, step).backward()
            for parameter in reference.parameters():
                dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
            optimizer.step()
            optimizer.zero_grad()
            equal(_vector(model), _vector(reference))
    dist.barrier()
    if restarted is not None:
        restarted.terminate()
        assert restarted.wait(harness.HUNG) == 0


def _forgot(rank, world, command, pid):
    model = _model()
    server = ParameterServer(model, "sgd:lr=0.1", "bsp")
    _learn(model, server, rank, 0)
    dist.barrier()
    restarted = None
    if rank == 0:
        restarted = _restart(command, pid)
    error = raises(unisono.PeerLost, _learn, model, server, rank, 1)
    assert "journal" in str(error), error
    dist.barrier()
    if restarted is not None:
        restarted.terminate()
        assert restarted.wait(harness.HUNG) == 0


def _restart(command: list[str], pid: int) -> subprocess.Popen:
    """Kills a server, and starts it again when its port is free."""
    os.kill(pid, signal.SIGKILL)
    host, port = os.environ["UNISONO_SERVERS"].split(":")
    while True:
        with socket.socket() as probe:
            if probe.connect_ex((host, int(port))) != 0:
                return subprocess.Popen(command)
        time.sleep(0.01)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def _loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(1000 * rank + step))
    return nn.functional.mse_loss(model(inputs), inputs.sum(dim=1, keepdim=True))


def _learn(model: nn.Module, server: ParameterServer, rank: int, step: int) -> float:
    loss = _loss(model, rank, step)
    loss.backward()
    server.step(loss)
    return loss.item()


def _vector(model: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _program(sys.argv[1], int(sys.argv[2]))
    else:
        _bare_program()
