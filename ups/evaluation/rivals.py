"""Networks of other kinds on the same data, as `make bench` measured them on the test split, for the report.

They are trained and tuned there, by the clock, and only read here. A result counts where the cache has the same fingerprint
(data, split, tokenizer) and as many context frames were given: then both were asked the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ups.config import ROOT, Config
from ups.files import read_record

FOLDER = ROOT / "bench" / "out"
RIVALS = ("fno", "unet")


def data_key(config: Config, task: str, fingerprint: str) -> dict[str, Any]:
    """What two results on `task` must share to stand side by side; fingerprint: of its cache."""
    return {"cache": fingerprint, "context_frames": config.context(task)}


def find_rivals(config: Config, parents: dict[str, str], folder: Path = FOLDER) -> dict[str, dict[str, dict]]:
    """TASK -> {"fno", "unet": row of results.json} for every evaluated task, the best on validation of several.

    parents: of the operator, among them TASK -> fingerprint of the cache.
    Nothing where the report is not on the whole test split. Raises DamagedError for a result that is not readable.
    """
    found: dict[str, dict[str, dict]] = {name: {} for name in config.evaluated}
    if config.evaluate.split != "test" or config.evaluate.max_trajectories:
        return found
    for name, best in found.items():
        key = data_key(config, name, parents[name])
        for path in sorted(folder.glob(f"{name}_*.json")):
            record = read_record(path, "a result of make bench", "Delete it and run make bench again.")
            for model, entry in record.get("models", {}).items() if record.get("data") == key else ():
                if model not in best or entry["validation"] < best[model]["validation"]:
                    best[model] = entry
    return {name: {model: entry["row"] for model, entry in best.items()} for name, best in found.items()}
