"""The records of a stage, verified, without torch: what identifies it (the hash of the settings that decide
its result, and its parents' fingerprints), what it holds when it is finished, and the names of its files.

Every record that a stage reads again carries its identity (environment.json, checkpoint manifests, fits,
done.json), which is compared whenever such a record is read.
"""

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ups.common.files import (
    DamagedError,
    read_record,
    read_sealed,
    require_hash,
    require_plain,
    require_small,
    value_hash,
)
from ups.common.place import STAGES, make_target
from ups.common.text import read_yaml

DONE, MODEL = "done.json", "model.safetensors"
CARD, IMAGES = "README.md", "images"  # the model card and its pictures
SIGNATURE = "<!-- sha256 of this card as a report wrote it:"  # last line; a card that differs is kept
DONE_FIELDS = {
    "model_sha256": str,
    "config_sha256": str,
    "fingerprint": str,
    "config_hash": str,
    "parents": dict,
    "stage": str,
    "step": int,
}
MANIFEST = "manifest.json"  # of a checkpoint

# Sections that decide what a stage computes, except for these keys of theirs.
SECTIONS = ("data", "cache", "task")
REMOVED_SECTIONS = ("sampling",)  # part of the hash of stages that were trained with them
FREE_KEYS = {
    "data.root",
    "data.url",
    "data.chunk",
    "cache.root",
    "cache.place",
    "cache.device_fraction",
    "cache.chunk",
}
FREE_TRAIN_KEYS = {
    "micro_batch",
    "compile",
    "log_every",
    "save_every",
    "keep",
    "max_skips",
    "hang_s",
    "timeout_s",
}


