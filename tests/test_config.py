"""Configuration: what is refused, that all of it is said at once, and that every message ends with what to do
next."""

import dataclasses
from pathlib import Path

import pytest
import yaml
from cases import cases

from ups.common.text import read_yaml
from ups.config.load import DEFAULT, load_config
from ups.tasks import TASKS

ROOT = Path(__file__).resolve().parent.parent


def refusal(*overrides, overlay=None, tmp_path=None):
    """The text with which a configuration is refused."""
    path = None
    if overlay is not None:
        path = tmp_path / "overlay.yaml"
        path.write_text(overlay, encoding="utf-8")
    with pytest.raises((ValueError, FileNotFoundError)) as refused:
        load_config(path, overrides)
    return str(refused.value)


# ---------------------------------------------------------------- run.name


@pytest.mark.parametrize("name", cases("config.run_names"))
def test_a_run_name_that_is_no_folder_of_its_own_is_refused(name, tmp_path):
    overlay = yaml.safe_dump({"run": {"name": name, "root": str(tmp_path)}})
    said = refusal(overlay=overlay, tmp_path=tmp_path)
    assert f"run.name is {name!r}" in said
    assert "Choose another (RUN= of make); another place is run.root" in said


@pytest.mark.parametrize("name", ["small", "a.b", "run-2", "v1.0+x", "_x", "2026-11-22", "läuft", "n" * 100])
def test_ordinary_run_names_are_taken(name):
    """A number and a date on the command line are text where text belongs."""
    run = load_config(None, [f"run.name={name}", "run.root=7", "run.seed=1"]).run
    assert (run.name, run.root, run.seed) == (name, "7", 1)


def test_a_run_name_of_a_file_that_is_there_is_refused(tmp_path):
    (tmp_path / "notes").touch()
    assert "run.name is 'notes'" in refusal("run.name=notes", f"run.root={tmp_path}")


# ---------------------------------------------------------------- text and bare words


@pytest.mark.parametrize("word", ["no", "No", "off", '"no"', "'no'"])
def test_precision_no_works_without_quotes(word, tmp_path):
    if word not in ("No", "off"):
        assert load_config(None, [f"operator.train.precision={word}"]).operator.train.precision == "no"
    (tmp_path / "overlay.yaml").write_text(f"operator: {{train: {{precision: {word}}}}}\n", encoding="utf-8")
    assert load_config(tmp_path / "overlay.yaml").operator.train.precision == "no"


# ---------------------------------------------------------------- all that is wrong


def test_everything_that_is_wrong_is_said_at_once(tmp_path):
    said = refusal(
        "task.burgers1d.reach=500",
        "operator.train.micro_batch=0",
        "data.val_fraction=2",
        "run.name=a/b",
        "task.burgers1d.space_stride=0",
        "task.advection1d.patch=3",
    ).splitlines()
    for start in (
        "run.name is 'a/b'",
        "operator.train.micro_batch is 0",
        "data.val_fraction is 2.0",
        "task.burgers1d.space_stride is 0",
        "task.advection1d.patch 3 does not divide the grid of 256 cells",
    ):
        assert sum(line.startswith(start) for line in said) == 1, (start, said)
    said = refusal(
        overlay="run: {seed: x, nmae: y}\noperator: {train: {steps: 1.5}}\n", tmp_path=tmp_path
    ).splitlines()
    assert [line.split(";")[0] for line in said] == [
        "unknown key run.nmae",
        "run.seed is 'x'",
        "operator.train.steps is 1.5",
    ]
    assert all(
        line.endswith(("Rename or remove it.", "in your overlay or on the command line.")) for line in said
    )


def test_a_reach_beyond_the_grid_says_the_setting_to_use():
    said = refusal("task.burgers1d.resolution=128", "task.burgers1d.space_stride=1")
    assert said == (
        "task.burgers1d.reach is 96; expected 1 to 64 cells (half the grid). Set task.burgers1d.reach=48, "
        "or drop transport from task.burgers1d.base."
    )
    load_config(
        None, ["task.burgers1d.resolution=128", "task.burgers1d.space_stride=1", "task.burgers1d.reach=48"]
    )


# ---------------------------------------------------------------- what a task knows


@pytest.mark.parametrize("name", TASKS)
def test_a_task_without_a_section_has_the_settings_of_its_file(name, tmp_path):
    (tmp_path / "overlay.yaml").write_text(f"data: {{tasks: [{name}]}}\n", encoding="utf-8")
    settings = load_config(tmp_path / "overlay.yaml").task[name]
    known = {**TASKS[name].settings, **read_yaml(DEFAULT)["task"].get(name, {})}
    assert dataclasses.asdict(settings) == known and settings.resolution == TASKS[name].resolution


def test_a_section_and_an_override_say_only_what_differs(tmp_path):
    (tmp_path / "overlay.yaml").write_text(
        "data: {tasks: [cfd1d]}\ntask:\n  cfd1d: {patch: 8, resolution: 512}\n"
    )
    config = load_config(tmp_path / "overlay.yaml", ["task.cfd1d.history=2"])
    settings = config.task["cfd1d"]
    assert (settings.patch, settings.resolution, settings.history, settings.num_frames) == (8, 512, 2, 101)
    assert set(config.task) == {"cfd1d", *read_yaml(DEFAULT)["task"]}


# ---------------------------------------------------------------- what to do next


@pytest.mark.parametrize(("overlay", "what", "do"), cases("config.overlays"))
def test_messages_say_what_is_wrong_and_what_to_do(overlay, what, do, tmp_path):
    said = refusal(overlay=overlay, tmp_path=tmp_path)
    assert what in said and do in said


@pytest.mark.parametrize(("override", "do"), cases("config.overrides"))
def test_overrides_that_are_refused_say_what_to_do(override, do):
    assert do in refusal(override)


def test_a_configuration_that_is_not_there_names_those_that_are():
    with pytest.raises(
        FileNotFoundError,
        match=r"Name one that is there with --config \(CONFIG= of make\): .*configs/small.yaml",
    ):
        load_config(ROOT / "configs" / "typo.yaml")


def test_an_include_is_looked_for_beside_the_file_and_in_the_folder_of_ups(tmp_path):
    (tmp_path / "a.yaml").write_text("include: configs/small.yaml\n", encoding="utf-8")
    small = load_config(ROOT / "configs/small.yaml")
    assert load_config(tmp_path / "a.yaml") == small
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/small.yaml").write_text("run: {seed: 7}\n", encoding="utf-8")
    assert load_config(tmp_path / "a.yaml").run.seed == 7  # the nearer one
    (tmp_path / "b.yaml").write_text("include: configs/none.yaml\n", encoding="utf-8")
    with pytest.raises(FileNotFoundError) as refused:
        load_config(tmp_path / "b.yaml")
    for place in (tmp_path, ROOT):
        assert str(place / "configs/none.yaml") in str(refused.value)
