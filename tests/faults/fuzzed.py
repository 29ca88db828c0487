"""Read mutated files, one after another, in a process that is watched: python fuzzed.py FOLDER SEED NUM
[CASE [TARGET]]

A line of JSON for each: the target, its number, the outcome. A case is a function of (seed, target, number).
It fails if it imports, runs, connects to, removes or writes anything or opens a file outside of its folder
(watched.py), takes longer than CASE_S, needs LIMIT_MB more or ends in an error that is not one clear
sentence. A case that no alarm can end ends the process."""

import contextlib
import faulthandler
import functools
import io
import itertools
import json
import random
import resource
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import test_hostile
import texts
import torch
import watched
from finished import sign, write_stage
from mutate import is_clear, mutate_bytes, mutate_tree

import prepare_data
from bench import leaderboard
from ups.common.files import file_hash, read_record, write_sealed
from ups.common.place import ROOT
from ups.config.load import to_dict
from ups.config.model import ModelConfig
from ups.generative.conditions import StateConditions
from ups.generative.corrector import Corrector
from ups.results import TABLE, Entry, Results
from ups.tasks import make_user_task
from ups.training.artifact import DONE, MODEL
from ups.userdata import readers
from ups.userdata.open_files import open_user_files
from ups.userdata.readers import process

CASE_S, LIMIT_MB, HEADER = 5, 500, 2048
# of 24 cases
PARTS = {"config.json": 9, "done.json": 3, MODEL: 4, "data": 4, "names": 2, "section": 1, "results": 1}
FACTS = {
    "arrays": [{"array": "u", "axes": ["trajectory", "time", "x"], "fields": ["u"]}],
    "inputs": [],
    "axes": ["x"],
    "boundary": "periodic",
    "domain": [[0, 1]],
    "parameters": {},
    "positive": [],
    "conserved": [],
    "bounded": [],
    "hidden": False,
    "symmetries": ["shift"],
    "vector": [],
    "times": "",
}  # of a task of the user's


class Late(BaseException):
    """CASE_S is over."""


def prepare(folder: Path) -> None:
    """Sound weights, of each kind of base and with a corrector, and sound fields in each kind of file."""
    for name in ["own", *(task["name"] for task in test_hostile.PUBLISHED["tasks"])]:
        operator = test_hostile.operator_of("burgers1d" if name == "own" else name)
        own = {"burgers1d": {"own": FACTS, "domain": [[0.0, 1.0]]}} if name == "own" else None
        signed = write_stage(folder / name / "operator", operator.described(own), operator.state_dict())
        if name == "burgers1d":
            corrector = Corrector(
                {
                    "model": to_dict(ModelConfig(**test_hostile.SIZE)),
                    "precision": "no",
                    "sampler_steps": 2,
                    "tasks": [StateConditions(operator, name).description],
                }
            )
            write_stage(
                folder / name / "diffusion",
                corrector.description,
                corrector.state_dict(),
                "diffusion",
                {"operator": signed},
            )
    u = np.random.default_rng(0).normal(size=(3, 4, 16)).astype("float32")
    np.save(folder / "u.npy", u)
    np.savez(folder / "u.npz", u=u)
    with h5py.File(folder / "u.h5", "w") as file:
        file["u"] = u


def change_stage(name: str, case: Path, sound: Path, rng: random.Random) -> None:
    """A run in which one file of one stage is mutated; mostly signed, as anybody can."""
    run = rng.choice([path for path in sorted(sound.iterdir()) if path.is_dir()] + 3 * [sound / "burgers1d"])
    shutil.copytree(run, case)
    stage = rng.choice([path for path in sorted(case.iterdir())])
    path = stage / name
    data = path.read_bytes()
    if name == MODEL:
        length = int.from_bytes(data[:8], "little")
        if rng.random() < 0.6:
            header = json.dumps(mutate_tree(json.loads(data[8 : 8 + length]), rng)).encode()
            path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])
        else:
            path.write_bytes(mutate_bytes(data[: 8 + length], rng) + data[8 + length :])
    elif rng.random() < 0.7:
        path.write_text(json.dumps(mutate_tree(json.loads(data), rng)), encoding="utf-8")
    else:
        path.write_bytes(mutate_bytes(data, rng))
    parents = read_record(stage / DONE, "a record", "", parents=dict)["parents"] if name != DONE else {}
    if name != DONE and rng.random() < 0.95:
        sign(stage, stage.name, parents)
    elif name == DONE and rng.random() < 0.7:
        record = json.loads(data)
        del record["seal"]
        changed = mutate_tree(record, rng)
        write_sealed(path, changed if isinstance(changed, dict) else record)


