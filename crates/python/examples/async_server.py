"""Asynchronous training: workers that never wait for each other, with a parameter server.

    unisono run --servers 1 -n 2 -- python async_server.py
    unisono run -n 2 -- python async_server.py
    torchrun --nproc-per-node 2 async_server.py

The first has the weights in a process of their own, the others in that of rank 0.  Rank 1 is slow;
rank 0 does not wait for it, but takes over most of its steps.
"""

import os
import time

import torch
from torch import nn

from unisono.torch import ParameterServer

rank = int(os.environ["RANK"])
torch.manual_seed(rank)

model = nn.Sequential(nn.Linear(8, 128), nn.ReLU(), nn.Linear(128, 1))

# In the place of an optimizer.  The run ends after 300 steps times the workers, whichever makes them.
with ParameterServer(model, "adam:lr=0.01", level="async", steps=300) as server:
    while not server.finished:
        inputs = torch.randn(64, 8)
        loss = nn.functional.mse_loss(model(inputs), inputs.square().sum(dim=1, keepdim=True))
        loss.backward()
        time.sleep(0.01 if rank == 1 else 0.001)
        server.step(loss)
        if server.clock % 100 == 0:
            print(f"rank {rank}, step {server.clock}: loss {loss.item():.3f}", flush=True)
    server.pull()
    seen = server.statistics()
    print(
        f"rank {rank}: {seen.pushes} pushes, {seen.mean_staleness:.1f} clocks old on average, "
        f"at most {seen.max_lead} clocks ahead"
    )
