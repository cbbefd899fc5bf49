"""Joining beside the training: a worker gets the state of a member while that goes on, and then makes its steps.

A member that is asked for its state, the *donor*, copies it between two steps, and the library sends the copy from
another thread.  From then on the donor also copies what decides about each of its steps: the gradients that its
optimizer is given, after whatever the program does to them, and the settings of the optimizer's groups.  The worker
that joins, the *joiner*, gives the same gradients to its own optimizer.  An optimizer is a function of gradients,
settings and its state: so both come to the same bits.  What else a step changes, the donor sends as it is after the
step: buffers, such as the statistics of batch norms, the scheduler, and the objects that the program changes itself.

A program can do what no other worker can do after it: change the weights by hand, or draw random numbers in the
optimizer.  So the donor also sends a hash of weights and optimizer state: of all of it after the first step and after
the last, when the members leave their group to let the joiner in, and of another part after each other one.  A joiner
that does not come to the same hash, or whose last one was of a part, gets the state inside of the next group, while the
others wait.

Tensors travel one by one, as they are in memory, and everything else in a head, which torch writes and reads as a file
of plain values.
"""

import hashlib
import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from unisono import _native
from unisono.errors import InvalidCall
from unisono.torch._gradients import handover

# Of how many parts of weights and optimizer state one is hashed after a step.  More: what a program does by hand now and
# then is noticed later.  Fewer: the donor's steps take longer while it is followed.
_PARTS = 64

# The least that is taken for the bytes of a step, of which the donor keeps some for a joiner that loads the state
# meanwhile.  More: the donor may need more memory.  Fewer: with a small model, whose steps are short, a joiner on a busy
# machine is dropped, and gets the state while the others wait.
_LEAST = 64 << 20

# Stands for a tensor that travels by itself.
_PLACE = torch.empty(0)

_TENSORS = (torch.Tensor, nn.Parameter)


