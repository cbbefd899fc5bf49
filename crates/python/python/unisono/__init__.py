"""Unisono keeps the replicas of a model in step while many workers train it.

`unisono.torch` is the backend for PyTorch:

    torch.distributed.init_process_group("unisono")
"""

from unisono.errors import (
    Aborted,
    CheckpointError,
    Diverged,
    Error,
    FormError,
    InvalidCall,
    Mismatch,
    PeerLost,
    TimedOut,
    Unsupported,
)

__all__ = [
    "Aborted",
    "CheckpointError",
    "Diverged",
    "Error",
    "FormError",
    "InvalidCall",
    "Mismatch",
    "PeerLost",
    "TimedOut",
    "Unsupported",
]
