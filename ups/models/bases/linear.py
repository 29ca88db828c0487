"""The linear base: every cell of the next frame from every cell of the last ones, by a map of reduced rank
that is fitted by ridge regression.
"""

import copy
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ups.common.progress import beat
from ups.models.bases.base import Base, Fit, ParameterBatch, Samples

if TYPE_CHECKING:
    from ups.models.bases.reduced_rank import Map
from ups_discovery.boundary import PERIODIC, along

FOLDS = 4  # of cross-validation; windows are in the order of initial conditions and time
GROWTH = 1e-4  # growth per frame above which the same map without growth is a candidate as well
STEPS, STATES = 40, 4  # of the power iteration for the growth
BATCH = 32  # windows that are read at once


class Linear(Base):
    """u_next = mean' + kept * (u - mean) + (x - mean) U V^T. x: the last `lags` frames, the forcing and the
    standardised parameters; kept: one number per cell: 0, 1 or its autocorrelation.

    It needs no symmetry, so it serves walls, masks and coefficients that vary in space. A map that was fitted
    to few windows has much smaller errors on these than on others, and a network would learn from too small
    residuals. In that case there are two maps: `alone` has the least error on held-out windows; a call, over
    which a network is trained, uses a firm map with more ridge and equal errors on both. firm_rank: the rank
    of that map.
    """

    kind, degree, is_cellwise = "linear", 1, True
    MOST_BYTES = 2**29  # of windows
    MOST_WEIGHTS = 2**24  # in U and V
    MOST_WINDOWS = 1500, 8  # in total, or per input of a map with few inputs; the larger one counts

    def __init__(
        self,
        num_channels: int,
        num_parameters: int,
        space: Sequence[int],
        num_inputs: int = 0,
        lags: int = 1,
        rank: int = 0,
        firm_rank: int | None = None,
        num_forcing: int = 0,
        series: Sequence[int] = (),
        **_: Any,
    ):
        super().__init__()
        self.series, self.forcing_fields = list(series), [*set(range(num_forcing)) - set(series)]
        self.space, self.lags, self.num_channels = tuple(space), lags, num_channels
        self.is_steady, self.has_firm = num_inputs > 0, firm_rank is not None
        cells = math.prod(space)
        num_out, num_in = num_channels * cells, (num_inputs or num_channels * lags) * cells + num_parameters
        num_in += 2 * (len(self.forcing_fields) * cells + len(self.series))
        for name, size in (("mean_in", num_in), ("mean", num_out), ("kept", num_out)):
            self.register_buffer(name, torch.zeros(size))
        for name, size in (("", rank), *[("firm_", firm_rank)] * self.has_firm):
            self.register_buffer(f"{name}reads", torch.zeros(num_in, size))
            self.register_buffer(f"{name}gives", torch.zeros(num_out, size))

    @property
    def num_fitted(self) -> int:
        return sum(value.numel() for value in (self.mean, self.kept, self.reads, self.gives))

    def inputs(self, u: Tensor, parameters: ParameterBatch) -> Tensor:
        """The input x (batch, numbers) of the map: the frames of u (batch, history, C, *space), newest first,
        the parameters, and the forcing now and in the next frame.
        """
        read = [u[:, -self.lags :].flip(1).flatten(1), parameters.standard]
        if parameters.forcing is not None:
            w = parameters.forcing[:, :2].flatten(3)
            read += [w[:, :, self.forcing_fields].flatten(1), w[:, :, self.series, 0].flatten(1)]
        return torch.cat([part.float() for part in read], 1)

    def forward(self, u: Tensor, parameters: ParameterBatch) -> Tensor:
        return self._mapped(u, parameters, "firm_" if self.has_firm else "")

    def alone(self, u: Tensor, parameters: ParameterBatch) -> Tensor:
        return self._mapped(u, parameters, "")

    def _mapped(self, u: Tensor, parameters: ParameterBatch, which: str) -> Tensor:
        x = self.inputs(u, parameters) - self.mean_in
        out = self.mean + x @ getattr(self, f"{which}reads") @ getattr(self, f"{which}gives").T
        if not self.is_steady:
            out = out + self.kept * x[:, : len(self.kept)]
        return out.view(-1, self.num_channels, *self.space)

    @torch.no_grad()
    def growth(self, seed: int) -> float:
        """The spectral radius of the map, the largest long-term growth of a deviation per frame, by power
        iteration."""
        num, rng = len(self.mean), torch.Generator().manual_seed(seed)
        x, logs = torch.randn(STATES, self.lags * num, generator=rng).to(self.mean), []
        reads = self.reads[: self.lags * num]
        for _ in range(2 * STEPS):
            new = x @ reads @ self.gives.T + self.kept * x[:, :num]
            x = torch.cat([new, x[:, : (self.lags - 1) * num]], 1)
            size = x.norm(dim=1, keepdim=True).clamp_min(1e-30)
            x = x / size
            logs.append(size.log())
        return float(torch.stack(logs[STEPS:]).mean(0).max().exp())

    @torch.no_grad()
    def shrunk(self, growth: float) -> "Linear":
        """This map with every rate divided by `growth`: coefficients of n frames ago by its power n + 1."""
        powers, num = torch.ones_like(self.mean_in), len(self.mean)
        for lag in range(self.lags):
            powers[lag * num : (lag + 1) * num] = growth ** -(lag + 1)
        self.kept /= growth
        self.reads *= powers[:, None]
        if self.has_firm:
            self.firm_reads *= powers[:, None]
        return self

    @classmethod
    @torch.no_grad()
    def fit(cls, samples: Samples, settings: dict[str, Any]) -> Fit["Linear"]:
        """Yield, for every start (see `starts`) and number of frames: the start itself, the map that is best
        on held-out windows and, if that one grows, the same without growth.
        """
        from ups.models.bases.reduced_rank import Directions, FoldSums, Map, fit_map

        task = samples.head.task
        if task.is_symmetric or (task.is_shifted and PERIODIC in along(task.boundary, task.ndim)):
            return f"{task.name} is shifted or mirrored in training, which a map between cells cannot follow"
        is_steady = task.is_steady
        for lags in sorted({1} if is_steady else {1, settings["history"]}):
            x, y = cls(**{**settings, "lags": lags}).windows(samples)
            if len(y) < 2 * FOLDS:
                return f"{len(y)} training windows are too few; it takes {2 * FOLDS}"
            means = [part.mean(0, dtype=torch.float64).float() for part in (x, y)]
            x, y = x - means[0], y - means[1]
            read, held = Directions.of(x), torch.arange(len(x), device=x.device).chunk(FOLDS)
            folds = [FoldSums.of(read.scores, some) for some in held]
            most = cls.MOST_WEIGHTS // (x.shape[1] + y.shape[1])
            for start, kept in starts(
                x, y, 0 if is_steady else settings["num_moving"] * y.shape[1] // settings["num_channels"]
            ):
                beat()
                target = y if is_steady else y - kept * x[:, : len(kept)]
                best, firm = fit_map(read, folds, Directions.of(target), held, most)
                numbers = *means, kept
                if lags == 1 and start != "persistence":  # that one is a separate base
                    yield cls.made(samples, settings, start, 1, *numbers, Map.none(x, y), None)
                if best.rank:
                    name, fitted, base = cls.made(samples, settings, start, lags, *numbers, best, firm)
                    yield name, fitted, base
                    if not is_steady and (growth := base.growth(samples.seed)) > 1 + GROWTH:
                        yield (
                            f"{name}, without its growth of {growth:.4g}",
                            fitted,
                            copy.deepcopy(base).shrunk(growth),
                        )
        return None

    @classmethod
    def made(
        cls,
        samples: Samples,
        settings: dict[str, Any],
        start: str,
        lags: int,
        mean_in: Tensor,
        mean: Tensor,
        kept: Tensor,
        best: "Map",
        firm: "Map | None",
    ) -> tuple[str, dict[str, Any], "Linear"]:
        """The candidate (name, settings, base) of fitted tensors."""
        settings = {**settings, "lags": lags, "rank": best.rank}
        settings |= {} if firm is None else {"firm_rank": firm.rank}
        base = cls(**settings).to(samples.device)
        found = {"mean_in": mean_in, "mean": mean, "kept": kept, "reads": best.reads, "gives": best.gives}
        found |= {} if firm is None else {"firm_reads": firm.reads, "firm_gives": firm.gives}
        base.load_state_dict(found)
        return f"linear from {start}, {lags} frame{'s' * (lags > 1)}, rank {best.rank}", settings, base

    def windows(self, samples: Samples) -> tuple[Tensor, Tensor]:
        """Inputs x (n, numbers) and next frames y (n, numbers) of training windows, in the order of initial
        conditions and time: all, or an even selection of as many as fit into memory.
        """
        from ups.models.bases.reduced_rank import MOST

        num_in, num_out = len(self.mean_in), len(self.mean)
        rows = samples.rows(None)
        rows = rows[samples.cache.trajectory[rows].argsort(stable=True)]
        total, (most, each) = len(rows) * samples.num_starts, self.MOST_WINDOWS
        most = max(most, each * num_in) if num_in <= MOST else most
        count = min(total, most, max(1, self.MOST_BYTES // (4 * (num_in + num_out))))
        picked = torch.linspace(0, max(0, total - 1), count, dtype=torch.float64).round().long()
        x, y = (
            torch.empty(count, num_in, device=samples.device),
            torch.empty(count, num_out, device=samples.device),
        )
        for first in range(0, count, BATCH):
            some = picked[first : first + BATCH]
            row, start = rows[some // samples.num_starts], samples.first + some % samples.num_starts
            u, parameters, u_next = samples.read(row, start)
            x[first : first + BATCH], y[first : first + BATCH] = self.inputs(u, parameters), u_next.flatten(1)
        reads = samples.head.input_codec if self.is_steady else samples.head.codec
        for values, valid, times in ((x, reads.valid, self.lags), (y, samples.head.codec.valid, 1)):
            if valid is not None:  # masked cells hold fill values
                inside = valid.flatten().repeat(times)
                values[:, : len(inside)] *= inside
        return x, y


def starts(x: Tensor, y: Tensor, num_moving: int) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, kept (numbers,)), the fraction of a cell's deviation that persists: nothing, all, and its
    autocorrelation. Fixed fields, whose numbers come last, persist. num_moving: numbers of the other fields;
    0 for a steady task.
    """
    if not num_moving:
        yield "the mean", torch.zeros_like(y[0])
        return
    x = x[:, : y.shape[1]]
    correlation = (x * y).sum(0) / x.square().sum(0).clamp_min(1e-12)
    for name, kept in (
        ("the mean", torch.zeros_like(y[0])),
        ("persistence", torch.ones_like(y[0])),
        ("damped persistence", correlation.clamp(-1, 1)),
    ):
        kept[num_moving:] = 1.0
        yield name, kept
