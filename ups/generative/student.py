"""Few-step students of a diffusion teacher: losses, samplers and validation.

Endpoint distillation: the student f(x, angle) = cos(angle) x - sin(angle) F(x, angle) regresses the end y of
the teacher's probability-flow ODE from x. y is a function of x, so f cannot become the conditional mean, as
it would when regressing r itself. Targets come from the teacher alone, so no error accumulates, as in
consistency training at small budgets (docs/lab/log.md). A path starts in pure noise, the only point
that a one-step sampler visits. The point where it passes `mid_angle` trains the second step towards the same
end: one solution, two pairs. Knowledge distillation on ODE pairs is Luhman and Luhman 2021 (arXiv
2101.02388); the second pair is ours.

`ensemble_scores` is the loss of the tuning phase and the only loss of the stage scoring (Lang et al. 2024,
arXiv 2412.15832).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ups.common.device import send
from ups.generative.corrector import Condition, Corrector, ResidualBatch
from ups.generative.diffusion import PURE_NOISE, Velocity, column, denoise, diffuse, path, sample
from ups.generative.residuals import Batches, Residuals, sum_by_task
from ups.metrics.proper import energy_score, fair_crps
from ups_discovery.seeds import generator

if TYPE_CHECKING:
    from ups.training.ranks import Ranks

STREAM = "consistency"  # of the random numbers
MID_EVERY = 4  # one row in so many starts at mid_angle
HUBER = 0.03  # pseudo-Huber scale, in residual standard deviations per element
ALPHA = 0.95  # of the almost fair CRPS (Lang et al. 2024), which penalises two equal members
SCORE_TOKENS = 4  # neighbouring tokens in one energy score
TINY = 1e-12  # smallest squared distance, so that equal samples have a gradient
MEMBERS = 16  # in validation


# ---- samplers with one and two evaluations


def sample_student(
    student: Velocity, noise: Tensor, mid_angle: float = 0.0, second: Tensor | None = None
) -> Tensor:
    """Samples from `noise` (batch, ...) in one evaluation, or in two with fresh noise `second` at
    `mid_angle`.

    y1 = f(noise, pi/2); then x = cos(mid) y1 + sin(mid) second, y = f(x, mid) (multistep consistency
    sampling, Song et al. 2023, algorithm 1). mid_angle in (0, pi/2).
    """
    y = denoise(student, noise, torch.full((len(noise),), PURE_NOISE, device=noise.device))
    if second is None:
        return y
    angle = torch.full((len(noise),), mid_angle, device=noise.device)
    return denoise(student, diffuse(y, second, angle), angle)


def as_map(network: Corrector, **description: float) -> Corrector:
    """A copy of the network that maps noise to samples; description: additional entries."""
    copy = Corrector(network.description | description | {"is_map": True})
    copy.load_state_dict(network.state_dict())
    return copy


# ---- pairs solved by the teacher


def mid_step(mid_angle: float, num_steps: int) -> int:
    """The step of a path of `num_steps` that starts nearest to `mid_angle`, but not the first of several."""
    return min(max(round((1 - mid_angle / PURE_NOISE) * num_steps), 1), num_steps - 1)


def student_of(teacher: Corrector, mid_angle: float) -> Corrector:
    """A copy of the teacher as a map, with mid_angle moved to the nearest angle of the teacher's path."""
    num_steps = teacher.sampler_steps
    return as_map(teacher, mid_angle=PURE_NOISE * (1 - mid_step(mid_angle, num_steps) / num_steps))


def pseudo_huber(difference: Tensor) -> Tensor:
    """sqrt(mean d^2 + c^2) - c per row (batch,), c = HUBER."""
    return (difference.square().flatten(1).mean(1) + HUBER**2).sqrt() - HUBER


def endpoint_loss(
    student: Velocity, x: Tensor, angle: Tensor, y: Tensor, size: Tensor | float = 1.0
) -> Tensor:
    """0.5 pseudo_huber(d) + 0.5 pseudo_huber(size d), d = f(x, angle) - y, per row (batch,).

    y: the end of the teacher's ODE from x. size: scale of each component in the units in which samples are
    scored. With whitened differences alone a network spends itself on small components, with scaled ones
    alone on a few large ones.
    """
    difference = denoise(student, x, angle) - y
    return 0.5 * (pseudo_huber(difference) + pseudo_huber(size * difference))


@torch.no_grad()
def solve_path(teacher: Velocity, start: Tensor, num_steps: int, step: int) -> tuple[Tensor, Tensor]:
    """(state of the teacher's path from `start` at pi/2 when `step` begins, its end)."""
    middle = state = start
    for i, state in enumerate(path(teacher, start, num_steps)):
        middle = state if i == step else middle
    return middle, state


