"""The records of a finished stage, verified: done.json, config.json, config.yaml. Without torch."""

import os
from collections.abc import Mapping
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
from ups.common.place import make_target
from ups.common.stages import STAGES
from ups.common.text import read_yaml
from ups.training.identity import relevant_keys

DONE, MODEL = "done.json", "model.safetensors"
CARD, IMAGES = "README.md", "images"  # the model card and its pictures
DONE_FIELDS = {
    "model_sha256": str,
    "config_sha256": str,
    "fingerprint": str,
    "config_hash": str,
    "parents": dict,
    "stage": str,
    "step": int,
}


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
    if not os.path.lexists(folder / DONE):
        return None
    done = read_stage(folder).done
    require_weights(folder, done)
    return done


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