class Run(NamedTuple):
    """What a worker must have of a run."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    #: By name, with the scheduler.
    objects: Mapping[str, Any]

    @property
    def fingerprint(self) -> bytes:
        """What two workers must have in common so that one can follow the other."""
        digest = hashlib.blake2b(digest_size=32)
        for name, tensor in self._named():
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad}\n".encode())
        for group in self.optimizer.param_groups:
            digest.update(f"{len(group['params'])}\n".encode())
        kinds = [("optimizer", self.optimizer), *self.objects.items()]
        digest.update(repr([(name, type(part).__qualname__) for name, part in kinds]).encode())
        return digest.digest()

    @property
    def changing_bytes(self) -> int:
        """About how many bytes of it are sent after a step, of which the donor keeps four steps' worth for a joiner."""
        states = [part.state_dict() for part in self.objects.values()]
        tensors = [*self.trained, *self.model.buffers(), *_tensors_in(states)]
        return max(sum(tensor.numel() * tensor.element_size() for tensor in tensors), _LEAST)

    @property
    def trained(self) -> list[torch.Tensor]:
        """What the optimizer changes, in its order."""
        return [each for group in self.optimizer.param_groups for each in group["params"]]

    def hash_of(self, part: int, of: int) -> bytes:
        """A hash of a part of all weights, and of all that the optimizer keeps for them."""
        tensors: list[torch.Tensor] = list(self.model.parameters())
        plain = []
        for number, parameter in enumerate(self.trained):
            kept = self.optimizer.state.get(parameter, {})
            for name in sorted(kept, key=str):
                is_tensor = isinstance(kept[name], torch.Tensor)
                (tensors if is_tensor else plain).append(kept[name])
            plain.append((number, len(kept)))
        words = repr(plain).encode()
        dense = [_dense(tensor)[0] for tensor in tensors if _travels(tensor)]
        here = [tensor for tensor in dense if tensor.is_cpu]
        here.append(torch.frombuffer(bytearray(words), dtype=torch.uint8))
        told = _native.hash_parts([_memory_of(tensor) for tensor in here], part, of)
        # Of a device, only the part that is hashed is fetched: as much of every tensor.
        fetched = [_part_of(tensor, part, of).cpu() for tensor in dense if not tensor.is_cpu]
        return told + _native.hash_parts([_memory_of(tensor) for tensor in fetched], 0, 1) if fetched else told

    def settings(self) -> list[dict[str, Any]]:
        """Those of the optimizer's groups."""
        groups = self.optimizer.param_groups
        return [{name: value for name, value in group.items() if name != "params"} for group in groups]

    def set_settings(self, settings: list[dict[str, Any]]) -> None:
        """Sets those of the optimizer's groups."""
        for group, values in zip(self.optimizer.param_groups, settings, strict=True):
            for name, value in values.items():
                if isinstance(value, torch.Tensor) and isinstance(group.get(name), torch.Tensor):
                    group[name].copy_(value)
                else:
                    group[name] = value

    def _named(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.model.named_parameters()
        yield from self.model.named_buffers()


def can_follow(optimizer: Any) -> bool:
    """Whether it can be seen what an optimizer is given in a step."""
    return isinstance(optimizer, torch.optim.Optimizer)


class Donor:
    """A member's side: what it gives to a worker that joins."""

    def __init__(self, job: _native.ElasticJob, run: Run):
        self._job = job
        self._run = run
        # The steps after which the step under way began, if it is to be given.
        self._begun: int | None = None
        # What the optimizer was given in it; more than one, or one that no other worker could make, if is_odd.
        self._given: _native.Copies | None = None
        self._is_odd = False
        # Whether the last that was given is a state.
        self._is_first = False
        # What the model had besides what is trained, when it was given last.
        self._others: dict[str, tuple] = {}

    def offer(self) -> None:
        """From now on workers that join may ask for the state."""
        self._job.offer(self._run.fingerprint, self._run.changing_bytes)

    def attend(self, steps: int) -> None:
        """Before a step: gives a worker that has asked for it the state after so many steps."""
        is_asked, is_followed = self._job.joiner
        if is_asked:
            model, optimizer, objects = self._run
            self._others = dict(self._seen())
            try:
                copies = _copied(handover.parts_of(steps, model, optimizer, objects, {}))
            except Exception as error:
                raise InvalidCall(f"the state of the run cannot be handed over ({error})") from error
            self._job.give_state(steps, copies)
            is_followed = self._is_first = True
        if not is_followed:
            self._others = {}
        self._begun = steps if is_followed else None
        self._given, self._is_odd = None, False

    def note_optimizer(self, arguments: tuple, options: Mapping[str, Any]) -> None:
        """The optimizer is about to make a step."""
        if self._begun is None:
            return
        # The first is the optimizer.
        has_closure = any(value is not None for value in (*arguments[1:], *options.values()))
        if has_closure or self._given is not None:
            self._is_odd = True
            return
        gradients = [parameter.grad for parameter in self._run.trained]
        self._given = _copied({"gradients": gradients, "settings": self._run.settings()})

    def give_step(self, steps: int, is_last: bool) -> None:
        """Where the loop goes on: gives a worker that follows the step that was made, if one was. The last is that after
        which the members leave their group."""
        begun, self._begun = self._begun, None
        if begun is None or steps == begun:
            return
        given = self._given or _copied({"gradients": None, "settings": []})
        self._given = None
        try:
            if self._is_odd:
                raise ValueError("its optimizer makes other steps than one without a closure")
            rest = _copied(self._rest(steps, is_last))
        except Exception as error:
            print(f"unisono: a worker that joins cannot follow this one: {error}", file=sys.stderr, flush=True)
            self._job.refuse()
            return
        self._job.give_step(steps, [given, rest])
        self._is_first = False

    def break_off(self) -> None:
        """The state was replaced by another, to which no step leads that a worker that follows could make."""
        self._begun = None
        self._job.break_off()

    def _rest(self, steps: int, is_last: bool) -> dict[str, Any]:
        """What a step has changed besides what the optimizer has."""
        now = dict(self._seen())
        changed = {name: seen for name, seen in now.items() if not _is_same(seen, self._others.get(name))}
        self._others = now
        weights = self._run.model.state_dict()
        part, of = (0, 1) if self._is_first or is_last else (steps % _PARTS, _PARTS)
        buffers = handover.other_buffers(self._run.model)
        return {
            "settings": self._run.settings(),
            "model": OrderedDict((name, weights[name]) for name in weights if name in changed),
            "buffers": {name: buffers[name] for name in buffers if f"\0{name}" in changed},
            "state": {name: part.state_dict() for name, part in self._run.objects.items()},
            "check": (part, of, self._run.hash_of(part, of)),
        }

    def _seen(self) -> Iterator[tuple[str, tuple]]:
        """What the model has besides what is trained: by what a change of it is noticed."""
        trained = {parameter.data_ptr() for parameter in self._run.trained}
        frozen = {each.data_ptr() for each in self._run.model.parameters()} - trained
        for name, value in self._run.model.state_dict().items():
            if not isinstance(value, torch.Tensor):
                yield name, (object(),)  # Taken for changed.
            elif value.data_ptr() in frozen:
                # Those may be most of a model. If a program changes one behind torch's back, the hash tells.
                yield name, (value.data_ptr(), value._version)
            elif value.data_ptr() not in trained:
                yield name, (value.detach().clone(),)
        for name, buffer in handover.other_buffers(self._run.model).items():
            yield f"\0{name}", (buffer.detach().clone(),)


class Joiner:
    """A joiner's side: takes over what a donor gives. The engine calls it on the thread that waits to be let in."""

    def __init__(self, run: Run):
        self._run = run
        self.fingerprint = run.fingerprint
        #: The steps after which the run is as it is here; None if it is that of no step.
        self.steps: int | None = None
        #: Whether all of it is known to be as it is at the donor.
        self.is_certain = False
        #: What the run was before, once it is not any more.
        self.initial: bytes | None = None
        # What the optimizer is to be given, while it makes a step.
        self._gradients: list[torch.Tensor | None] | None = None
        self._packages: list[Any] = []
        self._head: tuple[list, Any] | None = None
        self._vectors: list[bytearray] = []
        # Why what was taken cannot be read.
        self._flaw: Exception | None = None

    def begin(self) -> None:
        """What follows is a state."""
        self._head, self._vectors, self._packages, self._flaw = None, [], [], None

    def take(self, vector: bytearray) -> None:
        """Takes the next vector."""
        if self._flaw is None:
            try:
                self._collect(vector)
            except Exception as error:
                self._flaw = error

    def _collect(self, vector: bytearray) -> None:
        if self._head is None:
            length = int.from_bytes(vector[:8], "little")
            self._head = handover.load_plain(bytes(memoryview(vector)[8 : 8 + length]))
        else:
            self._vectors.append(vector)
        places, value = self._head
        if len(self._vectors) == 1 + max((place[0] for place in places if place), default=-1):
            self._packages.append(_unflattened(value, places, self._vectors))
            self._head, self._vectors = None, []

    def complete(self, steps: int) -> bool:
        """The state after so many steps was taken. Whether it can be followed."""
        if self._flaw is not None:
            return self._gives_up(self._flaw)
        (state,), self._packages = self._packages, []
        model, optimizer, objects = self._run
        if self.initial is None:
            self.initial = handover.pack(0, model, optimizer, objects, {})
        self.steps = None
        handover.set_parts(state, "the member that hands over its state", model, optimizer, objects)
        self.steps, self.is_certain = steps, True
        return True

    def stepped(self, steps: int) -> bool:
        """What the next step has changed was taken: makes it. Whether it has come to the same."""
        self.steps = None
        try:
            if self._flaw is not None:
                raise self._flaw
            (given, rest), self._packages = self._packages, []
            self._make(given, rest)
        except Exception as error:
            return self._gives_up(error)
        self.steps = steps
        return True

    @staticmethod
    def _gives_up(error: Exception) -> bool:
        # Not an InvalidCall: a program that no other worker can follow may be right.
        text = "this worker cannot follow the steps of the others, and gets the state while they wait"
        print(f"unisono: {text}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return False

    def note_optimizer(self) -> None:
        """The optimizer is about to make a step: gives it the gradients that the donor's was given, whatever hooks that
        were called before have made of others."""
        if self._gradients is not None:
            for parameter, gradient in zip(self._run.trained, self._gradients, strict=True):
                parameter.grad = None if gradient is None else gradient.to(parameter.device)
            self._gradients = None

    def _make(self, given: Mapping[str, Any], rest: Mapping[str, Any]) -> None:
        model, optimizer, objects = self._run
        if given["gradients"] is not None:
            self._run.set_settings(given["settings"])
            self._gradients = given["gradients"]
            optimizer.step()
            for parameter in self._run.trained:
                parameter.grad = None
        self._run.set_settings(rest["settings"])
        if rest["model"]:
            model.load_state_dict(rest["model"], strict=False)
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if name in rest["buffers"]:
                    buffer.copy_(rest["buffers"][name])
        for name, part in objects.items():
            part.load_state_dict(rest["state"][name])
        part, of, hash_there = rest["check"]
        if self._run.hash_of(part, of) != hash_there:
            raise ValueError("the same gradients led to other weights here, or the program changes them by hand")
        self.is_certain = of == 1


def _copied(value: Any) -> _native.Copies:
    head, tensors = _flattened(value)
    return _native.Copies(head, [_memory_of(tensor) for tensor in tensors])


def _flattened(value: Any) -> tuple[bytes, list[torch.Tensor]]:
    """A value of tensors, dictionaries and lists, as a head and the tensors that travel by themselves."""
    tensors: list[torch.Tensor] = []
    places: list[tuple | None] = []
    known: dict[tuple, int] = {}

    def visit(value: Any) -> Any:
        if type(value) in _TENSORS:
            if not _travels(value):
                places.append(None)
                return value
            dense, order = _dense(value)
            number = -1
            if value.numel():
                seen = value.is_conj(), value.is_neg()
                key = value.data_ptr(), value.dtype, tuple(value.shape), value.stride(), seen
                number = known.setdefault(key, len(tensors))
                if number == len(tensors):
                    tensors.append(dense.cpu())  # Itself, if it is there.
            places.append((number, str(value.dtype).removeprefix("torch."), tuple(dense.shape), order))
            return _PLACE
        return _mapped(visit, value)

    flat = visit(value)
    return handover.save_plain((places, flat)), tensors


def _unflattened(value: Any, places: list, vectors: list[bytearray]) -> Any:
    """The value of which this was the head."""
    left = iter(places)
    known: dict[int, torch.Tensor] = {}

    def visit(value: Any) -> Any:
        if type(value) not in _TENSORS:
            return _mapped(visit, value)
        place = next(left)
        if place is None:
            return value
        number, dtype, shape, order = place
        if number in known:
            return known[number]
        flat = torch.empty(0, dtype=getattr(torch, dtype))
        if number >= 0:
            count = torch.Size(shape).numel()
            flat = torch.frombuffer(vectors[number], dtype=flat.dtype, count=count)
        inverse = sorted(range(len(order)), key=order.__getitem__)
        tensor = flat.view(shape).permute(inverse)
        if number >= 0:
            known[number] = tensor
        return tensor

    return visit(value)


def _mapped(visit: Any, value: Any) -> Any:
    """A dictionary or list with what its values become; anything else as it is."""
    if type(value) in (dict, OrderedDict):
        mapped = type(value)((name, visit(each)) for name, each in value.items())
        if type(value) is OrderedDict:
            mapped.__dict__.update(value.__dict__)  # Versions of a model's modules.
        return mapped
    if type(value) in (list, tuple):
        return type(value)(visit(each) for each in value)
    return value


def _tensors_in(value: Any) -> Iterable[torch.Tensor]:
    found: list[torch.Tensor] = []

    def visit(value: Any) -> Any:
        if type(value) in _TENSORS:
            found.append(value)
            return value
        return _mapped(visit, value)

    visit(value)
    return found


def _travels(tensor: torch.Tensor) -> bool:
    """Whether a tensor is no more than numbers in memory of this machine or of a device."""
    is_plain = tensor.device.type in ("cpu", "cuda") and tensor.layout is torch.strided and not tensor.is_quantized
    return is_plain and type(tensor) in _TENSORS


def _dense(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """The numbers of a tensor without gaps, and which of its dimensions come in which order: that in which they are in
    memory, if there are no gaps there."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    order = tuple(range(tensor.dim()))
    if tensor.is_contiguous():
        return tensor, order
    strides = tensor.stride()
    by_stride = tuple(sorted(order, key=lambda each: -strides[each]))
    permuted = tensor.permute(by_stride)
    return (permuted, by_stride) if permuted.is_contiguous() else (tensor.contiguous(), order)


def _part_of(tensor: torch.Tensor, part: int, of: int) -> torch.Tensor:
    """One of so many parts of a tensor without gaps."""
    flat = tensor.reshape(-1)
    return flat[len(flat) * part // of : len(flat) * (part + 1) // of]


def _memory_of(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.numel() * tensor.element_size()


def _is_same(seen: tuple, before: tuple | None) -> bool:
    if before is None or len(seen) != len(before):
        return False
    if isinstance(seen[0], torch.Tensor):
        return isinstance(before[0], torch.Tensor) and handover.has_bits_of(seen[0], before[0])
    return seen == before
