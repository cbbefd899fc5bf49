"""What was run, for `run.toml`."""

import statistics
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from unisono.torch._profile.hooks import models, trainable


def describe(run_dir: Path, backend: str, world: int, hosts: list[str]) -> dict:
    """Insight's `RunInfo`, without what only the records tell."""
    model = next(iter(models()), None)
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    inner = getattr(inner, "_orig_mod", inner)
    name = "unknown model" if inner is None else type(inner).__name__
    settings: dict = {"framework": f"torch {torch.__version__}", "backend": backend}
    if isinstance(model, DistributedDataParallel):
        settings["overlap"] = True
        settings["bucket_bytes"] = int(model.bucket_bytes_cap)
        settings["gradient_as_bucket_view"] = model.gradient_as_bucket_view
        settings["find_unused_parameters"] = model.find_unused_parameters
        settings["static_graph"] = model.static_graph
    if model is not None:
        settings["parameters"] = trainable(model)
    settings["threads"] = torch.get_num_threads()
    return {
        "name": run_dir.resolve().name or "run",
        "model": name,
        "data": "its own data",
        "strategy": _strategy(model, world),
        "transport": backend,
        "algorithm": "auto",
        "workers": world,
        "shards": world,
        "hosts": hosts,
        "settings": settings,
    }


def device_use(steps: list[dict]) -> str | None:
    """How a device spends a step, in the middle of all that were recorded; None if there is none."""
    with_device = [step for step in steps if "device" in step and step["end"] > step["begin"]]
    if not with_device:
        return None

    def share(part: str) -> str:
        shares = (step["device"][part] / (step["end"] - step["begin"]) for step in with_device)
        return f"{100 * statistics.median(shares):.0f} %"

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "a device"
    parts = f"computes {share('compute')} of a step, waits for communication and copies {share('exposed')}"
    return f"{name}: {parts}, is idle {share('idle')}"


def backend_name() -> str:
    """What carries the bytes: "gloo", "cpu:gloo,cuda:nccl"."""
    return dist.get_backend() if dist.is_available() and dist.is_initialized() else "none"


def _strategy(model: nn.Module | None, world: int) -> str:
    if world == 1:
        return "one worker"
    if isinstance(model, DistributedDataParallel):
        return "DDP"
    names = {base.__name__ for base in type(model).__mro__} if model is not None else set()
    return "FSDP" if names & {"FSDPModule", "FullyShardedDataParallel"} else "torch.distributed"
