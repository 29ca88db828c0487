"""Weights from strangers: whatever a folder holds, opening it runs nothing, opens nothing else, ends soon,
takes little memory and, unless it is whole, is refused in one clear sentence."""

import copy
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import python
from finished import sign, write_stage
from test_pdebench import settings as data_settings

import ups
from ups.commands import predict
from ups.common.place import ROOT
from ups.config.load import to_dict
from ups.config.model import ModelConfig
from ups.data.generate import write_data
from ups.generative.corrector import Corrector
from ups.models.operator import Operator
from ups.training.artifact import MODEL

MOST_S, MOST_MB = 5, 500
PUBLISHED = json.loads((ROOT / "pretrained" / "operator" / "config.json").read_text(encoding="utf-8"))
SIZE = {**PUBLISHED["model"], "width": 8, "depth": 1, "modes": 2}


def operator_of(*names: str) -> Operator:
    """A small operator of some of the published tasks, its weights finite and without a meaning."""
    torch.manual_seed(0)
    tasks = [copy.deepcopy(task) for task in PUBLISHED["tasks"] if task["name"] in names]
    operator = Operator({"model": SIZE, "precision": "no", "tasks": tasks})
    for name, value in operator.state_dict().items():  # a codec that changes nothing, and wide bounds
        end = name.rpartition(".")[2]
        value.copy_(
            {
                "low": torch.full_like(value, -9),
                "high": torch.full_like(value, 9),
                "std": torch.ones_like(value),
                "basis": torch.eye(*value.shape) if value.ndim == 2 else value,
            }.get(end, value)
        )
    return operator


def stage(
    folder: Path, change: Callable[[dict], Any] = lambda description: None, name: str = "burgers1d"
) -> None:
    """An operator whose description was changed before it was signed."""
    operator = operator_of(name)
    description = copy.deepcopy(operator.description)
    change(description)
    write_stage(folder / "operator", description, operator.state_dict())


def settings(description: dict) -> dict:
    return description["tasks"][0]["base"]["settings"]


def put(place: Callable[[dict], dict], **values: Any) -> Callable[[Path], None]:
    return lambda folder: stage(folder, lambda description: place(description).update(values))


def model(description: dict) -> dict:
    return description["model"]


def first(description: dict) -> dict:
    return description["tasks"][0]


def solver(place: str) -> Callable[[Path], None]:
    base = {
        "kind": "solver",
        "settings": {
            "num_channels": 1,
            "solver": place,
            "task": "burgers1d",
            "positive": [],
            "names": [],
            "dt": 0.05,
        },
    }

    def make(folder: Path) -> None:
        operator = operator_of("burgers1d")
        changes = {"base": base, "network_weight": 0.0, "is_conservative": False}
        named = Operator(operator.described({"burgers1d": changes}))
        weights = {name: operator.state_dict().get(name, value) for name, value in named.state_dict().items()}
        write_stage(folder / "operator", named.description, weights)

    return make


def altered(name: str, change: Callable[[bytes], bytes], is_signed: bool = False) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        stage(folder)
        path = folder / "operator" / name
        path.write_bytes(change(path.read_bytes()))
        if is_signed:
            sign(folder / "operator")

    return make


def header(change: Callable[[dict], Any]) -> Callable[[Path], None]:
    def of(data: bytes) -> bytes:
        length = int.from_bytes(data[:8], "little")
        entries = json.loads(data[8 : 8 + length])
        text = json.dumps(change(entries) or entries).encode()
        return len(text).to_bytes(8, "little") + text + data[8 + length :]

    return altered(MODEL, of, is_signed=True)


def replaced(name: str, by: Callable[[Path], Any]) -> Callable[[Path], None]:
    """A file of the stage, or the stage itself, that is something else."""

    def make(folder: Path) -> None:
        stage(folder)
        path = folder / name
        path.rename(folder.parent / f"{folder.name} {path.name} outside")
        by(path)

    return make


def link(path: Path) -> None:
    path.symlink_to(
        path.parent.parent.parent / f"{path.parent.parent.name} {path.name} outside"
        if path.name != "operator"
        else path.parent.parent / f"{path.parent.name} {path.name} outside"
    )


def other_corrector(folder: Path) -> None:
    operator = operator_of("burgers1d")
    write_stage(folder / "operator", operator.description, operator.state_dict())
    task = {
        "name": "burgers1d",
        "dim": 4,
        "num_conditions": 24,
        "tokens": [64],
        "fields": [1, 64],
        "num_features": 0,
    }
    corrector = Corrector(
        {"model": to_dict(ModelConfig(**SIZE)), "precision": "no", "sampler_steps": 2, "tasks": [task]}
    )
    write_stage(
        folder / "diffusion",
        corrector.description,
        corrector.state_dict(),
        "diffusion",
        {"operator": "0" * 64},
    )


