"""The drift of a stochastic equation, identified from pairs of consecutive frames.

If noise drives a field, its change from one frame to the next is mostly noise, in some of its modes. So this
fit differs from that of a deterministic equation (differences.py) in two ways: every mode is weighted by
its residual (generalised least squares, Aitken 1936), and the second frame is explained by the first alone.
Terms averaged over both frames would be correlated with the noise between them.

First differences are regressed as if the step were short (Euler-Maruyama). Then the integrator is fitted to
the pairs (Gauss-Newton), and terms are dropped whose coefficient is not many standard errors from zero.

The residuals are noise by nature. A drift is not stated if they are correlated from frame to frame, as noise
of measurement is, or if the frames have noise of measurement."""

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ups_discovery.certainty import UNCLEAR, Certainty, assessed
from ups_discovery.data import Data
from ups_discovery.integrator import Integrator, Model
from ups_discovery.least_squares import significant, solve
from ups_discovery.progress import beat, evaluation
from ups_discovery.seeds import generator
from ups_discovery.spectral import FieldTransform
from ups_discovery.windows import number_of

# in all pairs; of the regression, for a library of FEW_TERMS terms
REGRESSION_CELLS, FIT_CELLS = 2**20, 2**19
FEW_TERMS = 32
MAX_REGRESSION_PAIRS, MAX_FIT_PAIRS = 4096, 2048
MAX_BYTES = 2**27  # of the terms evaluated at once
MIN_STANDARD_ERRORS = 12.0  # of a coefficient from zero; pairs of one trajectory are not independent
MIN_POWER = 1e-3  # of the power of a channel's strongest mode: weaker modes depend on the grid
NUM_REWEIGHTINGS, MAX_ROUNDS, MAX_NEWTON_STEPS = 2, 12, 4
EARLY = 4  # times fewer pairs while terms are dropped; the last rounds have all
MAX_CORRELATION = 0.1  # of the residuals in consecutive frames, of a drift that is stated
MAX_ERROR = 1.5  # of the rollouts of a model over persistence's; those of true drifts have 0.8 to 0.9


