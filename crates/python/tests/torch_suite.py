#!/usr/bin/env python3
"""Runs torch's own distributed tests on a backend, each in processes of its own.

    torch_suite.py run --backend gloo    --world 2 --out gloo.json
    torch_suite.py run --backend unisono --world 2 --out unisono.json --like gloo.json
    torch_suite.py compare gloo.json unisono.json
    torch_suite.py run --backend unisono --world 1 --device cuda --out cuda.json

Most of the tests ask whether the backend is called "gloo" before they run, and many look for events
named after it.  So Unisono runs under that name: it is registered as "gloo" in every process of a
test, where torch finds it before its own.  Nothing of the tests is changed, and a test that Gloo
passes is the same test for us.  One compares the name by which it asked for the backend with the
name that the backend gives itself: that one asks for "unisono", and its record says so.

With `--device cuda` the tests see the machine's GPUs.  Torch skips most of those that use them unless every rank has
one of its own, so on a machine with one GPU a world of 1 runs more of them than a world of 2.

A test's outcome is one of passed, failed, skipped and timeout; the reason is kept with it.
`compare` names what only one of two backends passes, and fails if the second passes less.  Needs
the packages expecttest and hypothesis, which torch's tests import.
"""

import argparse
import collections
import json
import os
import pathlib
import shutil
import signal
import sys
import tempfile
import time
import unittest

# Compares the backend's own name with the one that it was asked for by.
UNDER_OWN_NAME = {"test_ddp_logging_data_cpu"}


def main() -> None:
    raw = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("run")
    command.add_argument("--backend", choices=["gloo", "unisono"], required=True)
    command.add_argument("--world", type=int, default=2)
    command.add_argument("--out", type=pathlib.Path, required=True, help="where the record goes")
    command.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="what the tests may see")
    command.add_argument("--timeout", type=int, default=120, help="seconds for a test")
    command.add_argument("--only", nargs="*", help="tests whose names contain one of these words")
    command.add_argument("--like", type=pathlib.Path, help="only what passed in this record")
    command = commands.add_parser("compare")
    command.add_argument("base", type=pathlib.Path)
    command.add_argument("ours", type=pathlib.Path)
    arguments = parser.parse_args()
    if arguments.command == "run":
        run(arguments)
    else:
        compare(arguments)


def run(arguments) -> None:
    """Runs the tests one after the other; the record is complete after each."""
    os.environ.update(
        BACKEND="gloo",
        WORLD_SIZE=str(arguments.world),
        MASTER_ADDR="127.0.0.1",
        # Looked at when the tests are imported: unless it is a file, some are left out.
        INIT_METHOD="file:///unused",
    )
    if arguments.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    else:
        # Counts the GPUs without starting CUDA, which no forked process could use then.
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    kind = test_class()
    tests = sorted(name for name in dir(kind) if name.startswith("test"))
    if arguments.only:
        tests = [test for test in tests if any(word in test for word in arguments.only)]
    if arguments.like:
        known = tests_of(arguments.like)
        tests = [test for test in tests if known.get(test, {}).get("outcome") == "passed"]
    records = {}
    for test in tests:
        record = records[test] = run_test(arguments, kind, test)
        outcome, seconds = record["outcome"], record["seconds"]
        name = f"as {record['name']}" if record.get("name", "gloo") != "gloo" else ""
        print(f"{outcome:8} {seconds:6} s  {test}  {name}{last_line(record)}", flush=True)
        body = {"backend": arguments.backend, "world": arguments.world, "tests": records}
        arguments.out.write_text(json.dumps(body, indent=1, sort_keys=True))
    counts = collections.Counter(record["outcome"] for record in records.values())
    print(f"{arguments.backend}, world {arguments.world}: {dict(counts)}")


