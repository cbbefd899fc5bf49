"""The engine's codes, and how torch's types and reductions map to them.

Data that is only moved travels as bytes, whatever its type.  What is reduced needs a type that the
engine can reduce:

- a bool is a byte of 0 or 1: sum and max are *or*, product and min are *and*;
- a complex number is a pair of floats, for which only sum and mean make sense;
- what the engine has no type for is refused, by name.

A premultiplied sum is a sum of what each rank has multiplied by a factor before.
"""

from collections.abc import Sequence

import torch
from torch.distributed import ReduceOp

from unisono.errors import InvalidCall

ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, REDUCE = range(5)
GATHER, SCATTER, ALL_TO_ALL = range(5, 8)
F32, F64, F16, BF16, I8, U8, I32, I64 = range(8)
SUM, MEAN, MIN, MAX, PRODUCT, AND, OR, XOR = range(8)

_DTYPES = {
    torch.float32: F32,
    torch.float64: F64,
    torch.float16: F16,
    torch.bfloat16: BF16,
    torch.int8: I8,
    torch.uint8: U8,
    torch.int32: I32,
    torch.int64: I64,
}

# By number: a ReduceOp compares equal to its members but hashes differently, and a comparison costs
# a call into C++.
_REDUCTIONS = {
    int(member): code
    for member, code in (
        (ReduceOp.SUM, SUM),
        (ReduceOp.AVG, MEAN),
        (ReduceOp.MIN, MIN),
        (ReduceOp.MAX, MAX),
        (ReduceOp.PRODUCT, PRODUCT),
        (ReduceOp.BAND, AND),
        (ReduceOp.BOR, OR),
        (ReduceOp.BXOR, XOR),
        (ReduceOp.PREMUL_SUM, SUM),
    )
}

_OF_BOOLS = {SUM: OR, MAX: OR, OR: OR, PRODUCT: AND, MIN: AND, AND: AND, XOR: XOR}


def reduction(op) -> int:
    """The engine's code of a torch reduction."""
    # The options of a call hold a `ReduceOp`, whose `op` is the member.
    member = getattr(op, "op", op)
    code = _REDUCTIONS.get(int(member))
    if code is None:
        raise InvalidCall(f"unisono does not reduce by {member}; scale the tensor, then sum")
    return code


def multiplied(tensors: Sequence[torch.Tensor], op) -> Sequence[torch.Tensor]:
    """What is to be reduced: the tensors as they are, or copies that are multiplied by a factor."""
    factor = factor_of(op)
    if factor is None:
        return tensors
    return [multiply(tensor.detach(), factor) for tensor in tensors]


def multiply(tensor: torch.Tensor, factor, into: torch.Tensor | None = None) -> torch.Tensor:
    """The product, in the type of the tensor."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        raise InvalidCall(f"a premultiplied sum is not defined for {tensor.dtype}")
    with torch.no_grad():
        return torch.mul(tensor, factor, out=into)


def factor_of(op) -> float | torch.Tensor | None:
    """The factor of a premultiplied sum."""
    if int(getattr(op, "op", op)) != int(ReduceOp.PREMUL_SUM):
        return None
    # There is no other way to it in Python than how the reduction is pickled.
    return op.__getstate__()[1]


def reducible(tensor: torch.Tensor, code: int) -> tuple[torch.Tensor, int, int]:
    """The tensor as something that the engine can reduce, its type, and the reduction."""
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is not None:
        if dtype <= BF16 and code >= AND:
            raise InvalidCall(f"bitwise reductions are not defined for {tensor.dtype}")
        return tensor, dtype, code
    if tensor.dtype is torch.bool:
        if code not in _OF_BOOLS:
            raise InvalidCall("the mean of bools is not defined; convert to a number type")
        return tensor, U8, _OF_BOOLS[code]
    if tensor.is_complex():
        if code not in (SUM, MEAN):
            raise InvalidCall(f"{tensor.dtype} can be summed and averaged, not more")
        pairs = torch.view_as_real(tensor)
        return pairs, _DTYPES[pairs.dtype], code
    raise InvalidCall(f"unisono does not reduce {tensor.dtype}; convert it first")
