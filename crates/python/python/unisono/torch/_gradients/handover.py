"""All that a worker knows of a run, as bytes: for another worker, or for a file.

A file is what `torch.save` writes, and behind that a mark and a hash of it.  `torch.load` reads such a file too.
"""

import errno
import hashlib
import io
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from unisono.errors import CheckpointError, InvalidCall

# What comes between a state and its hash in a file.
_MARK = b"unisono blake2b "
_HASH_LEN = 64

# What a state_dict holds besides tensors, lists and dictionaries.
_PLAIN_TYPES = (bool, int, float, str, bytes, type(None))

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
        load_plain(save_plain(part.state_dict()))
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
    parts = parts_of(steps, model, optimizer, objects, codec)
    try:
        return save_plain(parts)
    except Exception as error:
        raise InvalidCall(f"the state of the run cannot be saved ({error}); {_PLAIN}") from error


def parts_of(
    steps: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    objects: Mapping[str, Any],
    codec: Mapping[str, bytes],
) -> dict[str, Any]:
    """All there is of a run after so many steps, with the run's own tensors."""
    return {
        "steps": steps,
        "model": model.state_dict(),
        "buffers": other_buffers(model),
        "optimizer": optimizer.state_dict(),
        "state": {name: part.state_dict() for name, part in objects.items()},
        "codec": {name: _tensor_of(data) for name, data in codec.items()},
    }


def unpack(
    packed: bytes,
    source: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    objects: Mapping[str, Any],
) -> dict[str, bytes]:
    """Sets all parts of a run to what was packed; what codecs remember."""
    state = _read(packed, source)
    set_parts(state, source, model, optimizer, objects)
    return {name: tensor.numpy().tobytes() for name, tensor in state["codec"].items()}


def set_parts(
    state: Mapping[str, Any],
    source: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    objects: Mapping[str, Any],
) -> None:
    """Sets all parts of a run to these. Their tensors may become the run's own."""
    name = "the model"
    try:
        model.load_state_dict(state["model"])
        with torch.no_grad():
            for buffer, tensor in model.named_buffers():
                if buffer in state["buffers"]:
                    tensor.copy_(state["buffers"][buffer])
        name = "the optimizer"
        optimizer.load_state_dict(state["optimizer"])
        _restore_types(optimizer, state["optimizer"])
        if set(state["state"]) != set(objects):
            name = "state="
            raise ValueError(f"it has {sorted(state['state'])}, and this worker {sorted(objects)}")
        for name, part in objects.items():
            part.load_state_dict(state["state"][name])
    except Exception as error:
        raise InvalidCall(f"{source} has another state of {name} than fits here: {error}") from error
    _expect_loaded("the model", model, state["model"])
    _expect_same("the model", other_buffers(model), state["buffers"])
    _expect_loaded("the optimizer", optimizer, state["optimizer"])
    for name, part in objects.items():
        _expect_loaded(name, part, state["state"][name])


def pack_codec(codec: Mapping[str, bytes]) -> bytes:
    """What codecs remember, by itself: for a worker that has all else."""
    return save_plain({name: _tensor_of(data) for name, data in codec.items()})


def unpack_codec(packed: bytes) -> dict[str, bytes]:
    """What codecs remember."""
    return {name: tensor.numpy().tobytes() for name, tensor in load_plain(packed).items()}


def steps_of(packed: bytes, source: str) -> int:
    """The steps after which this was packed."""
    return _read(packed, source)["steps"]


def write(path: str, packed: bytes) -> None:
    """Replaces a file, all at once: whatever happens, it is what it was or what it should be."""
    folder, name = os.path.split(os.path.abspath(path))
    # A worker that was cut off may write at the same time as the one that took its place, on storage that they share.
    worker = f"{name}.{socket.gethostname()}-{os.environ.get('RANK', '0')}-"
    new = os.path.join(folder, f"{worker}{os.getpid()}.new")
    try:
        # What earlier lives of this worker left behind when they were killed.
        for entry in os.listdir(folder):
            if entry.startswith(worker) and entry.endswith(".new"):
                os.unlink(os.path.join(folder, entry))
        with open(new, "wb") as file:
            file.write(packed)
            file.write(_MARK + _hash_of(packed))
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
        _make_last(folder)
    except OSError as error:
        with suppress(OSError):
            os.unlink(new)
        text = f"the checkpoint {path} cannot be written ({error}); make room, or name another file"
        raise CheckpointError(text, path=path) from error


