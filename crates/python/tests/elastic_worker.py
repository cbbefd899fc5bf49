"""A worker of an elastic job that a test starts, and what is to happen to it.

    elastic_worker.py SETTINGS

The settings are JSON. `faults` are lists of a place, the `RANK` of a process, which of its lives it is to happen
in, from 0 (-1 for any), the first step in which it can happen, and a signal. A fault is written to the file `proof` before it happens.
The signal "donor" is a SIGKILL of the worker that has given its state last, which the diary knows.
From step `hold` on, workers wait until all faults, or so many `kills`, have happened, as many workers are there as
should be, and so many processes have `begun`; before step `beside` no longer than until a worker that joins is given the
state, again if something happened to it or to its donor. Such a worker then waits until the others have made so many steps `ahead` before it
follows. `poison` is a shard that kills its workers, a `mistake` something that a program should not do, `by_hand` what
it may do between gradients and optimizer. `ballast` numbers make the state larger.
To the file `diary` a worker writes, as lines of JSON, that it has begun, the groups that it was in, under its `name`,
what it told the launcher, what it saved, what it was after the loop, the steps after which it gave a worker that joins
the state, how many workers it saw that got the state inside of a group, and as a worker that joins the steps after which
it has got a state, and those that it has followed.
"""

import contextlib
import hashlib
import json
import os
import resource
import signal
import sys
import threading
import time

import torch
import unisono.torch
from jobs.sharded import Network
from torch import nn
from unisono.torch._gradients import elastic, following, handover

# Longer than a worker takes to start on a busy machine.
PATIENCE = 240

settings = json.loads(sys.argv[1])
life = int(os.environ.get("UNISONO_LIFE", "0"))
rank = int(os.environ.get("RANK", "0"))
faults = [
    fault
    for fault in settings.get("faults", [])
    if fault[1] in (-1, rank) and fault[2] in (-1, life)
]
# When to wait no longer.
end = time.monotonic() + PATIENCE


def proven() -> list[str]:
    """Faults that have happened so far."""
    try:
        with open(settings["proof"]) as file:
            return file.read().splitlines()
    except (KeyError, FileNotFoundError):
        return []


def reach(place: str) -> None:
    """This worker has come to a place: what is to happen there happens."""
    for fault in list(faults):
        if fault[0] == place and number_now() >= fault[3]:
            faults.remove(fault)
            if json.dumps(fault) in proven():
                continue
            with open(settings["proof"], "a") as file:
                file.write(json.dumps(fault) + "\n")
            if fault[4] == "donor":
                os.kill(written("gave")[-1][1], signal.SIGKILL)
            else:
                os.kill(os.getpid(), getattr(signal, fault[4]))


def before(owner, name: str, place: str) -> None:
    """A place is where a function is about to be called."""
    original = getattr(owner, name)

    def call(*arguments, **options):
        reach(place)
        return original(*arguments, **options)

    setattr(owner, name, call)


def number_now() -> int:
    return step.steps


def write_down(kind: str, *about) -> None:
    if "diary" in settings:
        with open(settings["diary"], "a") as file:
            file.write(json.dumps([kind, *about]) + "\n")


def written(kind: str) -> list[list]:
    """What workers have written down of a kind, in whole lines."""
    try:
        with open(settings["diary"]) as file:
            lines = file.read().split("\n")[:-1]
    except (KeyError, FileNotFoundError):
        return []
    return [entry[1:] for entry in map(json.loads, lines) if entry[0] == kind]


class Places:
    """The native module, with places."""

    def __getattr__(self, name):
        return getattr(native, name)

    @staticmethod
    def receive_state(*arguments):
        reach("receiving")
        received = native.receive_state(*arguments)
        reach("received")
        return received

    @staticmethod
    def send_state(*arguments):
        reach("sending")
        native.send_state(*arguments)
        reach("sent")


native, elastic._native = elastic._native, Places()
torch.set_num_threads(1)
torch.manual_seed(7)
model = Network()
mistake = settings.get("mistake")
if settings.get("optimizer") == "nadam":
    model.bfloat16()
