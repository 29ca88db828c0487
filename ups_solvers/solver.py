"""What a family offers: trajectories from (seed, index), and the same scheme from any given state."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

MIN_RESOLUTION = 8
GPU = "cuda"
MEASURED_S = 1.0  # a solver is measured for so long
# trajectories that are measured together, as long as they have no more cells: on small grids a solver of many
# trajectories takes little longer than a solver of one
TOGETHER, MOST_CELLS = 16, 2**17


@dataclass(frozen=True, kw_only=True)
class Solver:
    """The solver of one task. Fields u are (n, time, channel, *space).

    trajectory(seed, index, resolution=, num_frames=, parameter=, t_end=) -> (num_frames, channel, *space), at
    t = linspace(0, t_end, num_frames); a steady task has one frame, of coefficient and solution.
    cells_at_once: if not 0, the function takes several indices and returns (n, num_frames, channel, *space);
    it gets as many indices at a time as have about so many cells. cell_bytes: if not 0, the function computes
    on torch's default device and needs about so much memory per cell; on a GPU it gets as many indices as fit
    in half of the free memory.
    """

    trajectory: Callable[..., Tensor]
    parameter: str | None = None  # its name; None for an equation without one
    channels: int = 1
    ndim: int = 1
    is_steady: bool = False
    cells_at_once: int = 0
    cell_bytes: int = 0
    edition: int = 1  # raised when `trajectory` changes its numbers; files name it
    # (u (n, channel, *space), *, parameter, dt, num_frames) -> (n, num_frames, channel, *space) at dt, 2 dt,
    # .., by the same scheme; None if the stored fields are not the whole state. Of a steady task: u holds its
    # inputs, and the only frame is the solution.
    integrate: Callable[..., Tensor] | None = None
    # (u (n, channel, *space), num, *, seed, rows, num_frames, parameter, dt) -> `num` exact futures (n, num,
    # num_frames, channel, *space), float32, at dt, 2 dt, ..; future j of a state depends on (seed, its number
    # in `rows`, j) alone. None if the future is certain or its law unknown.
    exact_futures: Callable[..., Tensor] | None = None
    # (observation, num, seed, parameter) -> `num` exact samples (a, u), each (num, *space), given a linear
    # observation of log a: resolution, cells, values and noise of darcy_grf.LinearObservation
    posterior: Callable[..., tuple[Tensor, Tensor]] | None = None

    @property
    def step(self) -> Callable[..., Tensor] | None:
        """step(u, *, parameter, dt): the first frame of `integrate`; None for a steady task."""
        if self.integrate is None or self.is_steady:
            return None

        def first_frame(u: Tensor, *, parameter: float | None, dt: float) -> Tensor:
            return self.integrate(u, parameter=parameter, dt=dt, num_frames=1)[:, 0]

        return first_frame

    @property
    def device(self) -> str:
        """The device of `solve`: a GPU if torch has one and the solver gains by it."""
        return GPU if self.cell_bytes and torch.cuda.is_available() else "cpu"

    def simulate(
        self,
        indices: Sequence[int],
        *,
        seed: int,
        resolution: int,
        num_frames: int,
        parameter: float | None,
        t_end: float,
    ) -> Tensor:
        """Trajectories `indices`, float32, solved in float64. Trajectory i depends on (seed, i) alone, so
        chunks of any size give the same bits.

        Raises ValueError for resolution < 8, num_frames < 1, negative indices or seed, t_end not positive
        with several frames, and a parameter that is missing, superfluous or not a positive finite number.
        """
        is_time = math.isfinite(t_end) and t_end > 0
        is_right = {
            f"resolution = {resolution} cells per axis; expected at least {MIN_RESOLUTION} (simulate); "
            "choose a larger data resolution.": resolution >= MIN_RESOLUTION,
            f"num_frames = {num_frames}; expected at least 1, the initial state (simulate); choose how "
            "many frames from t = 0 to t_end to keep.": num_frames >= 1,
            f"t_end = {t_end} with {num_frames} frames; expected a positive time (simulate); give the "
            "length of a trajectory, or ask for one frame.": is_time or self.is_steady or num_frames == 1,
            f"seed = {seed} or one of the trajectory indices is negative; expected numbers >= 0 "
            "(simulate); count trajectories from 0.": min((seed, *indices)) >= 0,
            f"parameter = {parameter} for an equation without one; expected None (simulate); leave the "
            "parameter out.": parameter is None or self.parameter is not None,
            f"{self.parameter} = {parameter}; expected a positive number (simulate); give one of the "
            "values the published files use.": self.parameter is None
            or (parameter is not None and math.isfinite(parameter) and parameter > 0),
        }
        if wrong := [text for text, fine in is_right.items() if not fine]:
            raise ValueError(wrong[0])
        u = torch.empty(
            len(indices),
            1 if self.is_steady else num_frames,
            self.channels,
            *[resolution] * self.ndim,
            device="cpu",
        )
        cells = self.cells_at_once
        if self.cell_bytes and torch.get_default_device().type != "cpu":
            cells = torch.cuda.mem_get_info()[0] // (2 * self.cell_bytes)
        num = max(1, cells // resolution**self.ndim)
        for row in range(0, len(indices), num):
            block = indices[row : row + num] if self.cells_at_once else indices[row]
            u[row : row + num] = self.trajectory(
                seed, block, resolution=resolution, num_frames=num_frames, parameter=parameter, t_end=t_end
            )
        return u

    def solve(self, indices: np.ndarray, **settings: Any) -> np.ndarray:
        """`simulate` on `device`. Sets torch to one thread: for arrays this small a second one only waits
        (diff_react2d under load: 0.3 s per trajectory with one thread, 9 s with two)."""
        torch.set_num_threads(1)
        with torch.device(self.device):
            return np.asarray(self.simulate(indices, **settings))

    def seconds(self, settings: Mapping[str, Any]) -> float:
        """Processor time of `solve` per trajectory, measured on a few trajectories and on more and more of
        their frames, until they took MEASURED_S; the first frame, which may take a run-up, is measured
        apart. settings: the arguments of `simulate` and num_trajectories."""
        wanted = settings["num_frames"]
        steps, frames = wanted - 1, min(2, wanted)
        cells = settings["resolution"] ** self.ndim * self.channels
        num = max(1, min(TOGETHER, settings["num_trajectories"], MOST_CELLS // cells))
        fixed = {key: settings[key] for key in ("seed", "resolution", "parameter")}

        def measured(frames: int) -> float:
            start = time.process_time()
            t_end = settings["t_end"] * (frames - 1) / max(steps, 1)
            self.solve(np.arange(num), num_frames=frames, t_end=t_end, **fixed)
            return (time.process_time() - start) / num

        while True:
            seconds = measured(frames)
            if frames == wanted:
                return seconds
            if seconds * num > MEASURED_S:
                first = min(measured(1), seconds)
                return first + (seconds - first) * steps / (frames - 1)
            frames = min(2 * frames, wanted)
