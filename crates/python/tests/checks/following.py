"""What a worker that joins beside the training is given; `jobs/elastic.py` has whole runs."""

from collections import OrderedDict

import torch
from tools import raises
from torch import nn
from unisono import _native
from unisono.torch._gradients import following


def check_following_tensors(rank, world):
    """Tensors of every kind, alone and within lists and dictionaries, are what they were."""
    plain = torch.arange(24.0)
    pairs = torch.complex(plain, -plain)
    kinds = {
        "plain": plain,
        "number": torch.tensor(5.0),
        "none": torch.empty(3, 0),
        "halves": plain.bfloat16(),
        "doubles": plain.double() / 3,
        "flags": plain > 7,
        "long": plain.long(),
        "complex": pairs,
        "conjugate": pairs.conj(),
        "imaginary": pairs.imag,
        "negated": pairs.conj().imag,
        "odd bytes": torch.arange(7).to(torch.uint8),
        "transposed": plain.view(4, 6).t(),
        "gaps": plain[::5],
        "expanded": torch.ones(1, 3).expand(4, 3),
        "channels": plain.view(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
        "parameter": nn.Parameter(plain),
        "sparse": torch.eye(3).to_sparse(),
    }
    weights = nn.Linear(2, 3).state_dict()
    value = {"kinds": kinds, "nested": [(weights, None), 7, "text"], "ordered": OrderedDict(a=plain)}
    found = _round_trip(value)
    for name, tensor in kinds.items():
        same = found["kinds"][name]
        assert same.dtype == tensor.dtype and same.shape == tensor.shape, name
        assert torch.equal(same.to_dense(), tensor.to_dense()), name
    assert found["kinds"]["channels"].is_contiguous(memory_format=torch.channels_last)
    assert found["nested"][1:] == [7, "text"] and found["nested"][0][1] is None
    assert found["nested"][0][0]._metadata == weights._metadata
    # One tensor in several places is one tensor.
    assert found["ordered"]["a"].data_ptr() == found["kinds"]["plain"].data_ptr()
    found["kinds"]["plain"].add_(1)


def check_following_hash(rank, world):
    """Every byte is in one of the parts."""
    tensor, short = torch.zeros(1000, dtype=torch.uint8), torch.zeros(3, dtype=torch.uint8)
    buffers = [(tensor.data_ptr(), 1000), (short.data_ptr(), 3)]

    def hashes():
        return [_native.hash_parts(buffers, part, 7) for part in range(7)]

    before = hashes()
    for place in (0, 142, 143, 999):
        tensor[place] = 1
        assert sum(one != other for one, other in zip(before, hashes())) == 1, place
        tensor[place] = 0
    for place in range(3):
        short[place] = 1
        assert sum(one != other for one, other in zip(before, hashes())) == 1, place
        short[place] = 0
    raises(ValueError, _native.hash_parts, buffers, 7, 7)
    raises(ValueError, _native.hash_parts, [(0, 4)], 0, 1)
    raises(ValueError, _native.Copies, b"", [(0, 4)])


def check_following_by_hand(rank, world):
    """A worker that follows is sure of all weights only by a hash of all of them, which finds what a program changes by
    hand."""

    class Job:
        joiner = (True, False)

        def give_state(self, steps, copies):
            self.sent, self.joiner = [copies], (False, True)

        def give_step(self, steps, copies):
            self.sent = copies

    def made():
        torch.manual_seed(3)
        model = nn.Linear(64, 64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return following.Run(model, optimizer, {})

    own, other, job = made(), made(), Job()
    donor, joiner = following.Donor(job, own), following.Joiner(other)
    other.optimizer.register_step_pre_hook(lambda *_: joiner.note_optimizer())
    copied, following._copied = following._copied, following._flattened
    try:
        for steps, by_hand, is_last, follows, is_certain in (
            (1, False, False, True, True),
            (2, False, False, True, False),
            (3, False, True, True, True),
            (4, True, False, True, False),
            (5, False, True, False, False),
        ):
            donor.attend(steps - 1)
            if steps == 1:
                joiner.begin()
                _feed(joiner, *job.sent[0])
                assert joiner.complete(0) and joiner.is_certain
            for parameter in own.trained:
                parameter.grad = torch.full_like(parameter, 0.1 * steps)
            donor.note_optimizer((own.optimizer,), {})
            own.optimizer.step()
            if by_hand:
                with torch.no_grad():
                    own.model.weight[0, 0] += 1  # In another part than is hashed.
            donor.give_step(steps, is_last)
            for copies in job.sent:
                _feed(joiner, *copies)
            assert joiner.stepped(steps) == follows, steps
            assert (joiner.steps, joiner.is_certain) == (steps if follows else None, is_certain), steps
    finally:
        following._copied = copied


def check_following_flaws(rank, world):
    """What cannot be read is no error of this worker, which gets the state otherwise."""
    joiner = following.Joiner(following.Run(nn.Linear(1, 1), torch.optim.SGD([torch.zeros(1)]), {}))
    joiner.begin()
    joiner.take(bytearray(b"\x04\0\0\0\0\0\0\0junk"))
    joiner.take(bytearray(8))
    assert not joiner.complete(3) and joiner.steps is None


def _round_trip(value):
    """What a joiner makes of a value, by the bytes that a donor copies."""
    head, tensors = following._flattened(value)
    joiner = following.Joiner(following.Run(nn.Linear(1, 1), torch.optim.SGD([torch.zeros(1)]), {}))
    joiner.begin()
    _feed(joiner, head, tensors)
    (found,) = joiner._packages
    return found


def _feed(joiner, head, tensors):
    """Gives a joiner what a donor copies."""
    joiner.take(bytearray(len(head).to_bytes(8, "little") + head + b"\0"))
    for tensor in tensors:
        tensor = tensor.detach()
        data = tensor.reshape(-1).view(torch.uint8) if tensor.dim() else tensor.view(1).view(torch.uint8)
        joiner.take(bytearray(data.numpy().tobytes() + bytes(-data.numel() % 4)))
