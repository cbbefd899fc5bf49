"""Gradients of DDP in fewer bytes.

DDP calls a communication hook for every bucket of gradients, in order, as backward fills them, and
waits for the hooks' futures at the end of backward.  The hook hands the gradients to a
synchronizer, which encodes and exchanges them in buckets of its own, on a thread of its own, while
backward goes on.  The hook of the last bucket, when backward has nothing more to compute, waits for
the means and completes the futures of all.  Waiting there and not behind a future lets an error
leave `backward` as the exception that it is; and in the first step of a static graph DDP calls all
hooks after backward and looks at the futures at once, before another thread could complete them.
"""

import logging
from collections import deque
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from unisono import _native
from unisono.errors import InvalidCall
from unisono.torch._gradients import device
from unisono.torch._gradients.codec import CodecSettings, codec_of
from unisono.torch._gradients.engine import EngineGroup, engine_of
from unisono.torch._gradients.member import Member
from unisono.torch._gradients.route import DeviceRoute, EncodedRoute, HostRoute, route_for

_LOG = logging.getLogger("unisono")


def compress(
    model: DistributedDataParallel,
    codec: str = "auto",
    *,
    rules: Mapping[str, str | None] | None = None,
    warm_up: int = 0,
    error_feedback: bool = True,
    seed: int = 0,
) -> "Compression":
    """Lets the gradients of a DDP model travel in fewer bytes.

        model = DistributedDataParallel(model)
        compression = unisono.torch.compress(model, "powersgd:2")

    `codec` is one of fp16, bf16, int8, int4, qsgd, sign, topk, randk, dgc and powersgd, with its
    settings (``"topk:1%"``, ``"qsgd:4"``), a sparse one also with a codec for its values
    (``"topk:1%+int8"``); ``"none"``; or ``"auto"``, which observes some steps and then takes what
    is predicted to be fastest, which may be none.  Until then gradients travel as they are, and to
    measure the network takes a second or two and some bytes more (`observing` says how many): a
    short run is better off with a codec that it names.  ``dgc`` has the momentum in it: the
    optimizer should have none.

    Biases, the parameters of norms and tensors of less than 1024 elements travel as they are,
    unless one of the `rules` says otherwise: ``{"embed*": None, "*.head.weight": "int8"}``, of
    which the first that fits a parameter's name decides; one that fits none is refused.  In the
    first `warm_up` steps nothing is encoded.  What an encoding leaves out is added to the next
    gradient, unless `error_feedback` is off; without it, most codecs do not converge.  Codecs that
    draw random numbers draw them from `seed`.

    All ranks call this, with the same arguments, after making the model and before the first step.
    It works with `no_sync`, `find_unused_parameters`, `static_graph` and `gradient_as_bucket_view`,
    and with any backend: where that is not Unisono, the ranks connect for themselves.  A model may be on a
    CUDA device: gradients are encoded, exchanged and decoded there, with the same bits; with ``dgc`` and
    ``"auto"`` they are copied to this machine while backward goes on.  Gradients of every type travel as 32-bit floats, or by the codec: those in float64
    are rounded, and what is beyond the largest of 32 bits becomes infinite.
    """
    if not isinstance(model, DistributedDataParallel):
        kind = type(model).__name__
        raise InvalidCall(f"compress takes a DistributedDataParallel, not a {kind}; wrap the model")
    if getattr(model, "_comm_hooks", None):
        raise InvalidCall("the model has a communication hook already, and can have one only")
    compression = Compression(model, codec, rules, warm_up, error_feedback, seed)
    model.register_comm_hook(compression, _take)
    return compression


