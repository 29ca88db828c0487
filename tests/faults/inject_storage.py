"""Files that are lost, replaced or damaged under a stage: never success with what another run or a disk made.

Each case ends with the operator's own command, which must come to the end of a run that nothing happened to.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from inject_runs import (
    CASE_S,
    SAVE,
    STEP,
    Ended,
    References,
    Result,
    compare,
    end_ranks,
    leftovers,
    run_ranks,
    settings_of,
    start_ranks,
)

ANOTHER = "run.seed=7"  # asked for where the first run had 0


class Scene:
    """An operator in a folder of its own, and what was wrong with what became of it."""

    def __init__(self, references: References, name: str) -> None:
        self.references, self.problems, self.note = references, [], ""
        self.folder = references.work / "cases" / f"storage_{name.replace(' ', '_')}"
        shutil.rmtree(self.folder, ignore_errors=True)
        self.directory = self.folder / "runs" / "smoke" / "operator"

    def arguments(self, *more: str) -> list[str]:
        return [*settings_of(self.references.work, self.folder / "runs", "operator"), *more]

    def run(self, *more: str, **fault: Any) -> Ended:
        return run_ranks(self.folder, "operator", self.arguments(*more), {"ranks": [], **fault})

    def interrupt(self, *more: str) -> None:
        """Leave a stage with a checkpoint."""
        self.run(*more, kind="kill", ranks=[0, 1], step=STEP)
        assert (self.directory / "state" / f"step_{SAVE:09d}").is_dir()

    def refused(self, ended: Ended, *says: str) -> None:
        """Every rank must end, none with success, and say so."""
        if not set(ended.codes) <= {1, 2}:
            self.problems.append(f"exit codes {ended.codes}, not 1 or 2")
        if missing := [text for text in says if text not in ended.text]:
            self.problems.append(f"no message says {missing[0]!r}")

    def ends_right(self, *more: str, reference: Path | None = None) -> None:
        """The command comes to the end of an undisturbed run."""
        ended = self.run(*more)
        if ended.codes != [0, 0]:
            self.problems.append(f"the right command ended with {ended.codes}")
        else:
            self.problems += compare(reference or self.references.get("operator"), self.directory, True)

    def caches(self) -> str:
        """The setting that gives this scene caches of its own, which may be spoilt."""
        shutil.copytree(self.references.work / "cache", self.folder / "cache", dirs_exist_ok=True)
        return f"cache.root={self.folder / 'cache'}"


def lost_record(scene: Scene) -> None:
    """A record of the stage is lost, and another seed is asked for."""
    for name in ("config.yaml", "environment.json"):
        aside = scene.folder / name
        (scene.directory / name).rename(aside)
        scene.refused(scene.run(ANOTHER), "another configuration")
        aside.rename(scene.directory / name)
    (scene.directory / "config.yaml").unlink()
    scene.ends_right()


def lost_unfinished(scene: Scene) -> None:
    scene.interrupt()
    lost_record(scene)


def lost_finished(scene: Scene) -> None:
    shutil.copytree(scene.references.get("operator"), scene.directory)
    lost_record(scene)


def two_first_starts(scene: Scene) -> None:
    """The second looked at the empty folder before the first took it; it goes on when the first was
    killed."""
    go, late = scene.folder / "go", scene.folder / "late"
    held = {"kind": "held_back", "ranks": [0, 1], "until": str(go)}
    pids, logs = start_ranks(late, "operator", scene.arguments(ANOTHER), held)
    until = time.monotonic() + CASE_S
    while len(list(late.glob("struck*"))) < 2 and time.monotonic() < until:
        time.sleep(0.05)
    scene.interrupt()
    go.touch()
    scene.refused(end_ranks(late, pids, logs), "another configuration")
    scene.ends_right()


def removed(scene: Scene, then: Callable[[], None]) -> None:
    """The folder is removed under a running job, which must notice and end."""
    slow = {"kind": "slow", "ranks": [0, 1], "step": 0, "repeat": 99}
    first = scene.folder / "first"
    pids, logs = start_ranks(first, "operator", scene.arguments(), slow)
    checkpoint, until = scene.directory / "state" / f"step_{SAVE:09d}", time.monotonic() + CASE_S
    while not checkpoint.is_dir() and time.monotonic() < until:
        time.sleep(0.02)
    shutil.rmtree(scene.directory)
    then()
    scene.refused(end_ranks(first, pids, logs), str(scene.directory), "was removed or replaced")


def removed_running(scene: Scene) -> None:
    removed(scene, lambda: None)
    if (scene.directory / "done.json").exists():
        scene.problems.append("it wrote done.json into a folder that it never locked")
    scene.ends_right()


def removed_and_taken(scene: Scene) -> None:
    """A second job with other settings takes the place while the first still runs."""
    alone = scene.folder / "alone"
    settings = settings_of(scene.references.work, alone / "runs", "operator")
    run_ranks(alone, "operator", [*settings, ANOTHER], {"ranks": []})
    removed(scene, lambda: scene.ends_right(ANOTHER, reference=alone / "runs" / "smoke" / "operator"))
    if "seed: 7" not in (scene.directory / "config.yaml").read_text():
        scene.problems.append("config.yaml is not of the job that was started last")


def flip(path: Path, place: int, bit: int = 64) -> None:
    """Change a byte of a file."""
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ bit]))


def flipped_base(scene: Scene) -> None:
    """A bit of what was fitted once: the network would be trained over another base."""
    scene.interrupt()
    path = next((scene.directory / "bases").glob("burgers*.safetensors"))
    flip(path, path.stat().st_size - 2, bit=1)
    scene.refused(scene.run(), str(path), "expected")
    flip(path, path.stat().st_size - 2, bit=1)
    scene.ends_right()


def flipped_row(scene: Scene) -> None:
    """A bit of a training row of a cache that is too large to be read through when it is opened."""
    import h5py

    cache = scene.caches()
    path = next((scene.folder / "cache").glob("burgers*.h5"))
    with h5py.File(path, "r", locking=False) as file:
        latents = file["state/latents"]
        row = int(file["split/train"][0])
        place = latents.id.get_offset() + row * latents.nbytes // len(latents) + 2
    flip(path, place)
    scene.refused(scene.run(cache, is_large=True), path.name, f"damaged row {row}")
    flip(path, place)
    scene.ends_right(cache)


def overwritten_cache(scene: Scene) -> None:
    """Other latents, written in place into the file that training has mapped."""
    fault = {"kind": "overwritten", "ranks": [0], "step": STEP, "cache": str(scene.folder / "cache")}
    scene.refused(scene.run(scene.caches(), "cache.place=mmap", is_large=True, **fault), "damaged row")
    scene.ends_right(scene.caches())


def damaged_line(scene: Scene) -> None:
    """Numbers of steps before the checkpoint are lost from the log; only its last line may be torn."""
    scene.interrupt()
    path = scene.directory / "metrics.jsonl"
    text = path.read_text()
    path.write_text(text.replace('"step": 2', '"step": 2x', 1))
    scene.refused(scene.run(), str(path))
    path.write_text(text)
    scene.ends_right()


def full_disk(scene: Scene) -> None:
    """Data are generated on a disk that is too small, and on one that somebody else fills; then again with
    room."""
    import small_disk

    if reason := small_disk.reason_to_skip():
        scene.note = f"not tried: {reason}"
        return
    for task, share, is_taken in (("advection1d", 0.99, False), ("diff_react2d", 1.5, True)):
        found = small_disk.outcome(task, share, is_taken)
        wanted = {"wrong": 0, "second": 0, "is_whole": True}
        if found["first"] == 0 or not found["said"] or wanted.items() - found.items():
            scene.problems.append(f"{task} on a disk of {share} of its size: {found}")


STORAGE: dict[str, Callable[[Scene], None]] = {
    "a record of an unfinished stage lost": lost_unfinished,
    "a record of a finished stage lost": lost_finished,
    "two first starts of which one is killed": two_first_starts,
    "folder removed under a job": removed_running,
    "folder removed and taken by another job": removed_and_taken,
    "a bit of a base flipped": flipped_base,
    "a bit of a large cache flipped": flipped_row,
    "a cache overwritten in place": overwritten_cache,
    "a middle line of the log damaged": damaged_line,
    "a disk full while data are generated": full_disk,
}
QUICK_STORAGE = ("a record of an unfinished stage lost",)


def storage_case(references: References, name: str) -> Result:
    """One of STORAGE."""
    started, scene = time.monotonic(), Scene(references, name)
    scene.folder.mkdir(parents=True)
    STORAGE[name](scene)
    total_s = time.monotonic() - started
    result = Result(f"storage/{name}", scene.problems + leftovers(), total_s=total_s, note=scene.note)
    if result.problems:
        result.note = f"see {scene.folder}"
    else:
        shutil.rmtree(scene.folder)
    return result
