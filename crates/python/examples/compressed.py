"""Data-parallel training whose gradients travel in fewer bytes.

    unisono run -n 2 -- python compressed.py
    torchrun --nproc-per-node 2 compressed.py [CODEC]

Trains one network with and without a codec, and shows what each has sent and learned.
"""

import sys

import torch
import torch.distributed as dist
import unisono.torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("unisono")
rank = dist.get_rank()


def train(codec: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU())
    model = DistributedDataParallel(nn.Sequential(*model, nn.Linear(256, 1)))
    compression = unisono.torch.compress(model, codec)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    data = torch.Generator().manual_seed(rank)
    for _ in range(200):
        inputs = torch.randn(64, 32, generator=data)
        loss = nn.functional.mse_loss(model(inputs), inputs.abs().mean(dim=1, keepdim=True) * 10)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    mean = loss.detach()
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    if rank == 0:
        print(
            f"{codec}: loss {mean.item():.3f}, sent {compression.sent_bytes / 1e6:.1f} MB,"
            f" {compression.wire_ratio():.1f} times less than an all-reduce"
        )


train("none")
train(sys.argv[1] if len(sys.argv) > 1 else "powersgd:2")
dist.destroy_process_group()
