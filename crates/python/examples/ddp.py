"""Data-parallel training: a PyTorch program with one word changed.

    unisono run -n 2 -- python ddp.py
    torchrun --nproc-per-node 2 ddp.py

Teaches a small network a function of eight numbers.  All ranks end with equal weights.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("unisono")
torch.manual_seed(0)

inputs = torch.randn(4096, 8)
data = TensorDataset(inputs, inputs.square().sum(dim=1, keepdim=True))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=64, sampler=sampler)

model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 128), nn.ReLU(), nn.Linear(128, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

for epoch in range(5):
    sampler.set_epoch(epoch)
    total = torch.zeros(1)
    for batch, target in loader:
        loss = nn.functional.mse_loss(model(batch), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach()
    dist.all_reduce(total, op=dist.ReduceOp.AVG)
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: loss {total.item() / len(loader):.3f}")

weights = nn.utils.parameters_to_vector(model.parameters()).detach()
everybodys = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
dist.all_gather(everybodys, weights)
assert all(torch.equal(weights, others) for others in everybodys)

dist.destroy_process_group()
