"""The drift of an equation that noise drives, from pairs of frames.

What such a field does from one frame to the next is mostly noise, in some of its modes. So least squares
count every mode by what is left in it (generalised least squares, Aitken 1936), and explain the second frame
of a pair by the first alone: the noise between them is part of the second, and terms averaged over both, as
for quiet data (ups/models/bases/identify.py), take it for theirs. First differences are regressed as if the
step were short (Euler and Maruyama), then the integrator is fitted to the pairs (Gauss and Newton), and terms
go whose weight is not many times its standard error.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ups.common.progress import beat
from ups.common.seeds import generator
from ups.common.spectral import FieldTransform
from ups.models.bases.identify import Identification, Model
from ups.models.bases.least_squares import significant, solve

if TYPE_CHECKING:
    from ups.models.bases.base import Samples

NUM_REGRESSED, NUM_FITTED = 2**20, 2**19  # cells of the pairs, for a library of so many terms
FEW_TERMS = 32
MOST_REGRESSED, MOST_FITTED = 4096, 2048  # pairs
BYTES = 2**27  # of terms at a time
SURE = 12.0  # standard errors that a weight is from zero; pairs of one trajectory are not independent
LEAST = 1e-3  # of the power of a channel's strongest mode: weaker ones tell of the grid
REWEIGHED, ROUNDS, NEWTON = 2, 12, 4


class Drift:
    """Of one parameter value, over the library, integrator and judgement of its `Identification`."""

    def __init__(self, found: Identification, samples: "Samples", value: int):
        self.found, settings = found, found.settings
        self.transform = FieldTransform(tuple(settings["space"]), settings["boundary"]).to(found.seen.device)
        self.space, self.dt, many = tuple(settings["space"]), settings["dt"], len(found.library)
        draw = generator(samples.seed, samples.name, "drift", value)
        count = found.count(NUM_REGRESSED * FEW_TERMS // max(FEW_TERMS, many), MOST_REGRESSED)
        self.at_once = max(1, min(64, BYTES // (8 * found.cells * many * settings["num_channels"])))
        self.pairs = samples.states(found.rows[torch.arange(count) % len(found.rows)], 2, draw)
        self.few = self.pairs[: found.count(NUM_FITTED, MOST_FITTED)]
        self.power = sum(self.modes(s[:, 1] - s[:, 0]).square().sum(0) for s in self.pairs.split(64)) / count
        self.trust = self.trusted(self.power)

    def modes(self, u: Tensor) -> Tensor:
        """(..., *space) to (..., numbers), those of a complex mode being two."""
        u_hat = self.transform(u)
        return torch.view_as_real(u_hat).flatten(-2) if u_hat.is_complex() else u_hat

    def trusted(self, left: Tensor) -> Tensor:
        """One over the standard deviation of every number (C, numbers), left (C, numbers) being its mean
        square; 0 where hardly anything moves."""
        least = LEAST * self.power.amax(1, True)
        return torch.where(self.power > least, left.clamp_min(least).rsqrt(), 0.0)

    def columns(self) -> Iterator[tuple[Tensor, Tensor]]:
        """What the library's terms at the first frames do in a frame's time (rows, terms, numbers), and what
        happened (rows, C, numbers)."""
        every = torch.arange(self.found.cells, device=self.pairs.device)
        for s in self.pairs.split(self.at_once):
            beat()
            values = self.dt * self.found.whole(s[:, 0], every)
            yield self.modes(values.unflatten(-1, self.space)), self.modes(s[:, 1] - s[:, 0])

    def equations(self) -> Tensor:
        """Normal equations (C, terms + 1, terms + 1) of whitened differences."""
        total: Tensor | float = 0.0
        for x, y in self.columns():
            columns = torch.cat([x[:, None].expand(-1, y.shape[1], -1, -1), y[:, :, None]], 2)
            columns = (columns * self.trust[:, None]).permute(1, 2, 0, 3).flatten(2)
            total = total + columns @ columns.mT
        return total

    def regressed(self) -> Model:
        """A first model, as if the step were short."""
        every = list(range(len(self.found.library)))
        for _ in range(REWEIGHED):
            values = torch.stack([solve(a, every) for a in self.equations()])  # (C, terms)
            left = sum(
                (y - torch.einsum("ct,rtm->rcm", values, x)).square().sum(0) for x, y in self.columns()
            )
            self.trust = self.trusted(left / len(self.pairs))
        unknowns, values = [], []
        for channel, a in enumerate(self.equations()):
            kept = significant(a, every, SURE)
            unknowns += [(channel, term) for term in kept]
            values.append(solve(a, kept))
        return Model(unknowns, torch.cat(values))

    def shooting(self, model: Model) -> tuple[Tensor, Tensor]:
        """Normal equations (unknowns + 1, unknowns + 1) for the values themselves, the integrator being taken
        as linear in them; and the mean square (C, numbers) of what it leaves."""
        total: Tensor | float = 0.0
        left: Tensor | float = 0.0
        for x, r in self.whitened(model, self.few):
            x, left = x.flatten(1), left + r.square().sum(0)
            total = total + x @ x.T
        return total, left / len(self.few)

    def shooting_rows(self, model: Model, pairs: Tensor) -> Tensor:
        """The normal equations of every pair (pairs, unknowns + 1, unknowns + 1)."""
        parts = (x.transpose(0, 1).flatten(2) for x, _ in self.whitened(model, pairs))
        return torch.cat([x @ x.mT for x in parts])

    def whitened(self, model: Model, pairs: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Tangents and what they are to explain, whitened (unknowns + 1, rows, C, numbers), and what the
        integrator leaves (rows, C, numbers), of some pairs at a time."""
        for s in pairs.split(32):
            at, tangents = self.found.tangents(model, s)
            r = self.modes(s[:, 1] - at[:, 0])
            x = self.modes(tangents[:, :, 0])
            wanted = r + torch.einsum("u,urcm->rcm", model.values, x)
            yield torch.cat([x, wanted[None]]) * self.trust, r

    def model(self) -> Model | None:
        """The terms and their weights, or None where nothing is better than persistence over longer
        frames."""
        found, model = self.found, self.regressed()
        for turn in range(ROUNDS):
            if not model.unknowns or (model := found.timed(model)) is None:
                return None
            every = list(range(len(model.unknowns)))
            for _ in range(NEWTON):
                a, left = self.shooting(model)
                if not bool(a.isfinite().all()):
                    return None
                now = solve(a, every)
                is_settled = bool(((now - model.values).abs() <= 0.01 * now.abs()).all())
                model = replace(model, values=now)
                if is_settled:
                    break
            self.trust, kept = self.trusted(left), significant(a, every, SURE, max(1, len(every) // 4))
            if len(kept) == len(every) and turn > 1:
                break
            model = replace(
                model, unknowns=[model.unknowns[place] for place in kept], values=model.values[kept]
            )
        return model if found.error(model, found.held) < found.still else None
