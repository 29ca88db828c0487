"""What deletes, deletes what carries our own record; what publishes, replaces an earlier copy alone, whole or
not at all."""

import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from finished import sign, write_stage
from test_hostile import operator_of
from test_pdebench import settings, solver

from ups.commands import publish
from ups.commands.remove import remove_ours
from ups.common.files import partial_path, value_hash, write_json, write_sealed
from ups.config import ROOT
from ups.data.generate import write_data
from ups.training.identity import relevant_keys

CONFIG = (ROOT / "pretrained" / "operator" / "config.yaml").read_text(encoding="utf-8")


def files_in(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def make(*arguments: str, cwd: Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [
            "make",
            "--no-print-directory",
            "-f",
            str(ROOT / "Makefile"),
            *arguments,
            f"PYTHON={sys.executable}",
        ],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


MINE = (
    "my/thesis.tex",
    "home/me/letters.txt",
    "runs/smoke/operator/mine.py",
    "data/smoke/mine.h5",
    "cache/smoke/mine.h5",
)


@pytest.fixture
def place(tmp_path) -> Path:
    """A folder of somebody's, with names that make's recipes use."""
    for name in MINE:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("mine", encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["clean-smoke", "RUNS=my runs"], "RUNS is 'my runs'; expected one word"),
        (["smoke", "CONFIG=a b.yaml"], "expected one word"),
        (["remove", "RUN=home", "STAGE=me", "RUNS="], "RUNS is empty"),
        (["publish", "TO=a b"], "expected one word"),
        (["remove", "RUN=home", "STAGE=me", "RUNS=."], "was not deleted, as it holds home/me/letters.txt"),
        (["clean-smoke"], "was not deleted, as it holds runs/smoke/operator/mine.py"),
    ],
)
def test_no_recipe_deletes_what_carries_no_record_of_ours(place, arguments, words):
    done = make(*arguments, cwd=place)
    assert done.returncode != 0 and words in done.stderr, (done.stdout, done.stderr)
    assert files_in(place) == dict.fromkeys(MINE, b"mine")


def test_no_recipe_deletes_by_itself():
    recipes = [
        line for line in (ROOT / "Makefile").read_text(encoding="utf-8").splitlines() if line.startswith("\t")
    ]
    assert not [line for line in recipes if re.search(r"\brm\b|-delete|rmtree|unlink", line)]


def stages(run: Path) -> Path:
    """A run with a finished operator, an unfinished diffusion and a report of which a gate failed."""
    operator = operator_of("burgers1d")
    write_stage(run / "operator", operator.description, operator.state_dict())
    (run / "diffusion").mkdir()
    (run / "diffusion" / ".lock").touch()
    write_json(run / "diffusion" / "environment.json", {"config_hash": "0", "parents": {}, "starts": []})
    (run / "report").mkdir()
    write_json(
        run / "report" / "results.json", {"run": run.name, "config_hash": "0", "gates": [], "tasks": {}}
    )
    return run


def test_what_is_ours_is_deleted_and_said(tmp_path, capsys):
    run, data = stages(tmp_path / "runs" / "smoke"), tmp_path / "data" / "smoke" / "burgers1d" / "one.hdf5"
    data.parent.mkdir(parents=True)
    write_data(data, "burgers1d", solver("burgers1d"), settings("burgers1d", num_trajectories=2), chunk=2)
    shutil.copyfile(data, partial_path(data))
    assert (
        remove_ours(run) and remove_ours(tmp_path / "data" / "smoke") and not remove_ours(tmp_path / "cache")
    )
    assert [path.name for path in tmp_path.rglob("*")] == ["runs", "data"] or not files_in(tmp_path)
    assert capsys.readouterr().out.count("deleting ") == 5


@pytest.mark.parametrize(
    "spoil",
    [
        lambda run: (run / "notes.txt").write_text("mine"),
        lambda run: (
            (run / "diffusion" / "environment.json").unlink()
            or (run / "diffusion" / "a.py").write_text("mine")
        ),
        lambda run: (run / "steady").symlink_to(run / "operator"),
        lambda run: (run / "operator" / "done.json").write_text("{}"),
        lambda run: sign(run / "operator", "steady"),
    ],
    ids=["a note", "a lock of another kind", "a link", "a record without a seal", "another stage's record"],
)
def test_one_thing_that_is_not_ours_keeps_all(tmp_path, spoil):
    run = stages(tmp_path / "smoke")
    spoil(run)
    before = files_in(tmp_path)
    with pytest.raises(
        ValueError, match="smoke was not deleted, as it holds .*Move what is yours, or delete it yourself"
    ):
        remove_ours(run)
    assert files_in(tmp_path) == before


