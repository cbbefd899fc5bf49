"""Averages for DDP, in one pass less."""

import torch
import torch.distributed as dist


def average(group: dist.ProcessGroup | None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A communication hook of DDP that divides where gradients are summed.

        replica = DistributedDataParallel(model, gradient_as_bucket_view=True)
        replica.register_comm_hook(None, unisono.torch.average)

    Without a hook, DDP divides every gradient by the number of ranks before it hands it over, in a pass over memory that
    takes its time from `backward`.  The mean is then rounded once, so it has the same bits only where the number of
    ranks is a power of two.  The first argument is the group, if it is not the one of all processes.
    """
    work = dist.all_reduce(bucket.buffer(), dist.ReduceOp.AVG, group, async_op=True)
    return work.get_future().then(_only_tensor)


def _only_tensor(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
    return done.value()[0]
