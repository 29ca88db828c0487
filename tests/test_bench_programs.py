"""Programs of bench/ that no other test runs, on problems of a few cells and trainings of a few steps: each
ends with the entries of its table."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from loop_stage import run_scripts

from bench import inversion, shift_grid, strangers, transfer, trust
from bench import table as tables

SMALL = [f"operator.model.{size}" for size in ("width=8", "depth=1", "modes=4", "kernel_size=3")]
SMALL += ["operator.train.batch_size=8", "operator.train.micro_batch=8", "operator.base_steps=5"]
STEPS = ["operator.train.steps=4", "operator.train.validate_every=4", "operator.train.precision='no'"]


@pytest.fixture
def small(monkeypatch, tmp_path):
    """A function that sets names of a program; what it trains by scripts is trained in forks."""

    def forked(config: Path, options: list[str], *scripts: str) -> None:
        run_scripts(tmp_path, ["--config", str(config), *options], *scripts)

    def change(module, **values) -> None:
        for name, value in values.items():
            monkeypatch.setattr(module, name, value)

    for module in (inversion, transfer):
        change(module, run_scripts=forked)
    monkeypatch.setattr(torch, "set_num_threads", lambda num: None)
    return change


def entries(folder: Path, name: str) -> list[dict]:
    return json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))["entries"]


def test_transfer_trains_with_and_without_a_trunk(small, tmp_path):
    small(transfer, FOLDER=tmp_path / "work", KEPT=tmp_path / "kept", STEPS=4, NUM_STARTS=12, NUM_TEST=3)
    small(transfer, NUM_FRAMES=8, NUM_CELLS=32, WARM_UP=0.1, NETWORK=(*transfer.NETWORK, *SMALL, STEPS[-1]))
    words = "--family burgers1d --count 5 --column bare --problems 0 2 --seeds 0 --budget 0.1".split()
    transfer.main(words)
    found = entries(tmp_path / "kept", "burgers1d")
    assert [one["key"]["problems"] for one in found] == [0, 2]
    assert all(one["row"]["steps"] > 0 and np.isfinite(one["row"]["other"]["error"]) for one in found)
    transfer.main(words)  # results that are there are not computed again
    assert entries(tmp_path / "kept", "burgers1d") == found
    assert "| burgers1d | bare | 5 |" in tables.TABLES["transfer"].text(tables.results(tmp_path / "kept"))


def test_strangers_compare_ours_with_an_fno(small, tmp_path):
    wave = strangers.PROBLEMS["wave"]

    def coarse(*given: int) -> dict[str, np.ndarray]:
        return {name: u[..., ::4, ::4] for name, u in wave.solve(*given).items()}

    small(
        strangers,
        FOLDER=tmp_path / "kept",
        OUT=tmp_path,
        PROBLEMS={"wave": replace(wave, solve=coarse)},
        NUM_FILE=12,
        NUM_TEST=2,
    )
    small(strangers, NUM_FRAMES=6, NUM_LONG=10, HORIZON=3, LATE=5, SETTINGS=({}, {"lr": 1e-3}))
    small(strangers, USUAL={"width": 4, "depth": 1, "modes": 2, "batch_size": 2})
    small(strangers, OVERRIDES=[*strangers.OVERRIDES, *SMALL, "task.wave.base=[persistence]"])
    words = "--problem wave --column ours fno --budget 1.5 --search 0.3 --seeds 0"
    strangers.main(words.split())
    found = entries(tmp_path / "kept", "wave")
    assert [one["key"]["column"] for one in found] == ["ours", "fno"]
    assert all(one["steps"] > 0 and np.isfinite(one["row"]["late"]) for one in found)
    text = tables.TABLES["strangers"].text(tables.results(tmp_path / "kept"))
    assert text.splitlines()[-1].startswith("| wave |")


@pytest.mark.parametrize("kind", ["grid", "authors"])
def test_trust_scores_bands_on_shifted_and_on_authors_films(small, tmp_path, monkeypatch, kind):
    small(trust, RESULTS=tmp_path / "kept", OUT=tmp_path, NUM_STARTS=48, NUM_BOOTSTRAP=20)
    small(trust, NUM_FILMS=240, NUM_GIVEN=240)
    small(shift_grid, OUT=tmp_path, NUM_STARTS=240, NUM_TEST=4, NUM_FRAMES=8)
    coarse = dict(num_modes=(1, 2, 3), resolution=32)
    family = shift_grid.FAMILIES["advection"].__class__("advection1d", dt=0.05, parameter=0.4, **coarse)
    monkeypatch.setitem(shift_grid.FAMILIES, "advection", family)
    for module in (shift_grid, trust):
        small(module, MIDDLE=1, TRAINED=tuple(np.linspace(0.7, 1.4, 12).tolist()))

    def moved(author, python, path, tried, given) -> dict[str, np.ndarray]:
        return {"u0": np.stack([np.roll(given[0], 2 * step, 1) for step in range(8)], 1)}

    small(trust, solve=moved, NUM_CELLS=32)
    name, task = {"grid": ("advection", "advection"), "authors": ("pypde", "burgers_pypde")}[kind]
    words = [f"--{kind}", "--tasks", name, *SMALL, *STEPS, f"task.{task}.base=[persistence]"]
    monkeypatch.setattr("sys.argv", ["trust", *words])
    trust.main()
    [found] = entries(tmp_path / "kept" / "trust", kind)
    assert found["starts"] == 48 and 0 <= found["inside"][0] <= 1
    assert (found["shifted"] > 0) == (kind == "grid")
    assert len(tables.TABLES["trust"].text(tables.results(tmp_path / "kept" / "trust")).splitlines()) == 3
