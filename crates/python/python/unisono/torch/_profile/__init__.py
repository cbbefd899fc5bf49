"""Insight for PyTorch: where the time of a training run goes, on any backend.

What is measured comes from two places.  `hooks` marks where the program is: forward, backward,
optimizer, waiting.  `tracer` lets torch's own profiler show the calls of the backend, whichever it
is, and the work of devices.  `steps` makes a record of every step of this rank out of both, without
knowing torch; `exchange` brings the ranks' records together, and the engine's Insight writes them,
as it does for `unisono train`.

Why torch's profiler: the reducer of DDP calls its backend from C++, where Python has no hook, but
every backend shows its calls to the profiler.  Why not the profiler alone: recording operators, to
see forward and backward in it, costs more than many steps do.
"""

import json
import math
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from unisono import _native
from unisono.errors import InvalidCall
from unisono.torch._profile import describe
from unisono.torch._profile.exchange import Exchange, Machine, Offset
from unisono.torch._profile.hooks import Hooks, Note
from unisono.torch._profile.steps import Step, sent, steps
from unisono.torch._profile.tracer import Tracer

# How many steps are recorded unless told otherwise.  More: more memory, and a longer pause when the
# recording ends.  Fewer: figures that rest on less.  A device reports every kernel.
_STEPS_OF_HOST = 500
_STEPS_OF_DEVICE = 50

# How long rank 0 waits for the others' records, if the program ended well and if it failed.
# Longer: a job with a lost rank ends later.  Shorter: a rank that has more to do at the end is left
# out.
_PATIENCE = timedelta(seconds=60)
_PATIENCE_AFTER_FAILURE = timedelta(seconds=5)


class Profile:
    """What `profile` returns."""

    def __init__(self, run_dir: str | Path, limit: int) -> None:
        self._run_dir = Path(run_dir)
        self._limit = limit
        self._hooks: Hooks | None = None
        self._tracer: Tracer | None = None
        self._steps: list[Step] = []
        self._notes: list[dict] = []
        self._start = 0
        # Whether another profiler ended the recording.
        self._lost = False
        self._remove: Callable[[], None] = lambda: None
        # (store, rank, world, backend) as soon as there is one, for a program may make its group
        # inside of the block, and destroy it there.
        self._group: tuple | None = None
        #: The verdict in one sentence, and the path of the report's page; rank 0 has them after the
        #: block.
        self.verdict: str | None = None
        self.report: str | None = None

    def step(self, loss: "float | torch.Tensor | None" = None, samples: int = 0) -> None:
        """Says that a step has ended, for programs in which no optimizer does.

        Once it is called, nothing else ends a step.  `loss` is this rank's, and `samples` how many
        it used; both can be left out.
        """
        if self._hooks is not None:
            loss = loss.detach() if isinstance(loss, torch.Tensor) else loss
            self._hooks.declare(loss, samples)
            self._find_group()
            if self._hooks.declared >= self._limit:
                self._stop()

    def __enter__(self) -> "Profile":
        self._find_group()
        occupied = [name for name in ("run.toml", "steps.jsonl") if (self._run_dir / name).exists()]
        if occupied:
            raise InvalidCall(
                f"{self._run_dir} already holds a run; choose another folder, or remove that one"
            )
        self._tracer = Tracer()
        self._hooks = Hooks(self._update_ended)
        self._remove = self._hooks.remove
        self._start = time.time_ns()
        return self

    def __exit__(self, kind, error, _traceback) -> None:
        self._stop()
        self._remove()
        try:
            self._write(failed=kind is not None)
        except Exception as problem:
            if kind is None:
                raise
            # What the program failed of matters more.
            warnings.warn(f"no report was written: {problem}", stacklevel=2)

    def _update_ended(self) -> None:
        self._find_group()
        # If the program calls `step`, those steps are counted.
        if self._hooks is not None and not self._hooks.declared:
            if self._hooks.updates >= self._limit:
                self._stop()

    def _find_group(self) -> None:
        if self._group is None and dist.is_available() and dist.is_initialized():
            store = dist.distributed_c10d._get_default_store()
            backend = describe.backend_name()
            self._group = store, dist.get_rank(), dist.get_world_size(), backend

    def _stop(self) -> None:
        """Ends the recording; the program goes on undisturbed."""
        if self._hooks is None or self._tracer is None:
            return
        hooks, tracer = self._hooks, self._tracer
        self._hooks = self._tracer = None
        marks, calls = hooks.stop(), tracer.stop()
        if calls is None:
            self._lost = True
            return
        self._steps = steps(marks + calls, self._start)
        declared = hooks.declared > 0
        counted = hooks.sent_after_declared if declared else hooks.sent_after_update
        world = self._group[2] if self._group else 1
        for step in self._steps:
            first, last = step.counted
            noted = [n for n in hooks.notes if first <= (n.declared if declared else n.updates) < last]
            total = counted[last] - counted[first]
            self._notes.append(
                {
                    "loss": _loss(noted, declared),
                    "samples": _samples(noted, declared),
                    "sent": total if total > 0 else sent(step.calls, world),
                    # Without a call, nothing was sent.
                    "counted": total > 0 or not step.calls,
                }
            )

    def _write(self, failed: bool) -> None:
        store, rank, world, backend = self._group or (None, 0, 1, "none")
        patience = _PATIENCE_AFTER_FAILURE if failed else _PATIENCE
        machine = Machine.here()
        machines, offset, exchange = {0: machine}, Offset(), None
        if world > 1:
            prefix = f"unisono-profile/{_number()}"
            exchange = Exchange(dist.PrefixStore(prefix, store), rank, world, patience)
            machines = exchange.meet(machine)
            offset = exchange.compare_clocks(machines)
        records = {
            "lost": self._lost,
            "error": offset.error,
            "overlap": any(step.overlaps for step in self._steps),
            "steps": [
                {**note, "times": step.record(offset.seconds)}
                for step, note in zip(self._steps, self._notes, strict=True)
            ],
        }
        collected = exchange.hand_in(records) if exchange else {0: records}
        if collected is not None:
            self._report(collected, machines, world, backend)

    def _report(self, collected: dict, machines: dict, world: int, backend: str) -> None:
        """Writes the folder, at rank 0, from the records of the ranks that handed some in."""
        ranks = sorted(collected)
        lost = [rank for rank in ranks if collected[rank]["lost"]]
        if lost:
            raise InvalidCall(
                f"no report was written: on ranks {lost} another profiler of torch ran inside of "
                "the block, and ended this one; use one at a time"
            )
        missing = sorted(set(range(world)) - set(ranks))
        complete = min(len(collected[rank]["steps"]) for rank in ranks)
        labels = _labels({rank: machines.get(rank, Machine("", "")) for rank in ranks})
        hosts = [labels[rank] for rank in ranks]
        if missing:
            warnings.warn(
                f"ranks {missing} handed in no records; the report is about the others",
                stacklevel=4,
            )
            # Insight numbers those that are there.
            hosts = [f"{labels[rank]} (rank {rank})" for rank in ranks]
        if not complete:
            warnings.warn(
                "no step was seen to end; if no optimizer of torch's ends them, call `step` of what "
                "the block is given",
                stacklevel=4,
            )
        info = describe.describe(self._run_dir, backend, len(ranks), hosts)
        info["clock_error"] = max(collected[rank]["error"] for rank in ranks)
        first = collected[0]["steps"]
        was_counted = bool(first) and all(step["counted"] for step in first)
        overlaps = any(collected[rank]["overlap"] for rank in ranks)
        info["settings"].setdefault("overlap", overlaps)
        info["settings"] |= {
            "recorded_steps": complete,
            "wire_bytes": "counted" if was_counted else "estimated",
            "queueing_known": torch.cuda.is_available(),
        }
        device = describe.device_use([step["times"] for rank in ranks for step in collected[rank]["steps"]])
        if device is not None:
            info["settings"]["device"] = device
        if missing:
            info["settings"]["missing_ranks"] = missing
        lines = [
            json.dumps(_record(number, [collected[rank]["steps"][number] for rank in ranks]))
            for number in range(complete)
        ]
        written = _native.write_report(str(self._run_dir), json.dumps(info), lines)
        self.verdict, self.report = written
        print(f"{self.verdict}\nreport: {self.report}", flush=True)


