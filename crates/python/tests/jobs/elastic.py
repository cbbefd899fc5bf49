"""Workers of an elastic job that are killed, stopped and let in again, and the weights of the undisturbed run.

Every fault is written down by the process that it happens to, just before, and counted.
"""

import functools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TESTS = Path(__file__).parent.parent
EXAMPLE = TESTS.parent / "examples" / "elastic.py"
# After this long, a job has hung.
HUNG = 300
# Random kills of one run.
KILLS = int(os.environ.get("UNISONO_TEST_KILLS", "30"))


def case_elastic_undisturbed() -> None:
    """The same bits on one process, without a launcher, and on 4 with each."""
    _expect_same("undisturbed", _launched([], **_momentum()), _alone("momentum"))
    for arguments in ((), ("--elastic", "1:4")):
        ended = _run([_program(), "run", "-n", "4", *arguments], optimizer="adamw")
        _expect_same(str(arguments), _hash(ended), _alone("adamw"))


def case_elastic_kills() -> None:
    """Workers are killed in backward, in the optimizer and the scheduler; those that come back while they form
    a group, while they receive the state, and once they have it."""
    faults = [
        ["backward", 1, 0, 5, "SIGKILL"],
        ["optimizer", 2, 0, 8, "SIGKILL"],
        ["scheduler", 3, 0, 11, "SIGKILL"],
        ["receiving", 1, 1, 0, "SIGKILL"],
        ["formed", 2, 1, 0, "SIGKILL"],
        ["received", 3, 1, 0, "SIGKILL"],
        ["entering", 1, 2, 0, "SIGKILL"],
        ["regrouping", 2, 2, 0, "SIGKILL"],
    ]
    ended = _launched(faults, joined=3, **_momentum())
    _expect_same("kills", ended, _alone("momentum"))


def case_elastic_donor() -> None:
    """Two are killed at once, another is stopped, and the worker that hands over the state is killed."""
    faults = [
        ["backward", 1, 0, 5, "SIGKILL"],
        ["backward", 2, 0, 5, "SIGKILL"],
        ["sending", -1, -1, 1, "SIGKILL"],
        ["backward", 3, 0, 14, "SIGSTOP"],
    ]
    _expect_same("donor", _launched(faults, joined=3), _alone("adamw"))


def case_elastic_end() -> None:
    """A worker is killed when all steps are made, and rank 0 before and after it hands in the result."""
    faults = [
        ["ending", 0, 0, 20, "SIGKILL"],
        ["handing in", -1, -1, 20, "SIGKILL"],
        ["handed in", -1, -1, 20, "SIGKILL"],
    ]
    ended = _faulted(faults, workers=3, steps=20, hold=1 << 30, optimizer="momentum")
    assert _hash(ended) == _hash(_run([], steps=20, optimizer="momentum"))


def case_elastic_all_killed() -> None:
    """All workers are killed: the run goes on from its checkpoint, or from its beginning."""
    faults = [["backward", rank, 0, 12, "SIGKILL"] for rank in range(2)]
    ended = _faulted(faults, joined=2, workers=2)
    assert "no worker has the state of the run: it goes on from its beginning" in ended.stderr
    _expect_same("from the beginning", _hash(ended), _alone("adamw"))
    with tempfile.TemporaryDirectory() as folder:
        saved = {"checkpoint": os.path.join(folder, "run.pt"), "save_every": 5}
        # One of them while it writes the checkpoint after step 15: that after step 10 is still there.
        faults = [["backward", 0, 0, 12, "SIGKILL"], ["backward", 1, 0, 12, "SIGKILL"]]
        faults += [["saving", -1, 1, 15, "SIGKILL"]]
        ended = _faulted(faults, joined=2, workers=2, **saved)
        assert re.search(r"goes on from the checkpoint .*, after 10 steps", ended.stderr), ended.stderr
        _expect_same("from a checkpoint", _hash(ended), _alone("adamw"))
        # A run that is complete can be asked for more steps, by another number of workers.
        longer = _run([_program(), "run", "-n", "2"], steps=70, **saved)
        _expect_same("resumed", _hash(longer), _hash(_run([], steps=70)))


