"""How torch finds the backend, and what it does beside others."""

import os
import subprocess
import sys
import textwrap

import harness
import torch
import torch.distributed as dist
from tools import equal, is_old_torch

_CUDA = torch.device("cuda")


def case_found_by_name() -> None:
    """A program names the backend, and imports nothing of ours."""
    program = """
        import sys
        import torch
        import torch.distributed as dist

        assert "unisono.torch" not in sys.modules and "torch._dynamo" not in sys.modules
        for backend in ("unisono", "cpu:unisono,cuda:gloo", "cuda:gloo,cpu:unisono"):
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
            cpu = dist.group.WORLD._get_backend(torch.device("cpu"))
            assert type(cpu).__module__.startswith("unisono.torch"), cpu
            tensor = torch.ones(2)
            dist.all_reduce(tensor)
            dist.destroy_process_group()
        assert "torch._dynamo" not in sys.modules
    """
    environment = {**os.environ, "PYTHONPATH": ""}
    program = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program)]
    ended = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr


def case_beside_another_device() -> None:
    """Tensors of CPUs come to us, and those of other devices go to the other backend."""
    for backend in ("cpu:unisono,cuda:gloo", "cuda:gloo,cpu:unisono"):
        assert harness.run(_beside_another_device, 2, backend=backend) == [0, 0]


def case_devices_only() -> None:
    """Tensors of GPUs come to us, and those of CPUs go to the other backend."""
    for backend in ("cpu:gloo,cuda:unisono", "cuda:unisono,cpu:gloo"):
        assert harness.run(_devices_only, 2, backend=backend) == [0, 0]


def _devices_only(rank, world):
    for group in (dist.group.WORLD, dist.new_group()):
        assert {device.type for device in group._device_types} == {"cpu", "cuda"}
        assert isinstance(group._get_backend(torch.device("cpu")), dist.ProcessGroupGloo), group
        ours = group._get_backend(_CUDA)
        assert type(ours).__module__.startswith("unisono."), ours
        before = ours._sent()
        tensor = torch.ones(1000)
        dist.all_reduce(tensor, group=group)
        equal(tensor, torch.full((1000,), float(world)))
        assert ours._sent() == before
        dist.barrier(group)


def _beside_another_device(rank, world):
    pairs = [dist.group.WORLD, dist.new_group(), dist.new_group([0, 1])]
    names = [dist.get_process_group_ranks(group) for group in pairs]
    assert names == [[0, 1]] * 3, names
    for group in pairs:
        assert {device.type for device in group._device_types} == {"cpu", "cuda"}
        assert isinstance(group._get_backend(_CUDA), dist.ProcessGroupGloo), group
        ours = group._get_backend(torch.device("cpu"))
        assert type(ours).__module__.startswith("unisono."), ours
        before = ours._sent()
        tensor = torch.ones(1000)
        dist.all_reduce(tensor, group=group)
        equal(tensor, torch.full((1000,), float(world)))
        assert ours._sent() > before
        dist.barrier(group)
    if is_old_torch():
        _expect_passed_on(rank, world)
    # Torch does not list a group that is only a part of ours.
    count = len(dist.distributed_c10d._world.pg_map)
    assert count == 3, count
    dist.destroy_process_group(pairs[2])
    dist.barrier()


class _Counting:
    """Stands in for torch's group of the other backends, for there is no other device here."""

    def __init__(self):
        self.calls = []
        self._device_types = [_CUDA]

    def __getattr__(self, name):
        return lambda *arguments, **options: self.calls.append(name)


def _expect_passed_on(rank, world):
    """With tensors that are of no CPU."""
    group = dist.group.WORLD
    held, group._others = group._others, _Counting()
    theirs, group._theirs = group._theirs, {"cuda", "meta"}

    def there(*shape):
        return torch.ones(*shape, device="meta")

    lists = [there(2) for _ in range(world)]
    dist.all_reduce(there(2))
    dist.broadcast(there(2), 0)
    dist.reduce(there(2), 0)
    dist.all_gather(lists, there(2))
    dist.all_gather_into_tensor(there(2 * world), there(2))
    dist.reduce_scatter(there(2), lists)
    dist.reduce_scatter_tensor(there(2), there(2 * world))
    dist.all_to_all(lists, lists)
    dist.all_to_all_single(there(2 * world), there(2 * world))
    dist.gather(there(2), lists if rank == 0 else None, 0)
    dist.scatter(there(2), lists if rank == 0 else None, 0)
    dist.send(there(2), 1 - rank)
    dist.recv(there(2), 1 - rank)
    options = dist.BarrierOptions()
    options.device = torch.device("cuda", 0)
    group.barrier(options)
    calls = group._others.calls
    group._others, group._theirs = held, theirs
    assert calls == [
        "allreduce", "broadcast", "reduce", "allgather", "_allgather_base", "reduce_scatter",
        "_reduce_scatter_base", "alltoall", "alltoall_base", "gather", "scatter", "send", "recv",
        "barrier",
    ], calls