# ---------------------------------------------------------------- publishing


def published(run: Path) -> Path:
    """A run that may be published: cards, configurations, a picture, and checkpoints that stay."""

    operator, folder = operator_of("burgers1d"), run / "operator"
    write_stage(folder, operator.description, operator.state_dict())
    (folder / "config.yaml").write_text(CONFIG, encoding="utf-8")
    record = json.loads((folder / "done.json").read_text())
    record.pop("seal")
    record["config_hash"] = value_hash(
        {"stage": "operator", **relevant_keys(yaml.safe_load(CONFIG), "operator")}
    )
    write_sealed(folder / "done.json", record)
    (folder / "images").mkdir()
    for name in ("README.md", "images/one.png", "metrics.jsonl", "state/step_000000001/shared.pt", ".lock"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("ours", encoding="utf-8")
    return run


TARGETS = {
    "itself": lambda root: root / "run",
    "its stage": lambda root: root / "run" / "operator",
    "around it": lambda root: root,
    "another run": lambda root: published(root / "other"),
    "somebody's operator": lambda root: mine(root / "mine"),
    "a copy with something beside": lambda root: mine(
        publish.copy(root / "run", root / "copy"), "operator/notes.md"
    ),
    "a link": lambda root: linked(root / "link", publish.copy(root / "run", root / "copy")),
    "a file": lambda root: mine(root, "file") / "file",
}


def mine(folder: Path, name: str = "operator/my.py") -> Path:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("mine", encoding="utf-8")
    return folder


def linked(path: Path, to: Path) -> Path:
    path.symlink_to(to)
    return path


@pytest.mark.parametrize("target", TARGETS)
def test_publishing_takes_the_place_of_an_earlier_copy_alone(tmp_path, target):
    run = published(tmp_path / "run")
    to = TARGETS[target](tmp_path)
    before = files_in(tmp_path)
    with pytest.raises(ValueError, match="Name another with TO="):
        publish.copy(run, to)
    assert files_in(tmp_path) == before
    copy = publish.copy(run, tmp_path / "again")
    (run / "operator" / "README.md").write_text("new", encoding="utf-8")
    assert (publish.copy(run, copy) / "operator" / "README.md").read_text() == "new"


@pytest.mark.parametrize("name", ["README.md", "images/two.png", "images", "config.json", "metrics.jsonl"])
def test_a_link_in_a_run_is_not_followed(tmp_path, name):
    run, secret = published(tmp_path / "run"), tmp_path / "secret"
    secret.mkdir() if name == "images" else secret.write_text("secret")
    path = run / "operator" / name
    path.rename(tmp_path / "moved") if path.exists() else None
    path.symlink_to(secret)
    with pytest.raises(ValueError, match="is a link"):
        publish.copy(run, tmp_path / "copy")
    with pytest.raises(ValueError, match="is a link"):
        publish.published_files(run)  # which `push` sends
    assert not (tmp_path / "copy").exists()


def publish_slowly(run: Path, to: Path, has_begun: Any) -> None:
    """As make publish does, a fifth of a second for each file."""

    def slowly(*paths: Path, **options: Any) -> Path:
        has_begun.set()
        time.sleep(0.2)
        return whole(*paths, **options)

    whole, publish.shutil.copyfile, sys.argv = shutil.copyfile, slowly, ["publish", str(run), str(to)]
    sys.exit(publish.main())


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_an_interruption_leaves_what_was_there(tmp_path, how):
    run, to = published(tmp_path / "run"), tmp_path / "pub" / "copy"
    before = files_in(publish.copy(run, to))
    (run / "operator" / "README.md").write_text("new", encoding="utf-8")
    fork = multiprocessing.get_context("fork")  # has all that is imported
    has_begun = fork.Event()
    process = fork.Process(target=publish_slowly, args=(run, to, has_begun))
    process.start()
    assert has_begun.wait(30)
    time.sleep(0.3)
    os.kill(process.pid, how)
    process.join(30)
    assert process.exitcode not in (0, None) and files_in(to) == before
    assert how == signal.SIGKILL or [path.name for path in to.parent.iterdir()] == ["copy"]
    assert (publish.copy(run, to) / "operator" / "README.md").read_text() == "new"


def test_a_run_that_does_not_open_is_not_published(tmp_path):
    run = published(tmp_path / "run")
    text = (run / "operator" / "config.json").read_text().replace('"dt": 0.05', '"dt": 0.1')
    (run / "operator" / "config.json").write_text(text)
    with pytest.raises(ValueError, match="config.json is .*; expected .* as done.json says"):
        publish.copy(run, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
