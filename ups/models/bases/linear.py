"""The linear base: every cell of the next frame from every cell of the last ones, by a map of reduced rank
that is fitted by ridge regression.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ups.models.bases.base import OVER_BUDGET, Base, Fit, OverBudgetError, ParameterBatch, Samples
from ups_discovery.boundary import PERIODIC, along

if TYPE_CHECKING:
    from ups.models.bases.reduced_rank import Map

BATCH = 32  # windows that are read at once
MEAN = "the mean"
# nominal seconds of a fit to all windows at once. Else it begins with fewer, and takes MORE times as many
# while that reduces the held-out mean square error to MORE_GAIN, of starts within CLEARLY times the least
CHEAP, FEWEST, MORE, MORE_GAIN, CLEARLY = 0.5, 32, 2, 0.81, 2.0


class Linear(Base):
    """u_next = mean' + kept * (u - mean) + (x - mean) U V^T. x: the last `lags` frames, the forcing and the
    standardised parameters; kept: 0 or 1 per cell.

    It needs no symmetry, so it serves walls, masks and coefficients that vary in space.
    """

    kind, degree, is_costly = "linear", 1, True
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
        num_forcing: int = 0,
        series: Sequence[int] = (),
        **_: Any,
    ):
        super().__init__()
        self.series, self.forcing_fields = list(series), [*set(range(num_forcing)) - set(series)]
        self.space, self.lags, self.num_channels = tuple(space), lags, num_channels
        self.is_steady = num_inputs > 0
        cells = math.prod(space)
        num_out, num_in = num_channels * cells, (num_inputs or num_channels * lags) * cells + num_parameters
        num_in += 2 * (len(self.forcing_fields) * cells + len(self.series))
        for name, size in (("mean_in", num_in), ("mean", num_out), ("kept", num_out)):
            self.register_buffer(name, torch.zeros(size))
        self.register_buffer("reads", torch.zeros(num_in, rank))
        self.register_buffer("gives", torch.zeros(num_out, rank))

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
        x = self.inputs(u, parameters) - self.mean_in
        out = self.mean + x @ self.reads @ self.gives.T
        if not self.is_steady:
            out = out + self.kept * x[:, : len(self.kept)]
        return out.view(-1, self.num_channels, *self.space)

    @classmethod
    @torch.no_grad()
    def fit(cls, samples: Samples, settings: dict[str, Any]) -> Fit["Linear"]:
        """Yield, for every start (see `starts`) and number of frames, the start itself and the map that is
        best on held-out windows.

        A costly map is fitted to a few windows, then to more and more: as long as that reduces its held-out
        error, and from those starts whose error is not clearly larger than the least.
        """
        from ups.models.bases.reduced_rank import FOLDS, Map, fit_maps, work

        task = samples.head.task
        if task.is_symmetric or (task.is_shifted and PERIODIC in along(task.boundary, task.ndim)):
            return f"{task.name} is shifted or mirrored in training, which a map between cells cannot follow"
        missing = None
        for lags in sorted({1} if task.is_steady else {1, settings["history"]}):
            unfitted = cls(**{**settings, "lags": lags}).to(samples.device)
            counts = [unfitted.num_windows(samples)]
            if counts[0] < 2 * FOLDS:
                return f"{counts[0]} training windows are too few; it takes {2 * FOLDS}"
            sizes = len(unfitted.mean_in), len(unfitted.mean)
            left, found, least = unfitted.starts(settings), {}, math.inf
            while work(counts[0], *sizes, len(left)) > CHEAP and counts[0] >= MORE * FEWEST:
                counts.insert(0, counts[0] // MORE)
            for count in counts:
                try:
                    samples.spend(work(count, *sizes, len(left)))
                except OverBudgetError:
                    missing = OVER_BUDGET
                    break
                found = fit_maps(*unfitted.windows(samples, count), left, cls.MOST_WEIGHTS // sum(sizes))
                before, least = least, min(error for *_, error in found.values())
                if least > MORE_GAIN * before:
                    break
                left = {name: left[name] for name, (*_, error) in found.items() if error <= CLEARLY * least}
            for start, (numbers, best, _) in found.items():
                if lags == 1 and start == MEAN:  # persistence is a base of its own
                    none = Map(best.reads[:, :0], best.gives[:, :0])
                    yield unfitted.made(settings, start, numbers, none)
                if best.rank:
                    yield unfitted.made(settings, start, numbers, best)
        return missing

    @torch.no_grad()
    def twin(self, samples: Samples, settings: dict[str, Any]) -> tuple[dict[str, Any], "Linear"]:
        """The map fitted to other samples, from the same start."""
        from ups.models.bases.reduced_rank import fit_maps, work

        count, sizes = self.num_windows(samples), (len(self.mean_in), len(self.mean))
        while work(count, *sizes, 1) > samples.most_work and count >= MORE * FEWEST:
            count //= MORE
        samples.spend(work(count, *sizes, 1))
        most = self.MOST_WEIGHTS // sum(sizes)
        found, best, _ = fit_maps(*self.windows(samples, count), {MEAN: self.kept}, most)[MEAN]
        return self.made(settings, MEAN, found, best)[1:]

    def starts(self, settings: dict[str, Any]) -> dict[str, Tensor]:
        """Name -> the fraction (numbers,) of a number's deviation that persists without the map: none or all
        of it. Fixed fields, whose numbers come last, persist."""
        nothing = torch.zeros_like(self.mean)
        if self.is_steady:
            return {MEAN: nothing}
        nothing[settings["num_moving"] * len(nothing) // self.num_channels :] = 1.0
        return {MEAN: nothing, "persistence": torch.ones_like(nothing)}

    def made(
        self, settings: dict, start: str, found: dict[str, Tensor], best: "Map"
    ) -> tuple[str, dict[str, Any], "Linear"]:
        """The candidate (name, settings, base) of fitted tensors."""
        settings = {**settings, "lags": self.lags, "rank": best.rank}
        found = found | {"reads": best.reads, "gives": best.gives}
        base = Linear(**settings).to(best.reads.device)
        base.load_state_dict(found)
        frames = f"{self.lags} frame{'s' * (self.lags > 1)}"
        return f"linear from {start}, {frames}, rank {best.rank}", settings, base

    def num_windows(self, samples: Samples) -> int:
        """The number of training windows: all, or as many as fit into memory."""
        from ups.models.bases.reduced_rank import MOST

        num_in, num_out, (most, each) = len(self.mean_in), len(self.mean), self.MOST_WINDOWS
        most = max(most, each * num_in) if num_in <= MOST else most
        most = min(most, max(1, self.MOST_BYTES // (4 * (num_in + num_out))))
        return min(len(samples.rows(None)) * samples.num_starts, most)

    def windows(self, samples: Samples, count: int) -> tuple[Tensor, Tensor]:
        """Inputs x (n, numbers) and next frames y (n, numbers) of an even selection of training windows, in
        the order of initial conditions and time.
        """
        num_in, num_out, rows = len(self.mean_in), len(self.mean), samples.rows(None)
        rows = rows[samples.cache.trajectory[rows].argsort(stable=True)]
        total = len(rows) * samples.num_starts
        picked = torch.linspace(0, max(0, total - 1), count, dtype=torch.float64).round().long()
        x = torch.empty(count, num_in, device=samples.device)
        y = torch.empty(count, num_out, device=samples.device)
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