def change_data(case: Path, sound: Path, rng: random.Random) -> None:
    path = rng.choice([path for path in sorted(sound.iterdir()) if path.is_file()])
    data = path.read_bytes()
    case.mkdir()
    # a zip's directory is at its end
    at = len(data) - HEADER if path.suffix == ".npz" and rng.random() < 0.5 else 0
    end = max(at, 0) + (128 if path.suffix == ".npy" else HEADER)
    (case / path.name).write_bytes(
        data[: max(at, 0)] + mutate_bytes(data[max(at, 0) : end], rng) + data[end:]
    )


def read_data(case: Path) -> None:
    data = open_user_files(make_user_task("mine", FACTS), list(case.iterdir()))
    data.read(0, data.num_trajectories)


def change_names(case: Path, _: Path, rng: random.Random) -> None:
    case.mkdir()
    texts.write_mutated(case, rng)


def read_names(case: Path) -> None:
    """What a user does with a file: describe it, and examine it with the section that this prints."""
    [path] = [path for path in case.iterdir() if path.name != "evil.py"]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        prepare_data.main(["--describe", str(path)])
    watched.folder = None
    section = case / "section.yaml"
    section.write_text(printed.getvalue().replace("include: configs", f"include: {ROOT}/configs"))
    watched.folder = case
    start_clocks(CASE_S)  # of the second command
    examine_section(section)


def examine_section(section: Path) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        prepare_data.main(["--doctor", "--config", str(section)])


def change_section(case: Path, _: Path, rng: random.Random | None) -> None:
    """A section, sound without `rng`. Which files it names is for its author to say."""
    case.mkdir()
    files = str(texts.write_file("npz", case, texts.sound_contents()))
    section = (texts.mutate_texts(texts.SECTION, rng) if rng else texts.SECTION) | {"files": files}
    config = {"include": str(ROOT / "configs/small.yaml"), "data": {"tasks": ["mine"], "source": "user"}}
    texts.write_yaml(case / "section.yaml", {**config, "task": {"mine": section}})


def results() -> Results:
    """Those whose facts are texts.RESULTS."""
    operator = {"nrmse": {"value": 0.1, "low": 0.0, "high": 0.2}, "ms_per_state": 1.0}
    tasks = {name: Entry(name, "tasks", facts) for name, facts in texts.RESULTS["tasks"].items()}
    for entry in tasks.values():
        entry.add("", {"num_trajectories": 3, "num_frames_predicted": 4})
        entry.add("operator", operator)
    return Results({key: value for key, value in texts.RESULTS.items() if key != "tasks"}, tasks)


def change_results(case: Path, _: Path, rng: random.Random) -> None:
    """Two reports, one of them mutated, mostly with a record that confirms it."""
    for name in ("sound", "odd"):
        report = case / name / "report"
        report.mkdir(parents=True)
        data = json.dumps(texts.RESULTS | {"run": name})
        if name == "odd":
            change = rng.choice((texts.mutate_texts, mutate_tree))
            data = json.dumps(change(texts.RESULTS, rng))
        data = mutate_bytes(data.encode(), rng) if name == "odd" and rng.random() < 0.2 else data.encode()
        results().save(report)
        if name == "odd" and rng.random() < 0.3:
            table = (report / TABLE).read_bytes()
            (report / TABLE).write_bytes(mutate_bytes(table, rng))
        else:
            (report / "results.json").write_bytes(data)
        if name == "sound" or rng.random() < 0.8:
            files = {path.name: file_hash(path) for path in report.iterdir()}
            write_sealed(report / DONE, {"files": files})


def read_results(case: Path) -> None:
    shown = leaderboard.table(case)
    if "| sound |" not in shown or not shown.replace("\n", "").isprintable():
        raise AssertionError(f"listed as {shown!r}")
    if refusal := shown.partition("Not listed: ")[2]:
        raise ValueError(refusal)


