"""What starts again or reports again deletes only files that it wrote; what publishes, replaces an earlier
copy alone, whole or not at all."""

import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from finished import write_stage
from test_hostile import operator_of

from ups.commands import publish
from ups.common.files import value_hash, write_sealed
from ups.common.place import ROOT
from ups.config.load import load_config
from ups.report import model_card
from ups.results import Results
from ups.training.artifact import relevant_keys
from ups.training.folder import StageFolder

CONFIG = (ROOT / "pretrained" / "operator" / "config.yaml").read_text(encoding="utf-8")


def files_in(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def test_no_recipe_deletes_by_itself():
    recipes = [
        line for line in (ROOT / "Makefile").read_text(encoding="utf-8").splitlines() if line.startswith("\t")
    ]
    assert not [line for line in recipes if re.search(r"\brm\b|-delete|rmtree|unlink", line)]


def test_the_next_start_of_a_stage_deletes_no_file_of_a_user(tmp_path):
    names = ("errors/notes.txt", "heartbeat/notes.txt", "state/notes.txt", "errors/rank0.json")
    folder = StageFolder(load_config(None, [f"run.root={tmp_path}", "run.name=smoke"]), "operator", {})
    for name in (*names, "heartbeat/rank0.json"):
        mine(folder.path, name)
    folder.begin({"start": 0})
    assert files_in(folder.path).keys() - {"config.yaml", "environment.json"} == {*names}


OF_OPERATOR = Results({"stages": {"operator": ["burgers1d"]}})


def test_new_cards_delete_no_picture_of_a_user(tmp_path, monkeypatch):
    monkeypatch.setattr(model_card, "card", lambda *arguments: "![](images/burgers1d_median_error_u.png)")
    figures, images = mine(tmp_path / "report/figures", "burgers1d_median_error_u.png"), "run/operator/images"
    (tmp_path / "run/operator").mkdir(parents=True)
    for place in (tmp_path / images, tmp_path / "elsewhere"):
        model_card.write_cards(tmp_path / "run", OF_OPERATOR, {}, figures)
        mine(place, "mine.png")
    assert sorted(os.listdir(tmp_path / images)) == ["burgers1d_median_error_u.png", "mine.png"]
    (tmp_path / images / "burgers1d_median_error_u.png").unlink()
    linked(tmp_path / images / "burgers1d_median_error_u.png", mine(tmp_path, "thesis") / "thesis")
    (tmp_path / "report/figures/burgers1d_median_error_u.png").write_text("new")
    model_card.write_cards(tmp_path / "run", OF_OPERATOR, {}, figures)
    assert (tmp_path / "thesis").read_text() == "mine"


@pytest.mark.parametrize("change", ["My words.\n{}", "{}My words.\n", "My card.\n"])
def test_a_card_that_somebody_changed_is_kept_and_named(tmp_path, monkeypatch, capsys, change):
    folder = tmp_path / "run/operator"
    folder.mkdir(parents=True)
    for text in ("one\n", "two\n"):  # as it was written, it is replaced
        monkeypatch.setattr(model_card, "card", lambda *_, text=text: text)
        model_card.write_cards(tmp_path / "run", OF_OPERATOR, {}, tmp_path)
    written = (folder / "README.md").read_text(encoding="utf-8")
    assert written.startswith("two\n") and not capsys.readouterr().out
    theirs = change.format(written)
    (folder / "README.md").write_text(theirs, encoding="utf-8")
    model_card.write_cards(tmp_path / "run", OF_OPERATOR, {}, tmp_path)
    assert (folder / "README.md").read_text(encoding="utf-8") == theirs
    assert f"{folder / 'README.md'} was changed" in capsys.readouterr().out


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


def mine(folder: Path, name: str = "operator/my.py") -> Path:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("mine", encoding="utf-8")
    return folder


def linked(path: Path, to: Path) -> Path:
    path.symlink_to(to)
    return path


@pytest.mark.parametrize("target", ["the run", "an earlier copy", "a link", "a file"])
def test_publishing_replaces_nothing(tmp_path, target):
    run = published(tmp_path / "run")
    to = {
        "the run": lambda: run,
        "an earlier copy": lambda: publish.copy(run, tmp_path / "copy"),
        "a link": lambda: linked(tmp_path / "link", mine(tmp_path / "elsewhere")),
        "a file": lambda: mine(tmp_path, "file") / "file",
    }[target]()
    before = files_in(tmp_path)
    with pytest.raises(FileExistsError, match=r"is there already; .*Name another with TO=, or delete it"):
        publish.copy(run, to)
    assert files_in(tmp_path) == before
    (tmp_path / "empty").mkdir()
    assert files_in(publish.copy(run, tmp_path / "empty"))


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
def test_an_interruption_leaves_no_half_copy(tmp_path, how):
    run, to = published(tmp_path / "run"), tmp_path / "pub" / "copy"
    fork = multiprocessing.get_context("fork")  # has all that is imported
    has_begun = fork.Event()
    process = fork.Process(target=publish_slowly, args=(run, to, has_begun))
    process.start()
    assert has_begun.wait(30)
    time.sleep(0.3)
    os.kill(process.pid, how)
    process.join(30)
    assert process.exitcode not in (0, None) and not to.exists()
    assert how == signal.SIGKILL or not [*to.parent.iterdir()]
    assert (publish.copy(run, to) / "operator" / "README.md").read_text() == "ours"


def test_a_run_that_does_not_open_is_not_published(tmp_path):
    run = published(tmp_path / "run")
    text = (run / "operator" / "config.json").read_text().replace('"dt": 0.05', '"dt": 0.1')
    (run / "operator" / "config.json").write_text(text)
    with pytest.raises(ValueError, match="config.json is .*; expected .* as done.json says"):
        publish.copy(run, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
