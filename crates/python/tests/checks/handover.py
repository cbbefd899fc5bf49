"""The state of a worker on its way to another; `jobs/elastic.py` has whole runs."""

import torch
import unisono
from tools import raises
from unisono import _native
from unisono.torch._gradients.engine import engine_of

# As the package tags the messages of a state.
TAG = 0x5E1F


def check_handover_length(rank, world):
    """A length that is wrong reserves no memory: what arrives does."""
    engine = engine_of()
    if rank == 0:
        claimed = torch.frombuffer(bytearray((1 << 50).to_bytes(8, "little") + bytes(32)), dtype=torch.uint8)
        engine.group.send(claimed.data_ptr(), claimed.numel(), 1, TAG, claimed).wait(60)
    elif rank == 1:
        raises(unisono.PeerLost, _native.receive_state, engine.group, 0, 60)
    engine.group.close(5)


def check_handover_state(rank, world):
    """A state of several pieces, and one of none, arrive as they were."""
    engine = engine_of()
    for length in (0, 1, (16 << 20) + 5):
        state = bytes(torch.arange(length, dtype=torch.int64).to(torch.uint8).numpy())
        if rank == 0:
            _native.send_state(engine.group, list(range(1, world)), state, 60)
        else:
            assert _native.receive_state(engine.group, 0, 60) == state
    engine.group.close(5)
