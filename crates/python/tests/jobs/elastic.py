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
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TESTS = Path(__file__).parent.parent
EXAMPLE = TESTS.parent / "examples" / "elastic.py"
# After this long, a job has hung.
HUNG = 600
# Of the 60 steps of a run, those in which a worker can join beside the others, which then do not wait for it.
BESIDE = 40
# Numbers that make a state larger than what connections hold by themselves.
BALLAST = 2 << 20
# Random kills of one run.
KILLS = int(os.environ.get("UNISONO_TEST_KILLS", "15"))


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


def case_elastic_beside() -> None:
    """A worker that joins gets the state while the others make steps, and makes them too; no state is handed over
    inside of a group. Batch norms, an average of the weights and a scheduler are always part of it."""
    for settings in (
        {"optimizer": "momentum"},
        {"optimizer": "adamw"},
        {"optimizer": "nadam"},
        {"optimizer": "adamw", "by_hand": True},
    ):
        entries = _joined_beside(**settings)
        told = [about for kind, *about in entries if kind == "stepped"]
        assert told[-1][3] == 0, told


def case_elastic_beside_codec() -> None:
    """With a codec that remembers something a worker that joins gets only that inside of the group."""
    with tempfile.TemporaryDirectory() as folder:
        saved = {"checkpoint": os.path.join(folder, "run.pt"), "save_every": 4}
        _joined_beside(optimizer="momentum", codec="int8", **saved)


def case_elastic_beside_kills() -> None:
    """The donor is killed while it sends its state, and while a worker follows it: another takes its place. The worker
    that joins is killed in the same places: its next life joins, and the others have noticed nothing."""
    for place in ("taking", "following"):
        entries = _joined_beside(place, "donor", optimizer="momentum")
        gave = [about[1] for kind, *about in entries if kind == "gave"]
        assert len(set(gave)) >= 2, gave
        entries = _joined_beside(place, "SIGKILL", optimizer="momentum")
        lives = {about[1] for kind, *about in entries if kind == "joins"}
        assert 2 in lives, entries


def case_elastic_beside_not() -> None:
    """A program that changes weights by hand cannot be followed: the worker that joins notices, and gets the state
    inside of the group."""
    settings = {"mistake": "clamps", "optimizer": "adamw"}
    faults = [["backward", 1, 0, 5, "SIGKILL"]]
    with tempfile.TemporaryDirectory() as folder:
        diary = os.path.join(folder, "diary")
        beside = {"beside": BESIDE, "ahead": 3, "pace": 0.03, "diary": diary}
        ended = _faulted(faults, 1, 3, **beside, **settings)
        entries = _lines(diary)
    assert "cannot follow the steps of the others" in ended.stderr, ended.stderr
    assert [about for kind, *about in entries if kind == "handed over" and about[0] > 0 and about[1] == 1]
    _expect_same("clamps", _hash(ended), _alone(**settings))


def _joined_beside(place: str | None = None, what: str = "", **settings) -> list[list]:
    """Lets a worker join beside the training of two others, something happen to it or to its donor in a place on its
    way, and compares the weights. What the workers have written down."""
    faults = [["backward", 1, 0, 5, "SIGKILL"]]
    if place is not None:
        faults.append([place, 1, 1, 0, what])
        settings["ballast"] = BALLAST
    with tempfile.TemporaryDirectory() as folder:
        diary = os.path.join(folder, "diary")
        beside = {"beside": BESIDE, "ahead": 5, "pace": 0.03, "diary": diary}
        ended = _faulted(faults, 1, 3, **beside, **settings)
        entries = _lines(diary)
    alone = {name: value for name, value in settings.items() if name not in ("checkpoint", "save_every")}
    _expect_same(f"{place} {what} {settings}", _hash(ended), _alone(**alone))
    joined = [about for kind, *about in entries if kind == "joins"]
    followed = [about for kind, *about in entries if kind == "followed"]
    assert joined and len(followed) >= 3 and all(about[-1] for about in followed), (joined, followed)
    handed_over = [about for kind, *about in entries if kind == "handed over" and about[0] > 0 and about[1]]
    if settings.get("codec"):
        # After the loss all go back to the checkpoint, which one of them has read.
        handed_over = [about for about in handed_over if about[0] >= joined[-1][-1]]
    assert not handed_over, (handed_over, entries, ended.stderr)
    return entries


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
        diary = os.path.join(folder, "diary")
        faults = [["backward", 1, 0, 10, "SIGKILL"]]
        ended = _faulted(faults, joined=1, workers=3, codec="int8", diary=diary, **_momentum(), **saved)
        told = [about for kind, *about in _lines(diary) if kind == "stepped"]
    assert re.search(r"goes on from the checkpoint .*, after 8 steps", ended.stderr), ended.stderr
    assert "what was gathered before its members changed" in ended.stderr, ended.stderr
    _expect_same("int8", _hash(ended), expected)
    # What the launcher was told of first steps: whether they were begun before, and whether steps were lost.
    assert [about[2:5:2] for about in told if about[0] == 9] == [[True, True]], told
    assert told[-1][2:5:2] == [False, False], told
    ended = _faulted([["optimizer", 0, 0, 10, "SIGKILL"]], joined=1, workers=3, codec="int8", **_momentum())
    assert "goes on from its beginning" in ended.stderr, ended.stderr
    _expect_same("int8 without a checkpoint", _hash(ended), expected)


