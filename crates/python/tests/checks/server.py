"""Training with a parameter server: what each level promises, and what a step does with tensors."""

import copy
import math
import sys
import threading
import time

import torch
import torch.distributed as dist
import unisono
from tools import equal, raises
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from unisono.torch import ParameterServer


def check_server_bsp(rank, world):
    """Lock-step is synchronous training: close to torch's, and with equal bits on all ranks."""
    torch.manual_seed(rank)  # The weights of rank 0 count.
    model = _network()
    reference = copy.deepcopy(model)
    for parameter in reference.parameters():
        dist.broadcast(parameter.detach(), 0)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    with ParameterServer(model, "momentum:lr=0.1", "bsp") as server:
        assert _is_equal_everywhere(model, world)
        for step in range(6):
            batch, target = _batch(rank, step)
            for trained in (model, reference):
                nn.functional.mse_loss(trained(batch), target).backward()
            for parameter in reference.parameters():
                dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
            optimizer.step()
            optimizer.zero_grad()
            server.step()
            assert server.clock == step + 1 and server.lead == 0
            assert all(parameter.grad is None for parameter in model.parameters())
            equal(_vector(model), _vector(reference))
            assert _is_equal_everywhere(model, world)
            dist.barrier()


def check_server_ssp(rank, world):
    """A worker that is ahead by the bound waits, and not before."""
    bound, steps = 3, 10
    store = _store("ssp")
    model = _network()
    with ParameterServer(model, "sgd:lr=0.01", f"ssp:{bound}") as server:
        if rank > 0:
            store.wait(["ahead"])
        for step in range(steps):
            _learn(model, server, rank, step)
            if rank == 0 and step + 1 == bound:
                store.set("ahead", b"yes")
        assert server.clock == steps
        statistics = server.statistics()
        # Rank 0 went as far as it could while the others waited for it to do so.
        assert statistics.max_lead == bound if rank == 0 else statistics.max_lead <= bound
        assert statistics.pushes == steps == sum(statistics.staleness.values())
        _expect_common_end(model, server, world)


def check_server_async(rank, world):
    """No worker waits for one that is slow, and the age of what it then pushes is known."""
    steps = 8
    store = _store("async")
    model = _network()
    with ParameterServer(model, "sgd:lr=0.01", "async") as server:
        if rank > 0:
            store.wait([f"done/{rank - 1}"])
        _learn(model, server, rank, 0)
        # All updates of the ranks before came after this one had read.
        assert server.staleness == rank * steps / world, server.staleness
        for step in range(1, steps):
            _learn(model, server, rank, step)
        store.set(f"done/{rank}", b"yes")
        assert (server.statistics().max_lead == steps - 1) == (rank < world - 1)
        _expect_common_end(model, server, world)


def check_server_lets_others_run(rank, world):
    """A wait for servers does not hold Python's lock: another thread runs meanwhile."""
    store = _store("threads")
    model = _network()
    main = threading.get_ident()

    def say_when_waiting():
        while sys._current_frames()[main].f_code.co_name != "_wait":
            time.sleep(0.001)
        store.set("waiting", b"yes")

    with ParameterServer(model, "sgd:lr=0.01", "bsp") as server:
        if rank == 0:
            threading.Thread(target=say_when_waiting).start()
        else:
            store.wait(["waiting"])
        _learn(model, server, rank, 0)
        assert server.clock == 1


def check_server_downpour(rank, world):
    """Replicas step by themselves, push what they have gathered, and fetch now and then."""
    model = _network()
    with ParameterServer(model, "sgd:lr=0.01", "downpour:2,4") as server:
        before = _vector(model)
        for step in range(4):
            batch, target = _batch(rank, step)
            loss = nn.functional.mse_loss(model(batch), target)
            loss.backward()
            if step == 0:
                own = [p.detach() - 0.01 * p.grad for p in model.parameters()]
            server.step(loss)
            if step == 0:
                equal(_vector(model), nn.utils.parameters_to_vector(own))
            assert server.clock == (step + 1) // 2
        assert not torch.equal(_vector(model), before)
        _expect_common_end(model, server, world)


def check_server_stale(rank, world):
    """What is too old is left out, and counted."""
    store = _store("stale")
    model = _network()
    with ParameterServer(model, "sgd:lr=0.01", "async", stale="drop:0") as server:
        if rank > 0:
            store.wait([f"done/{rank - 1}"])
        before = _vector(model)
        _learn(model, server, rank, 0)
        store.set(f"done/{rank}", b"yes")
        # The ranks before made an update; that of this one is as old, and none.
        assert server.statistics().dropped == (rank > 0)
        assert not torch.equal(_vector(model), before)
        dist.barrier()