HUGE, DIGESTS = 10**9, "is .*; expected .* as done.json says"
NONE, COUNTS = "describes no network", "describes no network .*it counts to"
KINDS: dict[str, tuple[Callable[[Path], None], str]] = {
    "a solver that opens a browser": (
        solver("antigravity:geohash"),
        "the base of burgers1d is a solver of the user's, 'anti",
    ),
    "a solver that ends the program": (solver("this:s.exit"), "weights name no code to run"),
    "a solver of a module beside the weights": (solver("operator.evil:step"), "weights name no code to run"),
    "a flipped bit": (altered(MODEL, lambda data: data[:-5] + bytes([data[-5] ^ 64]) + data[-4:]), DIGESTS),
    "a doubled time step": (
        altered("config.json", lambda data: data.replace(b'"dt": 0.05', b'"dt": 0.10')),
        DIGESTS,
    ),
    "a record that was edited": (
        altered("done.json", lambda data: data.replace(b'"run": "test"', b'"run": "x"')),
        "was alter",
    ),
    "no record": (
        lambda folder: (stage(folder), (folder / "operator" / "done.json").unlink()),
        "done.json is missing",
    ),
    "another operator's corrector": (
        other_corrector,
        "was made from another operator than the one beside it",
    ),
    "a precision that is none": (
        lambda folder: stage(folder, lambda d: d.update(precision={"bf16": 1})),
        "its precision is .*; expected no or bf16",
    ),
    "1e7 deep": (put(model, depth=10**7), COUNTS),
    "3000 deep": (put(model, depth=3000), "its depth is 3000 and its weights hold"),
    "an MLP of 1e7": (put(model, mlp_ratio=1e7), NONE),
    "patches that cut cells": (
        lambda folder: stage(folder, lambda d: first(d)["codec"].update(space=[257])),
        r"patches of 4 cells on a grid of \[257\]",
    ),
    "1e9 cells": (put(settings, space=[HUGE]), COUNTS),
    "a reach of 1e6": (put(settings, reach=10**6), "transport reaches"),
    "1e6 steps a frame": (
        lambda folder: stage(folder, lambda d: settings(d).update(num_steps=10**6), "cfd2d"),
        "an equation takes 1000000 steps a frame",
    ),
    "matrices of 2e4 x 2e4": (
        lambda folder: stage(folder, lambda d: settings(d).update(space=[20000, 8]), "cfd2d"),
        NONE,
    ),
    "a description of 8 MB": (
        altered("config.json", lambda data: data + b" " * 2**23, True),
        "has 8\\d* bytes; expected",
    ),
    "a linked description": (replaced("operator/config.json", link), "config.json is a link to"),
    "linked weights": (replaced(f"operator/{MODEL}", link), "model.safetensors is a link to"),
    "a linked record": (replaced("operator/done.json", link), "done.json is a link to"),
    "a linked stage": (replaced("operator", link), "operator is a link"),
    "a pipe": (replaced("operator/done.json", os.mkfifo), "done.json is missing|no plain file"),
}


def test_a_solver_is_called_if_the_user_passes_it(tmp_path):
    """By a function, and on the command line of predict.py by a name of the user's."""
    solver("antigravity:geohash")(tmp_path / "run")
    model = ups.load(tmp_path / "run", solvers={"burgers1d": lambda u: u + 0.25})
    u0 = torch.linspace(0, 1, 256).view(1, 1, 256)
    torch.testing.assert_close(
        model.forecast("burgers1d", u0, 0.05, 2, extrapolate=True)[0, :, 0],
        u0[0] + torch.tensor([[0.25], [0.5]]),
    )
    write_data(
        tmp_path / "in.h5",
        "burgers1d",
        lambda indices, **_: np.ones((len(indices), 2, 1, 256), "float32"),
        data_settings("burgers1d", num_trajectories=3, resolution=256, num_frames=2, t_end=0.05),
        chunk=3,
    )
    command = [
        "--run",
        str(tmp_path / "run"),
        "--task",
        "burgers1d",
        "--input",
        str(tmp_path / "in.h5"),
        "--extrapolate",
        "--output",
        str(tmp_path / "out.h5"),
    ]
    for more, words in (
        ([], "the base of burgers1d is a solver of the user's"),
        (["--solver", "step"], "expected TASK=MODULE"),
        (["--solver", "burgers1d=no_such:step"], "the solver of burgers1d is 'no_such:step', which is not"),
    ):
        with pytest.raises(ValueError, match=words):
            predict.main([*command, *more])
    assert predict.main([*command, "--solver", "burgers1d=numpy:square"]) == 0
    assert (tmp_path / "out.h5").is_file()


@pytest.mark.parametrize("is_outside", [False, True])
def test_links_of_a_hub_s_cache_lead_to_its_own_blobs(tmp_path, is_outside):
    run, blobs = tmp_path / "models--a--b" / "snapshots" / "1", tmp_path / "models--a--b" / "blobs"
    stage(run)
    blobs.mkdir()
    for path in [*(run / "operator").iterdir()]:
        to = (tmp_path if is_outside and path.name == MODEL else blobs) / f"{path.name} of the hub"
        path.rename(to)
        path.symlink_to(os.path.relpath(to, path.parent))
    if is_outside:
        with pytest.raises(ValueError, match="model.safetensors is a link to"):
            ups.load(run)
    else:
        assert [*ups.load(run).tasks] == ["burgers1d"]


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, dict]:
    """What opening a folder of each kind did."""
    root = tmp_path_factory.mktemp("hostile")
    stage(root / "sound")
    for kind, (make, _) in KINDS.items():
        make(root / kind)
    done = python(
        str(Path(__file__).with_name("watched.py")),
        root / "sound",
        root / "sound",
        *(root / kind for kind in KINDS),
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == 1 + len(KINDS), done.stderr[-2000:]
    return dict(zip(["sound", *KINDS], lines, strict=True))


def test_sound_weights_are_taken_and_need_no_more_than_is_allowed(found):
    assert found["sound"]["error"] == "" and not found["sound"]["seen"] and found["sound"]["mb"] < MOST_MB


@pytest.mark.parametrize("kind", KINDS)
def test_a_hostile_folder_is_refused_by_name_and_runs_opens_and_asks_for_nothing(found, kind):
    what = found[kind]
    assert re.match("(DamagedError|ValueError|FileNotFoundError): ", what["error"]), what
    assert re.search(KINDS[kind][1], what["error"], re.S) and len(what["error"]) < 1000, what
    assert not what["seen"] and what["seconds"] < MOST_S and what["mb"] < MOST_MB, what
