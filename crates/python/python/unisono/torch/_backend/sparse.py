"""The sum of sparse tensors, for DDP with sparse gradients.

The ranks have different numbers of entries.  They tell each other how many, then each in turn sends
its entries to all, and every rank adds them up in the order of the ranks: equal bits on all.
"""

import torch

from unisono.errors import InvalidCall
from unisono.torch._backend.codes import SUM, reduction
from unisono.torch._backend.tensors import write
from unisono.torch._backend.work import Work


class _SyncOptions:
    """Options of a call that is waited for."""

    asyncOp = False

    def __init__(self, root: int = -1):
        self.rootRank = root


def all_reduce(group, tensor: torch.Tensor, op) -> Work:
    """Sums the tensor over the ranks, and waits for it."""
    if reduction(op) != SUM:
        raise InvalidCall("sparse tensors can be summed, not more; use to_dense()")
    own = tensor.coalesce()
    indices, values = own.indices().contiguous(), own.values().contiguous()
    counts = torch.empty(group.size(), dtype=torch.int64)
    _wait(group.all_gather_single(counts, torch.tensor([values.shape[0]]), _SyncOptions()))
    total = None
    for rank, entries in enumerate(counts.tolist()):
        where, what = indices, values
        if rank != group.rank():
            where = indices.new_empty(indices.shape[0], entries)
            what = values.new_empty(entries, *values.shape[1:])
        for part in (where, what):
            _wait(group.broadcast([part], _SyncOptions(rank)))
        part = torch.sparse_coo_tensor(where, what, own.shape, check_invariants=False)
        total = part if total is None else total + part
    total = total.coalesce()
    write(tensor, total)
    return Work(None, [total])


def _wait(work: Work | None) -> None:
    """Under torch's profiler, and beside another backend, a call that is waited for has a work."""
    if work is not None:
        work.wait()
