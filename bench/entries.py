"""Results of benchmarks: a record FOLDER/TASK.json has facts, and an entry for each training or measurement.

An entry has a key, which says what was measured (column, seed, data, times, kind of processor ..), what was
found, and the environment with the command. It is written at once and not computed again.
"""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import torch

from ups.common.place import ROOT
from ups.training.environment import describe_environment

RESULTS = ROOT / "bench" / "results"


def read(task: str, folder: Path = RESULTS) -> dict[str, Any]:
    """Return the record of a task, without entries if there is none yet."""
    path = folder / f"{task}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"task": task, "entries": []}


def keep(record: dict[str, Any], folder: Path = RESULTS) -> None:
    """Write a record."""
    save(folder / f"{record['task']}.json", record)


def save(path: Path, found: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(json.dumps(clean(found), indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def clean(value: Any) -> Any:
    """Return `value` for JSON: null for NaN and inf (the model diverged, or the number is undefined)."""
    if isinstance(value, dict):
        return {key: clean(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [clean(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def processor(device: str = "cpu") -> str:
    """Return the kind of processor, on which times depend: the GPU, else the instruction set of torch."""
    is_gpu = device.startswith("cuda")
    return torch.cuda.get_device_name() if is_gpu else torch.backends.cpu.get_cpu_capability()


def described(device: str = "cpu") -> dict[str, Any]:
    """Return the environment: commit, machine, load, and the command of this process."""
    command = " ".join([f"python -m bench.{Path(sys.argv[0]).stem}", *sys.argv[1:]])
    load = {"load": os.getloadavg()}
    return describe_environment(1, torch.device(device)) | load | {"command": command}


def put(
    task: str, folder: Path, key: dict[str, Any], found: dict[str, Any], device: str = "cpu", **facts: Any
) -> None:
    """Add an entry, and facts of all, to a record, in place of an entry with the same key. The record is read
    anew, as another process may have written meanwhile."""
    record = read(task, folder) | facts
    entry = {"key": key, **found, "environment": described(device)}
    record["entries"] = [one for one in record["entries"] if one["key"] != key] + [entry]
    keep(record, folder)


def is_there(task: str, folder: Path, key: dict[str, Any]) -> bool:
    """Whether a record has an entry with this key, which is then said."""
    found = any(entry["key"] == key for entry in read(task, folder)["entries"])
    if found:
        print(f"{task} {key['column']} seed {key.get('seed', 0)}: there", flush=True)
    return found
