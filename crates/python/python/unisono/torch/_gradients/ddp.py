"""What DDP does behind the back of others, and what it cannot do here."""

import gc
from collections.abc import Iterable

import torch
from torch.distributed import BuiltinCommHookType
from torch.nn.parallel import DistributedDataParallel

from unisono.errors import InvalidCall, Unsupported
from unisono.torch._backend.core import Core


def refuse_ddp(parameters: Iterable[torch.Tensor], consequence: str) -> None:
    """Refuses parameters of which DDP averages the gradients in every step.

    Its reducer hangs C++ hooks on the parameters, which Python cannot list.  But the reducer lives as
    long as the DDP module that has it, and Python knows all modules (but those that the program hid
    by `gc.freeze`).
    """
    own = {id(parameter) for parameter in parameters}
    if _is_in_ddp(own):
        gc.collect()  # A module to which the program has no reference any more may still be there.
        if _is_in_ddp(own):
            raise InvalidCall(
                "the parameters are those of a DistributedDataParallel, which averages gradients"
                f" in every step, so that {consequence}; do not wrap the model"
            )


def _is_in_ddp(parameters: set[int]) -> bool:
    replicas = [one for one in gc.get_objects() if issubclass(type(one), DistributedDataParallel)]
    return any(id(parameter) in parameters for one in replicas for parameter in one.parameters())


def refuse_builtin_fp16() -> None:
    """Makes DDP say at once that a built-in hook does not work, and what does.

    It is C++ that wants a future made in C++, and without this ends in an assertion in the middle
    of the first backward pass.
    """
    register = DistributedDataParallel._register_builtin_comm_hook

    def checked(self: DistributedDataParallel, comm_hook_type: BuiltinCommHookType) -> None:
        if comm_hook_type == BuiltinCommHookType.FP16_COMPRESS and _is_on_ours(self):
            raise Unsupported(
                "DDP's built-in FP16_COMPRESS does not work on unisono; use"
                ' unisono.torch.compress(model, "fp16"), or register_comm_hook with'
                " default_hooks.fp16_compress_hook"
            )
        register(self, comm_hook_type)

    DistributedDataParallel._register_builtin_comm_hook = checked


def _is_on_ours(model: DistributedDataParallel) -> bool:
    device = next(model.parameters()).device
    return isinstance(model.process_group._get_backend(device), Core)
