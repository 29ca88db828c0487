"""Few-step students of a diffusion teacher: what they learn from, and what they are held to.

Endpoint distillation: the student f(x, angle) = cos(angle) x - sin(angle) F(x, angle) regresses the end y of
the teacher's probability-flow ODE that starts in x. y is a function of x, so the regression has no spread to
average over: f cannot end as the conditional mean (that is the trap of regressing r itself), and nothing is
bootstrapped, so no error accumulates (the trap of consistency training at small budgets:
bench/bootstrapped.py). A path begins in pure noise, the only point a one-step sampler visits, and where it
passes `mid_angle` it serves the second step, to which its end belongs as well: one solution, two pairs.
Knowledge distillation on ODE pairs is Luhman and Luhman 2021 (arXiv 2101.02388); the second is ours.

`scores` is what the tuning phase adds, and what the rival learns from alone (Lang et al. 2024, arXiv
2412.15832).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ups.common.seeds import generator
from ups.common.transfer import send
from ups.generative.corrector import Condition, Corrector, Drawn
from ups.generative.diffusion import NOISE, Velocity, column, denoise, diffuse, path, sample
from ups.generative.residuals import Batches, Residuals, summed
from ups.metrics.proper import energy_score, fair_crps

STREAM = "consistency"  # of the random numbers
NUM_TURNS = 4  # steps in which a row begins at mid_angle once
HUBER = 0.03  # pseudo-Huber scale, in residual standard deviations per element
ALPHA = 0.95  # of the almost fair CRPS (Lang et al. 2024): keeps two equal members from being free
TINY = 1e-12  # squared distance to which equal draws are lifted, for a gradient
MEMBERS = 16  # in validation
VARIES = 0.1  # from the teacher's variance a student's may differ
GAIN = 0.995  # tuning is kept if CRPS falls to this share or below, and nothing else is worse


# ---------------------------------------------------------------- one and two evaluations


def draw_members(student: Velocity, noise: Tensor) -> Tensor:
    """One-evaluation residuals f(noise, pi/2), with gradient, from noise (batch, ...)."""
    return denoise(student, noise, torch.full((len(noise),), NOISE, device=noise.device))


@torch.no_grad()
def sample_student(
    student: Velocity, noise: Tensor, mid_angle: float = 0.0, second: Tensor | None = None
) -> Tensor:
    """Residuals from `noise` (batch, ...) in one evaluation, or in two with fresh noise `second` at
    `mid_angle`.

    y1 = f(noise, pi/2); then x = cos(mid) y1 + sin(mid) second, y = f(x, mid) (multistep consistency
    sampling, Song et al. 2023, algorithm 1); mid_angle in (0, pi/2).
    """
    y = draw_members(student, noise)
    if second is None:
        return y
    angle = torch.full((len(noise),), mid_angle, device=noise.device)
    return denoise(student, diffuse(y, second, angle), angle)


def twin_of(network: Corrector, **facts: float) -> Corrector:
    """A network with the same weights that draws at once; facts: added to the description."""
    twin = Corrector(network.description | facts | {"is_map": True})
    twin.load_state_dict(network.state_dict())
    return twin


def fresh_of(network: Corrector) -> Corrector:
    """A network with the statistics, conditional mean, scale and waves of this one that draws at once: by
    what is linear alone, until it is trained."""
    fresh = Corrector(network.description | {"is_map": True})
    for name, head in network.heads.items():
        fresh.heads[name].load_state_dict(head.fitted, strict=False)
    return fresh


# ---------------------------------------------------------------- pairs solved by the teacher


def turn_of(mid_angle: float, num_steps: int) -> int:
    """The step, of a path of `num_steps` of them, that begins nearest to `mid_angle`, after the first where
    there are more."""
    return min(max(round((1 - mid_angle / NOISE) * num_steps), 1), num_steps - 1)


def student_of(teacher: Corrector, mid_angle: float) -> Corrector:
    """The teacher's twin whose second evaluation is where the teacher's own path passes, next to
    `mid_angle`."""
    num_steps = teacher.description["sampler_steps"]
    return twin_of(teacher, mid_angle=NOISE * (1 - turn_of(mid_angle, num_steps) / num_steps))


def pseudo_huber(difference: Tensor) -> Tensor:
    """sqrt(mean d^2 + c^2) - c per row (batch,), c = HUBER."""
    return (difference.square().flatten(1).mean(1) + HUBER**2).sqrt() - HUBER


def endpoint_loss(
    student: Velocity, x: Tensor, angle: Tensor, y: Tensor, size: Tensor | float = 1.0
) -> Tensor:
    """Half pseudo_huber(f(x, angle) - y) and half the same of `size` times the difference, per row (batch,);
    y = the end of the teacher's ODE from the same x, size: of each number in the units in which draws are
    judged. White alone, a network learns what carries no size; in units alone, the few that do."""
    difference = denoise(student, x, angle) - y
    return 0.5 * (pseudo_huber(difference) + pseudo_huber(size * difference))


def solve_path(teacher: Velocity, start: Tensor, num_steps: int, turn: int) -> tuple[Tensor, Tensor]:
    """(where the teacher's path from `start` at pi/2 is as step `turn` begins, its end)."""
    passed = state = start
    for i, state in enumerate(path(teacher, start, num_steps)):
        passed = state if i == turn else passed
    return passed, state


@dataclass(frozen=True)
class Solved:
    """Residuals r~ under their conditions, and the teacher's path from noise: its start at pi/2, where it
    passes the student's mid_angle, and its end y. within: as of `Noised`."""

    condition: Condition
    r: Tensor
    within: slice
    start: Tensor
    passed: Tensor
    y: Tensor

    def pairs(self, step: int, mid_angle: float) -> tuple[Tensor, Tensor]:
        """(x, angle) of the rows in a step of training: every fourth at mid_angle, the rest in noise."""
        places = torch.arange(self.within.start, self.within.stop, device=self.r.device)
        is_mid = (places + step) % NUM_TURNS == 0
        return (
            torch.where(column(is_mid, self.r), self.passed, self.start),
            torch.where(is_mid, mid_angle, NOISE),
        )


def solve(teacher: Corrector, batches: Batches, mid_angle: float, number: int, part: slice) -> Solved:
    """The rows `part` of this rank's share of the batch `number`, for `student_of` this mid_angle."""
    r, condition, within = batches.shown(teacher, number, part)
    start, num_steps = condition.begin(batches.noise(r, within, number)), teacher.description["sampler_steps"]
    passed, y = solve_path(teacher.velocity(condition), start, num_steps, turn_of(mid_angle, num_steps))
    return Solved(condition, r, within, start, passed, y)


def pool_number(step: int, pool_batches: int, seed: int) -> tuple[int, int]:
    """(number of the solved batch that `step` trains on, smallest number still in use).

    A pass goes through `pool_batches` batches in random order; the next pass drops the oldest quarter and
    adds as many. So each serves four passes, and everything is a function of (seed, step): a resumed run
    solves again what it needs.
    """
    turn, place = divmod(step, pool_batches)
    first = turn * (pool_batches // 4)
    order = torch.randperm(pool_batches, generator=generator(seed, "pool", turn))
    return first + int(order[place]), first


class SolvedPool:
    """Parts of batches, solved when first asked for, kept while used."""

    def __init__(self, solve: Callable[[int, slice], Any]):
        self.solve = solve
        self.kept: dict[tuple[int, int, int], Any] = {}

    def get(self, number: int, part: slice, oldest: int) -> Any:
        """solve(number, part), remembered until `oldest` passes it."""
        key = (number, part.start, part.stop)
        if key not in self.kept:
            self.kept = {k: v for k, v in self.kept.items() if k[0] >= oldest}
            self.kept[key] = self.solve(number, part)
        return self.kept[key]


# ---------------------------------------------------------------- scores


def ensemble_loss(
    members: Tensor, truth: Tensor, decode: Callable[[Tensor], Tensor], block: int = 4
) -> Tensor:
    """0.5 afCRPS of the field + 0.25 energy score of blocks of tokens + 0.25 of all tokens, per row (batch,).

    members (batch, M, *tokens, dim), truth (batch, *tokens, dim) in units in which errors are of order one;
    decode: latents to the field (linear). The CRPS is taken where it means something, at points of the field;
    the norms of the energy scores, which no rotation changes, keep the joint structure that a pointwise score
    would trade away.
    """
    crps = fair_crps(decode(members), decode(truth), ALPHA)
    whole = energy_score(members, truth, TINY)
    lines, lines_ref = members.flatten(2, -2), truth.flatten(1, -2)  # tokens in storage order
    usable = lines.shape[2] // block * block
    if usable == 0:
        return 0.5 * crps + 0.5 * whole
    parts = lines[:, :, :usable].unflatten(2, (-1, block)).flatten(3).movedim(2, 1).flatten(0, 1)
    parts_ref = lines_ref[:, :usable].unflatten(1, (-1, block)).flatten(2).flatten(0, 1)
    return (
        0.5 * crps + 0.25 * whole + 0.25 * energy_score(parts, parts_ref, TINY).view(len(truth), -1).mean(1)
    )


def score_noise(like: Tensor, rows: slice, size: int, num_members: int, seed: int, step: int) -> Tensor:
    """Noise (batch, M, *tokens, dim) of the members that are scored in `step`, for `rows` of a global batch
    of `size`."""
    noise = torch.randn(
        size, num_members, *like.shape[1:], generator=generator(seed, STREAM, "members", step)
    )
    return send(noise[rows], like.device)


def sizes_of(student: Corrector, condition: Condition) -> Tensor:
    """What a whitened number is worth in `_sized`, (batch, *tokens, dim)."""
    head = student.heads[condition.name]
    return head.r_std * condition.log_scale.exp() / head.r_std.square().mean().sqrt()


def _sized(student: Corrector, condition: Condition, r: Tensor) -> Tensor:
    """Whitened residuals r as latents have them, in units of r_std: what is large there counts as such."""
    head = student.heads[condition.name]
    return head.unwhiten(r, condition) / head.r_std.square().mean().sqrt()


def _drawn(student: Corrector, condition: Condition, noise: Tensor) -> Tensor:
    """Draws (batch, M, ...) of one evaluation from noise (batch, M, ...), as `_sized`."""
    num, batch = noise.shape[1], torch.arange(len(noise), device=noise.device)
    repeated = condition.rows(batch.repeat_interleave(num))
    draws = draw_members(student.velocity(repeated), noise.flatten(0, 1))
    return _sized(student, repeated, draws).unflatten(0, (-1, num))


def scores(student: Corrector, source: Residuals, condition: Condition, r: Tensor, noise: Tensor) -> Tensor:
    """`ensemble_loss` of one-evaluation draws (batch,); r (batch, ...) whitened, noise (batch, M, ...)."""
    return ensemble_loss(_drawn(student, condition, noise), _sized(student, condition, r), source.decode)


# ---------------------------------------------------------------- validation


@torch.no_grad()
def ends_of(teacher: Corrector, seed: int, name: str, number: int, drawn: Drawn) -> tuple:
    """A batch of validation with members' noise, and the teacher's ends of the first two members."""
    r, condition = teacher.heads[name].shown(*drawn)
    noise = send(
        torch.randn(len(r), MEMBERS, *r.shape[1:], generator=generator(seed, STREAM, "validate", number)),
        r.device,
    )
    return (
        condition,
        r,
        noise,
        *(
            sample(teacher.velocity(condition), noise[:, i], teacher.description["sampler_steps"])
            for i in (0, 1)
        ),
    )


def validate(
    student: Corrector, residuals: dict[str, Residuals], held_out: dict[str, list], ranks: Any
) -> dict[str, dict]:
    """Task -> pair (squared distance to the teacher's draw over its variance), variance (over the teacher's),
    crps, spread_skill, energy (score), of what `ends_of` gave, each of latents or the field. A collective."""

    def sums_of(name: str, part: tuple) -> Tensor:
        condition, r, noise, *ends = part
        states, truth, first, second = (
            _drawn(student, condition, noise),
            *(_sized(student, condition, end) for end in (r, *ends)),
        )
        field, field_ref, size = residuals[name].decode(states), residuals[name].decode(truth), len(r)
        return torch.stack(
            [
                (states[:, 0] - first).square().mean() * size,
                0.5 * (first - second).square().mean() * size,
                states.var(1).mean() * size,
                fair_crps(field, field_ref).sum(),
                (1 + 1 / noise.shape[1]) * field.var(1).mean() * size,
                (field.mean(1) - field_ref).square().mean() * size,
                energy_score(states, truth).sum(),
                r.new_tensor(size),
            ]
        )

    return {
        name: {
            "pair": pair / max(whole, 1e-12),
            "variance": own / max(whole, 1e-12),
            "crps": crps / count,
            "energy": energy / count,
            "spread_skill": (spread / max(skill, 1e-12)) ** 0.5,
        }
        for name, (pair, whole, own, crps, spread, skill, energy, count) in zip(
            held_out, summed(held_out, sums_of, 8, ranks), strict=True
        )
    }


def metrics_of(found: dict[str, dict]) -> dict[str, float]:
    """What `validate` found, as one level of names."""
    return {f"{name}/{key}": value for name, entry in found.items() for key, value in entry.items()}


def words_of(found: dict[str, dict]) -> str:
    """What `validate` found, in a line."""
    return ", ".join(
        f"{name} pair {entry['pair']:.3f} variance {entry['variance']:.2f} CRPS "
        f"{entry['crps']:.4f} spread/skill {entry['spread_skill']:.2f}"
        for name, entry in found.items()
    )


def gate(tuned: dict[str, dict], before: dict[str, dict]) -> float | None:
    """Mean CRPS ratio of the tuned student if it may be kept, else None: every task must gain and none lose
    elsewhere."""
    pairs = [(now, before[name]) for name, now in tuned.items()]
    is_kept = all(
        now["crps"] <= GAIN * old["crps"]
        and now["energy"] <= old["energy"]
        and abs(now["spread_skill"] - 1) <= abs(old["spread_skill"] - 1)
        and abs(now["variance"] - 1) <= max(abs(old["variance"] - 1), VARIES)
        for now, old in pairs
    )
    return sum(now["crps"] / old["crps"] for now, old in pairs) / len(pairs) if is_kept else None