def profile(run_dir: str | Path, *, steps: int | None = None) -> Profile:
    """Measures the training inside of a `with` block, and leaves a report in a folder.

        with unisono.torch.profile("runs/before"):
            train()

    For every backend of `torch.distributed`, without one, and for any model: nothing in the
    program changes.  All ranks enter the block.  At its end rank 0 writes the folder, prints the
    verdict and where the page with the report is; `unisono report` shows it too.

    The first `steps` steps are recorded (500, or 50 where there is a GPU), and the rest of the
    program runs undisturbed.  A step ends when an optimizer's step does; a program without one
    calls `step` of what the block is given:

        with unisono.torch.profile("runs/before") as p:
            for batch in data:
                p.step(loss=train_on(batch), samples=len(batch))
    """
    if steps is not None and steps < 1:
        raise InvalidCall(f"steps is {steps}; record at least one")
    default = _STEPS_OF_DEVICE if torch.cuda.is_available() else _STEPS_OF_HOST
    return Profile(run_dir, steps or default)


def _record(number: int, ranks: list[dict]) -> dict:
    """Insight's `StepRecord`."""
    losses = [rank["loss"] for rank in ranks]
    known = None not in losses
    return {
        "step": number + 1,
        "loss": sum(losses) / len(losses) if known else None,
        "samples": sum(rank["samples"] for rank in ranks),
        "wire_bytes": sum(rank["sent"] for rank in ranks),
        "agreed": True,
        "ranks": [rank["times"] for rank in ranks],
    }


def _loss(notes: list[Note], declared: bool) -> float | None:
    """What the program said, or what the only backward pass of the step began with.

    Of several it is unknown whether the program means their sum or their mean.
    """
    losses = [note.loss for note in notes if note.loss is not None]
    if not losses or (len(losses) > 1 and not declared):
        return None
    # What the program passes to `step` comes last.
    loss = float(losses[-1])
    return loss if math.isfinite(loss) else None


def _samples(notes: list[Note], declared: bool) -> int:
    given = notes[-1].samples if declared and notes else 0
    return given or sum(note.samples for note in notes)


def _labels(machines: dict[int, Machine]) -> dict[int, str]:
    """The hosts' names. Namesakes, as containers are apt to be, are told apart by a number."""
    kernels: dict[str, list[str]] = {}
    for machine in machines.values():
        namesakes = kernels.setdefault(machine.host, [])
        if machine.kernel not in namesakes:
            namesakes.append(machine.kernel)

    def label(machine: Machine) -> str:
        namesakes = kernels[machine.host]
        number = namesakes.index(machine.kernel)
        return f"{machine.host} {number}" if len(namesakes) > 1 else machine.host

    return {rank: label(machine) for rank, machine in machines.items()}


_profiles = 0


def _number() -> int:
    """Which profile of this process this is; the same on all ranks."""
    global _profiles
    _profiles += 1
    return _profiles