@dataclass(frozen=True)
class Solved:
    """Whitened residuals r~ with their conditions, and the teacher's paths from noise: start at pi/2, middle
    at the student's mid_angle, end y. within: the rows' place in the global
    batch."""

    condition: Condition
    r: Tensor
    within: slice
    start: Tensor
    middle: Tensor
    y: Tensor

    def pairs(self, step: int, mid_angle: float) -> tuple[Tensor, Tensor]:
        """(x, angle) of the rows in a training step: one in MID_EVERY at mid_angle, the others in pure
        noise."""
        position = torch.arange(self.within.start, self.within.stop, device=self.r.device)
        is_mid = (position + step) % MID_EVERY == 0
        return (
            torch.where(column(is_mid, self.r), self.middle, self.start),
            torch.where(is_mid, mid_angle, PURE_NOISE),
        )


def pool_number(step: int, pool_batches: int, seed: int) -> tuple[int, int]:
    """(number of the solved batch that `step` trains on, smallest number still in use).

    A pass goes through `pool_batches` batches in random order; the next pass replaces the oldest quarter. So
    every batch is used in four passes, and all is a function of (seed, step): a resumed run solves its
    batches again.
    """
    pass_number, position = divmod(step, pool_batches)
    first = pass_number * (pool_batches // 4)
    order = torch.randperm(pool_batches, generator=generator(seed, "pool", pass_number))
    return first + int(order[position]), first


class SolvedPool:
    """Batches that the teacher has solved: at first use, kept while in use. size: of `pool_number`."""

    def __init__(self, teacher: Corrector, batches: Batches, mid_angle: float, size: int):
        self.teacher, self.batches, self.mid_angle, self.size = teacher, batches, mid_angle, size
        self.kept: dict[tuple[int, int, int], Solved] = {}

    def number(self, step: int) -> int:
        """The batch of a training step; drops those that are not used any more."""
        number, oldest = pool_number(step, self.size, self.batches.seed)
        self.kept = {key: solved for key, solved in self.kept.items() if key[0] >= oldest}
        return number

    def get(self, number: int, rows: slice) -> Solved:
        """`rows` of this rank's shard of a batch, solved."""
        key = (number, rows.start, rows.stop)
        if key not in self.kept:
            self.kept[key] = self.solve(number, rows)
        return self.kept[key]

    def solve(self, number: int, rows: slice) -> Solved:
        """The teacher's paths for `rows` of this rank's shard of batch `number`."""
        name, batch, within = self.batches.read(number, rows)
        r, condition = self.teacher.heads[name].whitened(*batch)
        start = condition.initial_state(self.batches.noise(r, within, number))
        ends = self.teacher.call(SolvedPool._ends, self, condition, start)
        return Solved(condition, r, within, start, *ends)

    def _ends(self, condition: Condition, start: Tensor) -> tuple[Tensor, Tensor]:
        num_steps = self.teacher.sampler_steps
        turn = mid_step(self.mid_angle, num_steps)
        return solve_path(self.teacher.velocity(condition), start, num_steps, turn)


# ---- scores


def ensemble_loss(members: Tensor, truth: Tensor, decode: Callable[[Tensor], Tensor]) -> Tensor:
    """0.5 afCRPS of the field + 0.25 energy score of blocks of SCORE_TOKENS + 0.25 of all tokens, per row
    (batch,).

    members (batch, M, *tokens, dim) and truth (batch, *tokens, dim) in units in which errors are of order
    one; decode: latents to the field, linear. The CRPS scores the marginals at points of the field. The
    energy scores, whose norms are the same in latents and in the field, score the joint structure.
    """
    crps = fair_crps(decode(members), decode(truth), ALPHA)
    whole = energy_score(members, truth, TINY)
    lines, lines_ref = members.flatten(2, -2), truth.flatten(1, -2)  # tokens in storage order
    usable = lines.shape[2] // SCORE_TOKENS * SCORE_TOKENS
    if usable == 0:
        return 0.5 * crps + 0.5 * whole
    parts = lines[:, :, :usable].unflatten(2, (-1, SCORE_TOKENS)).flatten(3).movedim(2, 1).flatten(0, 1)
    parts_ref = lines_ref[:, :usable].unflatten(1, (-1, SCORE_TOKENS)).flatten(2).flatten(0, 1)
    return (
        0.5 * crps + 0.25 * whole + 0.25 * energy_score(parts, parts_ref, TINY).view(len(truth), -1).mean(1)
    )


def score_noise(like: Tensor, rows: slice, size: int, num_members: int, seed: int, step: int) -> Tensor:
    """Noise (batch, M, *tokens, dim) of the scored members in `step`, for `rows` of a global batch of
    `size`."""
    noise = torch.randn(
        size, num_members, *like.shape[1:], generator=generator(seed, STREAM, "members", step)
    )
    return send(noise[rows], like.device)


def latent_scales(student: Corrector, condition: Condition) -> Tensor:
    """Scale (batch, *tokens, dim) of the whitened components in `_scaled`."""
    head = student.heads[condition.name]
    return head.r_std * condition.log_scale.exp() / head.r_std.square().mean().sqrt()


def _scaled(student: Corrector, condition: Condition, r: Tensor) -> Tensor:
    """Whitened residuals r in latent units over the RMS of r_std, so that large components weigh more."""
    head = student.heads[condition.name]
    return head.unwhiten(r, condition) / head.r_std.square().mean().sqrt()


def _sample(student: Corrector, condition: Condition, noise: Tensor) -> Tensor:
    """Samples (batch, M, ...) of one evaluation from noise (batch, M, ...), as `_scaled`."""
    num, batch = noise.shape[1], torch.arange(len(noise), device=noise.device)
    repeated = condition.rows(batch.repeat_interleave(num))
    r = sample_student(student.velocity(repeated), noise.flatten(0, 1))
    return _scaled(student, repeated, r).unflatten(0, (-1, num))


def ensemble_scores(
    student: Corrector, source: Residuals, condition: Condition, r: Tensor, noise: Tensor
) -> Tensor:
    """`ensemble_loss` of samples of one evaluation (batch,); r (batch, ...) whitened, noise (batch, M,
    ...)."""
    return ensemble_loss(_sample(student, condition, noise), _scaled(student, condition, r), source.decode)


# ---- validation


@torch.no_grad()
def teacher_endpoints(teacher: Corrector, seed: int, name: str, number: int, batch: ResidualBatch) -> tuple:
    """(condition, r~, members' noise, the teacher's samples from the first two noises) of a validation
    batch."""
    r, condition = teacher.heads[name].whitened(*batch)
    noise = torch.randn(len(r), MEMBERS, *r.shape[1:], generator=generator(seed, STREAM, "validate", number))
    noise = send(noise, r.device)
    velocity, num_steps = teacher.velocity(condition), teacher.sampler_steps
    return (
        condition,
        r,
        noise,
        sample(velocity, noise[:, 0], num_steps),
        sample(velocity, noise[:, 1], num_steps),
    )


def validate(
    student: Corrector, residuals: dict[str, Residuals], shard: dict[str, list], ranks: "Ranks"
) -> dict[str, dict]:
    """Validation metrics of one-evaluation samples, for every task. A collective.

    pair: squared distance to the teacher's sample over its variance; variance: over the teacher's; energy:
    energy score of latents; crps and spread_skill: of the field. shard: task -> entries of
    `teacher_endpoints`.
    """

    def sums_of(name: str, batch: tuple) -> Tensor:
        condition, r, noise, *ends = batch
        members = _sample(student, condition, noise)
        truth, first, second = (_scaled(student, condition, x) for x in (r, *ends))
        field, field_ref, size = residuals[name].decode(members), residuals[name].decode(truth), len(r)
        return torch.stack(
            [
                (members[:, 0] - first).square().mean() * size,
                0.5 * (first - second).square().mean() * size,
                members.var(1).mean() * size,
                fair_crps(field, field_ref).sum(),
                (1 + 1 / noise.shape[1]) * field.var(1).mean() * size,
                (field.mean(1) - field_ref).square().mean() * size,
                energy_score(members, truth).sum(),
                r.new_tensor(size),
            ]
        )

    sums = sum_by_task(shard, sums_of, 8, ranks).tolist()
    return {
        name: {
            "pair": pair / max(teacher_variance, 1e-12),
            "variance": variance / max(teacher_variance, 1e-12),
            "crps": crps / count,
            "energy": energy / count,
            "spread_skill": (spread / max(skill, 1e-12)) ** 0.5,
        }
        for name, (pair, teacher_variance, variance, crps, spread, skill, energy, count) in zip(
            shard, sums, strict=True
        )
    }


def flat_metrics(metrics: dict[str, dict]) -> dict[str, float]:
    """The metrics of `validate` as task/metric -> value."""
    return {f"{name}/{key}": value for name, entry in metrics.items() for key, value in entry.items()}


def format_metrics(metrics: dict[str, dict]) -> str:
    """The metrics of `validate` in one line."""
    return ", ".join(
        f"{name} pair {entry['pair']:.3f} variance {entry['variance']:.2f} CRPS "
        f"{entry['crps']:.4f} spread/skill {entry['spread_skill']:.2f}"
        for name, entry in metrics.items()
    )
