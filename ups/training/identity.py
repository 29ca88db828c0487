"""What identifies a stage: the hash of the settings that decide its result, and its parents' fingerprints.

Every record that a stage reads again carries both (environment.json, checkpoint manifests, fits, done.json).
They are compared whenever such a record is read. Without torch.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

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