def dotted(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every leaf of nested mappings, below `key`."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from dotted(inner, f"{key}.{name}" if key else name)
    else:
        yield key, value


def relevant_keys(config: dict[str, Any], section: str) -> dict[str, Any]:
    """Dotted key -> value of the settings that decide a stage's result; the others may change on resume."""
    # the initial weights may lie elsewhere: their fingerprint is a parent
    free = FREE_KEYS | {f"{section}.init", *(f"{section}.train.{name}" for name in FREE_TRAIN_KEYS)}
    other_tasks = config["task"].keys() - set(config["data"]["tasks"])
    leaves = [("run.seed", config["run"]["seed"])]
    removed = [name for name in REMOVED_SECTIONS if name in config]
    for name in (*SECTIONS, *removed, section):
        leaves += dotted(config[name], name)
    return {
        key: value
        for key, value in leaves
        if key not in free and not (key.startswith("task.") and key.split(".")[1] in other_tasks)
    }


def require_identity(
    record: Mapping[str, Any], identity: Mapping[str, Any], what: str | Path, path: Path, do: str
) -> None:
    """Raise FileExistsError unless `record`, of the file `path`, has this identity. what: its owner."""
    then, now = record.get("config_hash", "none"), identity["config_hash"]
    if then != now:
        raise FileExistsError(
            f"{what} was made with another configuration (hash {then!s:.12} in {path.name}, {now[:12]} now); "
            f"expected the same one. {do}"
        )
    before, parents = record.get("parents", {}), identity["parents"]
    for name in sorted(before.keys() | parents.keys()):
        if before.get(name) != parents.get(name):
            then, now = (f"{of.get(name, 'none')!s:.80}" for of in (before, parents))
            raise FileExistsError(
                f"{what} was made from another {name!s:.80} ({then} then, {now} now); expected the same one. "
                f"{do}"
            )


# ---------------------------------------------------------------- a finished stage


class FinishedStage(NamedTuple):
    """The verified records of a finished stage: done.json and config.json, which describes its network."""

    done: dict[str, Any]
    description: dict[str, Any]


def read_stage(folder: Path, stage: str = "") -> FinishedStage | None:
    """The records of a finished stage, without checking its weights; None if it is not finished. stage: its
    name, if the folder has another.

    Raises DamagedError if a record was altered or is a link.
    """
    if not os.path.lexists(folder / DONE):
        return None
    again = _remedy(folder)
    done = read_sealed(folder / DONE, "the record of a finished stage", again, **DONE_FIELDS)
    if done["stage"] != (stage or folder.name):
        raise DamagedError(
            f"{folder / DONE} is of stage {done['stage']!s:.80}; expected {stage or folder.name}. {again}"
        )
    path, what = folder / "config.json", "the description of a network"
    require_small(path, what, again)
    require_hash(path, done["config_sha256"], DONE, again)
    return FinishedStage(done, read_record(path, what, again))


def finished_stage(folder: Path) -> dict[str, Any] | None:
    """The record of a finished stage with verified weights, or None if it is not finished.

    Raises DamagedError like `read_stage`, and for altered weights.
    """
    if (found := read_stage(folder)) is None:
        return None
    require_weights(folder, found.done)
    return found.done


def require_weights(folder: Path, done: Mapping[str, Any]) -> None:
    """Raise DamagedError unless the weights of a stage have the digest of its record."""
    again = _remedy(folder)
    require_plain(folder / MODEL, again)
    require_hash(folder / MODEL, done["model_sha256"], DONE, again)


def stage_config(folder: Path, done: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration that a finished stage was trained with: config.yaml, whose hash is in done.json.
    Raises DamagedError.
    """
    path = folder / "config.yaml"
    require_small(path, "a configuration", "Take another copy of the stage.")
    try:
        saved = read_yaml(path)
        found = value_hash({"stage": done["stage"], **relevant_keys(saved, done["stage"])})
    except (KeyError, TypeError, AttributeError, ValueError, FileNotFoundError) as error:
        raise DamagedError(
            f"{path} is not readable ({error!s:.200}); expected the configuration that this "
            f"stage was trained with. Take another copy of the stage."
        ) from error
    if found != done["config_hash"]:
        raise DamagedError(
            f"{path} has hash {found[:12]}; expected {done['config_hash']:.12} as {DONE} "
            f"says. Take another copy of the stage."
        )
    return saved


def stage_of_run(run: Path, stage: str) -> FinishedStage | None:
    """`read_stage` for a run that may come from elsewhere.

    Raises DamagedError if the stage is a link, or was made from other stages than those beside it.
    """
    folder = run / stage
    if folder.is_symlink():
        raise DamagedError(f"{folder} is a link; expected a folder of its own. Copy the stage there.")
    if (found := read_stage(folder)) is None:
        return None
    for parent in STAGES[stage].parents:
        beside, then = read_stage(run / parent), found.done["parents"].get(parent, "none")
        now = beside.done["fingerprint"] if beside is not None else "none"
        if now != then:
            raise DamagedError(
                f"{folder} was made from another {parent} than the one beside it "
                f"({then!s:.12}, not {now!s:.12}); expected stages of one run. Put the stages "
                f"of one run together, or run {make_target(stage)} again."
            )
    return found


def _remedy(folder: Path) -> str:
    return f"Delete {folder / DONE} and run the stage again; it resumes from its last checkpoint."


# ---------------------------------------------------------------- the names of the files that UPS replaces

# A folder may also hold notes, links and copies of its user: only plain files with these names are deleted
# (`ups.common.files.remove_named`).
HEARTBEATS = r"rank\d+\.json|stop-\d+\.json"
CHECKPOINT = r"manifest\.json|shared\.pt|rank_\d+\.pt"


def pictures_of_card(folder: Path) -> list[str]:
    """Patterns of the pictures that the card of a stage shows, under the names that a report gives them."""
    text = ""
    with contextlib.suppress(OSError, ValueError):
        text = (folder / CARD).read_text(encoding="utf-8")
    return [
        re.escape(name) for name in re.findall(rf"\]\({IMAGES}/([^/\n]+?_median_error_[^/\n]+?\.png)\)", text)
    ]


def signed_card(text: str) -> str:
    return f"{text}{SIGNATURE} {value_hash(text)} -->\n"


def is_changed_card(path: Path) -> bool:
    """Whether somebody changed a card since a report wrote it."""
    if not path.is_file():
        return False
    text = path.read_text(encoding="utf-8", errors="replace")
    return signed_card(text.rpartition(SIGNATURE)[0]) != text
