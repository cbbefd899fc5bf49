"""Torch's collectives, in terms of the engine's.

The names are those by which torch calls them, from C++ and from Python; where it has changed a
name, both are here.  `opts` are torch's options of the call; `asyncOp` in them is false for a call
that is waited for at once.
"""

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllreduceOptions

from unisono._native import Call
from unisono.errors import InvalidCall
from unisono.torch._backend import device, sparse
from unisono.torch._backend.codes import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BROADCAST,
    GATHER,
    REDUCE,
    REDUCE_SCATTER,
    SCATTER,
    factor_of,
    multiplied,
    multiply,
    reducible,
    reduction,
)
from unisono.torch._backend.core import Core, Prepared
from unisono.torch._backend.tensors import (
    Blocks,
    block_bytes,
    byte_count,
    check_copy_to,
    expect,
    source_of,
    sources_of,
    target_for,
    targets_for,
    write,
)

# What a rank that is not the root has, where the root has blocks.
_NOTHING = Blocks(0, ())


class Collectives(Core):
    """The collectives of a group."""

    # Reductions.

    def allreduce(self, tensors, opts=None):
        """Reduces a tensor over all ranks, in place. Several at once are several calls."""
        if not isinstance(opts, AllreduceOptions):  # None, or just a reduction.
            opts = _all_reduce_options(opts)
        tensors = _listed(tensors)
        if len(tensors) != 1:
            return self.allreduce_coalesced(tensors, opts)
        if tensors[0].layout is not torch.strided:
            return sparse.all_reduce(self, tensors[0], opts.reduceOp)
        return self._start(self._reduction(ALL_REDUCE, tensors, None, opts, "all_reduce"))

    def allreduce_coalesced(self, tensors, opts=None):
        """Reduces each of several tensors over all ranks, in place."""
        opts = opts or _all_reduce_options(None)
        calls = [self._reduction(ALL_REDUCE, [t], None, opts, None) for t in tensors]
        return self._start_all(calls, list(tensors), "all_reduce", tensors)

    def reduce(self, tensors, opts):
        """Reduces a tensor over all ranks, to the root's. The others' stay as they are."""
        tensors = _listed(tensors)
        root = opts.rootRank
        self._check_rank(root)
        return self._start(self._reduction(REDUCE, tensors, root, opts, "reduce"))

    def reduce_scatter(self, outputs, inputs, opts):
        """Reduces lists of tensors over all ranks; each rank gets one of the results."""
        if len({tensor.numel() for tensor in inputs[0]}) > 1:
            return self._reduce_scatter_unequal(outputs[0], inputs[0], opts)
        blocks = sources_of(multiplied(inputs[0], opts.reduceOp), outputs[0], self._size)
        prepared = self._scattered(outputs[0], blocks, opts, "reduce_scatter", inputs[0])
        return self._start(prepared)

    def reduce_scatter_single(self, output, input, opts):
        """Reduces a tensor over all ranks; each rank gets its part of the result."""
        blocks = self._source_blocks(*multiplied([input], opts.reduceOp), output)
        return self._start(self._scattered(output, blocks, opts, "_reduce_scatter_base", [input]))

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs, inputs, opts):
        """Several times `reduce_scatter_single`."""
        pairs = zip(outputs, inputs, strict=True)
        calls = []
        for output, input in pairs:
            blocks = self._source_blocks(*multiplied([input], opts.reduceOp), output)
            calls.append(self._scattered(output, blocks, opts, None, [input]))
        return self._start_all(calls, list(outputs), "reduce_scatter_tensor_coalesced", inputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # Data that only moves.

    def broadcast(self, tensors, opts):
        """Gives all ranks the root's tensor."""
        tensors = _listed(tensors)
        root = opts.rootRank
        self._check_rank(root)
        if self._rank == root:
            flat, finish = source_of(tensors[0]), None
        else:
            flat, finish = target_for(tensors[0], keep=False)
        address = flat.data_ptr()
        call = Call.moving(BROADCAST, address, address, byte_count(flat), root)
        return self._start(Prepared(call, opts, "broadcast", tensors, tensors, (flat,), finish))

    def allgather(self, outputs, inputs, opts=None):
        """Gives all ranks the tensors of all ranks, as a list."""
        return self._start(self._gathered_list(outputs[0], inputs[0], opts, "all_gather"))

    def all_gather_single(self, output, input, opts=None):
        """Gives all ranks the tensors of all ranks, one after the other."""
        return self._start(self._gathered(output, input, opts, "_all_gather_base"))

    _allgather_base = all_gather_single

    def allgather_coalesced(self, outputs, inputs, opts=None):
        """Several times `allgather`; `outputs` has one list per rank."""
        calls = [
            self._gathered_list([per_rank[i] for per_rank in outputs], source, opts, None)
            for i, source in enumerate(inputs)
        ]
        return self._start_all(calls, outputs, "all_gather", inputs)

    def all_gather_single_coalesced(self, outputs, inputs, opts=None):
        """Several times `all_gather_single`."""
        pairs = zip(outputs, inputs, strict=True)
        calls = [self._gathered(output, input, opts, None) for output, input in pairs]
        return self._start_all(calls, list(outputs), "_all_gather_base_coalesced", inputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs, inputs, opts):
        """Gives the root the tensors of all ranks, as a list."""
        source, root = source_of(inputs[0]), opts.rootRank
        self._check_rank(root)
        blocks, result = _NOTHING, []
        if self._rank == root:
            if len(outputs) != 1:
                raise InvalidCall("gather needs one list of outputs at the root")
            result = outputs[0]
            blocks = targets_for(result, source, self._size)
        elif len(outputs) and len(outputs[0]):
            raise InvalidCall("gather takes outputs at the root only")
        return self._gather(source, blocks, opts, result, inputs)

    def gather_single(self, output, input, opts):
        """Gives the root the tensors of all ranks, one after the other."""
        source = source_of(input)
        self._check_rank(opts.rootRank)
        is_root = self._rank == opts.rootRank
        blocks = self._target_blocks(output, source) if is_root else _NOTHING
        return self._gather(source, blocks, opts, [output], [input])

    gather_into_tensor = gather_single

    def scatter(self, outputs, inputs, opts):
        """Gives each rank one tensor of the root's list."""
        output, root = outputs[0], opts.rootRank
        self._check_rank(root)
        flat, finish = target_for(output, keep=False)
        blocks = _NOTHING
        if self._rank == root:
            if len(inputs) != 1:
                raise InvalidCall(f"scatter needs a list of {self._size} inputs at the root")
            blocks = sources_of(inputs[0], output, self._size)
        elif len(inputs) and len(inputs[0]):
            raise InvalidCall("scatter takes inputs at the root only")
        shown = inputs[0] if inputs else []
        call = Call.moving(SCATTER, blocks.address, flat.data_ptr(), byte_count(flat), root)
        keep = (*blocks.keep, flat)
        return self._start(Prepared(call, opts, "scatter", outputs, shown, keep, finish))

    def all_to_all_single(self, output, input, output_splits, input_splits, opts=None):
        """Gives each rank its rows of every rank's tensor; without splits, equally many."""
        source = source_of(input)
        flat, finish = target_for(output, keep=False)
        if output_splits or input_splits:
            sent = block_bytes(source, input_splits, self._size)
            received = block_bytes(flat, output_splits, self._size)
            return self._exchange(source, sent, flat, received, finish, opts, [output], [input])
        expect("the output", output, source.numel(), input.dtype)
        if source.numel() % self._size:
            raise InvalidCall(f"{source.numel()} elements do not divide into {self._size} blocks")
        block = byte_count(source) // self._size
        call = Call.moving(ALL_TO_ALL, source.data_ptr(), flat.data_ptr(), block)
        keep = (source, flat)
        return self._start(Prepared(call, opts, "all_to_all", [output], [input], keep, finish))

    alltoall_base = all_to_all_single

    def alltoall(self, outputs, inputs, opts=None):
        """Gives each rank its tensor of every rank's list."""
        for what, tensors in (("inputs", inputs), ("outputs", outputs)):
            if len(tensors) != self._size:
                text = f"all_to_all needs {self._size} {what}, one per rank, got {len(tensors)}"
                raise InvalidCall(text)
        source = torch.cat([source_of(t).reshape(-1).view(torch.uint8) for t in inputs])
        sent = [byte_count(tensor) for tensor in inputs]
        received = [byte_count(tensor) for tensor in outputs]
        flat = torch.empty(sum(received), dtype=torch.uint8, device=source.device)
        targets = tuple(outputs)
        for target in targets:
            check_copy_to(target)

        def finish():
            for tensor, part in zip(targets, flat.split(received), strict=True):
                write(tensor, part.view(tensor.dtype).view(tensor.shape))

        return self._exchange(source, sent, flat, received, finish, opts, outputs, inputs)

    def barrier(self, opts=None):
        """Waits for all ranks; if it is to be one of a GPU, after what the current stream there was given."""
        place = getattr(opts, "device", None)
        if place is not None and place.type == "cuda":
            device.refuse_recording(self._rank)
            device.drain(place)
        timeout = getattr(opts, "timeout", None)
        seconds = max(timeout.total_seconds(), 0.0) if timeout else 0.0
        call = Call.barrier()
        return self._start(Prepared(call, opts, "barrier", [], [], (), None, seconds))

    # What the calls above have in common.

    def _reduce_scatter_unequal(self, output, inputs, opts):
        """As many reductions as ranks: each to the one that gets the result."""
        if len(inputs) != self._size:
            raise InvalidCall(f"expected {self._size} tensors, one per rank, got {len(inputs)}")
        own = inputs[self._rank]
        expect("the output", output, own.numel(), own.dtype)
        check_copy_to(output)
        tensors = [output if rank == self._rank else t for rank, t in enumerate(inputs)]
        write(output, own.reshape(output.shape))
        calls = [self._reduction(REDUCE, [t], root, opts, None) for root, t in enumerate(tensors)]
        return self._start_all(calls, [output], "reduce_scatter", inputs)

    def _reduction(self, op, tensors, root, opts, name) -> Prepared:
        # The input of a rank that is not the root stays as it is.
        only_read = op == REDUCE and self._rank != root
        if only_read:
            flat, finish = source_of(tensors[0]), None
        else:
            flat, finish = target_for(tensors[0], keep=True)
        view, dtype, code = reducible(flat, reduction(opts.reduceOp))
        factor = factor_of(opts.reduceOp)
        if factor is not None:
            flat = multiply(flat.detach(), factor, None if only_read else flat.detach())
            view, _, _ = reducible(flat, code)
        address = view.data_ptr()
        output = 0 if only_read else address
        call = Call.reducing(op, dtype, code, address, output, view.numel(), root)
        return Prepared(call, opts, name, tensors, tensors, (flat,), finish)

    def _source_blocks(self, input, output) -> Blocks:
        """A tensor with one block per rank, each as long as another tensor."""
        source = source_of(input)
        expect("the input", source, output.numel() * self._size, output.dtype)
        return Blocks(source.data_ptr(), (source,))

    def _target_blocks(self, output, source) -> Blocks:
        """Memory for a tensor with one block per rank, each as long as another tensor."""
        expect("the output", output, source.numel() * self._size, source.dtype)
        flat, finish = target_for(output, keep=False)
        return Blocks(flat.data_ptr(), (flat,), finish)

    def _scattered(self, output, blocks, opts, name, shown) -> Prepared:
        flat, finish = target_for(output, keep=False)
        into, dtype, code = reducible(flat, reduction(opts.reduceOp))
        source, count = blocks.address, into.numel()
        call = Call.reducing(REDUCE_SCATTER, dtype, code, source, into.data_ptr(), count)
        return Prepared(call, opts, name, [output], shown, (*blocks.keep, flat), finish)

    def _gathered_list(self, outputs, input, opts, name) -> Prepared:
        source = source_of(input)
        blocks = targets_for(outputs, source, self._size)
        return self._gathered_in(blocks, source, opts, name, outputs, input)

    def _gathered(self, output, input, opts, name) -> Prepared:
        source = source_of(input)
        blocks = self._target_blocks(output, source)
        return self._gathered_in(blocks, source, opts, name, [output], input)

    def _gathered_in(self, blocks, source, opts, name, result, input) -> Prepared:
        address, count = source.data_ptr(), byte_count(source)
        call = Call.moving(ALL_GATHER, address, blocks.address, count)
        return Prepared(call, opts, name, result, [input], (source, *blocks.keep), blocks.finish)

    def _gather(self, source, blocks, opts, result, shown):
        address, count = source.data_ptr(), byte_count(source)
        call = Call.moving(GATHER, address, blocks.address, count, opts.rootRank)
        keep = (source, *blocks.keep)
        return self._start(Prepared(call, opts, "gather", result, shown, keep, blocks.finish))

    def _exchange(self, source, sent, flat, received, finish, opts, result, shown):
        """Blocks of different lengths, about which the ranks agree first."""
        call = Call.unequal(source.data_ptr(), sent, flat.data_ptr(), received)
        keep = (source, flat)
        return self._start(Prepared(call, opts, "all_to_all", result, shown, keep, finish))


def _listed(tensors):
    """Torch gives most calls a list of one tensor, and some older ones a tensor."""
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


def _all_reduce_options(op: dist.ReduceOp | None) -> AllreduceOptions:
    options = AllreduceOptions()
    if op is not None:
        options.reduceOp = op
    return options