def check_server_auto(rank, world):
    """The bound that adapts wants to know the loss."""
    model = _network()
    with ParameterServer(model, "adam:lr=0.01", "ssp:auto") as server:
        nn.functional.mse_loss(model(_batch(rank, 0)[0]), _batch(rank, 0)[1]).backward()
        assert "step(loss)" in str(raises(unisono.InvalidCall, server.step))
        server.step(1.0)
        for step in range(1, 10):
            _learn(model, server, rank, step)


def check_server_codec(rank, world):
    """Gradients that are encoded take fewer bytes, and still teach."""
    took, losses = {}, {}
    for codec in (None, "int8"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 256), nn.ReLU(), nn.Linear(256, 8))
        with ParameterServer(model, "adam:lr=0.01", "bsp", codec=codec) as server:
            for step in range(20):
                batch, _ = _batch(rank, step)
                loss = nn.functional.mse_loss(model(batch), batch.square())
                loss.backward()
                server.step(loss)
            took[codec] = server.statistics().bytes
            losses[codec] = loss.item()
    # Both ways were equal; one has become a quarter of it, but for the biases.
    assert took["int8"] < 0.7 * took[None], took
    assert losses["int8"] < 1.1 * losses[None], losses


def check_server_optimizers(rank, world):
    """An optimizer of torch means the same on the servers."""
    kinds = [
        (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.01}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.8, "nesterov": True, "weight_decay": 0.01}),
        (torch.optim.Adagrad, {"lr": 0.1, "weight_decay": 0.01}),
        (torch.optim.Adam, {"lr": 0.01, "betas": (0.8, 0.99)}),
        (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-6}),
    ]
    for kind, settings in kinds:
        torch.manual_seed(0)
        model = _network()
        reference = copy.deepcopy(model)
        optimizer = kind(reference.parameters(), **settings)
        given = kind(model.parameters(), **settings)
        with ParameterServer(model, given, "bsp") as server:
            for step in range(5):
                batch, target = _batch(0, step)  # The same on all ranks: so is the mean.
                for trained in (model, reference):
                    nn.functional.mse_loss(trained(batch), target).backward()
                optimizer.step()
                optimizer.zero_grad()
                server.step()
                equal(_vector(model), _vector(reference))