if "ballast" in settings:
    model.ballast = nn.Parameter(torch.arange(settings["ballast"]).float(), requires_grad=False)
if mistake == "models" and rank == 1:
    model.last = nn.Linear(64, 4, bias=False)
optimizer = {
    "momentum": lambda: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    "adamw": lambda: torch.optim.AdamW(model.parameters(), lr=0.01),
    # Keeps a product in 32 bits, also for weights in 16.
    "nadam": lambda: torch.optim.NAdam(model.parameters(), lr=0.01),
}[settings.get("optimizer", "adamw")]()


class Scheduler(torch.optim.lr_scheduler.MultiStepLR):
    def step(self, *arguments):
        if self.last_epoch >= 0:
            reach("scheduler")
        super().step(*arguments)


scheduler = Scheduler(optimizer, [5, 20, 40], gamma=0.7)
average = torch.optim.swa_utils.AveragedModel(model)
state = {"average": average}


class Odd:
    """Has a state that is not plain."""

    def state_dict(self):
        return {"odd": Odd}

    def load_state_dict(self, state):
        pass


class Counter:
    """Counts steps, and forgets some where it is handed over."""

    def __init__(self):
        self.steps = 0

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"] // 2


if mistake == "pickled":
    state["odd"] = Odd()
if mistake == "lossy":
    state["counter"] = Counter()
if mistake == "group":
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("unisono", store=store, rank=0, world_size=1)
if mistake == "late" and rank == 1:
    time.sleep(PATIENCE)
shards = 2 if settings.get("few_shards") else 8
step = unisono.torch.ElasticStep(
    model,
    optimizer,
    shards=shards,
    scheduler=scheduler,
    state=state,
    codec=settings.get("codec"),
    checkpoint=settings.get("checkpoint"),
    save_every=settings.get("save_every", 0),
)


class Entering:
    """The job, with places."""

    def __init__(self, job):
        self._job = job

    def __getattr__(self, name):
        return getattr(self._job, name)

    def stepped(self, *about):
        write_down("stepped", *about)
        self._job.stepped(*about)

    def enter(self, joiner):
        threading.Timer(0.02, reach, ["entering"]).start()
        reach("ready")
        group = self._job.enter(joiner)
        if group is not None:
            write_down("formed", settings.get("name"), group.rank, group.size)
        reach("formed")
        return group

    def finish(self, result):
        reach("handing in")
        self._job.finish(result)
        reach("handed in")


class Giving:
    """The job as a worker sees it that gives its state, with places."""

    def __init__(self, job):
        self._job = job

    def __getattr__(self, name):
        return getattr(self._job, name)

    def give_state(self, steps, copies):
        reach("sending")
        write_down("gave", steps, os.getpid(), len(proven()))
        self._job.give_state(steps, copies)
        reach("sent")


class Joiner(following.Joiner):
    """A worker that joins, with places."""

    def take(self, vector):
        super().take(vector)
        if len(self._vectors) == 3:
            reach("taking")

    def complete(self, steps):
        reach("receiving")
        is_well = super().complete(steps)
        write_down("joins", rank, life, steps)
        while settings.get("ahead") and time.monotonic() < end:
            # Behind those in which a worker can join beside them, the others make no step without this one.
            enough = min(steps + settings["ahead"], settings["beside"])
            if max((made for (made,) in written("made")), default=0) >= enough:
                break
            time.sleep(0.005)
        reach("received")
        return is_well

    def stepped(self, steps):
        is_well = super().stepped(steps)
        write_down("followed", rank, life, steps, is_well)
        reach("following")
        return is_well


def hand_over(*arguments):
    behind = original_hand_over(*arguments)
    write_down("handed over", step.steps, behind)
    return behind


write_down("begun")
following.Joiner = Joiner
original_hand_over, step._hand_over = step._hand_over, hand_over
if step._job is not None:
    step._job = Entering(step._job)
    step._donor._job = Giving(step._donor._job)
optimizer.register_step_pre_hook(lambda *_: reach("optimizer"))
before(step, "_regroup", "regrouping")
before(step, "_end", "ending")
before(handover, "write", "saving")
leave, write = step._leave, handover.write