def case_elastic_gathered() -> None:
    """What a codec remembers outlasts the worker that gathered it."""
    faults = [["backward", 1, 0, 6, "SIGKILL"], ["gathered", -1, -1, 8, "SIGKILL"]]
    ended = _faulted(faults, joined=2, workers=3, codec="int8", **_momentum())
    # Once, for the worker that was lost in the middle of a step.
    assert ended.stderr.count("goes on from its beginning") == 1, ended.stderr
    _expect_same("gathered", _hash(ended), _alone("momentum", "int8"))


def case_elastic_types() -> None:
    """Weights in 16 bits, and an optimizer that keeps something in 32: a worker that is let in gets all of it."""
    faults = [["backward", 1, 0, 5, "SIGKILL"], ["optimizer", 0, 0, 8, "SIGKILL"]]
    _expect_same("types", _launched(faults, joined=2, workers=3, optimizer="nadam"), _alone("nadam"))


def case_elastic_saves() -> None:
    """Every checkpoint that is due is written, also after a step after which the members let another in; none that
    is damaged is read; and torch reads them too."""
    with tempfile.TemporaryDirectory() as folder:
        diary, file = os.path.join(folder, "diary"), os.path.join(folder, "run.pt")
        saved = {"checkpoint": file, "save_every": 1}
        faults = [["backward", 1, 0, 5, "SIGKILL"]]
        _faulted(faults, joined=1, workers=3, steps=30, diary=diary, **saved)
        steps = {about[0] for kind, *about in _lines(diary) if kind == "saved"}
        assert steps == set(range(1, 31)), sorted(steps)
        assert sorted(os.listdir(folder)) == ["diary", "run.pt"], os.listdir(folder)
        good = Path(file).read_bytes()
        for flaw in (good[: len(good) // 2], good[:5000] + bytes([good[5000] ^ 1]) + good[5001:]):
            Path(file).write_bytes(flaw)
            ended = _run([_program(), "run", "--elastic", "1:2", "-n", "2"], steps=31, **saved)
            assert ended.returncode == 64 and "run.pt is damaged" in ended.stderr, ended.stderr
        # What a worker left behind that was killed while it wrote goes with its next checkpoint.
        Path(file).write_bytes(good)
        left = Path(f"{file}.{socket.gethostname()}-0-1.new")
        left.write_bytes(good[:100])
        _hash(_run([], steps=31, **saved))
        assert not left.exists()
        assert _torch_reads(file) == 31


def case_elastic_ends() -> None:
    """After the loop one worker is rank 0, and a spare knows that it has not the weights."""
    with tempfile.TemporaryDirectory() as folder:
        diary = os.path.join(folder, "diary")
        settings = {"steps": 20, "hold": 10, "begun": 3, "workers": 2, "diary": diary}
        _hash(_run([_program(), "run", "--elastic", "1:2", "-n", "3"], **settings))
        ended = sorted(about for kind, *about in _lines(diary) if kind == "ended")
        assert ended == [[-1, 0, False], [0, 2, True], [1, 2, True]], ended


def case_elastic_told_to_stop() -> None:
    """A launcher that is told to stop has its workers finish their step and save; a worker that is told to end does
    so, and the others go on."""
    expected = _hash(_run([], steps=100))
    with tempfile.TemporaryDirectory() as folder:
        diary, file = os.path.join(folder, "diary"), os.path.join(folder, "run.pt")
        settings = {"steps": 100, "pace": 0.05, "checkpoint": file, "diary": diary}
        launcher = [_program(), "run", "--elastic", "1:3", "-n", "3", "--grace", "60"]
        run = _start(launcher, **settings)
        try:
            while run.poll() is None and not any(kind == "stepped" for kind, *_ in _lines(diary)):
                time.sleep(0.05)
            run.send_signal(signal.SIGTERM)
            out, err = run.communicate(timeout=HUNG)
        finally:
            run.kill()
        saves = [about[0] for kind, *about in _lines(diary) if kind == "saved"]
        assert run.returncode == 143 and out == "" and len(saves) == 1, (run.returncode, out, err)
        ended = _run(launcher, **settings)
        assert f"goes on from the checkpoint {file}, after {saves[0]} steps" in ended.stderr, ended.stderr
        _expect_same("stopped", _hash(ended), expected)
        os.unlink(file)
        os.unlink(diary)
        # One worker alone: it is started again.
        faults = [["backward", 1, 0, 5, "SIGTERM"]]
        ended = _faulted(faults, joined=1, workers=3, **settings)
        _expect_same("one was told", _hash(ended), expected)
        assert "rank 1 exited with code 143" in ended.stderr, ended.stderr
        redone = [about[2] for kind, *about in _lines(diary) if kind == "stepped"]
        assert not any(redone), "no step was made in vain"


def case_elastic_poison() -> None:
    """A shard that kills every worker that computes it is named."""
    ended = _run([_program(), "run", "--elastic", "1:3", "-n", "3"], steps=10, poison=5)
    named = "each rank that was lost was computing shard 5: look at its data"
    assert ended.returncode == 1 and named in ended.stderr, (ended.returncode, ended.stderr)


def case_elastic_machine_leaves() -> None:
    """The machine of rank 0 leaves: its worker is let go before the end and knows it, and what a codec remembers does
    not go with it."""
    etcd = shutil.which("etcd")
    if etcd is None:
        print("SKIPPED elastic_machine_leaves: there is no etcd", flush=True)
        return
    expected = _hash(_run([], steps=150, codec="int8", **_momentum()))
    with tempfile.TemporaryDirectory() as folder, _etcd(etcd, folder) as url:
        diary = os.path.join(folder, "diary")
        launcher = [_program(), "run", "--elastic", "1:2", "--etcd", url, "--job", "leaves", "-n", "1"]
        settings = {"steps": 150, "codec": "int8", "pace": 0.05, "hold": 5, "begun": 2, "diary": diary, **_momentum()}
        runs = {name: _start(launcher, name=name, **settings) for name in "ab"}
        started, leaver = list(runs.values()), None
        try:
            while leaver is None and all(run.poll() is None for run in runs.values()):
                time.sleep(0.05)
                first = [entry[1] for entry in _lines(diary) if entry[0] == "formed" and entry[2:] == [0, 2]]
                leaver = first[0] if first else None
            assert leaver is not None, [run.communicate() for run in runs.values()]
            runs[leaver].send_signal(signal.SIGTERM)
            left = runs.pop(leaver)
            _, err = left.communicate(timeout=HUNG)
            assert left.returncode == 0, err
            entries = [about for kind, *about in _lines(diary) if kind == "ended"]
            assert entries == [[-1, 2, False]], entries
            (last,) = runs.values()
            out, err = last.communicate(timeout=HUNG)
        finally:
            for run in started:
                run.kill()
    _expect_same("the rest", _hash(subprocess.CompletedProcess(last.args, last.returncode, out, err)), expected)
    assert "goes on from its beginning" not in err and "what was gathered" in err, err


@contextmanager
def _etcd(program: str, folder: str) -> Iterator[str]:
    """A node of etcd; where it is."""
    client, peer = (f"http://127.0.0.1:{_free_port()}" for _ in range(2))
    command = [program, "--data-dir", os.path.join(folder, "etcd"), "--log-level", "error", "--name", "only"]
    command += ["--listen-client-urls", client, "--advertise-client-urls", client, "--listen-peer-urls", peer]
    command += ["--initial-advertise-peer-urls", peer, "--initial-cluster", f"only={peer}"]
    node = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield client
    finally:
        node.kill()
        node.wait()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


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


def case_elastic_spares() -> None:
    """A worker more than there are shards waits, and takes over."""
    settings = {"steps": 20, "few_shards": True}
    ended = _faulted([["backward", 1, 0, 5, "SIGKILL"]], workers=3, **settings)
    assert _hash(ended) == _hash(_run([], **settings))


def case_elastic_mistakes() -> None:
    """What would be repeated ends the run, and is told."""
    for mistake, words in {
        "models": "another model",
        "objects": "change it only if the step has returned a mean loss",
        "pickled": "cannot be handed over",
        "group": "leave it out",
        "twice": "a step has a number of its own",
        "differs": "of rank 1 differ from rank 0's after 8 steps",
        "lossy": "load_state_dict of counter is lossy: ['steps'] is not what it was given",
        "sampler": "the sampler cuts a batch into 4 shards, and the step has 8",
        "saves": "give it checkpoint= and save_every=, or call save()",
        "loads": "goes on from the file checkpoint=",
        "closes": "the run is not over",
        "raises": "InvalidCall: of the program's own",
        "disk": "run.pt cannot be written",
    }.items():
        faults = [["backward", 1, 0, 3, "SIGKILL"]] if mistake in ("objects", "lossy") else []
        with tempfile.TemporaryDirectory() as folder:
            settings = {"proof": os.path.join(folder, "proof"), "faults": faults, "steps": 8}
            if mistake == "lossy":
                settings |= {"hold": 5, "workers": 3}
            if mistake in ("differs", "disk"):
                settings |= {"checkpoint": os.path.join(folder, "run.pt"), "save_every": 4}
            launcher = [_program(), "run", "--elastic", "1:3", "-n", "3"]
            ended = _run(launcher, mistake=mistake, **settings)
            left = set(os.listdir(folder)) - {"proof"}
            assert left == ({"run.pt"} if mistake == "differs" else set()), (mistake, left)
            if mistake == "differs":
                # The replica of one is not taken for the run's.
                assert _torch_reads(settings["checkpoint"]) == 4
        assert ended.returncode == 64 and words in ended.stderr, (mistake, ended.returncode, ended.stderr)
        assert ("the run is not over" in ended.stderr) == (mistake == "closes"), (mistake, ended.stderr)


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


def _lines(file: str) -> list[list]:
    """What workers have written down so far, in whole lines."""
    return [json.loads(line) for line in _text(Path(file)).split("\n")[:-1]]


def _torch_reads(file: str) -> int:
    """The steps of a checkpoint, as torch reads it. Not here: what forks must not have started threads."""
    code = f"import torch; print(torch.load({file!r}, weights_only=True)['steps'])"
    return int(subprocess.check_output([sys.executable, "-c", code]))


def _start(launcher: list[str], **settings) -> subprocess.Popen:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(_command(launcher, settings), env=_environment(), **pipes)


def _momentum() -> dict:
    return {"optimizer": "momentum"}


@functools.cache
def _alone(optimizer: str, codec: str | None = None, **settings) -> str:
    """The hash of one process without a launcher."""
    return _hash(_run([], optimizer=optimizer, codec=codec, **settings))


def _launched(faults: list[list], joined: int = 0, workers: int = 4, **settings) -> str:
    """The hash of a job in which these faults have happened."""
    return _hash(_faulted(faults, joined, workers, **settings))


def _faulted(faults, joined=0, workers=4, **settings) -> subprocess.CompletedProcess:
    with tempfile.TemporaryDirectory() as folder:
        proof = os.path.join(folder, "proof")
        hold = max((fault[3] for fault in faults), default=0) + 2
        settings = {"hold": hold, "faults": faults, "proof": proof, "workers": workers, **settings}
        command = [_program(), "run", "--elastic", f"1:{workers}", "-n", str(workers)]
        # Torch takes a minute to load where many want the same cores.
        ended = _run([*command, "--timeout", "300"], **settings)
        if faults:
            assert os.path.exists(proof), (ended.returncode, ended.stdout, ended.stderr)
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
