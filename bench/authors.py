"""Burgers' equation by the packages of several authors, for bench/pays.py and bench/trust.py.

bench/authors_solvers.py says how each solves it. The packages are installed in an environment of their own,
bench/out/phi-env.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.apebench import environment
from bench.authors_solvers import AUTHORS
from bench.user_data import random_waves
from ups.common.place import ROOT
from ups_discovery.boundary import PERIODIC

__all__ = ["AUTHORS", "DIFFUSIVITY", "DT", "NUM_CELLS", "solve", "starts"]

PACKAGES = ("py-pde==0.59.0", "exponax==0.2.0", "jax[cpu]==0.10.2", "phiflow==3.4.0")
SEED, NUM_TRAJECTORIES, NUM_FRAMES = 36, 120, 41
NUM_CELLS, NUM_MODES, DT, DIFFUSIVITY = 128, 5, 0.025, 0.01


def starts(num_cells: int, count: int = NUM_TRAJECTORIES) -> np.ndarray:
    """Return random waves (count, x), float64, on a grid of so many cells."""
    return random_waves(range(count), SEED, NUM_MODES, num_cells, 1, PERIODIC).numpy()


def solve(
    author: str,
    python: Path | None,
    path: Path,
    tried: Sequence[tuple[int, int]],
    fields: Sequence[np.ndarray],
    **more: Any,
) -> dict[str, np.ndarray]:
    """Return what bench/authors_solvers.py makes of starts (n, x), one array per grid. path: beside it are
    files for as long as it runs. Raises CalledProcessError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    given, result = (path.with_suffix(end) for end in (".given.npz", ".result.npz"))
    grids = {f"u{u.shape[-1]}": u for u in fields}
    more |= {"dt": DT, "num_frames": NUM_FRAMES, "diffusivity": DIFFUSIVITY}
    np.savez(given, tried=tried, **grids, **more)
    script = ROOT / "bench" / "authors_solvers.py"
    subprocess.run([environment(python, "phi", PACKAGES), script, author, given, result], check=True)
    with np.load(result) as file:
        found = {name: file[name] for name in file.files}
    for done in (given, result):
        done.unlink()
    return found
