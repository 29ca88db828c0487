"""What a stage is, and the record of one that is finished. Without torch.

Identity: a stage is what its configuration (`relevant_keys`) and its parents make of it, so the hash of the
one and the fingerprints of the others name it. Everything that a stage writes to read it again carries both:
environment.json, the manifest of a checkpoint, what was fitted once, done.json. They are compared whenever
one of these is read, before the folder is locked and again after.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ups.files import DamagedError, file_hash, read_sealed, value_hash

DONE, MODEL, MANIFEST = "done.json", "model.safetensors", "manifest.json"
RECORDED = ("model_sha256", "config_sha256", "config_hash", "parents")   # of done.json, for its fingerprint

# Keys of these sections decide what a stage computes; of them, these last parts only say how and where.
SECTIONS = ("data", "cache", "task", "sampling")
FREE_KEYS = {"data.root", "data.url", "data.chunk", "cache.root", "cache.place", "cache.device_fraction",
             "cache.chunk"}
FREE_TRAIN_KEYS = {"micro_batch", "compile", "log_every", "save_every", "keep", "max_skips", "hang_s",
                   "timeout_s"}


def dotted(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every leaf of nested mappings, below `key`."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from dotted(inner, f"{key}.{name}" if key else name)
    else:
        yield key, value


def relevant_keys(config: dict[str, Any], section: str) -> dict[str, Any]:
    """Dotted key -> value of what decides the stage's result; the rest may change when a run continues."""
    free = FREE_KEYS | {f"{section}.train.{name}" for name in FREE_TRAIN_KEYS}
    tasks = config["data"]["tasks"]
    found = {"run.seed": config["run"]["seed"]}
    for name in (*SECTIONS, section):
        found.update(dotted(config[name], name))
    return {key: value for key, value in found.items()
            if key not in free and not (key.startswith("task.") and key.split(".")[1] not in tasks)}


def require_identity(record: Mapping[str, Any], identity: Mapping[str, Any], what: str | Path, path: Path,
                     do: str) -> None:
    """Raise FileExistsError unless `record`, read from `path`, carries `identity`; what: whose it is."""
    then, now = record.get("config_hash", "none"), identity["config_hash"]
    if then != now:
        raise FileExistsError(f"{what} was made with another configuration (hash {then[:12]} in {path.name}, "
                              f"{now[:12]} now); expected the same one. {do}")
    before, parents = record.get("parents", {}), identity["parents"]
    for name in sorted(before.keys() | parents.keys()):
        if before.get(name) != parents.get(name):
            raise FileExistsError(f"{what} was made from another {name} ({before.get(name, 'none')} then, "
                                  f"{parents.get(name, 'none')} now); expected the same one. {do}")


def finished_stage(folder: Path) -> dict[str, Any] | None:
    """The record of a finished stage, or None if it is not finished.

    Raises DamagedError if it is not as it was left.
    """
    again = f"Delete {folder / DONE} and run the stage again; it resumes from its last checkpoint."
    try:
        done = read_sealed(folder / DONE, "the record of a finished stage", again, model_sha256=str,
                           config_sha256=str, fingerprint=str, config_hash=str, parents=dict, stage=str,
                           step=int)
    except FileNotFoundError:
        return None
    fingerprint = value_hash({name: done[name] for name in RECORDED})
    if done["fingerprint"] != fingerprint or done["stage"] != folder.name:
        raise DamagedError(f"{folder / DONE} was altered (its fingerprint is not that of its content); "
                           f"expected the record as "
                           f"it was written. {again}")
    for name, key in ((MODEL, "model_sha256"), ("config.json", "config_sha256")):
        path = folder / name
        found = file_hash(path) if path.is_file() else "missing"
        if found != done[key]:
            raise DamagedError(f"{path} is {found[:12]}; expected {done[key][:12]} as {DONE} says. {again}")
    return done