def leave_at_place():
    is_place = step._gathered is not None and step.rank == 0
    leave()
    if is_place:
        reach("gathered")


def write_and_tell(*arguments):
    if mistake == "disk":
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    write(*arguments)
    write_down("saved", step.steps)


step._leave, handover.write = leave_at_place, write_and_tell
last = model.last.weight
last.register_hook(lambda gradient: reach("backward"))


def loss(batch):
    number, shard = batch
    generator = torch.Generator().manual_seed(1000 * number + shard)
    inputs = torch.randn(4, 16, generator=generator).to(last.dtype)
    if shard == settings.get("poison"):
        os.kill(os.getpid(), signal.SIGKILL)
    return nn.functional.mse_loss(model(inputs), inputs[:, :4].sin())


def is_joining() -> bool:
    """Whether a worker was given the state since the last fault."""
    happened = len(proven())
    return happened > 0 and any(gave[-1] == happened for gave in written("gave"))


def have_begun() -> bool:
    """Whether as many processes have begun as should."""
    if "begun" not in settings:
        return True
    with open(settings["diary"]) as file:
        return sum(line.startswith('["begun"') for line in file) >= settings["begun"]


def wait_for_faults(number: int) -> None:
    """Until all have happened, or this group is at its end."""
    while time.monotonic() < end and step._job is not None:
        # More than there are shards wait as spares.
        is_whole = step.workers == min(settings.get("workers", step.workers), shards) and have_begun()
        if len(proven()) >= settings.get("kills", len(settings.get("faults", []))) and is_whole:
            return
        if step._group.has_ended() or step._job.is_asked_to_regroup():
            return
        if number < settings.get("beside", 0) and is_joining():
            return
        # Nothing has changed since the loop was asked for this step.
        step._donor.attend(step.steps)
        time.sleep(0.005)


def bits_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()


if mistake == "sampler":
    sampler = unisono.torch.ShardedSampler(64, batch_size=16, shards=4)
    next(step.batches(torch.utils.data.DataLoader(range(64), batch_sampler=sampler), 1))
if mistake == "saves":
    step.state_dict()
if mistake == "loads":
    step.load_state_dict({"steps": 3, "tensors": {}})
for number in step.until(settings.get("steps", 60)):
    if number >= settings.get("hold", 1 << 30):
        wait_for_faults(number)
    if settings.get("pace"):
        time.sleep(settings["pace"])
    if settings.get("by_hand"):
        mean = step.gradients([(number, shard) for shard in step.shards], loss)
        if mean is not None:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            for group in optimizer.param_groups:
                group["weight_decay"] = 0.01 * (number % 3)
            optimizer.step()
            scheduler.step()
    else:
        mean = step([(number, shard) for shard in step.shards], loss)
    if mean is not None and settings.get("ahead"):
        write_down("made", step.steps)
    if mean is not None and mistake == "clamps":
        model.last.bias.data.clamp_(-0.01, 0.01)
    if mean is not None or mistake == "objects":
        average.update_parameters(model)
    if mean is not None and mistake == "lossy":
        state["counter"].steps += 1
    if mistake == "differs" and rank == 1 and number == 5:
        with torch.no_grad():
            model.last.bias += 1
    if mistake == "closes" and number == 3:
        step.close()
    if mistake == "raises" and number == 3:
        with contextlib.closing(step):
            raise unisono.InvalidCall("of the program's own")
    if mistake == "twice":
        step([(number, shard) for shard in step.shards], loss)

everything = hashlib.sha256()
for part in (model, average):
    for tensor in part.state_dict().values():
        everything.update(bits_of(tensor))
for kept in optimizer.state.values():
    for value in kept.values():
        if isinstance(value, torch.Tensor):
            everything.update(bits_of(value))
everything.update(repr((step.steps, scheduler.get_last_lr())).encode())
write_down("ended", step.rank, step.workers, step.is_complete)
step.finish(f"weights {everything.hexdigest()}")
step.close()
step.close()
