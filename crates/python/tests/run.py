#!/usr/bin/env python3
"""Tests the package that is installed.

    run.py [--worlds 2,3] [--backend NAME] [--kills N] [NAME…]

Runs every check of `checks/` on 2 and on 3 processes, every case of `jobs/`, and the units of
`profile_units.py`; with NAMEs, only those whose names contain one of them.  `--backend gloo` runs
the checks on Gloo.  `--kills N` repeats the case of the killed rank.
"""

import argparse
import os
import sys
import time
import traceback

# Two ranks or more share this machine; and a process that forks must not have started threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
# Torch's compiler would start processes to help it, for each rank.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Programs that jobs start find these modules too.
here = os.path.dirname(os.path.abspath(__file__))
os.environ["PYTHONPATH"] = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])

import checks
import harness
import jobs
import profile_units
from tools import functions_of

CHECKS = functions_of(checks, "check_")


def main() -> None:
    raw = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--worlds", default="2,3")
    parser.add_argument("--backend", default="unisono")
    parser.add_argument("--kills", type=int, default=1)
    parser.add_argument("names", nargs="*", metavar="NAME")
    arguments = parser.parse_args()

    def wanted(name):
        return not arguments.names or any(word in name for word in arguments.names)

    failed, ran = [], 0
    chosen = [name for name in CHECKS if wanted(name)]
    for world in map(int, arguments.worlds.split(",") if chosen else []):
        codes = harness.run(run_checks, world, chosen, backend=arguments.backend)
        ran += len(chosen)
        if any(codes):
            failed.append(f"checks on {world} processes (exit codes {codes})")
    if arguments.backend == "unisono":
        for name, case in functions_of(jobs, "case_").items():
            for _ in range(arguments.kills if name == "killed_in_backward" else 1):
                if wanted(name):
                    ran += 1
                    attempt(name, case, failed)
    if wanted("profile_units"):
        ran += 1
        attempt("profile_units", profile_units.run, failed)
    print(f"{ran} run, " + (f"FAILED: {', '.join(failed)}" if failed else "all passed"))
    sys.exit(1 if failed or not ran else 0)


def run_checks(rank: int, world: int, names: list[str]) -> None:
    """Runs the checks on one rank. One that fails on some ranks only leaves them out of step: the
    first failure ends the run."""
    for name in names:
        try:
            CHECKS[name](rank, world)
        except BaseException:
            print(f"FAIL {name} on rank {rank} of {world}", flush=True)
            raise
        if rank == 0:
            print(f"ok   {name} on {world} processes", flush=True)


def attempt(name: str, case, failed: list[str]) -> None:
    begin = time.monotonic()
    try:
        case()
        print(f"ok   {name} ({time.monotonic() - begin:.0f} s)", flush=True)
    except BaseException as error:
        traceback.print_exc()
        print(f"FAIL {name}: {error}", flush=True)
        failed.append(name)


if __name__ == "__main__":
    main()
