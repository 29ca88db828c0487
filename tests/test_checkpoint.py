"""ups/training/checkpoint.py: a checkpoint is whole or absent, whatever happens while it is written, and of
this stage, or refused."""

import json
import os

import pytest
import torch

from ups.common.files import DamagedError, file_hash
from ups.training.checkpoint import Checkpoints, saved_steps


def agreed(function, _doing):
    return function()


def make(tmp_path, keep=2, config_hash="c", cache="p"):
    return Checkpoints(
        tmp_path / "state", keep, 0, agreed, {"config_hash": config_hash, "parents": {"cache": cache}}
    )


def save(checkpoints, step, world=1):
    checkpoints.save(step, {"model": {"w": torch.full((4,), float(step))}}, {"rank": 0}, {"world": world})


@pytest.fixture
def checkpoints(tmp_path):
    """Those of a run of which step 5 is saved."""
    made = make(tmp_path)
    save(made, 5)
    return made


def test_a_saved_checkpoint_comes_back_equal_and_lists_every_file(checkpoints):
    assert checkpoints.newest()["step"] == 5
    shared, local = checkpoints.read(5, world=1)
    assert torch.equal(shared["model"]["w"], torch.full((4,), 5.0)) and local == {"rank": 0}
    manifest = json.loads((checkpoints.path(5) / "manifest.json").read_text())
    assert set(manifest["files"]) == {"shared.pt", "rank_0.pt"}
    assert manifest["files"]["shared.pt"]["sha256"] == file_hash(checkpoints.path(5) / "shared.pt")


def test_a_half_written_folder_where_a_checkpoint_goes_is_replaced_and_a_step_can_be_saved_twice(checkpoints):
    for folder in (checkpoints.path(10), *(checkpoints.directory / f".tmp-{n:09}" for n in (7, 10))):
        folder.mkdir()
        (folder / "rank_7.pt").write_bytes(b"half")
    for _ in range(2):
        save(checkpoints, 10)
        assert checkpoints.newest()["step"] == 10 and sorted(
            path.name for path in checkpoints.path(10).iterdir()
        ) == ["manifest.json", "rank_0.pt", "shared.pt"]
    assert saved_steps(checkpoints.directory) == [10, 5] and not [*checkpoints.directory.glob(".tmp*")]


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove", "manifest", "no_manifest"])
def test_a_damaged_newest_checkpoint_is_set_aside_loudly_and_the_one_before_taken(
    checkpoints, tmp_path, capsys, damage
):
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
    assert saved_steps(checkpoints.directory) == [5] and (tmp_path / "state" / ".damaged-000000010").is_dir()


def test_if_none_is_intact_the_run_does_not_start_over_silently(checkpoints):
    (checkpoints.path(5) / "rank_0.pt").unlink()
    with pytest.raises(
        DamagedError, match=r"none of the checkpoints \[5\].*Restore it from a copy, or delete"
    ):
        checkpoints.newest()


def test_a_part_of_a_rank_that_is_not_listed_is_damage(tmp_path):
    checkpoints = make(tmp_path)
    save(checkpoints, 5, world=2)
    with pytest.raises(
        DamagedError, match="of 2 processes and lists .*; expected 5, and a part of every process"
    ):
        checkpoints.verify(5)


@pytest.mark.parametrize("stage", ["_begin", "_write", "_commit"])
def test_a_failed_write_leaves_the_earlier_checkpoint_and_nothing_else(checkpoints, tmp_path, stage):
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


def test_a_crash_before_the_rename_leaves_no_checkpoint_behind(checkpoints, tmp_path, monkeypatch):
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
    assert saved_steps(checkpoints.directory) == [5] and checkpoints.newest()["step"] == 5


def test_another_number_of_processes_gets_the_shared_part_only(checkpoints):
    shared, local = checkpoints.read(5, world=2)
    assert "model" in shared and local is None


class Boom:
    def __reduce__(self):
        return (os.mkdir, ("should-not-exist",))


def test_nothing_is_unpickled(checkpoints, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"x": Boom()}, checkpoints.path(5) / "shared.pt")
    with pytest.raises(
        DamagedError,
        match="is not readable .UnpicklingError.*expected tensors and plain values. Delete .*step_",
    ):
        checkpoints.read(5, world=1)
    assert not (tmp_path / "should-not-exist").exists()


def test_a_checkpoint_of_another_stage_is_refused_and_not_set_aside(tmp_path):
    save(make(tmp_path), 5)
    for other in ({"config_hash": "d"}, {"cache": "q"}):
        with pytest.raises(
            FileExistsError, match="step_000000005 was made (with another configuration|from another cache)"
        ):
            make(tmp_path, **other).newest()
    assert make(tmp_path).newest()["step"] == 5


def test_a_link_in_place_of_an_unfinished_checkpoint_is_removed_and_its_target_stays(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").write_text("precious")
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / ".tmp-000000005").symlink_to(tmp_path / "elsewhere")
    save(make(tmp_path), 5)
    assert (tmp_path / "elsewhere" / "file").read_text() == "precious"
    assert make(tmp_path).newest()["step"] == 5


def test_files_of_a_user_between_checkpoints_are_kept(tmp_path, capsys):
    checkpoints = make(tmp_path)
    for step in (5, 10, 15, 10, 20):
        save(checkpoints, step)
        (checkpoints.path(step) / f"notes{step}.txt").write_text("mine")
        (checkpoints.directory / f".tmp-mine{step}").mkdir(exist_ok=True)
    kept = {path.name for path in checkpoints.directory.rglob("notes*.txt")}
    assert kept == {f"notes{step}.txt" for step in (5, 10, 15, 20)} and len(checkpoints.newest()) > 1
    assert saved_steps(checkpoints.directory) == [20, 15]
    assert {path.name for path in checkpoints.path(15).iterdir()} > {"manifest.json", "shared.pt"}
    assert len([*checkpoints.directory.glob(".tmp-mine*")]) == 4
    assert "files that UPS did not write: moved to" in capsys.readouterr().err