def case_elastic_codec() -> None:
    """With a codec a loss takes the run back to its checkpoint; a worker that is let in does not."""
    expected = _alone("momentum", "int8")
    with tempfile.TemporaryDirectory() as folder:
        saved = {"checkpoint": os.path.join(folder, "run.pt"), "save_every": 4}
        faults = [["backward", 1, 0, 10, "SIGKILL"]]
        ended = _faulted(faults, joined=1, workers=3, codec="int8", **_momentum(), **saved)
    assert re.search(r"goes on from the checkpoint .*, after 8 steps", ended.stderr), ended.stderr
    assert "what was gathered before its members changed" in ended.stderr, ended.stderr
    _expect_same("int8", _hash(ended), expected)
    ended = _faulted([["optimizer", 0, 0, 10, "SIGKILL"]], joined=1, workers=3, codec="int8", **_momentum())
    assert "goes on from its beginning" in ended.stderr, ended.stderr
    _expect_same("int8 without a checkpoint", _hash(ended), expected)


def case_elastic_random_kills() -> None:
    """Workers are killed at any moment, sometimes two at once, and also while they start."""
    chance = random.Random(5)
    steps = 40 * KILLS
    with tempfile.TemporaryDirectory() as folder:
        proof = os.path.join(folder, "proof")
        saved = {"checkpoint": os.path.join(folder, "run.pt"), "save_every": 50}
        settings = {"steps": steps, "hold": steps - 50, "pace": 0.02, "workers": 4, "proof": proof}
        launcher = [_program(), "run", "--elastic", "1:4", "-n", "4", "--restarts", "100000"]
        run = _start(launcher, **settings, **saved, kills=KILLS)
        kills = 0
        try:
            while kills < KILLS and run.poll() is None:
                time.sleep(chance.uniform(0.2, 1.5))
                workers = _workers_of(run.pid)
                members = [worker for worker in workers if _is_member(worker)]
                if len(members) < 2:
                    continue  # A busy machine starts workers more slowly than they are killed.
                chosen = chance.choice((members, members, members, workers))
                number = min(len(chosen), KILLS - kills, chance.choice((1, 1, 1, 2)))
                for worker in chance.sample(chosen, number):
                    os.kill(worker, signal.SIGKILL)
                    kills += 1
                    with open(proof, "a") as file:
                        file.write("killed\n")
            out, err = run.communicate(timeout=HUNG)
        finally:
            run.kill()
    ended = subprocess.CompletedProcess(run.args, run.returncode, out, err)
    lost, joined = _lost_and_joined(ended)
    killed = err.count("was killed by signal 9")
    print(f"{kills} kills, of which {lost} of members; {joined} joined", flush=True)
    assert kills == KILLS == killed and lost >= KILLS / 2 and joined >= KILLS / 2, (killed, err)
    _expect_same("random kills", _hash(ended), _hash(_run([], steps=steps)))


