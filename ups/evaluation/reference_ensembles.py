"""Ensembles that no network samples: the exact law, if the task has it, and the operator with its own errors.

    exact              fresh noise from the last input frame (`exact_futures`): no ensemble of independent
                       members has a lower mean CRPS (a fair score rewards dependent members:
                       ups/metrics/likeness.py)
    bayes_mean         the mean of exact samples: no single forecast has a lower mean squared error
    analogs            the operator's rollout plus the errors of its rollouts from the most similar reserved
                       starts, lead by lead
    starts             the operator's rollouts from noisy starts, where noise of measurement explains its
                       errors (ups/models/assimilation.py), with the noise that the data have

Nothing is fed back into an ensemble of analogs, so its errors grow only as they did in these rollouts. Starts
are compared by the latents of the last input frame, for a full-rank codec the normalised fields; parameters
that are input to models must agree.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ups.config.schema import EvaluateConfig
from ups.evaluation.ensemble import Ensembles
from ups.evaluation.truth import Truth, affordable
from ups.generative.sampling import Starts, sample_starts
from ups.models.assimilation import perturbed
from ups_discovery.seeds import generator

BANK, BANK_BYTES = 512, 2**28  # reserved starts whose errors are kept
EXACT = ("exact", "bayes_mean")

# rows, frames, members -> (rows, members, frames, C, *space)
Forecasts = Callable[[Tensor, int, int], Tensor]


def sample_exactly(truth: Truth, seed: int, rows: Tensor, num_frames: int, num_members: int) -> Tensor:
    """Exact futures of the last input frame of rows of the cache, in physical units."""
    start = truth.frames(rows, truth.context - 1, 1)[:, 0]
    return truth.draws(rows, start, rows, seed, num_frames, num_members)


def sample_law(
    truth: Truth, seed: int, rows: Tensor, num_frames: int, u_ref: Tensor, num_samples: int
) -> Tensor | None:
    """`num_samples` exact futures, fewer if memory is short, that replace the single future u_ref of the data
    as the truth; None if no law is known."""
    if not truth.task.has_known_law:
        return None
    return sample_exactly(truth, seed, rows, num_frames, affordable(num_samples, u_ref.nbytes))


def exact_mean(
    truth: Truth, seed: int, num_samples: int, rows: Tensor, num_frames: int, num_members: int
) -> Tensor:
    """The mean of `num_samples` exact futures as an ensemble of one member, whatever num_members is."""
    return torch.cat(
        [
            sample_exactly(truth, seed, some, num_frames, num_samples).mean(1, keepdim=True)
            for some in truth.cache.row_blocks(rows, num_frames * num_samples, len(rows))
        ]
    )


class RolloutErrors:
    """Errors of the operator's rollouts from the first frames of reserved trajectories.

    errors: (trajectories, num_frames, *tokens, dim), latents. starts: (trajectories, numbers), the latents of
    the last input frame. rows: of these trajectories in the cache.
    """

    def __init__(self, ensembles: Ensembles, num_frames: int):
        self.source, self.truth, self.seed = ensembles.residuals, ensembles.truth, ensembles.seed
        self.codec, cache = self.source.head.codec, self.truth.cache
        reserved = cache.split["reserved"]
        each = 4 * num_frames * cache.batch(reserved[:1], 0, 1)[0].numel()
        order = torch.randperm(len(reserved), generator=generator(self.seed, "errors"))
        self.rows = reserved[order[: max(1, min(BANK, BANK_BYTES // each))]]
        chunks = self.truth.cache.row_blocks(self.rows, num_frames, 64)
        self.starts = torch.cat([self._start(some) for some in chunks])
        self.errors = torch.cat(
            [
                self.truth.scored(some, self.codec, num_frames) - self._rollout(some, num_frames)
                for some in chunks
            ]
        )

    def _rollout(self, rows: Tensor, num_frames: int) -> Tensor:
        return self.source.operator.rollout(
            self.truth.given(rows, self.codec),
            self.source.name,
            self.truth.cache.parameters[rows],
            num_frames,
            forcing=self.truth.forced(rows, self.source.head, num_frames),
        )

    def _start(self, rows: Tensor) -> Tensor:
        return self.truth.given(rows, self.codec)[:, -1].flatten(1)

    def nearest(self, rows: Tensor, num_members: int) -> Tensor:
        """Positions (rows, num_members) of the errors from the most similar starts."""
        cache = self.truth.cache
        distance = torch.cdist(self._start(rows), self.starts).cpu()
        if not self.truth.task.hides:
            index = cache.parameter_index
            distance = distance.masked_fill(index[rows][:, None] != index[self.rows], torch.inf)
        return distance.argsort(1)[:, torch.arange(num_members) % len(self.rows)]

    @torch.no_grad()
    def sample(
        self, places_of: Callable[[Tensor, int], Tensor], rows: Tensor, num_frames: int, num_members: int
    ) -> Tensor:
        """The operator's rollouts plus the errors at the positions of `places_of`, in physical units."""
        return torch.cat(
            [
                self.add(some, self.errors[places_of(some, num_members)])
                for some in self.truth.cache.row_blocks(rows, num_frames * num_members, 64)
            ]
        )

    def add(self, rows: Tensor, errors: Tensor) -> Tensor:
        """The operator's rollouts plus errors (rows, members, num_frames, *tokens, dim), physical units."""
        z = self._rollout(rows, errors.shape[2])[:, None] + errors
        return self.truth.task.predicted(self.source.head.physical(z)).cpu()


@torch.no_grad()
def from_noisy_starts(ensembles: Ensembles, rows: Tensor, num_frames: int, num_members: int) -> Tensor:
    """Members of `sample_starts` with noise of measurement, which the data have, in physical units."""
    source, truth, seed, parts = ensembles.residuals, ensembles.truth, ensembles.seed, []
    head = source.head
    for some in truth.cache.row_blocks(rows, num_frames * num_members, len(rows)):
        given, names = truth.given(some, head.codec), some.tolist()
        starts = Starts(given, truth.cache.parameters[some], names)
        z = sample_starts(source.operator, head.name, starts, num_frames, num_members, seed)
        names = [f"{name} {member}" for name in names for member in range(num_members)]
        w = perturbed(head, head.codec.decode(z).flatten(0, 1), seed + 1, names, 1)
        u = truth.task.predicted(head.codec.denormalise(w)).cpu()
        parts.append(u.view(len(some), num_members, *u.shape[2:]))
    return torch.cat(parts)


@torch.no_grad()
def reference_ensembles(
    ensembles: Ensembles, settings: EvaluateConfig, num_frames: int
) -> dict[str, Forecasts]:
    """Name -> forecasts of this task."""
    truth, seed, errors = ensembles.truth, ensembles.seed, RolloutErrors(ensembles, num_frames)
    exact = {
        "exact": partial(sample_exactly, truth, seed),
        "bayes_mean": partial(exact_mean, truth, seed + 1, settings.truth_members),
    }
    return {
        "analogs": partial(errors.sample, errors.nearest),
        **({"starts": partial(from_noisy_starts, ensembles)} if errors.source.head.is_deterministic else {}),
        **(exact if truth.task.has_known_law else {}),
    }
