"""A finished stage for tests: the files and the record that a script leaves."""

from pathlib import Path
from typing import Any

from torch import Tensor

from ups.common.files import file_hash, value_hash, write_json, write_sealed
from ups.training.artifact import DONE, MODEL
from ups.training.weights import write_weights


def write_stage(
    folder: Path,
    description: dict[str, Any],
    weights: dict[str, Tensor],
    stage: str = "operator",
    parents: dict[str, str] | None = None,
) -> str:
    """A folder with config.json, model.safetensors and done.json; its fingerprint."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", description)
    write_weights(folder / MODEL, {name: value.detach().contiguous() for name, value in weights.items()})
    return sign(folder, stage, parents)


def sign(folder: Path, stage: str = "operator", parents: dict[str, str] | None = None) -> str:
    """done.json of the files that are there, as anybody may write it; the fingerprint."""
    record = {
        "model_sha256": file_hash(folder / MODEL),
        "config_sha256": file_hash(folder / "config.json"),
        "config_hash": "0" * 64,
        "parents": parents or {},
    }
    write_sealed(
        folder / DONE, {"stage": stage, "run": "test", **record, "fingerprint": value_hash(record), "step": 1}
    )
    return value_hash(record)
