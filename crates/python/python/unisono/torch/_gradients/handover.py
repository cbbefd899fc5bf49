"""All that a worker knows of a run, as bytes: for another worker, or for a file."""

import hashlib
import io
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from unisono.errors import InvalidCall

# What is wrong with a state that torch does not read.
_PLAIN = (
    "a state_dict that is handed over holds tensors, numbers, texts, lists and dictionaries; for other types call"
    " torch.serialization.add_safe_globals on every worker"
)


def expect_plain(name: str, part: Any) -> None:
    """Refuses a part of a run whose state another worker could not read."""
    if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
        raise InvalidCall(f"{name} has no state_dict and load_state_dict, and cannot be handed over")
    try:
        _load(_save(part.state_dict()))
    except Exception as error:
        raise InvalidCall(f"the state of {name} cannot be handed over ({error}); {_PLAIN}") from error


def pack(
    steps: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    objects: Mapping[str, Any],
    codec: Mapping[str, bytes],
) -> bytes:
    """All there is of a run after so many steps."""
    weights = model.state_dict()
    parts = {
        "steps": steps,
        "model": weights,
        "buffers": {n: b for n, b in model.named_buffers() if n not in weights},
        "optimizer": optimizer.state_dict(),
        "state": {name: part.state_dict() for name, part in objects.items()},
        "codec": {name: _tensor_of(data) for name, data in codec.items()},
    }
    try:
        return _save(parts)
    except Exception as error:
        raise InvalidCall(f"the state of the run cannot be saved ({error}); {_PLAIN}") from error


def unpack(
    packed: bytes,
    source: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    objects: Mapping[str, Any],
) -> dict[str, bytes]:
    """Sets all parts of a run to what was packed; what codecs remember."""
    state = _read(packed, source)
    name = "the model"
    try:
        model.load_state_dict(state["model"])
        with torch.no_grad():
            for buffer, tensor in model.named_buffers():
                if buffer in state["buffers"]:
                    tensor.copy_(state["buffers"][buffer])
        name = "the optimizer"
        optimizer.load_state_dict(state["optimizer"])
        if set(state["state"]) != set(objects):
            name = "state="
            raise ValueError(f"it has {sorted(state['state'])}, and this worker {sorted(objects)}")
        for name, part in objects.items():
            part.load_state_dict(state["state"][name])
    except Exception as error:
        raise InvalidCall(f"{source} has another state of {name} than fits here: {error}") from error
    return {name: tensor.numpy().tobytes() for name, tensor in state["codec"].items()}


def steps_of(packed: bytes, source: str) -> int:
    """The steps after which this was packed."""
    return _read(packed, source)["steps"]


def write(path: str, packed: bytes) -> None:
    """Replaces a file, all at once: whatever happens, it is what it was or what it should be."""
    new = f"{path}.new"
    with open(new, "wb") as file:
        file.write(packed)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)


def number_of(parts: Mapping[str, Any]) -> int:
    """A number, of 63 bits, for what these have come to: equal only if that is, to the bit."""
    digest = hashlib.blake2b(digest_size=8)
    for name, part in parts.items():
        _add(digest, name)
        _add(digest, part.state_dict())
    return int.from_bytes(digest.digest(), "big") >> 1


def _add(digest: Any, value: Any) -> None:
    """Adds a value of a state_dict. Not by pickling, whose bytes depend on which objects are the same one."""
    if isinstance(value, torch.Tensor):
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        flat = value.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy() if flat.numel() else b"")
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            _add(digest, key)
            _add(digest, value[key])
    elif isinstance(value, (list, tuple)):
        for item in value:
            _add(digest, item)
    elif isinstance(value, (bool, int, float, str, bytes, type(None))):
        digest.update(repr(value).encode())
    digest.update(b";")


def _tensor_of(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0).byte()


def _read(packed: bytes, source: str) -> dict[str, Any]:
    try:
        state = _load(packed)
        if not {"steps", "model", "buffers", "optimizer", "state", "codec"} <= set(state):
            raise ValueError("it has not the parts of a run")
        return state
    except Exception as error:
        raise InvalidCall(f"{source} is no state of a run ({error}); {_PLAIN}") from error


def _save(state: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def _load(packed: bytes) -> Any:
    return torch.load(io.BytesIO(packed), map_location="cpu", weights_only=True)
