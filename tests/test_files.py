"""Temporary names and locks: nothing is written through a link, into a finished file, or by two at once."""

import errno
import fcntl
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ups.common.files import (
    DamagedError,
    create,
    explained,
    held,
    is_at,
    read_sealed,
    replacing,
    temporary_folder,
    value_hash,
    write_atomic,
    write_sealed,
)
from ups.training.weights import write_weights

ROOT = Path(__file__).resolve().parent.parent


def take(path: Path) -> None:
    with held(path):
        pass


def plant(kind: str, path: Path, victim: Path) -> None:
    victim.write_text("somebody's data")
    {
        "symlink": lambda: path.symlink_to(victim),
        "hard link": lambda: path.hardlink_to(victim),
        "dangling": lambda: path.symlink_to(victim.with_name("nothing")),
        "pipe": lambda: os.mkfifo(path),
        "folder": path.mkdir,
        "socket": lambda: socket.socket(socket.AF_UNIX).bind(str(path)),
    }[kind]()


@pytest.mark.parametrize("kind", ["symlink", "hard link", "dangling", "pipe", "socket"])
def test_a_new_file_is_not_written_through_what_lies_at_its_name(tmp_path, kind):
    plant(kind, tmp_path / "new", tmp_path / "victim")
    with create(tmp_path / "new") as file:
        file.write(b"ours")
    assert (tmp_path / "new").read_text() == "ours" and not (tmp_path / "new").is_symlink()
    assert (tmp_path / "victim").read_text() == "somebody's data" and not (tmp_path / "nothing").exists()


def test_a_folder_at_a_temporary_name_is_refused_by_name(tmp_path):
    (tmp_path / ".record.json.tmp").mkdir()
    with pytest.raises(OSError, match="record.json.tmp is a folder; expected .*, or none. Remove it"):
        write_atomic(tmp_path / "record.json", "ours")


@pytest.mark.parametrize("kind", ["symlink", "hard link", "dangling", "pipe", "folder", "socket"])
def test_a_file_to_be_continued_is_a_plain_file_of_one_name(tmp_path, kind):
    plant(kind, tmp_path / "new.partial", tmp_path / "victim")
    with pytest.raises(OSError, match="new.partial is a link or no plain file; expected .*Remove it"):
        take(tmp_path / "new.partial")
    assert (tmp_path / "victim").read_text() == "somebody's data" and not (tmp_path / "nothing").exists()


def test_a_held_file_is_refused_to_others_and_free_once_its_holder_died(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from ups.common.files import held\n"
        f"with held(Path({str(tmp_path / 'a')!r})): print('ready', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "ready\n"
        with pytest.raises(BlockingIOError, match="written by another process; expected one at a time"):
            take(tmp_path / "a")
        holder.kill()
        holder.wait()
    with held(tmp_path / "a") as file:
        file.write(b"ours")


@pytest.mark.parametrize("end", ["renamed", "removed"])
def test_a_file_that_its_holder_finished_before_we_had_the_lock_is_not_touched(tmp_path, monkeypatch, end):
    partial, final, lock = tmp_path / "a.partial", tmp_path / "a", fcntl.flock
    partial.write_text("finished")

    def late(file, how):  # the holder ends between our open and our lock
        if partial.exists() and partial.read_text() == "finished":
            partial.rename(final) if end == "renamed" else partial.unlink()
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with held(partial) as file:
        file.truncate(0)
        assert is_at(partial, file)
    assert not final.exists() or final.read_text() == "finished"


def test_a_file_system_without_locks_is_named_with_what_to_do(tmp_path, monkeypatch):
    def none(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    with pytest.raises(OSError, match="a cannot be locked .No locks available.; expected .* locks.*Mount it"):
        take(tmp_path / "a")


def test_a_full_disk_is_explained_and_another_error_is_unchanged(tmp_path):
    message = "cannot write .*a .No space left.*and 3 MiB of room in it. .*change data.root"
    with pytest.raises(OSError, match=message), explained(tmp_path / "a", 3 * 2**20, "data.root"):
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(OSError, match="^.Errno 5. broken$"), explained(tmp_path / "a", 1, "data.root"):
        raise OSError(errno.EIO, "broken")


@pytest.mark.parametrize(
    "write", [lambda path: write_atomic(path, "new"), lambda path: write_weights(path, {"w": torch.ones(2)})]
)
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


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    write_atomic(tmp_path / "x", "one")
    with pytest.raises(RuntimeError), replacing(tmp_path / "x") as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert (tmp_path / "x").read_text() == "one" and os.listdir(tmp_path) == ["x"]
    write_atomic(tmp_path / "x", "two")
    assert (tmp_path / "x").read_text() == "two" and os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize(
    "make, call", [(temporary_folder, "mkdir"), (lambda root: replacing(root / "x"), "open")]
)
def test_a_signal_while_it_is_made_leaves_nothing(tmp_path, monkeypatch, make, call):
    works = getattr(os, call)

    def signalled(*arguments, **options):
        works(*arguments, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, call, signalled)
    with pytest.raises(KeyboardInterrupt), make(tmp_path):
        pass
    assert not os.listdir(tmp_path)


def test_one_flipped_character_of_a_sealed_record_is_noticed(tmp_path):
    write_sealed(tmp_path / "x.json", {"number": 0.125, "words": ["a"]})
    assert read_sealed(tmp_path / "x.json", "a record", "")["number"] == 0.125
    (tmp_path / "x.json").write_text((tmp_path / "x.json").read_text().replace("0.125", "0.135"))
    with pytest.raises(
        DamagedError, match="x.json was altered .its seal is not that of its content.; expected a record as"
    ):
        read_sealed(tmp_path / "x.json", "a record", "")


def test_hashes_ignore_key_order():
    assert value_hash({"a": 1, "b": 2}) == value_hash({"b": 2, "a": 1}) != value_hash({"a": 1, "b": 3})