def test_class() -> type[unittest.TestCase]:
    import torch
    from torch.testing._internal.distributed import distributed_test as suite

    class TestDistBackendWithSpawn(suite.TestDistBackend, suite.DistributedTest._DistTestBase):
        def setUp(self):
            super().setUp()
            suite.INIT_METHOD = os.environ["INIT_METHOD"]
            # Forked, not spawned: importing torch and its tests takes longer than most tests, and
            # nothing has started threads here yet.
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    # By which torch finds the class again.
    TestDistBackendWithSpawn.__qualname__ = "TestDistBackendWithSpawn"
    return TestDistBackendWithSpawn


def run_test(arguments, kind, test: str) -> dict:
    """Runs one test in a child of this process; what became of it."""
    directory = pathlib.Path(tempfile.mkdtemp(prefix="torch-suite-"))
    log, answer = directory / "log", directory / "answer"
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        # A session of its own, so that a test that hangs takes its children with it.
        os.setsid()
        try:
            record = run_here(arguments, kind(test), directory, log)
        except BaseException as error:
            record = {"outcome": "failed", "reason": repr(error)}
        answer.write_text(json.dumps(record))
        os._exit(0)
    ended = False
    while not ended and time.monotonic() < started + arguments.timeout:
        ended = os.waitpid(child, os.WNOHANG) != (0, 0)
        time.sleep(0.02)
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        pass
    if not ended:
        os.waitpid(child, 0)
    record = {"outcome": "timeout", "reason": f"after {arguments.timeout} s"}
    if answer.exists():
        record = json.loads(answer.read_text())
    if record["outcome"] in ("failed", "timeout") and log.exists():
        record["output"] = log.read_text(errors="replace")[-8000:]
    shutil.rmtree(directory, ignore_errors=True)
    record["seconds"] = round(time.monotonic() - started, 1)
    return record


def run_here(arguments, case, directory: pathlib.Path, log: pathlib.Path) -> dict:
    """Runs one test in this process and its children."""
    import torch.testing._internal.common_distributed as common
    from torch.testing._internal.distributed import distributed_test as suite

    os.environ.update(TEMP_DIR=str(directory), TMPDIR=str(directory))
    tempfile.tempdir = str(directory)
    # Torch's own limit comes first, and says more than ours.
    common.TIMEOUT_DEFAULT = arguments.timeout - 10
    common.TIMEOUT_OVERRIDE.clear()
    name = "gloo"
    if arguments.backend == "unisono":
        import unisono.torch

        unisono.torch.register("gloo")
        if case._testMethodName in UNDER_OWN_NAME:
            name = suite.BACKEND = "unisono"
    descriptor = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    result = unittest.TestResult()
    case.run(result)
    if result.skipped:
        return {"outcome": "skipped", "reason": result.skipped[0][1], "name": name}
    wrong = result.errors + result.failures
    if wrong:
        return {"outcome": "failed", "reason": wrong[0][1][-4000:], "name": name}
    return {"outcome": "passed", "reason": "", "name": name}


def compare(arguments) -> None:
    base, ours = tests_of(arguments.base), tests_of(arguments.ours)

    def passes(tests, test):
        return tests.get(test, {}).get("outcome") == "passed"

    worse = [test for test in base if passes(base, test) and not passes(ours, test)]
    better = [test for test in ours if passes(ours, test) and not passes(base, test)]
    for test in worse:
        record = ours.get(test, {"outcome": "missing", "reason": ""})
        print(f"WORSE  {test}: {record['outcome']}: {last_line(record)}")
    for test in better:
        print(f"better {test}")
    both = sum(passes(base, test) and passes(ours, test) for test in base)
    print(f"{both} pass on both, {len(worse)} on the first only, {len(better)} on the second only")
    sys.exit(1 if worse else 0)


def tests_of(path: pathlib.Path) -> dict:
    return json.loads(path.read_text())["tests"]


def last_line(record: dict) -> str:
    return (record["reason"].strip().splitlines() or [""])[-1][:150]


if __name__ == "__main__":
    main()
