"""Training a model that is spread over the processes: FSDP2, with one word changed.

    unisono run -n 2 -- python fsdp2.py
    torchrun --nproc-per-node 2 fsdp2.py

Every process holds a part of each layer, and gathers a layer when it is needed.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("unisono")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)

model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU())
model.append(nn.Linear(256, 1))
mesh = init_device_mesh("cpu", (world,))
for layer in model:
    if isinstance(layer, nn.Linear):
        fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

data = torch.Generator().manual_seed(rank)
for step in range(1, 101):
    inputs = torch.randn(64, 32, generator=data)
    loss = nn.functional.mse_loss(model(inputs), inputs.abs().mean(dim=1, keepdim=True) * 10)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0:
        mean = loss.detach()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        if rank == 0:
            print(f"step {step}: loss {mean.item():.3f}")

whole = sum(parameter.numel() for parameter in model.parameters())
held = sum(parameter.to_local().numel() for parameter in model.parameters())
if rank == 0:
    print(f"rank 0 holds {held} of {whole} weights")
dist.destroy_process_group()
