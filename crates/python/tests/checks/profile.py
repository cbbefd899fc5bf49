"""Reports of what a program spends its time on, on any backend.

No time is required of a machine that may be busy: where a verdict is, what it is about is made
many times larger than all the rest.
"""

import json
import shutil
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import unisono.torch
from tools import equal, raises, tomllib
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


def check_profile_of_ddp(rank, world):
    model = DistributedDataParallel(_layers(6, 512), bucket_cap_mb=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = _profiled(lambda: [_step(model, optimizer, torch.ones(4, 512)) for _ in range(8)])
    # Afterwards, nothing is left of it.
    _step(model, optimizer, torch.ones(4, 512))
    if rank != 0:
        return
    assert run.summary["steps"] == len(run.steps) == 8, run.summary
    assert run.info["workers"] == len(run.info["hosts"]) == world
    settings = run.info["settings"]
    assert (settings["backend"], settings["overlap"]) == (dist.get_backend(), True), settings
    assert run.info["model"] == "Sequential" and settings["bucket_bytes"] == 2 << 20, run.info
    gradients = 4 * sum(parameter.numel() for parameter in model.parameters())
    for step in run.steps:
        assert step["samples"] == 4 * world and step["loss"] is not None, step
        assert step["wire_bytes"] > 0, step
        assert len(step["ranks"]) == world, step
        for times in step["ranks"]:
            assert sum(bucket["bytes"] for bucket in times["buckets"]) >= gradients, times
            assert 0 < times["backward"] <= times["compute"], times
    # The first step of DDP has one bucket, from which it learns the order.
    assert all(len(times["buckets"]) > 1 for times in run.steps[-1]["ranks"]), run.steps[-1]
    _adds_up(run)


def check_profile_names_a_straggler(rank, world):
    model = DistributedDataParallel(_layers(2, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def train():
        for _ in range(10):
            if rank == 1:
                time.sleep(0.2)
            _step(model, optimizer, torch.ones(4, 64))

    run = _profiled(train)
    if rank == 0:
        assert run.summary["straggler_rank"] == 1, run.summary
        assert run.profile.verdict.startswith("Rank 1 on "), run.profile.verdict
        _adds_up(run)


def check_profile_tells_computing_from_synchronizing(rank, world):
    """16 MB of gradients and next to no work; then much work and next to no gradients."""
    model = DistributedDataParallel(nn.Embedding(64, 65536, sparse=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    everything = torch.zeros(16 << 20, dtype=torch.uint8)

    def synchronize():
        for _ in range(8):
            optimizer.zero_grad()
            model(torch.tensor([rank])).sum().backward()
            for _ in range(8):
                dist.all_reduce(everything)
            optimizer.step()

    run = _profiled(synchronize)
    if rank == 0:
        assert run.profile.verdict.startswith("Synchronization is the bottleneck"), run.text
        assert run.summary["exposed_ms"] > run.summary["compute_ms"], run.summary
        _adds_up(run)

    small = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(small.parameters(), lr=0.01)

    def compute():
        for _ in range(8):
            batch = small(torch.ones(4, 4))
            time.sleep(0.1)  # As long on every rank, however busy the machine is.
            batch.sum().backward()
            optimizer.step()

    run = _profiled(compute)
    if rank == 0:
        # Another rank may be, on a busy machine.
        assert not run.profile.verdict.startswith("Synchronization is the"), run.text
        assert run.summary["compute_ms"] > 99, run.summary
        _adds_up(run)


def check_profile_of_plain_calls(rank, world):
    """No DDP: gradients are accumulated, and averaged after the backward pass."""
    model = _layers(3, 64)
    optimizer = torch.optim.Adam(model.parameters())

    def train():
        for _ in range(6):
            for _ in range(3):
                model(torch.ones(2, 64)).sum().backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
        # Messages are seen too, behind the last step.
        number = torch.full((3,), float(rank))
        messages = [dist.isend(number, (rank + 1) % world), dist.irecv(torch.empty(3), (rank - 1) % world)]
        for message in messages:
            message.wait()

    run = _profiled(train)
    if rank == 0:
        assert len(run.steps) == 6, run.summary
        assert run.info["settings"]["overlap"] is False, run.info
        for step in run.steps:
            # Of three backward passes it is unknown which has the loss.
            assert step["samples"] == 6 * world and step["loss"] is None, step
            for times in step["ranks"]:
                assert len(times["buckets"]) == 6, times
                assert times["reduced"] > times["computed"], times
                assert times["buckets"][0]["ready"] >= times["computed"] - 1e-4, times
        _adds_up(run)


def check_profile_of_fsdp(rank, world):
    """Parameters are gathered in the forward pass, gradients scattered in the backward pass."""
    model = _layers(3, 64)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = _profiled(lambda: [_step(model, optimizer, torch.ones(4, 64)) for _ in range(6)])
    if rank == 0:
        assert len(run.steps) == 6 and run.info["strategy"] == "FSDP", run.info
        assert all(len(times["buckets"]) >= 6 for step in run.steps for times in step["ranks"])
        _adds_up(run)


def check_profile_of_other_exchanges(rank, world):
    """Codecs, local steps, shards and servers exchange without the backend, and are seen."""
    for begin, exchanges in (
        (_with_codec, [True] * 6),
        (_with_local_steps, [False, True] * 3),
        (_with_shards, [True] * 6),
        (_with_servers, [True] * 6),
    ):
        step, end = begin()
        run = _profiled(lambda: [step() for _ in range(6)])
        end()
        if rank != 0:
            continue
        settings = run.info["settings"]
        assert len(run.steps) == 6 and settings["wire_bytes"] == "counted", (begin, settings)
        assert [one["wire_bytes"] > 0 for one in run.steps] == exchanges, (begin, run.steps)
        for one, exchanged in zip(run.steps, exchanges, strict=True):
            seen = [sum(bucket["bytes"] for bucket in times["buckets"]) for times in one["ranks"]]
            assert all((size > 0) == exchanged for size in seen), (begin, one)
        _adds_up(run)


def _with_codec():
    model = DistributedDataParallel(_layers(3, 64))
    compression = unisono.torch.compress(model, "int8")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return lambda: _step(model, optimizer, torch.ones(4, 64)), lambda: compression


def _with_local_steps():
    model = _layers(3, 64)
    optimizer = unisono.torch.LocalSGD(torch.optim.SGD(model.parameters(), lr=0.01), every=2)
    return lambda: _step(model, optimizer, torch.ones(4, 64)), optimizer.settle


def _with_shards():
    model = _layers(3, 64)
    step = unisono.torch.ShardedStep(model, torch.optim.SGD(model.parameters(), lr=0.01))
    batches = [torch.ones(4, 64)] * len(step.shards)
    return lambda: step(batches, lambda batch: model(batch).square().mean()), step.close


def _with_servers():
    model = _layers(3, 64)
    server = unisono.torch.ParameterServer(model, "sgd:lr=0.01", "bsp")

    def step():
        model(torch.ones(4, 64)).square().mean().backward()
        server.step()

    return step, server.leave


def check_profile_of_said_steps(rank, world):
    """Two optimizers are one cycle, unless the program says where its steps end."""
    models = [_layers(1, 16), _layers(1, 16)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]

    def cycle():
        for model, optimizer in zip(models, optimizers, strict=True):
            _step(model, optimizer, torch.ones(2, 16))

    run = _profiled(lambda: [cycle() for _ in range(6)])
    if rank == 0:
        assert len(run.steps) == 6, run.summary

    def said(profile):
        for number in range(4):
            cycle()
            cycle()
            profile.step(loss=torch.tensor(float(number + rank)), samples=5)

    run = _profiled(said, takes_profile=True)
    if rank == 0:
        assert [step["samples"] for step in run.steps] == [5 * world] * 4, run.steps
        losses = [number + (world - 1) / 2 for number in range(4)]
        equal([step["loss"] for step in run.steps], losses)


def check_profile_stops_by_itself(rank, world):
    model = DistributedDataParallel(_layers(1, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = _profiled(
        lambda: [_step(model, optimizer, torch.ones(2, 16)) for _ in range(9)], steps=5
    )
    if rank == 0:
        assert len(run.steps) == 5, run.summary


def check_profile_of_a_program_that_fails(rank, world):
    """What was measured is reported, and the exception goes on."""
    model = DistributedDataParallel(_layers(1, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def train():
        for _ in range(6):
            _step(model, optimizer, torch.ones(2, 16))
        raise KeyError("nothing of ours")

    folder = _shared_folder()
    raises(KeyError, _within, unisono.torch.profile(folder), train)
    if rank == 0:
        assert _Run(folder).summary["steps"] == 6
        # A run is not written over.
        error = raises(unisono.InvalidCall, _within, unisono.torch.profile(folder), train)
        assert "already holds a run" in str(error), error
        shutil.rmtree(folder)
    raises(unisono.InvalidCall, unisono.torch.profile, folder, steps=0)
    dist.barrier()


def _layers(count: int, width: int) -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(count)])


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()


class _Run:
    """A folder that was written, read as a program would."""

    def __init__(self, folder: Path, profile=None):
        self.profile = profile
        self.info = tomllib.loads((folder / "run.toml").read_text())
        self.summary = json.loads((folder / "summary.json").read_text())
        lines = (folder / "steps.jsonl").read_text().splitlines()
        self.steps = [json.loads(line) for line in lines]
        self.text = f"{profile and profile.verdict} {self.summary}"
        assert (folder / "report.html").stat().st_size > 1000
        assert json.loads((folder / "trace.json").read_text())["traceEvents"] is not None


def _profiled(train, takes_profile: bool = False, **options) -> _Run | None:
    folder = _shared_folder()
    with unisono.torch.profile(folder, **options) as profile:
        train(*[profile] * takes_profile)
    if dist.get_rank() != 0:
        return None
    run = _Run(folder, profile)
    assert profile.report == str(folder / "report.html"), profile.report
    shutil.rmtree(folder)
    return run


def _within(profile, train) -> None:
    with profile:
        train()


def _shared_folder() -> Path:
    """A folder that is not there yet, the same on all ranks."""
    names = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(names, src=0)
    return Path(names[0]) / "run"


def _adds_up(run: _Run) -> None:
    """The parts are the step, and no rank waited for communication that was not there."""
    summary = run.summary
    parts = sum(summary[f"{part}_ms"] for part in ("compute", "exposed", "straggler", "rest"))
    assert abs(parts - summary["step_ms"]) <= 0.03 * summary["step_ms"], summary
    measured = sorted(
        sum(times["end"] - times["begin"] for times in step["ranks"]) / len(step["ranks"]) * 1e3
        for step in run.steps
    )
    assert measured[0] <= summary["step_ms"] <= measured[-1], (measured, summary)
    assert summary["exposed_ms"] <= summary["comm_ms"] * 1.0001, summary
    for step in run.steps:
        for times in step["ranks"]:
            instants = [times[name] for name in ("begin", "computed", "reduced", "end")]
            assert instants == sorted(instants), times
            assert times["compute"] <= times["computed"] - times["begin"] + 1e-6, times
