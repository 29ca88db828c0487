"""ups/training/folder.py, ups/commands/stages.py: what lies in a stage's folder is that stage's, or refused;
what is stale is never up to date."""

import shutil
import sys

import pytest

import ups.training.folder
from ups.commands import stages
from ups.commands.stages import report_parents, report_record, require_stage, why_report, why_to_do
from ups.common.files import DamagedError, file_hash, value_hash, write_sealed
from ups.config.command import run_script
from ups.config.load import load_config
from ups.training.artifact import DONE, finished_stage
from ups.training.folder import StageFolder

# ---------------------------------------------------------------- a finished stage


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Of a run under `tmp_path` whose cache of burgers1d says that its fingerprint is "p"."""
    monkeypatch.setattr(stages, "cache_fingerprint", lambda config, task: "p")
    monkeypatch.setattr(stages, "cache_context", lambda config, task: 10)
    return load_config(None, ["data.tasks=[burgers1d]", f"run.root={tmp_path}", "run.name=run"])


def finish(config, name="operator", **changes):
    """A finished stage of that configuration, or of one that was changed."""
    directory, identity = config.run_dir / name, stages.stage_folder(config, name).identity
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "model.safetensors").write_bytes(b"weights")
    (directory / "config.json").write_text("{}")
    record = {
        "model_sha256": file_hash(directory / "model.safetensors"),
        "config_sha256": file_hash(directory / "config.json"),
        **identity,
        **changes,
    }
    write_sealed(
        directory / "done.json", {"stage": name, "step": 3, "fingerprint": value_hash(record), **record}
    )
    return directory


def test_a_finished_stage_is_believed_only_with_its_own_model(config):
    assert finished_stage(config.run_dir / "operator") is None
    directory = finish(config)
    assert require_stage(config, "operator")["step"] == 3
    (directory / "model.safetensors").write_bytes(b"others!")
    with pytest.raises(
        DamagedError, match="model.safetensors is .*; expected .* as done.json says. Delete .*done.json"
    ):
        finished_stage(directory)
    (directory / "model.safetensors").write_bytes(b"weights")
    (directory / "config.json").unlink()
    with pytest.raises(DamagedError, match="config.json is missing; expected .* as done.json says"):
        finished_stage(directory)
    (directory / "done.json").write_text("{")
    with pytest.raises(DamagedError, match="done.json is not readable"):
        finished_stage(directory)


def test_a_finished_stage_is_one_of_this_configuration_with_these_parents(config, monkeypatch):
    finish(config)
    same = ["data.tasks=[burgers1d]", f"run.root={config.run.root}", "run.name=run"]
    other = load_config(None, [*same, "operator.model.width=48"])
    free = load_config(None, [*same, "operator.train.hang_s=9"])
    with pytest.raises(
        FileExistsError,
        match=r"stage operator of run run was made with another "
        r"configuration \(hash .* in done",
    ):
        report_parents(other)  # which requires every stage
    assert require_stage(free, "operator")["step"] == 3
    monkeypatch.setattr(stages, "cache_fingerprint", lambda config, task: "q")
    with pytest.raises(
        FileExistsError,
        match=r"was made from another burgers1d \(p then, q now\); .*operator \(rm -r\) and run make",
    ):
        require_stage(config, "operator")


# ---------------------------------------------------------------- the folder of a stage


def folder_of(config, *overrides, parents=None, name="operator"):
    same = ["data.tasks=[burgers1d]", f"run.root={config.run.root}", "run.name=run"]
    changed = load_config(None, [*same, *overrides])
    return StageFolder(changed, name, parents or {"cache": "p"})


@pytest.mark.parametrize("left", ["environment.json", "config.yaml", "done.json"])
def test_any_one_record_of_another_configuration_or_parent_refuses_the_folder(config, left):
    """config.yaml or environment.json may be lost: what is left says whose the folder is."""
    folder = folder_of(config)
    assert folder.take(0.0) == ""
    folder.begin({})
    finish(folder.config, **folder.identity) if left == "done.json" else None
    for path in [path for path in folder.path.rglob("*") if path.suffix in (".json", ".yaml")]:
        if path != folder.path / left and not (left == "done.json" and path.name == "config.json"):
            path.unlink()
    folder_of(config, "operator.train.hang_s=9").examine()
    text = "run.seed 0 -> 1" if left == "config.yaml" else "made with another configuration"
    with pytest.raises(FileExistsError, match=text):
        folder_of(config, "run.seed=1").examine()
    if left != "config.yaml":  # which knows no parents
        with pytest.raises(
            FileExistsError,
            match=r"was made from another cache \(p then, q now\); expected "
            r"the same one. "
            r"Delete .*operator \(rm -r\) and run make operator RUN=run",
        ):
            folder_of(config, parents={"cache": "q"}).examine()


def test_what_came_while_a_job_waited_for_the_lock_is_compared_again(config):
    first, second = folder_of(config), folder_of(config, "run.seed=1")
    assert second.examine() is None  # both start at the same time
    assert first.take(0.0) == ""
    assert "another process is training in" in second.take(0.0)
    first.begin({})
    first._lock.close()  # killed
    assert "run.seed 0 -> 1" in second.take(0.0)
    assert folder_of(config).take(0.0) == ""


def test_a_folder_that_was_removed_or_replaced_is_no_longer_ours(config):
    first, second = folder_of(config), folder_of(config)
    assert first.take(0.0) == "" and first.is_own()
    shutil.rmtree(first.path)
    with pytest.raises(
        FileNotFoundError,
        match="was removed or replaced while this job trained in it; expected the folder that",
    ):
        first.require_own()
    assert second.take(0.0) == "" and second.is_own() and not first.is_own()
    with pytest.raises(FileNotFoundError, match="was removed or replaced"):
        first.keep("record.json", {})


def test_the_lock_that_was_waited_for_is_the_one_in_the_folder(config, monkeypatch):
    """The folder is removed and made anew between opening .lock and locking it."""
    folder, lock = folder_of(config), ups.training.folder.lock

    def replaced(file, path):
        monkeypatch.setattr(ups.training.folder, "lock", lock)
        shutil.rmtree(path.parent)
        path.parent.mkdir()
        lock(file, path)

    monkeypatch.setattr(ups.training.folder, "lock", replaced)
    assert folder.take(5.0) == "" and folder.is_own()


# ---------------------------------------------------------------- whether there is anything to do


def test_a_stage_is_asked_after_by_its_files_not_by_their_times(config):
    assert why_to_do(config, "operator") == "it is missing"
    folder_of(config).path.mkdir(parents=True)
    assert why_to_do(config, "operator") == "it is unfinished"
    weights = finish(config) / "model.safetensors"
    assert why_to_do(config, "operator") == ""
    weights.write_bytes(b"weighty")
    with pytest.raises(DamagedError, match="model.safetensors is .*; expected .* as done.json says"):
        why_to_do(config, "operator")
    weights.unlink()
    with pytest.raises(DamagedError, match="model.safetensors is missing"):
        why_to_do(config, "operator")


def test_a_report_stands_only_whole_and_for_its_stages_and_settings(config):
    finish(config)
    (config.report_dir / "figures").mkdir(parents=True)
    for name in ("results.json", "report.html", "figures/a.png"):
        (config.report_dir / name).write_text(name)
    assert why_to_do(config, "report") == "it is missing, or a gate failed"
    write_sealed(config.report_dir / DONE, report_record(config, report_parents(config)))
    assert why_to_do(config, "report") == ""
    for name in ("results.json", "report.html", "figures/a.png"):
        (config.report_dir / name).write_text(name.upper())
        assert why_to_do(config, "report") == f"{name} is missing or was altered"
        (config.report_dir / name).unlink()
        assert why_to_do(config, "report") == f"{name} is missing or was altered"
        (config.report_dir / name).write_text(name)
    more = {**report_parents(config), "steady": "new"}
    assert why_report(config, more) == "what it was made from has changed"
    done = config.report_dir / DONE
    done.write_text(done.read_text().replace('"stage": "report"', '"stage": "retort"'))
    assert "done.json was altered" in why_to_do(config, "report")


def test_a_report_is_made_again_when_the_bench_has_measured_a_rival(config, monkeypatch):
    finish(config)
    before = report_parents(config)
    monkeypatch.setattr(stages, "find_bench_rows", lambda task, key: {"fno": key["cache"]})
    assert report_parents(config) != before and before == {**report_parents(config), "bench": before["bench"]}


@pytest.mark.parametrize(
    ("finished", "arguments", "code", "text"),
    [
        (True, [], 0, "run/operator: up to date"),
        (False, [], 3, "run/operator: to do, it is missing"),
        (True, ["run.seed=1"], 1, "was made with another configuration"),
        (True, ["run.sede=1"], 1, "did you mean 'seed'?"),
    ],
)
def test_the_answer_is_an_exit_code_and_one_line(
    config, monkeypatch, capsys, finished, arguments, code, text
):
    if finished:
        finish(config)
    same = ["data.tasks=[burgers1d]", f"run.root={config.run.root}", "run.name=run"]
    monkeypatch.setattr(
        sys, "argv", ["stage", "operator", "--config", "configs/default.yaml", *same, *arguments]
    )
    with pytest.raises(SystemExit) as ended:
        run_script(stages.main, "ups.commands.stages")
    if code == 1:  # Python prints what it ends with, and the status is 1
        assert text in ended.value.code and "\n" not in ended.value.code
    else:
        said = capsys.readouterr().out
        assert ended.value.code == code and text in said and said.count("\n") == 1
