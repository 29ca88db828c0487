"""What deletes, deletes what carries our own record; what publishes, replaces an earlier copy alone, whole or
not at all."""

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
import torch
import yaml
from commands import run
from finished import sign, write_stage
from test_hostile import operator_of
from test_pdebench import settings, solver

from ups.commands import publish
from ups.commands.remove import remove_ours
from ups.common.files import partial_path, value_hash, write_json, write_sealed
from ups.common.place import ROOT
from ups.config.load import load_config
from ups.data.generate import write_data
from ups.report import model_card
from ups.results import Results
from ups.training.artifact import relevant_keys, signed_card
from ups.training.folder import StageFolder

CONFIG = (ROOT / "pretrained" / "operator" / "config.yaml").read_text(encoding="utf-8")


def files_in(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def make(*arguments: str, cwd: Path):
    return run(
        "make",
        "--no-print-directory",
        "-f",
        ROOT / "Makefile",
        *arguments,
        f"PYTHON={sys.executable}",
        cwd=cwd,
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


# files of a user in the folders of a run, with names like ours
NOTES = (
    "operator/notes.md",
    "operator/config.yaml.bak",
    "operator/model (copy).safetensors",
    "operator/images/mine.png",
    "operator/images/burgers1d_median_error_mine.png",
    "operator/bases/mine.json",
    "operator/state/notes.txt",
    "operator/state/step_000000001/mine.pt",
    "operator/state/step_1/shared.pt",
    "operator/errors/notes.txt",
    "operator/errors_of_start_mine/rank0.json",
    "operator/heartbeat/rank0.json.old",
    "operator/tensorboard/notes.txt",
    "operator/wandb/run-20260101_000000-abc/files/notes.txt",
    "operator/sub/operator/done.json",
    "diffusion/mine/config.yaml",
    "report/paper.tex",
    "report/figures/mine.png",
    "report/figures/burgers1d_spectra_mine.png",
    "report/figures/training.png.bak",
)
OURS = (
    "operator/config.yaml",
    "operator/README.md",
    "operator/.config.json.tmp",
    "operator/images/burgers1d_median_error_u (m).png",
    "operator/bases/burgers1d.safetensors",
    "operator/bases/.burgers1d.json.tmp",
    "operator/state/step_000000001/shared.pt",
    "operator/state/.tmp-000000002/rank_1.pt",
    "operator/state/.damaged-000000002/manifest.json",
    "operator/errors/rank0.json",
    "operator/errors_of_start_0001/rank1.json",
    "operator/heartbeat/stop-17.json",
    "operator/memory/rank0.json",
    "operator/memory.json",
    "operator/tensorboard/events.out.tfevents.1.host.2.0",
    "report/report.html",
    "report/results.csv",
    "report/figures/training.png",
    "report/figures/burgers1d_median_error_u (m).png",
    "report/figures/burgers1d_spectra.png",
)
CONTENT = {
    "operator/config.yaml": "data: {tasks: [burgers1d]}",
    "operator/README.md": signed_card(
        "![burgers1d](images/burgers1d_median_error_u (m).png) ![mine](images/mine.png)"
    ),
}


def with_files(run: Path, names: tuple[str, ...]) -> Path:
    for name in names:
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(CONTENT.get(name, "mine" if name in NOTES else "ours"))
    return run


def test_files_of_a_user_in_the_folder_of_a_stage_or_report_stay_and_are_named(tmp_path, capsys):
    run = with_files(stages(tmp_path / "smoke"), NOTES + OURS)
    record = {"run": "smoke", "config_hash": "0", "gates": []}
    entry = {"fields": ["u"], "units": {"u": "m"}}
    write_json(run / "report" / "results.json", record | {"tasks": {"burgers1d": entry}})
    os.mkfifo(run / "operator" / "tuning.json")
    linked(run / "operator" / "status.json", mine(tmp_path / "elsewhere", "letters.txt") / "letters.txt")
    linked(run / "operator" / "memory" / "rank1.json", tmp_path / "elsewhere")
    linked(run / "operator" / "scales", tmp_path / "elsewhere")
    remove_ours(run)
    assert files_in(run) == dict.fromkeys((*NOTES, "operator/status.json"), b"mine")
    assert sorted(path.name for path in run.rglob("*") if path.is_symlink()) == [
        "rank1.json",
        "scales",
        "status.json",
    ]
    assert (run / "operator" / "tuning.json").is_fifo() and files_in(tmp_path / "elsewhere")
    text = capsys.readouterr().out
    assert f"{run}/report/paper.tex" in text and " more\n" in text and text.count("UPS did not write") == 3


def test_make_deletes_a_stage_but_not_the_notes_in_it(tmp_path):
    run = with_files(stages(tmp_path / "runs" / "small"), ("operator/notes.md", "report/paper.tex"))
    for stage in ("operator", "report"):
        done = make("remove", "RUN=small", f"STAGE={stage}", cwd=tmp_path)
        assert done.returncode == 0 and "did not write it: " in done.stdout, (done.stdout, done.stderr)
    assert {name for name in files_in(run) if "diffusion" not in name} == {
        "operator/notes.md",
        "report/paper.tex",
    }


def test_the_next_start_of_a_stage_deletes_no_file_of_a_user(tmp_path):
    names = ("errors/notes.txt", "heartbeat/notes.txt", "errors_of_start_0000/notes.txt")
    names += tuple(f"errors_of_start_{word}/mine.txt" for word in ("ideas", "0", "9"))
    folder = StageFolder(load_config(None, [f"run.root={tmp_path}", "run.name=smoke"]), "operator", {})
    for name in names:
        mine(folder.path, name)
    for start in range(8):
        mine(folder.path, "errors/rank0.json")
        mine(folder.path, "heartbeat/rank0.json")
        folder.begin({"start": start})
    kept = files_in(folder.path)
    assert kept.keys() - {"config.yaml", "environment.json"} == {
        *names,
        *(f"errors_of_start_{start:04d}/rank0.json" for start in range(3, 8)),
    }


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
    write_stage(folder, {}, {"w": torch.zeros(1)})
    (folder / "images").mkdir()
    (folder / "images/mine.png").write_bytes(b"")
    remove_ours(tmp_path / "run")
    assert files_in(folder) == {"README.md": theirs.encode(), "images/mine.png": b""}
    kept = capsys.readouterr().out.partition("kept, as UPS did not write it: ")[2]
    assert {*kept.strip().split(", ")} == {str(folder / "README.md"), str(folder / "images/mine.png")}


def test_a_forecast_beside_generated_data_is_the_users(tmp_path):
    data = tmp_path / "data" / "smoke" / "forecast.h5"
    data.parent.mkdir(parents=True)
    facts = settings("burgers1d", num_trajectories=2) | {"generator": "forecast of 0123"}
    write_data(data, "burgers1d", solver("burgers1d"), facts, chunk=2)
    with pytest.raises(ValueError, match="was not deleted, as it holds .*forecast.h5"):
        remove_ours(tmp_path / "data")
    assert data.is_file()


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


def as_new(run: Path) -> Path:
    (run / "operator" / "README.md").write_text("new", encoding="utf-8")
    return run


@pytest.mark.parametrize(
    "name", ["copy/../copy", "./copy", "copy/operator/..", "../{root}/copy/", "link/copy"]
)
def test_a_target_is_replaced_by_whatever_name_it_has(tmp_path, monkeypatch, name):
    run, copy = published(tmp_path / "run"), publish.copy(tmp_path / "run", tmp_path / "copy")
    linked(tmp_path / "link", tmp_path)
    monkeypatch.chdir(tmp_path)
    publish.copy(as_new(run), name.format(root=tmp_path.name))
    assert (copy / "operator" / "README.md").read_text() == "new"
    assert sorted(os.listdir(tmp_path)) == ["copy", "link", "run"]
    publish.copy(run, "missing/../more")
    assert (tmp_path / "more" / "operator").is_dir()


ALTERED = ("operator/README.md", "operator/config.yaml", "operator/metrics.jsonl", "operator/images/one.png")


@pytest.mark.parametrize("name", [*ALTERED, "operator/model.safetensors", "published.json"])
def test_a_copy_that_somebody_altered_is_refused_by_the_name_of_the_file(tmp_path, name):
    run, copy = published(tmp_path / "run"), publish.copy(tmp_path / "run", tmp_path / "copy")
    (copy / name).write_bytes((copy / name).read_bytes().replace(b"o", b"My words. ", 1))
    before = files_in(copy)
    with pytest.raises(ValueError, match=f"{name}.* altered .*Name another with TO="):
        publish.copy(as_new(run), copy)
    assert files_in(copy) == before and sorted(os.listdir(tmp_path)) == ["copy", "run"]


def test_a_copy_of_an_earlier_version_is_replaced_by_an_equal_one_alone(tmp_path):
    run, copy = published(tmp_path / "run"), publish.copy(tmp_path / "run", tmp_path / "copy")
    (copy / "published.json").unlink()
    assert (publish.copy(run, copy) / "published.json").is_file()
    (copy / "published.json").unlink()
    with pytest.raises(ValueError, match="README.md, which is not in the record of an earlier copy; .*TO="):
        publish.copy(as_new(run), copy)


def publish_until(run: Path, to: Path, call: str, can_exchange: bool) -> None:
    """Publish, and be killed after the first call that moves the earlier copy."""
    if not can_exchange:
        publish.exchange = lambda *paths: False
    owner = publish if call == "exchange" else Path
    whole = getattr(owner, call)

    def killed(*arguments: Any) -> None:
        whole(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, call, killed)
    publish.copy(run, to)


@pytest.mark.parametrize(("call", "can_exchange"), [("exchange", True), ("rename", False)])
def test_a_kill_at_the_exchange_loses_neither_copy(tmp_path, call, can_exchange):
    run, to = published(tmp_path / "run"), tmp_path / "pub" / "copy"
    old = files_in(publish.copy(run, to))
    arguments = (as_new(run), to, call, can_exchange)
    process = multiprocessing.get_context("fork").Process(target=publish_until, args=arguments)
    process.start()
    process.join(30)
    assert process.exitcode == -signal.SIGKILL
    assert to.is_dir() == can_exchange
    if can_exchange:  # at once: the new one is there, the old one is still beside it
        assert (to / "operator" / "README.md").read_text() == "new"
    else:
        assert old == files_in(to.parent / ".copy.publishing" / "old")
    assert (publish.copy(run, to) / "operator" / "README.md").read_text() == "new"
    assert [path.name for path in to.parent.iterdir()] == ["copy"]


def test_a_failure_between_two_renames_puts_the_copy_back(tmp_path, monkeypatch):
    run, copy = published(tmp_path / "run"), publish.copy(tmp_path / "run", tmp_path / "copy")
    before, rename = files_in(copy), Path.rename
    monkeypatch.setattr(publish, "exchange", lambda *paths: False)
    monkeypatch.setattr(
        Path, "rename", lambda path, to: linked(tmp_path, to) if path.name == "new" else rename(path, to)
    )
    with pytest.raises(OSError):
        publish.copy(as_new(run), copy)
    assert files_in(copy) == before and sorted(os.listdir(tmp_path)) == ["copy", "run"]


def test_what_a_user_put_where_a_copy_is_made_stays(tmp_path):
    run, work = published(tmp_path / "run"), tmp_path / ".copy.publishing"
    mine(work, "new/operator/notes.md")
    with pytest.raises(OSError, match="new/operator/notes.md is no file that publishing wrote; .*Move it"):
        publish.copy(run, tmp_path / "copy")
    assert (work / "new" / "operator" / "notes.md").read_text() == "mine"
    shutil.rmtree(work)
    linked(work, mine(tmp_path / "elsewhere", "new/README.md"))
    with pytest.raises(OSError, match="copy.publishing is a link; expected a folder of UPS, or none"):
        publish.copy(run, tmp_path / "copy")
    assert files_in(tmp_path / "elsewhere") == {"new/README.md": b"mine"}
