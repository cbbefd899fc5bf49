"""Training that synchronizes once in many steps, for slow links between the processes.

    unisono run -n 2 -- python diloco.py
    torchrun --nproc-per-node 2 diloco.py

Every process trains by itself, on data of its own.  Every 20 steps each half of the model is
synchronized, in 8 bits, while training goes on.
"""

import torch
import torch.distributed as dist
import unisono.torch
from torch import nn

dist.init_process_group("unisono")
rank = dist.get_rank()
torch.manual_seed(0)

model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU())
model.append(nn.Linear(256, 1))
inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
optimizer = unisono.torch.DiLoCo(inner, every=20, fragments=2, codec="int8")

data = torch.Generator().manual_seed(rank)
for step in range(1, 301):
    inputs = torch.randn(64, 32, generator=data)
    loss = nn.functional.mse_loss(model(inputs), inputs.abs().mean(dim=1, keepdim=True) * 10)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 100 == 0:
        mean = loss.detach()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        if rank == 0:
            print(f"step {step}: loss {mean.item():.3f}, sent {optimizer.sent_bytes / 1e6:.1f} MB")

optimizer.settle()
weights = nn.utils.parameters_to_vector(model.parameters()).detach()
everybodys = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
dist.all_gather(everybodys, weights)
assert all(torch.equal(weights, others) for others in everybodys)

dist.destroy_process_group()
