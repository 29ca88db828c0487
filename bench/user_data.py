"""Data that a benchmark makes, as a user's files: random starts, one .npz file, and its section of the
configuration. Every model gets one frame, and predicts all others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor

from ups.common.place import ROOT
from ups_discovery.boundary import NO_FLUX, PERIODIC
from ups_solvers.initial import cell_centres, random_stream

CONFIG = ROOT / "configs" / "small.yaml"  # sizes and rates of our network
FRACTIONS = {"val_fraction": 0.15, "test_fraction": 0.2}  # of few trajectories


def random_waves(
    indices: Sequence[int], seed: int, num_modes: int, resolution: int, ndim: int, boundary: str
) -> Tensor:
    """Return random Fourier series, (n, *space) float64, of mean zero and with maximum 1.

    num_modes: highest wave number along each axis, in periods per domain; all amplitudes up to it are
    N(0, 1). At walls without flux they are cosines of half periods, up to the same wave length. At the
    centres of cells.
    """
    x = math.pi * cell_centres(resolution)
    if boundary == NO_FLUX:
        basis = torch.cos(torch.arange(2 * num_modes + 1)[:, None] * x)
    else:
        angle = 2 * torch.arange(num_modes + 1)[:, None] * x
        basis = torch.cat((torch.cos(angle), torch.sin(angle[1:])))
    u = torch.from_numpy(
        np.stack([random_stream(seed, index).standard_normal((len(basis),) * ndim) for index in indices])
    )
    for _ in range(ndim):
        u = u.movedim(1, -1) @ basis
    u = u - u.flatten(1).mean(1).view(-1, *[1] * ndim)
    return u / u.flatten(1).abs().amax(1).view(-1, *[1] * ndim)


def write(path: Path, fields: Mapping[str, np.ndarray], **parameters: np.ndarray) -> None:
    """Write fields (trajectory, time, *space) and parameters (trajectory,) as one file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial.npz")
    np.savez(partial, **{name: value.astype(np.float32) for name, value in fields.items()}, **parameters)
    partial.replace(path)


def write_config(
    path: Path,
    parent: Path,
    task: str,
    dt: float,
    boundary: str = PERIODIC,
    domain: Sequence[float] = (0, 1),
    settings: Mapping[str, Any] | None = None,
) -> Path:
    """Write a configuration that declares a file of `write` as the user task `task`, beside it, and return
    its path. parent: the configuration that it includes. settings: further ones of the task.
    """
    with np.load(path) as file:
        fields = {name: file[name].ndim - 2 for name in file.files if file[name].ndim > 1}
        parameters = {name: name for name in file.files if file[name].ndim == 1}
    facts = {
        "files": str(path),
        "layout": {name: ["trajectory", "time", *"xyz"[:ndim]] for name, ndim in fields.items()},
        "boundary": boundary,
        "domain": list(domain),
        "dt": dt,
        "symmetries": ["shift"] if boundary == PERIODIC else ["mirror"],
        "history": 1,
        **({"parameters": parameters} if parameters else {}),
        **(settings or {}),
    }
    whole = {
        "include": str(parent.resolve()),
        "data": {"source": "user", "tasks": [task], **FRACTIONS},
        "cache": {"root": str(path.with_suffix("")) + "_cache"},
        "evaluate": {"context_frames": 1},
        "task": {task: facts},
    }
    config = path.with_suffix(".yaml")
    config.write_text(yaml.safe_dump(whole, sort_keys=False), encoding="utf-8")
    return config
