"""Averages for DDP, in one pass less."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from unisono.errors import InvalidCall


def average(model: DistributedDataParallel) -> None:
    """Lets DDP's gradients be divided where they are summed.

        replica = DistributedDataParallel(model, gradient_as_bucket_view=True)
        unisono.torch.average(replica)

    DDP by itself divides every gradient by the number of ranks before it hands it over, in a pass over memory that takes
    its time from `backward`.  Here the mean is rounded once, so it has the same bits as DDP's only where the number of ranks
    is a power of two.  This registers a communication hook, of which a model has one.
    """
    if not isinstance(model, DistributedDataParallel):
        raise InvalidCall("only gradients of a DistributedDataParallel are averaged; wrap the model first")
    model.register_comm_hook(model.process_group, _average)


def _average(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    work = dist.all_reduce(bucket.buffer(), dist.ReduceOp.AVG, group, async_op=True)
    return work.get_future().then(_only_tensor)


def _only_tensor(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
    return done.value()[0]
