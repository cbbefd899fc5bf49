"""Sharded training gives the same bits on any number of processes.

A function `case_…` runs jobs of its own, one after the other, and compares what they come to.
"""

import hashlib
import multiprocessing
import os
import tempfile
from contextlib import nullcontext

import harness
import torch
import unisono.torch
from late_device import late_device
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}

CODECS = ("int8", "topk:10%", "powersgd:2")


def case_sharded_worlds() -> None:
    """The number of processes, whether it divides the shards or not, and buckets change no bit."""
    for name in OPTIMIZERS:
        hashes = {world: _hash_on(world, optimizer=name) for world in (0, 1, 2, 3, 4)}
        assert len(set(hashes.values())) == 1, (name, hashes)
    others = {
        "buckets of a byte": _hash_on(2, optimizer="adamw", buckets=(1, 1)),
        "one bucket": _hash_on(3, optimizer="adamw", buckets=(1 << 30, 1 << 30)),
    }
    assert set(others.values()) == {hashes[1]}, (others, hashes)
    # The hash can tell: another seed, and other shards, give other bits.
    assert _hash_on(0, optimizer="adamw", seed=1) != hashes[1]
    assert _hash_on(0, optimizer="adamw", shards=4) != hashes[1]


def case_sharded_on_device() -> None:
    """Nor does it matter that gradients are on a device."""
    here = _hash_on(0, optimizer="momentum")
    hashes = {world: _hash_on(world, optimizer="momentum", late=True) for world in (0, 1, 2, 3, 4)}
    assert set(hashes.values()) == {here}, (here, hashes)


def case_sharded_codecs() -> None:
    """Neither with a codec, whose residuals belong to shards."""
    for codec in CODECS:
        hashes = {world: _hash_on(world, optimizer="sgd", codec=codec) for world in (0, 2, 3)}
        assert len(set(hashes.values())) == 1, (codec, hashes)


def case_sharded_resume() -> None:
    """A run that is stopped in the middle of an epoch goes on with other processes."""
    for codec in (None, "topk:10%"):
        whole = _hash_on(0, optimizer="momentum", codec=codec)
        with tempfile.TemporaryDirectory() as directory:
            file = os.path.join(directory, "checkpoint")
            _hash_on(2, optimizer="momentum", codec=codec, stop=5, saved=file)
            resumed = _hash_on(3, optimizer="momentum", codec=codec, resume=file)
        assert resumed == whole, codec


def _hash_on(world: int, **options) -> str:
    """The hash of the weights after training; on 0 processes, in one without a group."""
    if world == 0:
        return _in_child(options)
    hashes = multiprocessing.get_context("fork").Manager().dict()
    codes = harness.run(_train_and_tell, world, options, hashes)
    assert codes == [0] * world, codes
    assert len(set(hashes.values())) == 1, "the replicas differ"
    return hashes[0]


def _in_child(options) -> str:
    # Not here: what forks must not have started threads.
    context = multiprocessing.get_context("fork")
    hashes = context.Manager().dict()
    process = context.Process(target=_train_alone, args=(options, hashes))
    process.start()
    process.join(harness.HUNG)
    assert process.exitcode == 0, process.exitcode
    return hashes[0]


def _train_alone(options, hashes):
    torch.set_num_threads(1)
    _train_and_tell(0, 1, options, hashes)


def _train_and_tell(rank, world, options, hashes):
    options = dict(options)
    with late_device() if options.pop("late", False) else nullcontext():
        hashes[rank] = train(rank, **options)


class Network(nn.Module):
    """Has what tends to depend on who computes what: dropout, statistics of batches, and a layer
    that only some shards use."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 64)
        self.norm = nn.BatchNorm1d(64)
        self.drop = nn.Dropout(0.2)
        self.rare = nn.Linear(64, 64)
        self.unused = nn.Linear(3, 3)
        self.last = nn.Linear(64, 4)

    def forward(self, inputs):
        hidden = self.drop(torch.tanh(self.norm(self.first(inputs))))
        if inputs[0, 0] > 0.8:
            hidden = hidden + self.rare(hidden)
        return self.last(hidden)


def train(
    rank,
    optimizer,
    codec=None,
    shards=8,
    seed=0,
    buckets=None,
    stop=None,
    saved=None,
    resume=None,
) -> str:
    """Two epochs of four steps, or a part of them; the hash of all that training changes."""
    generator = torch.Generator().manual_seed(4)
    inputs = torch.randn(130, 16, generator=generator)
    data = TensorDataset(inputs, inputs[:, :4].sin())
    torch.manual_seed(1 + 7 * rank)  # Weights become rank 0's.
    model = Network()
    inner = OPTIMIZERS[optimizer](model.parameters())
    sampler = unisono.torch.ShardedSampler(len(data), batch_size=32, shards=shards, seed=seed)
    loader = DataLoader(data, batch_sampler=sampler)
    step = unisono.torch.ShardedStep(
        model, inner, shards, codec=codec, seed=seed, buckets=buckets
    )
    if resume is not None:
        for part, kept in zip((model, inner, sampler, step), torch.load(resume), strict=True):
            part.load_state_dict(kept)
    losses = []
    for epoch in range(sampler.epoch, 2):
        sampler.set_epoch(epoch)
        for batches in sampler.steps(loader):
            losses.append(step(batches, lambda b: nn.functional.mse_loss(model(b[0]), b[1])))
            if step.steps == stop:
                parts = [part.state_dict() for part in (model, inner, sampler, step)]
                if rank == 0:
                    torch.save(parts, saved)
                return ""
    assert step.steps == 8 and model.unused.weight.grad is None
    everything = [*model.state_dict().values(), torch.tensor(losses[-1])]
    for kept in inner.state.values():
        everything += [value for value in kept.values() if isinstance(value, torch.Tensor)]
    digest = hashlib.sha256()
    for tensor in everything:
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()