def case_elastic_example() -> None:
    """The example of the documents, one of whose workers is killed."""
    command = [sys.executable, str(EXAMPLE), "20"]
    alone = subprocess.run(command, env=_environment(), capture_output=True, text=True, timeout=HUNG)
    launcher = [_program(), "run", "--elastic", "1:2", "-n", "2", "--"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    run = subprocess.Popen([*launcher, *command], env=_environment(), **pipes)
    try:
        # Until it trains.
        while run.poll() is None and sum(map(_is_member, _workers_of(run.pid))) < 2:
            time.sleep(0.01)
        os.kill(_workers_of(run.pid)[0], signal.SIGKILL)
        out, err = run.communicate(timeout=HUNG)
    finally:
        run.kill()
    assert run.returncode == 0 and out == alone.stdout, (out, alone.stdout, err)
    assert "was killed by signal 9" in err, err


def _is_member(worker: int) -> bool:
    """Whether a worker has formed a group: then it has memory in common with others."""
    return "/memfd:unisono" in _text(Path(f"/proc/{worker}/maps"))


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


def _workers_of(launcher: int) -> list[int]:
    """The processes of the workers that run."""
    children = _text(Path(f"/proc/{launcher}/task/{launcher}/children")).split()
    return [int(child) for child in children if "python" in _text(Path(f"/proc/{child}/cmdline"))]


def case_elastic_mistakes() -> None:
    """What would be repeated ends the run, and is told."""
    for mistake, words in {
        "shards": "3 workers",
        "models": "another model",
        "objects": "change it only if the step has returned a mean loss",
        "pickled": "cannot be handed over",
        "group": "leave it out",
        "twice": "a step has a number of its own",
    }.items():
        faults = [["backward", 1, 0, 3, "SIGKILL"]] if mistake == "objects" else []
        with tempfile.TemporaryDirectory() as folder:
            proof = os.path.join(folder, "proof")
            launcher = [_program(), "run", "--elastic", "1:3", "-n", "3"]
            ended = _run(launcher, mistake=mistake, faults=faults, proof=proof, steps=8)
        assert ended.returncode == 64 and words in ended.stderr, (mistake, ended.returncode, ended.stderr)


def case_elastic_interrupted() -> None:
    """Ctrl-C ends workers in the middle of a step, and one that waits to be let in."""
    launcher = [_program(), "run", "--elastic", "2:2", "-n", "2"]
    for mistake, is_there in (("", _is_member), ("late", _waits_to_enter)):
        run = _start(launcher, pace=0.05, steps=100_000, mistake=mistake)
        try:
            while run.poll() is None and not any(map(is_there, _workers_of(run.pid))):
                time.sleep(0.05)
            begin = time.monotonic()
            run.send_signal(signal.SIGINT)
            out, err = run.communicate(timeout=HUNG)
        finally:
            run.kill()
        assert time.monotonic() - begin < 20, "it took too long"
        assert run.returncode == 130 and "KeyboardInterrupt" in err, (run.returncode, err)


def _waits_to_enter(worker: int) -> bool:
    """Whether a thread of a worker waits for its launcher."""
    tasks = Path(f"/proc/{worker}/task").glob("*/comm")
    return any(_text(task).strip() == "unisono-elastic" for task in tasks)


def _start(launcher: list[str], **settings) -> subprocess.Popen:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(_command(launcher, settings), env=_environment(), **pipes)


def _momentum() -> dict:
    return {"optimizer": "momentum"}


@functools.cache
def _alone(optimizer: str, codec: str | None = None) -> str:
    """The hash of one process without a launcher."""
    return _hash(_run([], optimizer=optimizer, codec=codec))


def _launched(faults: list[list], joined: int = 0, workers: int = 4, **settings) -> str:
    """The hash of a job in which these faults have happened."""
    return _hash(_faulted(faults, joined, workers, **settings))


def _faulted(faults, joined=0, workers=4, **settings) -> subprocess.CompletedProcess:
    with tempfile.TemporaryDirectory() as folder:
        proof = os.path.join(folder, "proof")
        hold = max((fault[3] for fault in faults), default=0) + 2
        settings = {"hold": hold, "faults": faults, "proof": proof, "workers": workers, **settings}
        command = [_program(), "run", "--elastic", f"1:{workers}", "-n", str(workers)]
        ended = _run(command, **settings)
        if faults:
            happened = [json.loads(line) for line in Path(proof).read_text().splitlines()]
            assert sorted(happened) == sorted(faults), (happened, ended.stderr)
    if faults:
        lost, came = _lost_and_joined(ended)
        assert lost >= 1 and came >= joined, ended.stderr
    return ended


def _lost_and_joined(ended: subprocess.CompletedProcess) -> tuple[int, int]:
    told = re.search(r"(\d+) ranks lost, (\d+) joined", ended.stderr)
    assert told, f"no rank was lost: {ended.stderr}"
    return int(told[1]), int(told[2])


def _run(launcher: list[str], **settings) -> subprocess.CompletedProcess:
    command = _command(launcher, settings)
    return subprocess.run(command, env=_environment(), capture_output=True, text=True, timeout=HUNG)


def _command(launcher: list[str], settings: dict) -> list[str]:
    program = [sys.executable, "-W", "ignore", str(TESTS / "elastic_worker.py"), json.dumps(settings)]
    return [*launcher, *(["--"] if launcher else []), *program]


def _environment() -> dict[str, str]:
    return {**os.environ, "UNISONO_TIMEOUT": "3"}


def _program() -> str:
    program = os.environ.get("UNISONO_PROGRAM") or shutil.which("unisono")
    assert program, "name the program unisono in UNISONO_PROGRAM"
    return program


def _hash(ended: subprocess.CompletedProcess) -> str:
    """The hash of the weights, which was printed once."""
    assert ended.returncode == 0, (ended.returncode, ended.stdout, ended.stderr)
    hashes = re.findall(r"^weights ([0-9a-f]+)$", ended.stdout, re.MULTILINE)
    assert len(hashes) == 1, (ended.stdout, ended.stderr)
    return hashes[0]


def _expect_same(name: str, own: str, expected: str) -> None:
    assert own == expected, f"{name}: {own} instead of {expected}"
