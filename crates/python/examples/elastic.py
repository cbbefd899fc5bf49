"""Training that goes on when workers are killed, and ends with the weights of an undisturbed run.

    unisono run --elastic 1:4 -n 4 -- python elastic.py
    unisono run -n 2 -- python elastic.py
    python elastic.py

Prints a hash of the weights: it is the same for all of these, also if you kill, stop or add workers of the first.
"""

import hashlib
import sys

import torch
import unisono.torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)  # Other numbers may add in another order.
torch.manual_seed(0)
epochs = int(sys.argv[1]) if len(sys.argv) > 1 else 3

inputs = torch.randn(2048, 16)
data = TensorDataset(inputs, inputs.square().sum(dim=1, keepdim=True))
sampler = unisono.torch.ShardedSampler(len(data), batch_size=64, shards=8)
loader = DataLoader(data, batch_sampler=sampler)

model = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 96)
step = unisono.torch.ElasticStep(model, optimizer, shards=8, scheduler=scheduler)


def loss(batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])


for batches in step.batches(loader, epochs):
    step(batches, loss)

weights = nn.utils.parameters_to_vector(model.parameters()).detach()
step.finish(f"weights {hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]}")