def check_server_groups_of_parameters(rank, world):
    """An optimizer may have groups, and know names, if it treats all parameters alike."""
    model = _network()
    named = list(model.named_parameters())
    groups = [{"params": named[:1]}, {"params": named[1:]}]
    with ParameterServer(model, torch.optim.SGD(groups, lr=0.1), "bsp") as server:
        _learn(model, server, rank, 0)
        assert server.clock == 1
    groups = [{"params": named[:1]}, {"params": named[1:], "lr": 0.2}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    error = raises(unisono.InvalidCall, ParameterServer, model, optimizer, "bsp")
    assert "equal settings" in str(error), error


def check_server_learning_rate(rank, world):
    """A learning rate means the same at every level: a step of all workers goes as far."""
    moved = {}
    for level in ("bsp", "ssp:0", "async"):
        model = nn.Linear(1, 1, bias=False)
        with ParameterServer(model, "sgd:lr=0.5,cosine=4,floor=0.5", level) as server:
            before = _vector(model)
            model.weight.grad = torch.ones(1, 1)
            server.step()
            dist.barrier()
            server.pull()
            moved[level] = _vector(model) - before
    for level, distance in moved.items():
        equal(distance, torch.tensor([-0.5]))


def check_server_learning_rate_of_replicas(rank, world):
    """At downpour a replica goes by its own steps, and servers go by the pushes of all workers."""
    steps, push = 8, 4
    model = nn.Linear(1, 1, bias=False)
    optimizer = f"sgd:lr=0.5,cosine={steps}"
    with ParameterServer(model, optimizer, f"downpour:{push},{steps}") as server:
        before = _vector(model)
        for step in range(1, push):
            at = _vector(model)
            model.weight.grad = torch.ones(1, 1)
            server.step()
            equal(at - _vector(model), torch.tensor([_cosine(0.5, step, steps)]))
        model.weight.grad = torch.ones(1, 1)
        server.step()
        dist.barrier()  # Every worker has pushed once, the mean of ones.
        server.pull()
        pushes = steps * world // push
        moved = sum(_cosine(0.5, number, pushes) for number in range(1, world + 1))
        equal(before - _vector(model), torch.tensor([moved]))
        dist.barrier()


def _cosine(peak: float, step: int, steps: int) -> float:
    return peak * (0.5 + 0.5 * math.cos(math.pi * step / steps))


def check_server_scheduler(rank, world):
    """A scheduler of torch's, which servers do not see, does not go unnoticed."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    with ParameterServer(model, optimizer, "bsp") as server:
        model(torch.ones(1, 1)).sum().backward()
        server.step()
        scheduler.step()
        model(torch.ones(1, 1)).sum().backward()
        assert "schedulers" in str(raises(unisono.InvalidCall, server.step))
        optimizer.param_groups[0]["lr"] = 0.1
        server.step()
        assert server.clock == 2


def check_server_tensors(rank, world):
    """Parameters of other types and layouts are converted; those without a gradient stay."""
    torch.manual_seed(0)
    model = nn.ModuleDict({
        "small": nn.Linear(3, 2, dtype=torch.bfloat16),
        "short": nn.Linear(2, 2, dtype=torch.float16),
        "image": nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last),
        "words": nn.Embedding(5, 3, sparse=True),
        "idle": nn.Linear(2, 2),
        "frozen": nn.Linear(2, 2).requires_grad_(False),
    })
    model.register_parameter("scalar", nn.Parameter(torch.tensor(2.0)))
    model.register_parameter("empty", nn.Parameter(torch.empty(0, 3)))
    assert not model["image"].weight.is_contiguous()
    reference = copy.deepcopy(model)
    with ParameterServer(model, "sgd:lr=0.5", "bsp", servers=world) as server:
        for step in range(2):
            for trained in (model, reference):
                loss = trained["small"](torch.ones(1, 3, dtype=torch.bfloat16)).sum().float()
                loss = loss + trained["short"](torch.ones(1, 2, dtype=torch.float16)).sum()
                image = torch.arange(18.0).reshape(1, 2, 3, 3)
                loss = loss + trained["image"](image).sum()
                loss = loss + trained["words"](torch.tensor([1, 3, 3])).sum()
                loss = loss + trained.scalar**2 + trained.empty.sum()
                loss.backward()
            with torch.no_grad():
                for parameter in reference.parameters():
                    if parameter.grad is not None:
                        parameter -= 0.5 * parameter.grad.to_dense()
                        parameter.grad = None
            server.step()
            for (name, is_), should in zip(model.named_parameters(), reference.parameters()):
                assert is_.dtype == should.dtype and is_.stride() == should.stride(), name
                # Servers keep more digits than bfloat16 has.
                torch.testing.assert_close(is_.detach(), should.detach(), msg=name)


def check_server_missing_gradients(rank, world):
    """At bsp a gradient that some do not have counts as zero; a step without any is a mistake."""
    model = nn.ModuleList([nn.Linear(2, 1, bias=False) for _ in range(2)])
    with ParameterServer(model, "sgd:lr=1", "bsp", servers=2) as server:
        before = [parameter.detach().clone() for parameter in model.parameters()]
        assert "backward()" in str(raises(unisono.InvalidCall, server.step))
        model[0].weight.grad = torch.ones(1, 2)
        assert "nan" in str(raises(unisono.InvalidCall, server.step, math.nan))
        model[0].weight.grad = None
        model[0](torch.ones(1, 2)).sum().backward()
        if rank == 0:
            model[1](torch.full((1, 2), float(world))).sum().backward()
        server.step()
        for parameter, old in zip(model.parameters(), before):
            equal(parameter.detach(), old - 1)


def check_server_two_models(rank, world):
    """Several runs live side by side, as two networks that play against each other need."""
    models = [_network(), nn.Linear(8, 1)]
    servers = [ParameterServer(model, "sgd:lr=0.01", "bsp") for model in models]
    for step in range(3):
        for model, server in zip(models, servers):
            _learn(model, server, rank, step)
            assert _is_equal_everywhere(model, world)
    for server in servers:
        server.leave()
        server.leave()  # Once more does nothing.
    model = models[0]
    model(_batch(rank, 0)[0]).sum().backward()
    assert "has left" in str(raises(unisono.Error, servers[0].step))
    assert servers[0].clock == 3 and servers[0].statistics().bytes > 0


def check_server_end(rank, world):
    """With `steps` the run ends when those of all workers are made, by whichever worker."""
    model, steps = _network(), 5
    made = torch.zeros(1)
    with ParameterServer(model, "sgd:lr=0.01", "async", steps=steps) as server:
        while not server.finished:
            _learn(model, server, rank, int(made.item()))
            made += 1
        dist.all_reduce(made)
        # What was under way when the last of them arrived still counts.
        assert steps * world <= made.item() < (steps + 1) * world, made


def check_server_mistakes(rank, world):
    """What is wrong with a call is said before any rank waits for another, or on all ranks."""
    model = _network()
    adam = torch.optim.Adam(model.parameters(), weight_decay=0.1)
    used = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.ones(1, 8)).sum().backward()
    used.step()
    tied = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    tied[1].weight.data = tied[0].weight.data
    sharded = fully_shard(nn.Linear(4 * world, 2), mesh=init_device_mesh("cpu", (world,)))
    mistakes = [
        ({"optimizer": "adamx"}, "unknown optimizer"),
        ({"optimizer": "sgd:rate=0.1"}, 'sgd takes no "rate"; it takes'),
        ({"optimizer": "sgd:lr=fast"}, "lr= and a number"),
        ({"optimizer": "sgd:lr=1,lr=2"}, "twice"),
        ({"optimizer": "momentum:momentum=1"}, "below 1"),
        ({"optimizer": adam}, "AdamW"),
        ({"optimizer": used}, "used before"),
        ({"optimizer": torch.optim.SGD(_network().parameters())}, "all parameters"),
        ({"optimizer": torch.optim.RMSprop(model.parameters())}, "servers have SGD"),
        ({"level": "eventual"}, "is no consistency level"),
        ({"level": "gossip"}, "has no servers"),
        ({"level": "bsp", "stale": "scale"}, "no gradient is stale"),
        ({"stale": "ignore"}, "is no policy"),
        ({"codec": "zip"}, "no codec zip"),
        ({"codec_rules": ["int8"]}, "is no rule"),
        ({"servers": world + 1}, "cannot be inside"),
        ({"servers": []}, "servers is empty"),
        ({"servers": ["localhost:1"], "token": "abc"}, "64 hexadecimal digits"),
        ({"patience": -1.0}, "patience"),
        ({"model": nn.Linear(2, 2).requires_grad_(False)}, "no parameter"),
        ({"model": nn.Linear(2, 2, dtype=torch.complex64)}, "complex64"),
        ({"model": tied}, "'0.weight' and '1.weight' share memory"),
        ({"model": sharded}, "do not shard the model"),
        ({"model": DistributedDataParallel(_network())}, "not wrapped in DDP"),
        ({"steps": 0}, "from 1 on"),
        ({"warm_up": -1}, "from 0 on"),
    ]
    for mistake, text in mistakes:
        arguments = {"model": model, "optimizer": "sgd", "level": "async"} | mistake
        error = raises(unisono.InvalidCall, ParameterServer, **arguments)
        assert text in str(error), (mistake, error)


def check_ddp_after_server(rank, world):
    model = _network()
    with ParameterServer(model, "sgd", "bsp") as server:
        replica = DistributedDataParallel(model)
        replica(torch.ones(1, 8)).sum().backward()
        error = raises(unisono.InvalidCall, server.step)
        assert "do not wrap the model" in str(error), error
        del replica, error
        server.step()


def check_server_of_doubles(rank, world):
    """Weights that would come back with fewer digits are refused."""
    model = nn.Linear(2, 2, dtype=torch.float64)
    error = raises(unisono.Unsupported, ParameterServer, model, "sgd", "async")
    assert "'weight' is float64" in str(error), error


def check_server_changed_model(rank, world):
    """A parameter that has another size than before is refused before anything is written to it."""
    model = nn.Linear(4, 4)
    with ParameterServer(model, "sgd:lr=0.1", "async") as server:
        model.bias.data = torch.zeros(2)
        assert "had 4 before" in str(raises(unisono.InvalidCall, server.pull))


def _network() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def _batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(1000 * rank + step))
    return inputs, inputs.sum(dim=1, keepdim=True)


def _learn(model: nn.Module, server: ParameterServer, rank: int, step: int) -> None:
    batch, target = _batch(rank, step)
    loss = nn.functional.mse_loss(model(batch), target)
    loss.backward()
    server.step(loss, samples=len(batch))


def _vector(model: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def _is_equal_everywhere(model: nn.Module, world: int) -> bool:
    own = _vector(model)
    all_weights = [torch.empty_like(own) for _ in range(world)]
    dist.all_gather(all_weights, own)
    return all(torch.equal(own, weights) for weights in all_weights)


def _expect_common_end(model: nn.Module, server: ParameterServer, world: int) -> None:
    """When all have pushed all, a pull gives every worker the same weights."""
    dist.barrier()
    server.pull()
    assert _is_equal_everywhere(model, world)


def _store(name: str) -> dist.Store:
    return dist.PrefixStore(f"check/{name}", dist.distributed_c10d._get_default_store())