TARGETS = {  # target -> (how a case is made, how it is read)
    **{name: (functools.partial(change_stage, name), watched.use) for name in ("config.json", DONE, MODEL)},
    "data": (change_data, read_data),
    "names": (change_names, read_names),
    "section": (change_section, lambda case: examine_section(case / "section.yaml")),
    "results": (change_results, read_results),
}


def outcome_of(case: Path, read: Callable[[Path], None]) -> str:
    """ "read", "refused" or "FAILED: why"."""
    watched.seen.clear()
    faulthandler.dump_traceback_later(4 * CASE_S, exit=True)
    start_clocks(CASE_S)
    try:
        watched.folder = case
        read(case)
        outcome = "read"
    except Late:
        outcome = f"FAILED: no end within {CASE_S} s of computing"
    except BaseException as error:  # noqa: BLE001, SystemExit would be a find
        watched.folder = None
        where = [
            f"{Path(frame.f_code.co_filename).name}:{line}"
            for frame, line in traceback.walk_tb(error.__traceback__)
        ][-3:]
        is_fine = isinstance(error, Exception) and is_clear(error)
        outcome = (
            "refused"
            if is_fine
            else f"FAILED: {type(error).__name__}: {' '.join(str(error).split())[:300]} at {where}"
        )
    finally:
        watched.folder = None
        start_clocks(0)
        faulthandler.cancel_dump_traceback_later()
    return f"FAILED: {watched.seen[:3]}" if watched.seen else outcome


CONTROLS: dict[str, Callable[[Path], object]] = {  # what must be noticed
    "import": lambda case: __import__("mailbox"),
    "write": lambda case: (case.parent / "outside").write_text(""),
    "trace": lambda case: {}["missing"],
    "hang": lambda case: time.sleep(60),
    "exit": lambda case: sys.exit(0),
    "memory": lambda case: bytearray(2 * LIMIT_MB * 2**20),
    "vague": lambda case: json.loads("{"),
}


def start_clocks(seconds: float) -> None:
    """Limit computing to `seconds`, and waiting, on a busy machine, to three times as many."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, 3 * seconds)


def read_here_or_apart(number: int) -> None:
    """Read data files in this process, which is watched, or in the process that reads them for users."""
    readers.Foreign = readers.open_here if number % 2 else process.Foreign
    process.running()


def late(*_: object) -> None:
    raise Late


def main() -> None:
    folder, seed, num, *only = Path(sys.argv[1]).absolute(), *sys.argv[2:]
    torch.set_num_threads(1)
    sound, case = folder / "sound", folder / "case"
    for number in (signal.SIGALRM, signal.SIGPROF):  # what is sound is read without a limit
        signal.signal(number, signal.SIG_IGN)
    sound.mkdir(parents=True)
    prepare(sound)
    for path in sorted(sound.iterdir()):  # imports what is needed, and proves that what is mutated is sound
        if path.is_dir():
            watched.use(path)
        else:
            shutil.copytree(sound, case, ignore=lambda _, names, keep=path.name: set(names) - {keep})
            read_data(case)
            shutil.rmtree(case)
    change_section(case, sound, None)
    examine_section(case / "section.yaml")
    shutil.rmtree(case)
    for number, kind in itertools.product(range(2), texts.KINDS):
        case.mkdir()
        texts.write_file(kind, case, texts.sound_contents())
        read_here_or_apart(number)
        read_names(case)
        shutil.rmtree(case)
    warnings.simplefilter("ignore")
    np.seterr(all="ignore")
    start_clocks(0)
    signal.signal(signal.SIGALRM, late)
    signal.signal(signal.SIGPROF, late)
    watched.begin()
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + LIMIT_MB * 2**20,) * 2)
    for name, control in () if only else CONTROLS.items():
        print(
            json.dumps({"target": "control", "number": name}),
            json.dumps({"outcome": outcome_of(case, control)}),
            flush=True,
        )
    for name, part in PARTS.items():
        if only[1:] not in ([], [name]):
            continue
        change, read = TARGETS[name]
        for number in only[:1] or range(int(num) * part // sum(PARTS.values())):
            rng = random.Random(f"{seed} {name} {number}")
            print(json.dumps({"target": name, "number": int(number)}), end=" ", flush=True)
            change(case, sound, rng)
            read_here_or_apart(int(number))
            print(json.dumps({"outcome": outcome_of(case, read)}), flush=True)
            shutil.rmtree(case)


if __name__ == "__main__":
    main()
