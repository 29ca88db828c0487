"""Read mutated files, one after another, in a process that is watched: python fuzzed.py FOLDER SEED NUM
[CASE]

A line of JSON for each: the target, its number, the outcome. A case is a function of (seed, target, number).
It fails if it imports, runs, connects to, removes or writes anything or opens a file outside of its folder
(watched.py), takes longer than CASE_S, needs LIMIT_MB more or ends in an error that is not one clear
sentence. A case that no alarm can end ends the process."""

import faulthandler
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
import torch
import watched
from finished import sign, write_stage
from mutate import is_clear, mutate_bytes, mutate_tree

from ups.common.files import read_record, write_sealed
from ups.config import ModelConfig, to_dict
from ups.generative.conditions import StateConditions
from ups.generative.corrector import Corrector
from ups.tasks import make_user_task
from ups.training.finished import DONE, MODEL
from ups.userdata.open_files import open_user_files

CASE_S, LIMIT_MB, HEADER = 5, 500, 2048
PARTS = {"config.json": 9, "done.json": 3, MODEL: 4, "data": 4}  # of 20 cases
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


def outcome_of(case: Path, read: Callable[[Path], None]) -> str:
    """ "read", "refused" or "FAILED: why"."""
    watched.seen.clear()
    faulthandler.dump_traceback_later(4 * CASE_S, exit=True)
    signal.setitimer(signal.ITIMER_REAL, CASE_S)
    try:
        watched.folder = case
        read(case)
        outcome = "read"
    except Late:
        outcome = f"FAILED: no end within {CASE_S} s"
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
        signal.setitimer(signal.ITIMER_REAL, 0)
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


def late(*_: object) -> None:
    raise Late


def main() -> None:
    folder, seed, num, *only = Path(sys.argv[1]).absolute(), *sys.argv[2:]
    torch.set_num_threads(1)
    sound, case = folder / "sound", folder / "case"
    sound.mkdir(parents=True)
    prepare(sound)
    for path in sorted(sound.iterdir()):  # imports what is needed, and proves that what is mutated is sound
        if path.is_dir():
            watched.use(path)
        else:
            shutil.copytree(sound, case, ignore=lambda _, names, keep=path.name: set(names) - {keep})
            read_data(case)
            shutil.rmtree(case)
    warnings.simplefilter("ignore")
    np.seterr(all="ignore")
    signal.signal(signal.SIGALRM, late)
    sys.addaudithook(watched.watch)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + LIMIT_MB * 2**20,) * 2)
    for name, control in () if only else CONTROLS.items():
        print(
            json.dumps({"target": "control", "number": name}),
            json.dumps({"outcome": outcome_of(case, control)}),
            flush=True,
        )
    for name, part in PARTS.items():
        for number in map(int, only) if only else range(int(num) * part // sum(PARTS.values())):
            rng = random.Random(f"{seed} {name} {number}")
            print(json.dumps({"target": name, "number": number}), end=" ", flush=True)
            if name == "data":
                change_data(case, sound, rng)
            else:
                change_stage(name, case, sound, rng)
            print(
                json.dumps({"outcome": outcome_of(case, read_data if name == "data" else watched.use)}),
                flush=True,
            )
            shutil.rmtree(case)


if __name__ == "__main__":
    main()
