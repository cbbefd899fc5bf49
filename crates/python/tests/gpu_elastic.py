#!/usr/bin/env python3
"""An elastic run on a GPU whose workers are killed now and then, and the weights of the undisturbed run.

    gpu_elastic.py [--program unisono] [--kills 4] [--steps 200] [--workers 4]

Trains the same model three times: by one process, by some workers that share the GPU, and by as many of which one is
killed from time to time, until enough were.  Prints the hashes, and `PASS` if they are the same and every kill was one.
"""

import argparse
import hashlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Seconds after which a run has hung.
HUNG = 400


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--program", default=os.environ.get("UNISONO_PROGRAM", "unisono"))
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--device", default="cuda", help="cpu shows the same without a GPU")
    parser.add_argument("--worker", metavar="FOLDER", help="of those that this starts")
    arguments = parser.parse_args()
    if arguments.worker is not None:
        work(arguments, Path(arguments.worker))
        return 0
    workers = str(arguments.workers)
    # Workers of a busy machine take long to start.
    elastic = [arguments.program, "run", "--timeout", "300", "--elastic", f"1:{workers}", "-n", workers, "--"]
    hashes = {
        "one process": run(arguments, [], 0),
        f"{workers} workers": run(arguments, elastic, 0),
        f"{workers} workers, {arguments.kills} kills": run(arguments, elastic, arguments.kills),
    }
    for name, told in hashes.items():
        print(f"     {name}: {told}")
    is_same = len(set(hashes.values())) == 1 and all("weights" in told for told in hashes.values())
    print(f"{'PASS' if is_same else 'FAIL'} the weights of a run whose workers are killed")
    return 0 if is_same else 1


def run(arguments: argparse.Namespace, launcher: list[str], kills: int) -> str:
    """What a run tells at its end."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "kills").touch()
        own = [sys.executable, __file__, "--worker", name, "--device", arguments.device]
        own += ["--steps", str(arguments.steps), "--kills", str(kills)]
        process = subprocess.Popen(launcher + own, stdout=subprocess.PIPE, text=True)
        killed = kill_some(process, folder, kills, arguments.workers)
        try:
            told = process.communicate(timeout=HUNG)[0].strip()
        except subprocess.TimeoutExpired:
            process.kill()
            return f"hung; {killed} were killed"
    print(f"     {killed} killed, {time.monotonic() - begin:.1f} s", flush=True)
    if process.returncode or killed != kills:
        return f"exit code {process.returncode}, {killed} of {kills} were killed: {told}"
    return told


def kill_some(process: subprocess.Popen, folder: Path, kills: int, workers: int) -> int:
    """Kills one worker after the other, each when all have made a step since the last one; how many."""
    chosen, killed = random.Random(1), 0
    end = time.monotonic() + HUNG
    while killed < kills and process.poll() is None and time.monotonic() < end:
        living = [path for path in folder.glob("step-*") if path.read_text()]
        if len(living) < workers:
            time.sleep(0.02)
            continue
        time.sleep(chosen.random() * 0.3)
        victim = chosen.choice(living)
        for path in living:
            path.write_text("")  # It is written anew with every step.
        try:
            os.kill(int(victim.name.removeprefix("step-")), signal.SIGKILL)
        except ProcessLookupError:
            continue
        victim.unlink()
        killed += 1
        (folder / "kills").write_text(str(killed))
    return killed


def work(arguments: argparse.Namespace, folder: Path) -> None:
    """Trains, as one of the workers."""
    import torch
    import unisono.torch
    from torch import nn

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    device = torch.device(arguments.device)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 512), nn.BatchNorm1d(512), nn.GELU(), nn.Dropout(0.1), nn.Linear(512, 512), nn.GELU(),
        nn.Linear(512, 10),
    ).to(device)  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.steps)
    step = unisono.torch.ElasticStep(model, optimizer, shards=8, scheduler=scheduler)
    mark = folder / f"step-{os.getpid()}"

    def loss(batch: tuple[int, int]) -> torch.Tensor:
        number, shard = batch
        inputs = torch.randn(32, 64, generator=torch.Generator().manual_seed(1000 * number + shard)).to(device)
        return nn.functional.cross_entropy(model(inputs), inputs[:, :10].argmax(1))

    for number in step.until(arguments.steps):
        mean = step([(number, shard) for shard in step.shards], loss)
        if mean is not None:
            mark.write_text(str(number))
        # The kills are spread over the steps, and none comes too late.
        due = min((number + 2) * (arguments.kills + 1) // arguments.steps, arguments.kills)
        while int((folder / "kills").read_text() or 0) < due:
            if step._group is None or step._group.has_ended() or step._job.is_asked_to_regroup():
                break
            mark.write_text(str(number))
            # A worker that joins gets the state between two steps, of which this is one place more.
            step._donor.attend(step.steps)
            time.sleep(0.02)
    digest = hashlib.sha256()
    for tensor in [*model.state_dict().values(), *values_of(optimizer)]:
        digest.update(tensor.cpu().numpy().tobytes())
    step.finish(f"weights {digest.hexdigest()}")
    step.close()


def values_of(optimizer):
    for state in optimizer.state.values():
        yield from state.values()


if __name__ == "__main__":
    sys.exit(main())
