"""Tensors as the engine wants them: contiguous memory of this machine, or of a GPU of it.

A tensor that is contiguous goes in and out as it is, and so do the tensors of a list, one per rank,
if all of them are.  Others are gathered into one before the call and spread after it.  What is left
to do after is a function without arguments, or None.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from unisono.errors import InvalidCall, Unsupported

Finish = Callable[[], object] | None

# Those that have memory, if they have elements.
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def byte_count(tensor: torch.Tensor) -> int:
    """Bytes of the elements."""
    return tensor.numel() * tensor.element_size()


def only(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The tensor of a list that must have one."""
    if len(tensors) != 1:
        raise InvalidCall(f"expected one tensor, got {len(tensors)}")
    return tensors[0]


def source_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's data, to be read."""
    _check_reachable(tensor)
    return _plain(tensor.detach()).contiguous()


def target_for(tensor: torch.Tensor, keep: bool) -> tuple[torch.Tensor, Finish]:
    """Memory to be written, and how it gets to the tensor; it begins with its data if `keep`."""
    _check_reachable(tensor)
    flat = _plain(tensor)
    if flat is tensor and tensor.is_contiguous():
        return tensor, None
    check_copy_to(tensor)
    if keep:
        flat = flat.detach().contiguous()
    else:
        flat = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    return flat, lambda: write(tensor, flat)


def write(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Fills a tensor, also one whose gradient is wanted: this is no part of a model."""
    with torch.no_grad():
        # From pinned memory of the host, in the order of the current stream; elsewhere it makes no difference.
        tensor.copy_(data, non_blocking=True)


@dataclass(frozen=True)
class Blocks:
    """One block of memory per rank: where it is, what keeps it there, and what is left to do."""

    #: Of all blocks if they follow each other; else a list of the address of each.
    address: int | list[int]
    keep: tuple[torch.Tensor, ...]
    finish: Finish = None


def sources_of(tensors: Sequence[torch.Tensor], like: torch.Tensor, size: int) -> Blocks:
    """The data of tensors, one per rank, to be read."""
    _check_list(tensors, like, size)
    if _can_lie_apart(tensors):
        return Blocks([tensor.data_ptr() for tensor in tensors], tuple(tensors))
    flat = torch.cat([source_of(tensor).reshape(-1) for tensor in tensors])
    return Blocks(flat.data_ptr(), (flat,))


def targets_for(tensors: Sequence[torch.Tensor], like: torch.Tensor, size: int) -> Blocks:
    """Memory to be written for tensors, one per rank."""
    _check_list(tensors, like, size)
    if _can_lie_apart(tensors):
        return Blocks([tensor.data_ptr() for tensor in tensors], tuple(tensors))
    for tensor in tensors:
        check_copy_to(tensor)
    flat = torch.empty((size, like.numel()), dtype=like.dtype, device=like.device)
    targets = tuple(tensors)

    def finish():
        for tensor, part in zip(targets, flat.unbind(0), strict=True):
            write(tensor, part.view(tensor.shape))

    return Blocks(flat.data_ptr(), (flat,), finish)


def _check_list(tensors: Sequence[torch.Tensor], like: torch.Tensor, size: int) -> None:
    if len(tensors) != size:
        raise InvalidCall(f"expected {size} tensors, one per rank, got {len(tensors)}")
    for tensor in tensors:
        expect("a tensor of the list", tensor, like.numel(), like.dtype)
        _check_reachable(tensor)


def _can_lie_apart(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the engine can use the tensors where they are."""
    first, size = tensors[0].data_ptr(), tensors[0].element_size()
    return all(
        tensor.is_contiguous()
        and _plain(tensor) is tensor
        # The engine counts in elements from one block to the other.
        and (tensor.data_ptr() - first) % size == 0
        for tensor in tensors
    )


def check_copy_to(tensor: torch.Tensor) -> None:
    """Refuses a tensor that nothing can be copied to: after the call, that would be too late."""
    _check_reachable(tensor)
    if torch._debug_has_internal_overlap(tensor) == 1:
        text = "elements of the tensor share memory, as of expand(): it cannot be filled; clone() it"
        raise InvalidCall(text)


def expect(what: str, tensor: torch.Tensor, count: int, dtype: torch.dtype) -> None:
    """Refuses a tensor of another size or type."""
    if tensor.numel() != count or tensor.dtype != dtype:
        raise InvalidCall(
            f"{what} has {tensor.numel()} elements of {tensor.dtype}, expected {count} of {dtype}:"
            " invalid tensor size or type"
        )


def block_bytes(tensor: torch.Tensor, splits: Sequence[int], size: int) -> list[int]:
    """Bytes of each rank's block, where torch counts rows; equal blocks without `splits`."""
    rows = tensor.shape[0] if tensor.dim() else 0
    if not splits:
        if rows % size:
            raise InvalidCall(f"{rows} rows do not divide into {size} equal blocks")
        splits = [rows // size] * size
    if len(splits) != size or sum(splits) != rows:
        raise InvalidCall("Tensor's dim 0 does not match the sum of the split sizes, one per rank")
    row = byte_count(tensor) // rows if rows else 0
    return [count * row for count in splits]


def _check_reachable(tensor: torch.Tensor) -> None:
    # The engine reads from the address: with memory of another kind, the process would crash.
    if not (tensor.is_cpu or tensor.is_cuda):
        text = f"unisono moves tensors of CPUs and CUDA devices, not of {tensor.device}; copy it first"
        raise Unsupported(text)
    if tensor.layout is not torch.strided:
        raise Unsupported(f"{tensor.layout} tensors are not supported here; use to_dense()")
    check_memory(tensor)


def check_memory(tensor: torch.Tensor) -> None:
    """Refuses a tensor that stands for others, such as a `DTensor`: its address leads nowhere."""
    if type(tensor) not in _PLAIN and tensor.numel() and tensor.data_ptr() == 0:
        kind = type(tensor).__name__
        raise Unsupported(f"a {kind} has no memory of its own; give this rank's part: to_local()")


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    # The memory of a conjugated or negated view holds the numbers it is a view of.
    if tensor.is_conj() or tensor.is_neg():
        return tensor.resolve_conj().resolve_neg()
    return tensor