class Compression(Member):
    """What `compress` returns: counts bytes and steps, and remembers what codecs owe.

    Only those steps count that were synchronized.  A `state_dict` is for as many ranks as there were.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        codec: str,
        rules: Mapping[str, str | None] | None,
        warm_up: int,
        error_feedback: bool,
        seed: int,
    ):
        engine = engine_of(model.process_group)
        named = {
            name: parameter
            for name, parameter in model.module.named_parameters()
            if parameter.requires_grad and name not in model.parameters_to_ignore
        }
        settings = codec_of(
            codec, rules, named, warm_up=warm_up, error_feedback=error_feedback, seed=seed
        )
        shapes = [(name, list(parameter.shape)) for name, parameter in named.items()]
        native, self._route = _way_of(list(named.values()), engine, shapes, settings)
        self._world = engine.size
        self._elements = sum(parameter.numel() for parameter in named.values())
        # Tensors compare by their elements, so they are found by what they are.
        self._indices = {id(parameter): index for index, parameter in enumerate(named.values())}
        # DDP hands over zeros for a parameter that this rank did not use.
        self._may_be_unused = model.find_unused_parameters or model.static_graph
        self._gradients: list[torch.Tensor] = [torch.empty(0)] * len(named)
        self._pending: list[tuple[torch.futures.Future[torch.Tensor], torch.Tensor]] = []
        self._choice: tuple[str, str] | None = None
        self._observing: tuple[int, int] | None = None
        # Until a codec is chosen: steps, and what had been sent after each of the last.
        self._undecided = 0
        self._sent_after = deque([0], maxlen=3)
        self._join(native, engine.seconds)

    @property
    def choice(self) -> tuple[str, str] | None:
        """With ``"auto"``, the codec that was chosen and why, once it was."""
        return self._choice

    @property
    def observing(self) -> tuple[int, int] | None:
        """What the choice of ``"auto"`` has cost, once it was made: steps without a codec, and
        bytes that this rank has sent beyond their gradients."""
        return self._observing

    def wire_ratio(self) -> float:
        """How many times less than without a codec this rank has sent; below 1 it was more.

        Without a codec, a rank of an all-reduce sends 2·(n−1)/n times the gradients' bytes.  What
        ``"auto"`` sends to choose counts too.
        """
        sent = self.sent_bytes
        return self._dense_bytes() / sent if sent else 1.0

    def _dense_bytes(self) -> float:
        """What this rank would have sent so far without a codec."""
        return self.steps * 4 * self._elements * 2 * (self._world - 1) / self._world

    def _take(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Hands a bucket over; its future is completed at the end of the step."""
        if bucket.index() == 0:
            self._pending.clear()  # Of a backward pass that failed.
            self._route.begin_shard()
            self._route.begin_backward(0.0)
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            index = self._indices[id(parameter)]
            self._gradients[index] = gradient
            self._route.gradient(index, gradient, self._may_be_unused)
        self._route.end_bucket()
        buffer = bucket.buffer()
        devices = [] if buffer.is_cpu else [buffer.device]
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        self._pending.append((future, buffer))
        if bucket.is_last():
            self._route.end_shard()
            self._finish()
        return future

    def _finish(self) -> None:
        """Writes the means to where the gradients were."""
        _, _, choice = self._route.finish(self._wait, self._gradients)
        if self._choice is None:
            self._undecided += 1
            self._sent_after.append(self.sent_bytes)
            if choice is not None:
                self._note_choice(*choice)
        for future, buffer in self._pending:
            future.set_result(buffer)
        self._pending.clear()

    def _note_choice(self, codec: str, reason: str) -> None:
        # The choice is made at the end of a step that sends what the one before it has sent.
        before, last, now = self._sent_after
        more = max(0, (now - last) - (last - before))
        self._observing = self._undecided, more
        cost = f"{self._undecided} steps without a codec, and {more} bytes to measure the network"
        self._choice = codec, f"{reason}; to find out took {cost}"
        _LOG.info("auto chose %s: %s", *self._choice)


def _way_of(
    parameters: list[torch.Tensor],
    engine: EngineGroup,
    shapes: list[tuple[str, list[int]]],
    settings: CodecSettings,
) -> tuple[_native.Synchronizer | _native.DeviceExchange, HostRoute | DeviceRoute | EncodedRoute]:
    """What synchronizes the gradients of these parameters, and how they get there: they stay on their device if the
    engine can encode them there, on all ranks."""
    found = device.device_of(parameters)
    if found is not None and found.number() is not None and all(map(found.holds, parameters)):
        on_device = _native.DeviceExchange.join(
            engine.group, found.number(), shapes, settings, engine.seconds
        )
        if on_device is not None:
            return on_device, EncodedRoute(on_device, found)
    native = _native.Synchronizer(engine.group, shapes, engine.size, settings, None, engine.seconds)
    return native, route_for(native, parameters)


def _take(
    compression: Compression, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    # Not a method: DDP looks at the number of arguments.
    return compression._take(bucket)