def read(path: str) -> bytes | None:
    """What was written to a file; None if there is no such file."""
    try:
        with open(path, "rb") as file:
            packed = file.read(max(os.fstat(file.fileno()).st_size - len(_MARK) - _HASH_LEN, 0))
            mark = file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        text = f"the checkpoint {path} cannot be read ({error}); mend that, or name another file"
        raise CheckpointError(text, path=path) from error
    if mark != _MARK + _hash_of(packed):
        text = f"the checkpoint {path} is damaged: it is not what was written, or no ElasticStep wrote it"
        raise CheckpointError(f"{text}; put a good one in its place, or remove it to begin anew", path=path)
    return packed


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
        digest.update(_bytes_of(value).numpy() if value.numel() else b"")
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            _add(digest, key)
            _add(digest, value[key])
    elif isinstance(value, (list, tuple)):
        for item in value:
            _add(digest, item)
    elif isinstance(value, _PLAIN_TYPES):
        digest.update(repr(value).encode())
    digest.update(b";")


def other_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that are not in the model's state_dict."""
    weights = model.state_dict()
    return {name: buffer for name, buffer in model.named_buffers() if name not in weights}


def _restore_types(optimizer: Any, saved: Mapping[str, Any]) -> None:
    """Gives the state of an optimizer the types that it had. Torch's `load_state_dict` casts floats to the type of
    their parameter: a product of factors in 32 bits, for a parameter in 16, would be rounded."""
    groups = zip(getattr(optimizer, "param_groups", ()), saved.get("param_groups", ()))
    for group, saved_group in groups:
        for parameter, number in zip(group["params"], saved_group["params"]):
            if number in saved["state"] and parameter in optimizer.state:
                state = _with_types(optimizer.state[parameter], saved["state"][number])
                optimizer.state[parameter] = state


def _with_types(loaded: Any, saved: Any) -> Any:
    """What was loaded, with the types that were saved."""
    if isinstance(saved, torch.Tensor) and isinstance(loaded, torch.Tensor):
        return loaded if loaded.dtype == saved.dtype else saved.to(loaded.device)
    if isinstance(saved, Mapping) and isinstance(loaded, dict):
        for key in saved.keys() & loaded.keys():
            loaded[key] = _with_types(loaded[key], saved[key])
    elif isinstance(saved, list) and isinstance(loaded, list):
        loaded[:] = map(_with_types, loaded, saved)
    return loaded


def _expect_loaded(name: str, part: Any, saved: Any) -> None:
    """Refuses a part that did not become what it was given: this worker would go on with other numbers."""
    _expect_same(name, part.state_dict(), saved)


def _expect_same(name: str, loaded: Any, saved: Any) -> None:
    place = next(_differences(loaded, saved, ""), None)
    if place is not None:
        text = f"load_state_dict of {name} is lossy: {place or 'its state'} is not what it was given"
        raise InvalidCall(f"{text}, and this worker would go on with other numbers than the rest; let it keep all")


def _differences(loaded: Any, saved: Any, place: str) -> Iterator[str]:
    """Where two values of state_dicts differ, to the bit. What cannot be compared is taken for equal."""
    if isinstance(saved, torch.Tensor):
        if not (isinstance(loaded, torch.Tensor) and has_bits_of(loaded, saved)):
            yield place
    elif isinstance(saved, Mapping):
        if not isinstance(loaded, Mapping) or set(loaded) != set(saved):
            yield place
            return
        for key in saved:
            yield from _differences(loaded[key], saved[key], f"{place}[{key!r}]")
    elif isinstance(saved, (list, tuple)):
        if not isinstance(loaded, (list, tuple)) or len(loaded) != len(saved):
            yield place
            return
        for index, (one, other) in enumerate(zip(loaded, saved)):
            yield from _differences(one, other, f"{place}[{index}]")
    elif isinstance(saved, _PLAIN_TYPES) and repr(loaded) != repr(saved):
        yield place


def has_bits_of(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal to the bit."""
    is_alike = one.dtype == other.dtype and one.shape == other.shape
    return is_alike and (one.numel() == 0 or torch.equal(_bytes_of(one), _bytes_of(other)))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _hash_of(packed: bytes) -> bytes:
    return hashlib.blake2b(packed, digest_size=_HASH_LEN // 2).hexdigest().encode()


def _make_last(folder: str) -> None:
    """Waits until the names in a folder are where they survive the machine."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # Which a file system says that has no such call.
            raise
    finally:
        os.close(descriptor)


def _tensor_of(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0).byte()


def _read(packed: bytes, source: str) -> dict[str, Any]:
    try:
        state = load_plain(packed)
        if not {"steps", "model", "buffers", "optimizer", "state", "codec"} <= set(state):
            raise ValueError("it has not the parts of a run")
        return state
    except Exception as error:
        raise InvalidCall(f"{source} is no state of a run ({error}); {_PLAIN}") from error


def save_plain(state: Any) -> bytes:
    """What torch saves, as bytes."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def load_plain(packed: bytes) -> Any:
    """What torch reads of bytes, if it holds nothing but tensors and plain values."""
    return torch.load(io.BytesIO(packed), map_location="cpu", weights_only=True)
