"""A benchmark rank of a backend of torch.distributed; ../README.md describes the protocol.

    RANK=R WORLD_SIZE=N python pytorch.py DIR NAME [BACKEND [DEVICE]]

The backend is Gloo unless another is named, and the device the CPU. On `cuda`, a rank has the GPU of its
number modulo their number, and an operation has ended when the GPU has done it.
"""

import json
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

# A sample is as many operations as it takes to fill SAMPLE_US, LARGEST_BATCH at most: longer
# samples would average away what a median is for, shorter ones would time the clock.
SAMPLE_US = 20.0
LARGEST_BATCH = 16

# All-reduce in place multiplies the values by `world` each time: from START on, they may grow
# by GROWTH_BITS before they leave the range of f32.
START = 2.0**-100
GROWTH_BITS = 192


def pattern(count):
    return (1 + torch.arange(count) % 251).to(torch.float32)


def finish():
    """Waits until the device has done what was asked of it: the CPU has."""


class Collective:
    """One operation with its buffers: `input` stays, `work` is what the operation writes."""

    def __init__(self, count, block):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.count, self.block = count, block
        self.total = START * self.world * (self.world + 1) / 2

    def refill(self):
        self.work.fill_(-1.0)

    def is_right(self, repeats, tolerance):
        """Whether `work` holds the result of one operation and `repeats` more."""
        want = self.expected(repeats)
        return bool(torch.all((self.work - want).abs() <= want * tolerance))


class AllReduce(Collective):
    def __init__(self, count, block):
        super().__init__(count, block)
        self.input = START * (self.rank + 1) * pattern(count)
        self.work = torch.empty(count)

    def refill(self):
        self.work.copy_(self.input)

    def operate(self):
        dist.all_reduce(self.work)

    def expected(self, repeats):
        return self.total * float(self.world) ** repeats * pattern(self.count)


class ReduceScatter(Collective):
    def __init__(self, count, block):
        super().__init__(count, block)
        self.input = START * (self.rank + 1) * pattern(block * self.world)
        self.work = torch.empty(block)

    def operate(self):
        dist.reduce_scatter_tensor(self.work, self.input)

    def expected(self, _repeats):
        first = self.rank * self.block
        return self.total * pattern(first + self.block)[first:]


class AllGather(Collective):
    def __init__(self, count, block):
        super().__init__(count, block)
        self.input = START * (self.rank + 1) * pattern(block)
        self.work = torch.empty(block * self.world)

    def operate(self):
        dist.all_gather_into_tensor(self.work, self.input)

    def expected(self, _repeats):
        return torch.cat([START * (r + 1) * pattern(self.block) for r in range(self.world)])


class Broadcast(Collective):
    def __init__(self, count, block):
        super().__init__(count, block)
        self.input = START * pattern(count)
        self.work = torch.empty(count)

    def refill(self):
        if self.rank == 0:
            self.work.copy_(self.input)
        else:
            super().refill()

    def operate(self):
        dist.broadcast(self.work, src=0)

    def expected(self, _repeats):
        return self.input


COLLECTIVES = {
    "all-reduce": AllReduce,
    "reduce-scatter": ReduceScatter,
    "all-gather": AllGather,
    "broadcast": Broadcast,
}


def run(name, size, iterations, warmup):
    """The samples of one `run` line, in microseconds per operation.

    Every rank makes the same calls whatever its checks find, so that a wrong result cannot
    leave the others waiting.
    """
    world = dist.get_world_size()
    collective = COLLECTIVES[name](size // 4, size // 4 // world)

    def operate(times=1):
        for _ in range(times):
            collective.operate()
            finish()

    stretch = GROWTH_BITS // max(1, (world - 1).bit_length())
    clock = time.perf_counter_ns

    collective.refill()
    dist.barrier()
    operate()
    right = collective.is_right(0, 0.0)

    fastest = SAMPLE_US
    for done in range(warmup):
        if done % stretch == 0:
            collective.refill()
            finish()
        start = clock()
        operate()
        fastest = min(fastest, (clock() - start) / 1000)
    batch = 1
    while batch < LARGEST_BATCH and batch * fastest < SAMPLE_US:
        batch *= 2

    samples = []
    done = 0
    while done < iterations:
        collective.refill()
        finish()
        dist.barrier()
        operate()
        repeats = 0
        while repeats < stretch and done < iterations:
            todo = min(batch, stretch - repeats, iterations - done)
            start = clock()
            operate(todo)
            samples.append((clock() - start) / todo / 1000)
            repeats += todo
            done += todo
        right = right and collective.is_right(repeats, 1e-4)

    if not right:
        raise ArithmeticError(f"wrong result of {name}")
    return samples


def answer(line):
    try:
        command, name, *numbers = line.split()
        if command != "run" or name not in COLLECTIVES:
            raise ValueError(f"cannot do: {line.strip()}")
        return json.dumps([round(us, 3) for us in run(name, *map(int, numbers))])
    except Exception as error:  # whatever torch throws is the answer, not the end of the rank
        return f"error rank {dist.get_rank()}: {error}".replace("\n", " ")


def main():
    global finish
    directory, name = sys.argv[1:3]
    backend = sys.argv[3] if len(sys.argv) > 3 else "gloo"
    device = sys.argv[4] if len(sys.argv) > 4 else "cpu"
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
        torch.set_default_device("cuda")
        finish = torch.cuda.synchronize
    dist.init_process_group(
        backend,
        init_method=f"file://{directory}/{name}.store",
        rank=rank,
        world_size=world,
        timeout=timedelta(minutes=2),
    )
    with open(f"{directory}/{name}.{rank}") as commands:
        answers = os.open(f"{directory}/{name}.out", os.O_WRONLY)
        for line in commands:
            if line == "quit\n":
                break
            os.write(answers, (answer(line) + "\n").encode())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
