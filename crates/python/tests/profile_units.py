#!/usr/bin/env python3
"""How events become steps: the pure parts of `unisono.torch.profile`, from events written by hand.

Times are in microseconds here, to be readable.
"""

import json
import tempfile
import threading
import time
import unittest
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import unisono.torch
from tools import tomllib
from torch import nn
from torch._C._autograd import DeviceType
from unisono.torch._profile import spans
from unisono.torch._profile.describe import device_use
from unisono.torch._profile.exchange import Exchange, Machine
from unisono.torch._profile.spans import Kind, Span, length, union, within, without
from unisono.torch._profile.steps import sent, steps
from unisono.torch._profile.tracer import read


def seen(kind: Kind, begin: int, end: int | None = None, what: str = "", size: int = 0) -> Span:
    return Span(kind, begin * 1000, (begin if end is None else end) * 1000, what, size)


def kernel(name: str, begin: int, end: int, launched: int) -> Span:
    return Span(spans.on_device(name), begin * 1000, end * 1000, name, launched=launched * 1000)


def instants(step) -> list[int]:
    """Begin, computed, reduced, end, and compute and backward."""
    times = (step.begin, step.computed, step.reduced, step.end, step.compute, step.backward)
    return [time // 1000 for time in times]


class Intervals(unittest.TestCase):
    def test_union_joins_what_touches(self):
        self.assertEqual(union([(5, 7), (1, 3), (3, 4), (2, 3), (9, 9)]), [(1, 4), (5, 7)])

    def test_without_cuts_holes(self):
        left = without([(0, 10), (20, 30)], [(2, 3), (8, 22)])
        self.assertEqual(left, [(0, 2), (3, 8), (22, 30)])
        self.assertEqual(without([(0, 10)], [(0, 10)]), [])

    def test_within_and_length(self):
        self.assertEqual(within([(0, 4), (6, 9)], 2, 7), [(2, 4), (6, 7)])
        self.assertEqual(length([(2, 4), (6, 7)]), 3)


class Names(unittest.TestCase):
    def test_calls_of_every_backend(self):
        for name in ("gloo:all_reduce", "nccl:_all_gather_base", "nccl:send 0->1", "mpi:barrier",
                     "nccl:_reduce_scatter_base", "gloo:recvAnySource", "my_own:all_to_all"):
            self.assertEqual(spans.on_host(name), (Kind.COMMUNICATION, name.split(":")[1]), name)

    def test_other_scopes_are_none(self):
        for name in ("Optimizer.step#SGD.step", "FSDP::all_gather", "model:layer", "all_reduce",
                     "DistributedDataParallel.forward", "gloo:", "mine: reduce the noise"):
            self.assertIsNone(spans.on_host(name), name)

    def test_data_and_kernels(self):
        loader = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
        self.assertEqual(spans.on_host(loader), (Kind.DATA, ""))
        collective = spans.on_device("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgs)")
        self.assertIs(collective, Kind.COMMUNICATION)
        self.assertIs(spans.on_device("fold_bf16_sum_2"), Kind.COMMUNICATION)
        self.assertIs(spans.on_device("quantize_encode_int8_owed"), Kind.COMMUNICATION)
        self.assertIs(spans.on_device("void at::native::sbtopk::gatherTopK<float>"), Kind.KERNEL)
        self.assertIs(spans.on_device("sm90_xmma_gemm_f32f32"), Kind.KERNEL)
        self.assertIs(spans.on_device("Memcpy DtoH (Device -> Pinned)"), Kind.COPY)
        self.assertIs(spans.on_device("Memcpy HtoD (Pageable -> Device)"), Kind.COPY)
        self.assertIs(spans.on_device("Memcpy DtoD (Device -> Device)"), Kind.KERNEL)

    def test_bytes(self):
        self.assertEqual(spans.byte_count([[2, 3], [4]], ["float", "c10::BFloat16"]), 32)
        self.assertEqual(spans.byte_count([[], []], ["float", ""]), 4)
        self.assertEqual(spans.byte_count([[[2], [3]]], [""]), 20)
        self.assertEqual(spans.byte_count([], []), 0)


class OnHost(unittest.TestCase):
    """Steps of a CPU."""

    def test_ddp(self):
        """The second bucket travels after the last gradient, and backward waits for it."""
        [step] = steps([
            seen(Kind.DATA, 0, 10),
            seen(Kind.FORWARD, 20),
            seen(Kind.BACKWARD, 50, 100),
            seen(Kind.COMMUNICATION, 60, 75, "all_reduce", 400),
            seen(Kind.COMPUTED, 80),
            seen(Kind.COMMUNICATION, 78, 95, "all_reduce", 100),
            seen(Kind.OPTIMIZER, 105, 110, "0"),
        ], 0)
        # Waits from 80 until 95; copies its buckets back until 100.
        self.assertEqual(instants(step), [0, 80, 95, 110, 60, 30])
        self.assertEqual([b[0] for b in step.buckets], [400, 100])
        self.assertTrue(step.overlaps)

    def test_accumulation_is_one_step(self):
        """Passes without communication wait for nothing."""
        [step] = steps([
            seen(Kind.FORWARD, 5), seen(Kind.BACKWARD, 10, 21), seen(Kind.COMPUTED, 20),
            seen(Kind.FORWARD, 25), seen(Kind.BACKWARD, 30, 50), seen(Kind.COMPUTED, 40),
            seen(Kind.COMMUNICATION, 38, 50, "all_reduce", 4),
            seen(Kind.OPTIMIZER, 52, 60, "0"),
        ], 0)
        self.assertEqual(instants(step), [0, 40, 50, 60, 15 + 15, 10])

    def test_calls_after_backward(self):
        [step] = steps([
            seen(Kind.FORWARD, 0), seen(Kind.BACKWARD, 10, 20), seen(Kind.COMPUTED, 20),
            seen(Kind.COMMUNICATION, 22, 30, "all_reduce", 4), seen(Kind.WAIT, 21, 31),
            seen(Kind.COMMUNICATION, 33, 40, "all_reduce", 4), seen(Kind.WAIT, 32, 41),
            seen(Kind.OPTIMIZER, 45, 50, "0"),
        ], 0)
        self.assertEqual(instants(step), [0, 20, 20 + 10 + 9, 50, 20, 10])
        # The program waited before the backend took it up.
        self.assertEqual([bucket[1] // 1000 for bucket in step.buckets], [21, 32])
        self.assertFalse(step.overlaps)

    def test_waits_inside_of_passes_move_to_the_end(self):
        """FSDP gathers in the forward pass; a sharded optimizer sends its results around."""
        [step] = steps([
            seen(Kind.FORWARD, 0),
            seen(Kind.COMMUNICATION, 1, 6, "_all_gather_base", 4), seen(Kind.WAIT, 2, 6),
            seen(Kind.BACKWARD, 20, 40), seen(Kind.COMPUTED, 40),
            seen(Kind.COMMUNICATION, 24, 28, "_all_gather_base", 4), seen(Kind.WAIT, 25, 28),
            seen(Kind.OPTIMIZER, 41, 60, "0"),
            seen(Kind.COMMUNICATION, 50, 55, "broadcast", 4), seen(Kind.WAIT, 50, 55),
        ], 0)
        # 4 + 3 before all was computed, 5 after.
        self.assertEqual(instants(step), [0, 33, 33 + 12, 60, 33, 17])

    def test_no_backward_at_all(self):
        [step] = steps([
            seen(Kind.DATA, 0, 5), seen(Kind.COMMUNICATION, 20, 25, "all_reduce", 4),
            seen(Kind.WAIT, 20, 25), seen(Kind.STEP, 30),
        ], 0)
        self.assertEqual(instants(step), [0, 25, 30, 30, 20, 0])

    def test_steps_of_several_optimizers(self):
        """D, D, G is one cycle; one that was used once is none."""
        updates = [("0", 1), ("0", 2), ("1", 3), ("0", 4), ("0", 5), ("1", 6), ("2", 7), ("0", 8)]
        found = steps([seen(Kind.OPTIMIZER, at * 10, at * 10 + 1, who) for who, at in updates], 0)
        self.assertEqual([step.end // 1000 for step in found], [31, 61])
        self.assertEqual([step.counted for step in found], [(0, 3), (3, 6)])

    def test_the_program_has_the_last_word(self):
        found = steps([
            seen(Kind.OPTIMIZER, 10, 11, "0"), seen(Kind.OPTIMIZER, 20, 21, "0"),
            seen(Kind.STEP, 30), seen(Kind.OPTIMIZER, 40, 41, "0"), seen(Kind.STEP, 50),
            seen(Kind.OPTIMIZER, 60, 61, "0"),
        ], 0)
        self.assertEqual([step.end // 1000 for step in found], [30, 50])

    def test_nothing_seen(self):
        self.assertEqual(steps([], 0), [])


class OnDevice(unittest.TestCase):
    """Steps of a GPU, whose host is ahead of it. Written by hand, not recorded."""

    def step_of_nccl(self, at: int, ahead: int) -> list[Span]:
        """The host asks for a step's work from `at - ahead` on; the device does it from `at` on."""
        host = at - ahead
        return [
            seen(Kind.FORWARD, host),
            kernel("gemm_forward", at, at + 20, host + 1),
            seen(Kind.BACKWARD, host + 3, host + 8), seen(Kind.COMPUTED, host + 7),
            kernel("gemm_backward", at + 20, at + 40, host + 4),
            seen(Kind.COMMUNICATION, host + 5, host + 6, "all_reduce", 4000),
            kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", at + 30, at + 70, host + 5),
            kernel("gemm_backward", at + 40, at + 50, host + 6),
            seen(Kind.OPTIMIZER, host + 9, host + 10, "0"),
            kernel("multi_tensor_apply", at + 70, at + 80, host + 9),
        ]

    def test_time_is_that_of_the_device(self):
        first, second = steps(self.step_of_nccl(100, 20) + self.step_of_nccl(180, 85), 80_000)
        # Computes until 150, and the device only waits until 170.
        self.assertEqual(instants(first), [80, 150, 170, 180, 50, 30])
        # The host was done with the second step before the device began with it.
        self.assertEqual(instants(second), [180, 230, 250, 260, 50, 30])
        self.assertEqual([tuple(t // 1000 if i else t for i, t in enumerate(bucket))
                          for bucket in second.buckets], [(4000, 100, 210, 250)])
        self.assertTrue(first.overlaps)

    def test_waiting_before_the_end_of_computing_moves(self):
        """FSDP: a kernel needs what is gathered."""
        [step] = steps([
            seen(Kind.COMMUNICATION, 0, 1, "_all_gather_base", 8),
            kernel("ncclDevKernel_AllGather_RING_LL", 10, 25, 0),
            seen(Kind.BACKWARD, 2, 6), seen(Kind.COMPUTED, 5),
            kernel("gemm", 25, 45, 3),
            seen(Kind.OPTIMIZER, 7, 8, "0"),
            kernel("sgd", 45, 50, 7),
        ], 0)
        self.assertEqual(instants(step), [0, 30, 45, 50, 20, 20])

    def test_calls_of_a_host_backend(self):
        """Gloo takes tensors of devices, and no kernel shows it."""
        [step] = steps([
            seen(Kind.BACKWARD, 0, 30), seen(Kind.COMPUTED, 5), kernel("gemm", 2, 12, 1),
            seen(Kind.COMMUNICATION, 10, 28, "all_reduce", 8),
            seen(Kind.OPTIMIZER, 31, 32, "0"), kernel("sgd", 33, 35, 31),
        ], 0)
        self.assertEqual(instants(step), [0, 12, 28, 35, 10, 10])


    def test_gradients_that_are_staged(self):
        """A codec of the host: gradients are copied while backward goes on, the means after it; a batch is copied by
        the program."""
        [step] = steps([
            kernel("Memcpy HtoD (Pageable -> Device)", 2, 6, 1),
            seen(Kind.BACKWARD, 3, 60), seen(Kind.COMPUTED, 9), kernel("gemm", 6, 30, 4),
            seen(Kind.STAGING, 5, 7), kernel("Memcpy DtoH (Device -> Pinned)", 20, 35, 6),
            seen(Kind.COMMUNICATION, 36, 50, "synchronize", 8),
            seen(Kind.STAGING, 48, 52), kernel("Memcpy HtoD (Pinned -> Device)", 50, 55, 51),
            seen(Kind.OPTIMIZER, 61, 62, "0"), kernel("sgd", 63, 70, 61),
        ], 0)
        # Computes from 6 until 30; then only copies, the host's exchange, and copies.
        self.assertEqual(instants(step), [0, 30, 30 + 5 + 19, 70, 24, 24])
        device = {name: 1e6 * value for name, value in step.record(0.0)["device"].items()}
        told = {name: round(value) for name, value in device.items()}
        self.assertEqual(told, {"compute": 31, "communication": 20, "exposed": 14, "copies": 24, "idle": 25})

    def test_the_use_of_a_device(self):
        first, second = steps(self.step_of_nccl(100, 20) + self.step_of_nccl(180, 85), 80_000)
        told = device_use([first.record(0.0), second.record(0.0), second.record(0.0)])
        self.assertIn("computes 75 % of a step, waits for communication and copies 25 %, is idle 0 %", told)
        self.assertIsNone(device_use([{"begin": 0.0, "end": 1.0}]))

    def test_the_device_times_of_nccl(self):
        first, _ = steps(self.step_of_nccl(100, 20) + self.step_of_nccl(180, 85), 80_000)
        told = [first.device.compute, first.device.communication, first.device.exposed, first.device.idle]
        self.assertEqual([time // 1000 for time in told], [60, 40, 20, 20])


class FakeEvent:
    """An event of torch's profiler."""

    def __init__(self, name, begin, end, device=False, correlation=0, annotation=False, shapes=()):
        self.name, self.start_ns, self.end_ns = (lambda: name), (lambda: begin), (lambda: end)
        self.device_type = lambda: DeviceType.CUDA if device else DeviceType.CPU
        self.correlation_id, self.is_user_annotation = (lambda: correlation), (lambda: annotation)
        self.shapes, self.dtypes = (lambda: shapes), (lambda: ["float"] * len(shapes))


class Reading(unittest.TestCase):
    def test_kernels_know_their_launch(self):
        self.assertEqual(
            read([
                FakeEvent("aten::mm", 0, 9),
                FakeEvent("cudaLaunchKernel", 1, 2, correlation=7),
                FakeEvent("gemm", 5, 8, device=True, correlation=7),
                FakeEvent("nccl:all_reduce", 3, 4, annotation=True, shapes=[[10, 2]]),
                FakeEvent("nccl:all_reduce", 5, 9, device=True, annotation=True),
                FakeEvent("cuLaunchKernelEx", 3, 4, correlation=8),
                FakeEvent("ncclDevKernel_AllReduce", 6, 9, device=True, correlation=8),
            ]),
            [
                Span(Kind.KERNEL, 5, 8, "gemm", launched=1),
                Span(Kind.COMMUNICATION, 3, 4, "all_reduce", 80),
                Span(Kind.COMMUNICATION, 6, 9, "ncclDevKernel_AllReduce", launched=3),
            ],
        )


class Sent(unittest.TestCase):
    def test_by_the_usual_algorithms(self):
        self.assertEqual(sent([("all_reduce", 300)], 3), 400)
        self.assertEqual(sent([("_all_gather_base", 100)], 3), 200)
        self.assertEqual(sent([("_reduce_scatter_base", 300)], 3), 200)
        calls = [("send 0->1", 5), ("recv 1<-0", 5), ("all_reduce_barrier", 4)]
        self.assertEqual(sent(calls, 2), 5)
        self.assertEqual(sent([("all_reduce", 300)], 1), 0)


class Alone(unittest.TestCase):
    """A program without `torch.distributed`."""

    def test_all_is_computing(self):
        class Batches(torch.utils.data.Dataset):
            def __len__(self):
                return 10

            def __getitem__(self, index):
                time.sleep(0.01)
                return torch.ones(8)

        with tempfile.TemporaryDirectory() as folder:
            folder = Path(folder) / "run"
            with unisono.torch.profile(folder) as profile:
                # Made inside of the block, like the group of a program might be.
                model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                for batch in torch.utils.data.DataLoader(Batches(), batch_size=1):
                    loss = model(batch).mean()
                    time.sleep(0.005)
                    loss.backward()
                    optimizer.step()
                with torch.no_grad():
                    model(torch.ones(8))
            lines = (folder / "steps.jsonl").read_text().splitlines()
            steps = [json.loads(line) for line in lines]
            info = tomllib.loads((folder / "run.toml").read_text())
        self.assertEqual(len(steps), 10)
        self.assertEqual((info["workers"], info["settings"]["backend"]), (1, "none"))
        self.assertIn("not the bottleneck", profile.verdict)
        for step in steps[1:]:
            [rank] = step["ranks"]
            self.assertEqual((step["samples"], step["wire_bytes"], rank["buckets"]), (1, 0, []))
            self.assertEqual(rank["computed"], rank["reduced"])
            self.assertIsNotNone(step["loss"])
            # Waiting for the data is not computing; sleeping in a pass is.
            self.assertGreaterEqual(rank["compute"], 0.005)
            self.assertLess(rank["compute"], rank["end"] - rank["begin"] - 0.01 + 1e-6)

    def test_nothing_is_left_behind(self):
        before = torch.autograd.backward, torch._C._distributed_c10d.Work.wait
        with tempfile.TemporaryDirectory() as folder, self.assertWarns(UserWarning):
            with unisono.torch.profile(Path(folder) / "run"):
                self.assertIsNot(torch.autograd.backward, before[0])
        self.assertEqual((torch.autograd.backward, torch._C._distributed_c10d.Work.wait), before)


    def test_another_profiler(self):
        """There is one at a time; who comes second is told."""
        with tempfile.TemporaryDirectory() as folder:
            folder = Path(folder) / "run"
            with torch.profiler.profile(), self.assertRaises(unisono.InvalidCall):
                unisono.torch.profile(folder).__enter__()
            with self.assertRaises(unisono.InvalidCall), unisono.torch.profile(folder):
                with torch.profiler.profile():
                    pass
            self.assertFalse(folder.exists())


class Exchanging(unittest.TestCase):
    """Ranks that are threads, over a store in memory."""

    def results_of(self, ranks, world: int, patience: float, work) -> dict:
        store, results = dist.HashStore(), {}

        def rank(number):
            exchange = Exchange(store, number, world, timedelta(seconds=patience))
            results[number] = work(exchange, number)

        threads = [threading.Thread(target=rank, args=(number,)) for number in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    def test_clocks_of_other_hosts_are_compared(self):
        ahead = [0.0, 0.0, 1000.0]

        def work(exchange, rank):
            machines = exchange.meet(Machine("host", "b" if rank == 2 else "a"))
            return exchange.compare_clocks(machines, lambda: time.time() + ahead[rank])

        offsets = self.results_of(range(3), 3, 30, work)
        for rank in (0, 1):
            self.assertEqual((offsets[rank].seconds, offsets[rank].error), (0.0, 0.0))
        self.assertGreater(offsets[2].error, 0)
        self.assertLessEqual(abs(offsets[2].seconds - ahead[2]), offsets[2].error + 1e-4)

    def test_a_rank_that_does_not_come_is_left_out(self):
        def work(exchange, rank):
            machines = exchange.meet(Machine("host", "a"))
            exchange.compare_clocks(machines)
            return exchange.hand_in([rank])

        results = self.results_of([0, 2], 3, 0.5, work)
        self.assertEqual(results, {0: {0: [0], 2: [2]}, 2: None})


def run() -> None:
    """Runs all of it, and raises if anything fails."""
    tests = unittest.defaultTestLoader.loadTestsFromName(__name__)
    if not unittest.TextTestRunner(verbosity=0).run(tests).wasSuccessful():
        raise AssertionError("a unit failed")


if __name__ == "__main__":
    unittest.main()
