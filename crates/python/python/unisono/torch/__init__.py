"""Unisono as a backend of `torch.distributed`.

    torch.distributed.init_process_group("unisono")

finds it by itself, among the installed packages.
"""

import torch.distributed as dist

from unisono.torch import _untraced
from unisono.torch._backend import holding as _holding  # Before its functions are marked.
from unisono.torch._backend.allocate import allocate
from unisono.torch._backend.group import Group, create
from unisono.torch._gradients.accumulate import accumulate
from unisono.torch._gradients.average import average
from unisono.torch._gradients.compress import Compression, compress
from unisono.torch._gradients.ddp import refuse_builtin_fp16
from unisono.torch._gradients.elastic import ElasticStep
from unisono.torch._gradients.local import DiLoCo, LocalSGD
from unisono.torch._gradients.sampler import ShardedSampler
from unisono.torch._gradients.sharded import ShardedStep
from unisono.torch._profile import Profile, profile
from unisono.torch._servers.server import ParameterServer, ServerStatistics

__all__ = [
    "Compression",
    "DiLoCo",
    "ElasticStep",
    "Group",
    "LocalSGD",
    "ParameterServer",
    "Profile",
    "ServerStatistics",
    "ShardedSampler",
    "ShardedStep",
    "accumulate",
    "allocate",
    "average",
    "compress",
    "profile",
    "register",
]


def register(name: str = "unisono") -> None:
    """Makes the backend known to torch under a name. Done already for `"unisono"`."""
    if name.upper() in dist.Backend._plugins:
        return
    # Torch attaches its flight recorder to groups whose C++ part has a backend, which ours has not;
    # the names in this set are left alone.
    getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set()).add(name)
    dist.Backend.register_backend(
        name,
        lambda options, _backend_options: create(name, options),
        extended_api=True,
        devices=["cpu", "cuda"],
    )


register()
refuse_builtin_fp16()
_untraced.mark(__name__)