class Drift:
    """The drift of one parameter value, by the library and the rollouts of an integrator."""

    def __init__(self, one: Integrator, data: Data, value: int):
        self.one, settings = one, one.settings
        self.space, self.dt, num_terms = tuple(one.space), settings["dt"], len(one.library)
        device = one.windows.regression.device
        self.transform = FieldTransform(self.space, settings["boundary"]).to(device)
        rng = generator(data.seed, data.name, "drift", value)
        num_cells = REGRESSION_CELLS * FEW_TERMS // max(FEW_TERMS, num_terms)
        count = number_of(num_cells, MAX_REGRESSION_PAIRS, one.space)
        bytes_each = 8 * math.prod(one.space) * num_terms * settings["num_channels"]
        self.batch_size = max(1, min(64, MAX_BYTES // bytes_each))
        rows = one.windows.rows
        self.pairs = data.states(rows[torch.arange(count) % len(rows)], 2, rng)
        self.fit_pairs = self.pairs[: number_of(FIT_CELLS, MAX_FIT_PAIRS, one.space)]
        self.power = sum(self.modes(s[:, 1] - s[:, 0]).square().sum(0) for s in self.pairs.split(64)) / count
        self.whitening = self.whitening_of(self.power)

    def modes(self, u: Tensor) -> Tensor:
        """The modes of (..., *space) as real numbers (..., numbers): a complex mode is two."""
        u_hat = self.transform(u)
        return torch.view_as_real(u_hat).flatten(-2) if u_hat.is_complex() else u_hat

    def whitening_of(self, residual: Tensor) -> Tensor:
        """One over the standard deviation of every number (C, numbers), from its mean square residual; 0 for
        modes without power."""
        least = MIN_POWER * self.power.amax(1, True)
        return torch.where(self.power > least, residual.clamp_min(least).rsqrt(), 0.0)

    def regression_columns(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The terms at the first frames times dt (rows, terms, numbers), and the change (rows, C,
        numbers)."""
        every = torch.arange(math.prod(self.space), device=self.pairs.device)
        for s in self.pairs.split(self.batch_size):
            beat(work=evaluation(6 * s.numel(), len(self.one.library)))
            values = self.dt * self.one.terms(s[:, 0], every)
            yield self.modes(values.unflatten(-1, self.space)), self.modes(s[:, 1] - s[:, 0])

    def regression_equations(self) -> Tensor:
        """Normal equations (C, terms + 1, terms + 1) of whitened differences."""
        total: Tensor | float = 0.0
        for x, y in self.regression_columns():
            columns = torch.cat([x[:, None].expand(-1, y.shape[1], -1, -1), y[:, :, None]], 2)
            columns = (columns * self.whitening[:, None]).permute(1, 2, 0, 3).flatten(2)
            total = total + columns @ columns.mT
        return total

    def regressed(self) -> Model:
        """The first model, as if the step were short."""
        every = list(range(len(self.one.library)))
        for _ in range(NUM_REWEIGHTINGS):
            values = torch.stack([solve(a, every) for a in self.regression_equations()])  # (C, terms)
            residual = sum(
                (y - torch.einsum("ct,rtm->rcm", values, x)).square().sum(0)
                for x, y in self.regression_columns()
            )
            self.whitening = self.whitening_of(residual / len(self.pairs))
        unknowns, values = [], []
        for channel, a in enumerate(self.regression_equations()):
            kept = significant(a, every, MIN_STANDARD_ERRORS)
            unknowns += [(channel, term) for term in kept]
            values.append(solve(a, kept))
        return Model(unknowns, torch.cat(values))

    def shooting_equations(self, model: Model, pairs: Tensor) -> tuple[Tensor, Tensor]:
        """Normal equations (unknowns + 1, unknowns + 1) of the values by pairs, with the integrator
        linearised in them; and its mean square residual (C, numbers)."""
        total = residual = torch.zeros((), dtype=pairs.dtype, device=pairs.device)
        for x, r in self.whitened(model, pairs):
            x, residual = x.flatten(1), residual + r.square().sum(0)
            total = total + x @ x.T
        return total, residual / len(pairs)

    def shooting_equations_by_row(self, model: Model, pairs: Tensor) -> Tensor:
        """The normal equations of every pair (pairs, unknowns + 1, unknowns + 1)."""
        columns = (x.transpose(0, 1).flatten(2) for x, _ in self.whitened(model, pairs))
        return torch.cat([x @ x.mT for x in columns])

    def whitened(self, model: Model, pairs: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Of a few pairs at a time: tangents and target, whitened (unknowns + 1, rows, C, numbers), and the
        integrator's residual (rows, C, numbers)."""
        for s in pairs.split(32):
            predicted, tangents = self.one.tangents(model, s)
            r = self.modes(s[:, 1] - predicted[:, 0])
            x = self.modes(tangents[:, :, 0])
            target = r + torch.einsum("u,urcm->rcm", model.values, x)
            yield torch.cat([x, target[None]]) * self.whitening, r

    def model(self) -> Model | None:
        """The drift of this parameter value, or None if it does not beat persistence in held-out rollouts."""
        one, model = self.one, self.regressed()
        pairs = self.fit_pairs[: math.ceil(len(self.fit_pairs) / EARLY)]
        for turn in range(MAX_ROUNDS):
            if not model.unknowns or (model := one.with_converged_steps(model)) is None:
                return None
            if not one.error(model, one.windows.held_out) <= MAX_ERROR * one.persistence_error:
                return None  # no noise, but what the library does not have: minutes until the fit shows it
            every = list(range(len(model.unknowns)))
            for _ in range(MAX_NEWTON_STEPS):
                a, residual = self.shooting_equations(model, pairs)
                if not bool(a.isfinite().all()):
                    return None
                now = solve(a, every)
                is_settled = bool(((now - model.values).abs() <= 0.01 * now.abs()).all())
                model = replace(model, values=now)
                if is_settled:
                    break
            self.whitening = self.whitening_of(residual)
            least = MIN_STANDARD_ERRORS * math.sqrt(len(pairs) / len(self.fit_pairs))
            kept = significant(a, every, least, max(1, len(every) // 4))
            if len(kept) == len(every) and turn > 1:
                if len(pairs) == len(self.fit_pairs):
                    break
                pairs = self.fit_pairs
            unknowns = [model.unknowns[place] for place in kept]
            model = replace(model, unknowns=unknowns, values=model.values[kept])
        return model if one.error(model, one.windows.held_out) < one.persistence_error else None

    def certainty(self, model: Model) -> Certainty:
        """The certainty of a drift, from the pairs that it was fitted to."""
        one, s = self.one, self.one.windows.regression
        built = one.build(model)
        first, second = (
            self.modes(s[:, i + 1] - one.integrate(built, model.values, s[:, i], 1)[:, 0]) * self.whitening
            for i in (0, 1)
        )
        correlation = float((first * second).sum() / (first.square().sum() * second.square().sum()).sqrt())
        # a drift is fitted to single frames, and takes the return from noise of measurement for dynamics
        doubt = UNCLEAR if one.windows.noise is not None or abs(correlation) > MAX_CORRELATION else ""

        def solved(a: Tensor, columns: list[int]) -> Tensor:
            values = torch.zeros_like(model.values)
            values[columns] = solve(a, columns)
            return values

        return assessed(one, model, self.fit_pairs, self.shooting_equations_by_row, solved, None, doubt)
