"""Burgers' equation by the packages of several authors, for bench/pays.py (bench/authors_solvers.py says how
each solves it). The packages are installed in an environment of their own, bench/out/phi-env.
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


<<<<<<< HEAD
def starts(num_cells: int) -> np.ndarray:
    """Return random waves (n, x), float64, on a grid of so many cells."""
    rows = range(NUM_TRAJECTORIES)
    return random_waves(rows, SEED, NUM_MODES, num_cells, 1, PERIODIC).numpy()
=======
@dataclass(frozen=True)
class Equation:
    """Grid, frame interval, coefficients and starts: offset + amplitude * random waves."""

    ndim: int
    resolution: int
    num_modes: int
    dt: float
    coefficients: dict[str, float]
    offset: float = 0.0
    amplitude: float = 1.0

    def starts(self, count: int = NUM_TRAJECTORIES) -> np.ndarray:
        """Return (count, *space) float64."""
        waves = random_waves(range(count), SEED, self.num_modes, self.resolution, self.ndim, PERIODIC)
        return (self.offset + self.amplitude * waves).numpy()


EQUATIONS = {
    "burgers": Equation(1, 128, 5, 0.025, {"diffusivity": 0.01}),
    "fisher": Equation(2, 32, 3, 0.02, {"diffusivity": 0.005, "rate": 5.0}, offset=0.25, amplitude=0.25),
}


# ---- data --------------------------------------------------------------------------------------------------


def identity(equation: str) -> str:
    """Return what identifies the data of all authors."""
    return value_hash([asdict(EQUATIONS[equation]), SEED, NUM_TRAJECTORIES, NUM_FRAMES, PACKAGES])


def made(equation: str, author: str, python: Path | None) -> Path:
    """Return the file with an author's solutions; solve unless it is there."""
    path, facts = OUT / "authors" / identity(equation)[:8] / f"{equation}_{author}.npz", EQUATIONS[equation]
    if not path.is_file():
        found = solve(author, python, path, equation, [(facts.resolution, 0)], [facts.starts()])
        write(path, {"u": checked(found["u0"], facts, author)})
    return path
>>>>>>> h-bands


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
