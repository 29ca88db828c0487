"""ups/checkpoint.py, stage.py, files.py: a checkpoint is whole or absent, whatever happens while it is written; what lies in a
stage's folder is that stage's, or refused."""

import json
import os
import shutil

import pytest
import torch

from ups import stage
from ups.checkpoint import Checkpoints, write_weights
from ups.config import load_config
from ups.files import DamagedError, file_hash, read_sealed, replacing, value_hash, write_atomic, write_sealed
from ups.stage import StageFolder, finished_stage, require_stage


def agreed(function, _doing):
    return function()


def make(tmp_path, keep=2, config_hash="c", cache="p"):
    return Checkpoints(tmp_path / "state", keep, 0, agreed, {"config_hash": config_hash, "parents": {"cache": cache}})


def save(checkpoints, step, world=1):
    checkpoints.save(step, {"model": {"w": torch.full((4,), float(step))}}, {"rank": 0}, {"world": world})


def test_a_saved_checkpoint_comes_back_equal_and_lists_every_file(tmp_path):
    checkpoints = make(tmp_path)
    save(checkpoints, 5)
    assert checkpoints.newest()["step"] == 5
    shared, local = checkpoints.read(5, world=1)
    assert torch.equal(shared["model"]["w"], torch.full((4,), 5.0)) and local == {"rank": 0}
    manifest = json.loads((checkpoints.path(5) / "manifest.json").read_text())
    assert set(manifest["files"]) == {"shared.pt", "rank_0.pt"}
    assert manifest["files"]["shared.pt"]["sha256"] == file_hash(checkpoints.path(5) / "shared.pt")


def test_no_checkpoint_at_all_is_none(tmp_path):
    assert make(tmp_path).newest() is None


def test_pruning_keeps_the_newest_ones(tmp_path):
    checkpoints = make(tmp_path, keep=2)
    for step in (5, 10, 15, 20):
        save(checkpoints, step)
    assert checkpoints.steps() == [20, 15]
    with pytest.raises(ValueError, match="keep is 1; expected at least 2"):
        make(tmp_path, keep=1)


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove", "manifest", "no_manifest"])
def test_a_damaged_newest_checkpoint_is_set_aside_loudly_and_the_one_before_taken(tmp_path, capsys, damage):
    checkpoints = make(tmp_path)
    save(checkpoints, 5)
    save(checkpoints, 10)
    part, manifest = checkpoints.path(10) / "shared.pt", checkpoints.path(10) / "manifest.json"
    content = part.read_bytes()
    if damage == "truncate":
        part.write_bytes(content[:-10])
    elif damage == "flip":
        part.write_bytes(content[:700] + bytes([content[700] ^ 1]) + content[701:])
    elif damage == "remove":
        part.unlink()
    elif damage == "manifest":
        manifest.write_text(manifest.read_text()[:40])
    else:
        manifest.unlink()
    assert checkpoints.newest()["step"] == 5
    warning = capsys.readouterr().err
    assert "WARNING" in warning and "step_000000010" in warning and "going back to step 5" in warning
    assert checkpoints.steps() == [5] and (tmp_path / "state" / ".damaged-000000010").is_dir()


def test_if_none_is_intact_the_run_does_not_start_over_silently(tmp_path):
    checkpoints = make(tmp_path)
    save(checkpoints, 5)
    (checkpoints.path(5) / "rank_0.pt").unlink()
    with pytest.raises(DamagedError, match=r"none of the checkpoints \[5\].*Restore it from a copy, or delete"):
        checkpoints.newest()


def test_a_part_of_a_rank_that_is_not_listed_is_damage(tmp_path):
    checkpoints = make(tmp_path)
    save(checkpoints, 5, world=2)
    with pytest.raises(DamagedError, match="does not list rank_1.pt; expected one part per process"):
        checkpoints.verify(5)


