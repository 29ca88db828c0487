"""The windows of the data that an equation is fitted to."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ups_discovery.data import Data
from ups_discovery.denoise import Film
from ups_discovery.noise import MOST_VALUES, measurement_noise
from ups_discovery.seeds import generator
from ups_discovery.units import widened

# Cells in all windows together, and the largest number of windows.
REGRESSION_CELLS, SHOOTING_CELLS, NOISY_CELLS = 2**15, 2**12, 2**13
MOST_REGRESSION, MOST_SHOOTING, MOST_NOISY, FEWEST = 256, 32, 64, 4
SHOOTING_FRAMES, NOISY_FRAMES = 2, 8  # that the integrator is fitted to, from each start
AT_ONCE = 8  # windows that are integrated together
HELD_OUT = 16  # trajectories and frames on which a fit is validated
MOST_BOUNDING = 64  # trajectories whose range bounds the predictions
FILM_VALUES = 2**22  # of a channel, in the films of data with noise


def number_of(num_cells: int, most: int, space: list[int]) -> int:
    """The number of windows that have this number of cells in all."""
    return min(most, max(FEWEST, num_cells // math.prod(space)))


@dataclass(frozen=True)
class FilmWindows:
    """Windows (windows, frames, C, *space) of one parameter value; states, float64.

    regression: of three frames. shooting: that the integrator is fitted to, at_once together. held_out: that
    fits are validated on. rows: trajectories of the first two. cells: some, that the regression uses. std (C,
    1, ..): of the fields. bounds: smallest and largest state (C,) of a prediction.
    noise (C,): standard deviation of white noise in the states, None without any. With noise, the windows are
    those of denoised films; films (films, time, C, *space): the noisy ones."""

    regression: Tensor
    shooting: Tensor
    held_out: Tensor
    rows: Tensor
    cells: Tensor
    std: Tensor
    bounds: tuple[Tensor, Tensor]
    at_once: int = AT_ONCE
    noise: Tensor | None = None
    films: Tensor | None = None

    @classmethod
    def of(cls, data: Data, settings: dict[str, Any], value: int, least_noise: float = 0.0) -> "FilmWindows":
        """Those of one parameter value. settings: of `search.candidates`. least_noise: of every channel that
        has less, relative to its standard deviation."""
        space, boundary = settings["space"], settings["boundary"]
        rng, rows = generator(data.seed, data.name, "equation", value), data.rows(value)
        rows = rows[torch.randperm(len(rows), generator=rng)]
        of_held_out = rows[: min(HELD_OUT, max(1, len(rows) // 8))]
        of_fit = rows[len(of_held_out) :] if len(rows) > 1 else rows

        def windows(rows: Tensor, count: int, length: int) -> Tensor:
            return data.states(rows[torch.arange(count) % len(rows)], length, rng)

        num_regression = number_of(REGRESSION_CELLS, MOST_REGRESSION, space)
        num_shooting = number_of(SHOOTING_CELLS, MOST_SHOOTING, space)
        regression = windows(of_fit, num_regression, 3)
        shooting = windows(of_fit, num_shooting, 1 + SHOOTING_FRAMES)
        held_out = windows(of_held_out, len(of_held_out), 1 + HELD_OUT)
        cells = torch.randperm(math.prod(space), generator=rng)[: max(1, REGRESSION_CELLS // num_regression)]
        ranges = []
        for row in rows[:MOST_BOUNDING].split(1):
            s = data.states(row, data.num_frames, rng).transpose(0, 2).flatten(1)
            ranges.append((s.amin(1), s.amax(1)))
        low, high = (torch.stack(ends) for ends in zip(*ranges, strict=True))
        device = regression.device
        found = cls(
            regression,
            shooting,
            held_out,
            of_fit,
            cells.to(device),
            data.units.scale.to(device).view(-1, *[1] * len(space)),
            widened(low.amin(0), high.amax(0), len(ranges)),
        )
        some = data.films(rows, MOST_VALUES)
        sigma = [
            max(measurement_noise(one.cpu().numpy()) or 0.0, least_noise * float(one.std()))
            for one in some.unbind(2)
        ]
        if not any(sigma):
            return found
        films = data.films(rows, FILM_VALUES)
        return found.of_denoised(films, some.new_tensor(sigma), boundary, rng)

    def of_denoised(self, films: Tensor, noise: Tensor, boundary: str, rng: torch.Generator) -> "FilmWindows":
        """Windows of denoised films in place of these. films (films, time, C, *space): the noisy ones, of
        which the first are held out; noise: as in the class. Those for the integrator are longer."""
        space = list(films.shape[3:])
        smooth = Film(films.shape[1], tuple(space), boundary).denoised(films, noise)
        num_held_out = min(len(self.held_out), max(1, len(smooth) // 8))
        held_out, smooth = smooth[:num_held_out], smooth[num_held_out:] if len(smooth) > 1 else smooth

        def windows(smooth: Tensor, count: int, length: int) -> Tensor:
            length = min(length, smooth.shape[1])
            starts = torch.randint(0, smooth.shape[1] - length + 1, (count,), generator=rng)
            if len(smooth) == 1:  # blocks of windows (certainty.py) are parts of the film
                starts = starts.sort().values
            places = enumerate(starts.tolist())
            return torch.stack([smooth[i % len(smooth), first : first + length] for i, first in places])

        num_shooting = number_of(NOISY_CELLS, MOST_NOISY, space)
        return FilmWindows(
            shooting=windows(smooth, num_shooting, 1 + NOISY_FRAMES),
            regression=windows(smooth, len(self.regression), 3),
            held_out=windows(held_out, 2 * num_held_out, 1 + HELD_OUT),
            rows=self.rows[: len(smooth)],
            cells=self.cells,
            std=self.std,
            bounds=self.bounds,
            at_once=max(1, NOISY_CELLS // math.prod(space)),
            noise=noise,
            films=films[-len(smooth) :],
        )
