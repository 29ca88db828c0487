"""Ensembles that no network draws: the exact law, where the task knows it, and the operator's own errors.

    exact              fresh noise from the shown state (Task.draw): no ensemble of independent members has a
                       lower mean CRPS (a fair score rewards dependent ones: ups/evaluation/checks.py)
    bayes_mean         the mean of exact draws: no single forecast has a lower mean squared error
    dressed_leads      the operator's rollout + what its rollouts leave of reserved trajectories, at random
    analogs            the same of the reserved trajectories whose starts are most like the shown one
    normal_leads       the operator's rollout + Gaussian noise of the mean and scale of these errors by lead
    normal_analogs     the same of the NEAR trajectories whose starts are most like the shown one

The last four are of whole rollouts, lead by lead, from the same frame on: nothing is fed back, so nothing
can grow but what grew there. The distance of analogs is that of the latents last shown, which for a
full-rank codec is that of the normalised fields; a parameter that models are told must agree.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ups.common.seeds import generator
from ups.common.transfer import send
from ups.config import EvaluateConfig
from ups.evaluation.ensemble import Ensembles
from ups.evaluation.truth import Truth, affordable

BANK, BANK_BYTES = 512, 2**28  # reserved starts behind errors by lead
EXACT = ("exact", "bayes_mean")
NEAR = 64  # of them, to which a Gaussian of each start is fitted
CHEAP_ROLLOUTS = ("dressed_leads", "analogs", "normal_leads", "normal_analogs")

# rows, frames, members -> (rows, members, frames, C, *space)
Forecasts = Callable[[Tensor, int, int], Tensor]


def draw_exactly(truth: Truth, seed: int, rows: Tensor, num_frames: int, num_members: int) -> Tensor:
    """Exact futures of the last frame that models are shown, of rows of the cache, in physical units."""
    shown = truth.frames(rows, truth.context - 1, 1)[:, 0]
    return truth.draws(rows, shown, rows, seed, num_frames, num_members)


def draw_law(
    truth: Truth, seed: int, rows: Tensor, num_frames: int, u_ref: Tensor, num_draws: int
) -> Tensor | None:
    """`num_draws` exact futures, fewer where they take too much memory, to judge by in place of the one that
    the data hold, u_ref; None where no law is known."""
    if truth.task.exact_futures is None:
        return None
    return draw_exactly(truth, seed, rows, num_frames, affordable(num_draws, u_ref))


def mean_exactly(
    truth: Truth, seed: int, num_draws: int, rows: Tensor, num_frames: int, num_members: int
) -> Tensor:
    """The mean of `num_draws` exact futures, one member. num_members changes nothing."""
    return torch.cat(
        [
            draw_exactly(truth, seed, some, num_frames, num_draws).mean(1, keepdim=True)
            for some in truth.cache.row_blocks(rows, num_frames * num_draws, len(rows))
        ]
    )


class Errors:
    """What the operator's rollouts leave from the first reserved frames, (trajectories, num_frames, *tokens,
    dim)."""

    def __init__(self, ensembles: Ensembles, num_frames: int):
        self.source, self.truth, self.seed = ensembles.residuals, ensembles.truth, ensembles.seed
        self.device, self.codec, cache = ensembles.device, self.source.head.codec, self.truth.cache
        reserved = cache.split["reserved"]
        each = 4 * num_frames * cache.batch(reserved[:1], 0, 1)[0].numel()
        order = torch.randperm(len(reserved), generator=generator(self.seed, "errors"))
        self.rows = reserved[order[: max(1, min(BANK, BANK_BYTES // each))]]
        self.shown = torch.cat([self._shown(some) for some in self._parts(self.rows, num_frames)])
        self.left = torch.cat(
            [
                self.truth.scored(some, self.codec, self.device, num_frames) - self._rollout(some, num_frames)
                for some in self._parts(self.rows, num_frames)
            ]
        )

    def _parts(self, rows: Tensor, num_frames: int) -> tuple[Tensor, ...]:
        return self.truth.cache.row_blocks(rows, num_frames, 64)

    def _rollout(self, rows: Tensor, num_frames: int) -> Tensor:
        source = self.source
        return source.operator.rollout(
            self._given(rows),
            source.name,
            self.truth.cache.parameters[rows],
            num_frames,
            forcing=self.truth.forced(rows, source.head, num_frames),
        )

    def _given(self, rows: Tensor) -> Tensor:
        return self.truth.given(rows, self.codec, self.device)

    def _shown(self, rows: Tensor) -> Tensor:
        return self._given(rows)[:, -1].flatten(1)

    def random(self, rows: Tensor, num_members: int) -> Tensor:
        """Which errors the members of each row get (rows, num_members), drawn at random."""
        return torch.stack(
            [
                torch.randperm(len(self.rows), generator=generator(self.seed, "errors", row))
                for row in rows.tolist()
            ]
        )[:, torch.arange(num_members) % len(self.rows)]

    def nearest(self, rows: Tensor, num_members: int) -> Tensor:
        """The same, those of the most similar starts."""
        cache = self.truth.cache
        apart = torch.cdist(self._shown(rows), self.shown).cpu()
        if not self.truth.task.hides:
            told = cache.parameter_index
            apart = apart.masked_fill(told[rows][:, None] != told[self.rows], torch.inf)
        return apart.argsort(1)[:, torch.arange(num_members) % len(self.rows)]

    @torch.no_grad()
    def draw(
        self, choose: Callable[[Tensor, int], Tensor], rows: Tensor, num_frames: int, num_members: int
    ) -> Tensor:
        """The operator's rollout with the chosen errors, physical units."""
        return torch.cat(
            [
                self._with(some, self.left[choose(some, num_members)])
                for some in self._parts(rows, num_frames * num_members)
            ]
        )

    @torch.no_grad()
    def draw_normal(
        self, choose: Callable[[Tensor, int], Tensor] | None, rows: Tensor, num_frames: int, num_members: int
    ) -> Tensor:
        """The operator's rollout with noise of the mean and scale of each number in the NEAR chosen errors,
        or in all, physical units."""
        parts = []
        for some in self._parts(rows, num_frames * max(num_members, NEAR)):
            near = self.left[choose(some, NEAR)] if choose else self.left[None]
            mean, scale = near.mean(1, keepdim=True), near.std(1, keepdim=True)
            noise = torch.stack(
                [
                    torch.randn(
                        num_members, *self.left.shape[1:], generator=generator(self.seed, "normal", row)
                    )
                    for row in some.tolist()
                ]
            )
            parts.append(self._with(some, mean + scale * send(noise, self.device)))
        return torch.cat(parts)

    def _with(self, rows: Tensor, errors: Tensor) -> Tensor:
        """The operator's rollouts of rows with errors (rows, members, num_frames, *tokens, dim)."""
        z = self._rollout(rows, errors.shape[2])[:, None] + errors
        return self.truth.task.predicted(self.source.head.physical(z)).cpu()


@torch.no_grad()
def rivals_of(ensembles: Ensembles, settings: EvaluateConfig, num_frames: int) -> dict[str, Forecasts]:
    """Name -> forecasts of this task."""
    truth, seed, errors = ensembles.truth, ensembles.seed, Errors(ensembles, num_frames)
    known = {
        "exact": partial(draw_exactly, truth, seed),
        "bayes_mean": partial(mean_exactly, truth, seed + 1, settings.truth_members),
    }
    return {
        "dressed_leads": partial(errors.draw, errors.random),
        "analogs": partial(errors.draw, errors.nearest),
        "normal_leads": partial(errors.draw_normal, None),
        "normal_analogs": partial(errors.draw_normal, errors.nearest),
        **(known if truth.task.exact_futures else {}),
    }


def timed(
    forecasts: Forecasts, rows: Tensor, num_frames: int, num_members: int
) -> tuple[Tensor, dict[str, Any]]:
    """(members, what they cost)."""
    begun = time.perf_counter()
    members = forecasts(rows, num_frames, num_members)
    seconds = time.perf_counter() - begun
    return members, {
        "ms_per_state": 1e3 * seconds / (len(rows) * num_frames * members.shape[1]),
        "evaluations_per_state": 0.0,
    }