def test_leftovers_of_an_interrupted_write_are_never_loaded_and_are_removed(tmp_path):
    checkpoints = make(tmp_path)
    save(checkpoints, 5)
    stale = tmp_path / "state" / ".tmp-000000010"
    stale.mkdir()
    (stale / "shared.pt").write_bytes(b"half")
    assert checkpoints.newest()["step"] == 5 and not stale.exists()
    stale.mkdir()
    save(checkpoints, 15)
    assert not stale.exists() and checkpoints.steps() == [15, 5]


@pytest.mark.parametrize("stage", ["_begin", "_write", "_commit"])
def test_a_failed_write_leaves_the_earlier_checkpoint_and_nothing_else(tmp_path, stage):
    checkpoints = make(tmp_path)
    save(checkpoints, 5)
    original = getattr(checkpoints, stage)

    def fail(*arguments):
        if stage == "_write":
            original(*arguments)
        raise OSError(28, "No space left on device")

    setattr(checkpoints, stage, fail)
    with pytest.raises(OSError, match="No space left"):
        save(checkpoints, 10)
    assert os.listdir(tmp_path / "state") == ["step_000000005"]
    setattr(checkpoints, stage, original)
    save(checkpoints, 10)
    assert checkpoints.newest()["step"] == 10


def test_a_crash_before_the_rename_leaves_no_checkpoint_behind(tmp_path, monkeypatch):
    checkpoints = make(tmp_path)
    save(checkpoints, 5)
    replace = os.replace

    def crash(source, target):
        if "step_" in str(target):
            raise SystemExit  # not an Exception: nothing is cleaned up, as in a kill
        replace(source, target)

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(SystemExit):
        save(checkpoints, 10)
    monkeypatch.undo()
    assert (tmp_path / "state" / ".tmp-000000010" / "manifest.json").is_file()
    assert checkpoints.steps() == [5] and checkpoints.newest()["step"] == 5


def test_another_number_of_processes_gets_the_shared_part_only(tmp_path):
    checkpoints = make(tmp_path)
    save(checkpoints, 5)
    shared, local = checkpoints.read(5, world=2)
    assert "model" in shared and local is None


class Boom:
    def __reduce__(self):
        return (os.mkdir, ("should-not-exist",))


