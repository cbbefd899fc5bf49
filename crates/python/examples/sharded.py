"""Training that gives the same weights, to the bit, on any number of processes.

    python sharded.py
    unisono run -n 2 -- python sharded.py
    torchrun --nproc-per-node 3 sharded.py

Prints a hash of the weights: it is the same for all of these.
"""

import hashlib
import os

import torch
import torch.distributed as dist
import unisono.torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)  # Other numbers may add in another order.
if "RANK" in os.environ:
    dist.init_process_group("unisono")
torch.manual_seed(0)

inputs = torch.randn(2048, 16)
data = TensorDataset(inputs, inputs.square().sum(dim=1, keepdim=True))
sampler = unisono.torch.ShardedSampler(len(data), batch_size=64, shards=8)
loader = DataLoader(data, batch_sampler=sampler)

model = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
step = unisono.torch.ShardedStep(model, optimizer, shards=8)


def loss(batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])


for _ in range(3):
    for batches in sampler.steps(loader):
        mean = step(batches, loss)

if step.shards[0] == 0:
    weights = nn.utils.parameters_to_vector(model.parameters()).detach()
    print(f"loss {mean:.3f}, weights {hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]}")
if dist.is_initialized():
    dist.destroy_process_group()