def test_nothing_is_unpickled(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkpoints = make(tmp_path)
    save(checkpoints, 5)
    torch.save({"x": Boom()}, checkpoints.path(5) / "shared.pt")
    with pytest.raises(DamagedError, match="is not readable .UnpicklingError.*expected tensors and plain values. Delete .*step_"):
        checkpoints.read(5, world=1)
    assert not (tmp_path / "should-not-exist").exists()


# ---------------------------------------------------------------- a finished stage


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Of a run under `tmp_path` whose cache of burgers1d says that its fingerprint is "p"."""
    monkeypatch.setattr(stage, "cache_fingerprint", lambda config, task: "p")
    return load_config(None, ["data.tasks=[burgers1d]", f"run.root={tmp_path}", "run.name=run"])


def finish(config, name="operator", **changes):
    """A finished stage of that configuration, or of one that was changed."""
    directory, identity = config.run_dir / name, stage.stage_folder(config, name).identity
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "model.safetensors").write_bytes(b"weights")
    (directory / "config.json").write_text("{}")
    record = {"model_sha256": file_hash(directory / "model.safetensors"), "config_sha256": file_hash(directory / "config.json"),
              **identity, **changes}
    write_sealed(directory / "done.json", {"stage": name, "step": 3, "fingerprint": value_hash(record), **record})
    return directory


def test_a_finished_stage_is_believed_only_with_its_own_model(config):
    assert finished_stage(config.run_dir / "operator") is None
    directory = finish(config)
    assert require_stage(config, "operator")["step"] == 3
    (directory / "model.safetensors").write_bytes(b"others!")
    with pytest.raises(DamagedError, match="model.safetensors is .*; expected .* as done.json says. Delete .*done.json"):
        finished_stage(directory)
    (directory / "model.safetensors").write_bytes(b"weights")
    (directory / "config.json").unlink()
    with pytest.raises(DamagedError, match="config.json is missing; expected .* as done.json says"):
        finished_stage(directory)
    (directory / "done.json").write_text("{")
    with pytest.raises(DamagedError, match="done.json is not readable"):
        finished_stage(directory)


def test_missing_operator_names_the_make_target(config):
    with pytest.raises(FileNotFoundError, match="stage operator of run run is missing; expected .*Run: make operator RUN=run"):
        require_stage(config, "operator")
    (config.run_dir / "operator").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match="is unfinished"):
        require_stage(config, "operator")


def test_a_finished_stage_is_one_of_this_configuration_with_these_parents(config, monkeypatch):
    finish(config)
    same = ["data.tasks=[burgers1d]", f"run.root={config.run.root}", "run.name=run"]
    other, free = load_config(None, [*same, "operator.model.width=64"]), load_config(None, [*same, "operator.train.hang_s=9"])
    with pytest.raises(FileExistsError, match=r"stage operator of run run was made with another configuration \(hash .* in done"):
        require_stage(other, "operator")
    assert require_stage(free, "operator")["step"] == 3
    monkeypatch.setattr(stage, "cache_fingerprint", lambda config, task: "q")
    with pytest.raises(FileExistsError, match=r"was made from another burgers1d \(p then, q now\); .*make remove STAGE=operator"):
        require_stage(config, "operator")


# ---------------------------------------------------------------- the folder of a stage


def folder_of(config, *overrides, parents=None, name="operator"):
    changed = load_config(None, ["data.tasks=[burgers1d]", f"run.root={config.run.root}", "run.name=run", *overrides])
    return StageFolder(changed, name, "operator", parents or {"cache": "p"})


@pytest.mark.parametrize("left", ["environment.json", "config.yaml", "done.json", "state/step_000000005/manifest.json",
                                  "bases/burgers1d.json"])
def test_any_one_record_of_another_configuration_or_parent_refuses_the_folder(config, left):
    """config.yaml or environment.json may be lost: what is left says whose the folder is."""
    folder = folder_of(config)
    assert folder.take(0.0) == ""
    folder.begin({}, {})
    (folder.path / "bases").mkdir()
    folder.keep("bases/burgers1d.json", {})
    (folder.path / "state").mkdir()
    Checkpoints(folder.path / "state", 2, 0, agreed, folder.identity).save(5, {}, {}, {"world": 1})
    finish(folder.config, **folder.identity) if left == "done.json" else None
    for path in [path for path in folder.path.rglob("*") if path.suffix in (".json", ".yaml")]:
        if path != folder.path / left and not (left == "done.json" and path.name == "config.json"):
            path.unlink()
    folder_of(config, "operator.train.hang_s=9").examine()
    with pytest.raises(FileExistsError, match="run.seed 0 -> 1" if left == "config.yaml" else "made with another configuration"):
        folder_of(config, "run.seed=1").examine()
    if left != "config.yaml":   # which knows no parents
        with pytest.raises(FileExistsError, match=r"was made from another cache \(p then, q now\); expected the same one. "
                                                  "Delete .*make remove STAGE=operator RUN=run"):
            folder_of(config, parents={"cache": "q"}).examine()


def test_what_came_while_a_job_waited_for_the_lock_is_compared_again(config):
    first, second = folder_of(config), folder_of(config, "run.seed=1")
    assert second.examine() is None   # both start at the same time
    assert first.take(0.0) == ""
    assert "another process is training in" in second.take(0.0)
    first.begin({}, {})
    first._lock.close()   # killed
    assert "run.seed 0 -> 1" in second.take(0.0)
    assert folder_of(config).take(0.0) == ""


def test_a_folder_that_was_removed_or_replaced_is_no_longer_ours(config):
    first, second = folder_of(config), folder_of(config)
    assert first.take(0.0) == "" and first.is_own()
    shutil.rmtree(first.path)
    with pytest.raises(FileNotFoundError, match="was removed or replaced while this job trained in it; expected the folder that"):
        first.require_own()
    assert second.take(0.0) == "" and second.is_own() and not first.is_own()
    with pytest.raises(FileNotFoundError, match="was removed or replaced"):
        first.keep("record.json", {})


def test_the_lock_that_was_waited_for_is_the_one_in_the_folder(config, monkeypatch):
    """The folder is removed and made anew between opening .lock and locking it."""
    folder, lock = folder_of(config), stage.lock

    def replaced(file, path):
        monkeypatch.setattr(stage, "lock", lock)
        shutil.rmtree(path.parent)
        path.parent.mkdir()
        lock(file, path)

    monkeypatch.setattr(stage, "lock", replaced)
    assert folder.take(5.0) == "" and folder.is_own()


def test_errors_of_earlier_starts_are_kept_and_bounded(config):
    folder = folder_of(config)
    assert folder.take(0.0) == ""
    for start in range(9):
        folder.begin({}, {"start": start})
        (folder.path / "errors").mkdir()
        (folder.path / "errors" / "rank0.json").write_text(str(start))
    folder.begin({}, {})
    kept = sorted(path for path in folder.path.glob("errors*"))
    assert [(path.name, (path / "rank0.json").read_text()) for path in kept] == [
        (f"errors_of_start_{start:04d}", str(start - 1)) for start in range(5, 10)]


def test_a_checkpoint_of_another_stage_is_refused_and_not_set_aside(tmp_path):
    save(make(tmp_path), 5)
    for other in ({"config_hash": "d"}, {"cache": "q"}):
        with pytest.raises(FileExistsError, match="step_000000005 was made (with another configuration|from another cache)"):
            make(tmp_path, **other).newest()
    assert make(tmp_path).newest()["step"] == 5


# ---------------------------------------------------------------- files


@pytest.mark.parametrize("write", [lambda path: write_atomic(path, "new"),
                                   lambda path: write_weights(path, {"w": torch.ones(2)})])
def test_a_link_in_a_temporary_files_place_is_never_followed_and_modes_follow_the_umask(tmp_path, write):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for name in (".new.tmp", "new.partial", "new.tmp"):
        (tmp_path / name).symlink_to(victim)
    before = os.umask(0o027)
    try:
        write(tmp_path / "new")
    finally:
        os.umask(before)
    assert victim.read_text() == "precious" and not (tmp_path / "new").is_symlink()
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o640


def test_a_link_in_place_of_an_unfinished_checkpoint_is_removed_and_its_target_stays(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").write_text("precious")
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / ".tmp-000000005").symlink_to(tmp_path / "elsewhere")
    save(make(tmp_path), 5)
    assert (tmp_path / "elsewhere" / "file").read_text() == "precious" and make(tmp_path).newest()["step"] == 5


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    write_atomic(tmp_path / "x", "one")
    with pytest.raises(RuntimeError), replacing(tmp_path / "x") as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert (tmp_path / "x").read_text() == "one" and os.listdir(tmp_path) == ["x"]


def test_one_flipped_character_of_a_sealed_record_is_noticed(tmp_path):
    write_sealed(tmp_path / "x.json", {"number": 0.125, "words": ["a"]})
    assert read_sealed(tmp_path / "x.json", "a record", "")["number"] == 0.125
    (tmp_path / "x.json").write_text((tmp_path / "x.json").read_text().replace("0.125", "0.135"))
    with pytest.raises(DamagedError, match="x.json was altered .its seal is not that of its content.; expected a record as"):
        read_sealed(tmp_path / "x.json", "a record", "")


def test_atomic_write_replaces_whole_files_and_hashes_ignore_key_order(tmp_path):
    path = tmp_path / "x.txt"
    write_atomic(path, "one")
    write_atomic(path, "two")
    assert path.read_text() == "two" and os.listdir(tmp_path) == ["x.txt"]
    assert value_hash({"a": 1, "b": 2}) == value_hash({"b": 2, "a": 1}) != value_hash({"a": 1, "b": 3})
