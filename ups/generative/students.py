"""What students learn from and what they are held to: solved pairs, scores of one-evaluation draws, validation, the gate."""

from __future__ import annotations

import torch
from torch import Tensor

from ups.config import Config
from ups.data.schedule import Schedule
from ups.generative.consistency import almost_fair_crps, draw_members, draw_starts, energy_score, ensemble_loss
from ups.generative.corrector import Condition, Corrector
from ups.generative.diffusion import diffuse, sample
from ups.generative.residuals import Residuals, validation
from ups.seeds import generator
from ups.training.run import Run

STAGE = "consistency"
MEMBERS = 16          # in validation
GAIN = 0.995          # tuning is kept if CRPS falls to this share or below, and nothing else is worse


def solve(teacher: Corrector, residuals: dict[str, Residuals], schedule: Schedule, config: Config, share: tuple[int, int],
          number: int, part: slice) -> tuple[Condition, Tensor, Tensor, Tensor, Tensor]:
    """(condition, r~, x, angle, y) of the rows `part` of this rank's share of solved batch `number`."""
    seed, size = config.run.seed, config.consistency.train.batch_size
    batch = schedule.batch(number).share(*share)
    mine, source = batch.within(part), residuals[batch.task]
    draw = source.draw("reserved", batch.rows[part], batch.starts[part], generator(seed, STAGE, "augment", number),
                       is_disturbed=True)
    condition = teacher.condition(batch.task, *draw[1:])
    r = teacher.whiten(draw[0], condition)
    largest = float(teacher.heads[batch.task].largest_std)
    angle = draw_starts(size, generator(seed, STAGE, "angle", number), largest)[mine].to(source.device)
    noise = torch.randn(size, *r.shape[1:], generator=generator(seed, STAGE, "noise", number))[mine].to(source.device)
    x = diffuse(r, noise, angle)
    y = sample(teacher.velocity(condition), x, config.diffusion.sampler_steps, angle)
    return condition, r, x, angle, y


def scores(student: Corrector, residual: Residuals, condition: Condition, r: Tensor, noise: Tensor) -> Tensor:
    """`ensemble_loss` of one-evaluation draws (batch,); r (batch, ...) whitened, noise (batch, M, ...). In units of r_std."""
    num, head = noise.shape[1], student.heads[condition.name]
    repeated = condition.rows(torch.arange(len(r), device=r.device).repeat_interleave(num))
    members = draw_members(student.velocity(repeated), noise.flatten(0, 1))
    unit = head.r_std.square().mean().sqrt()
    states = (student.unwhiten(members, repeated) / unit).unflatten(0, (-1, num))
    return ensemble_loss(states, student.unwhiten(r, condition) / unit, residual.decode)


@torch.no_grad()
def prepare(teacher: Corrector, residuals: dict[str, Residuals], config: Config, run: Run) -> dict[str, list[tuple]]:
    """Validation residuals with members' noise, and the teacher's endpoints of the first two: what students are held to."""
    held_out: dict[str, list] = {}
    for name, source in residuals.items():
        batches = validation(source, config.run.seed, config.consistency.train.validate_trajectories)
        for number in range(run.rank, len(batches), run.world):
            r, tokens, facts = batches[number]
            condition = teacher.condition(name, tokens, facts)
            r = teacher.whiten(r, condition)
            noise = torch.randn(len(r), MEMBERS, *r.shape[1:],
                                generator=generator(config.run.seed, STAGE, "validate", number)).to(run.device)
            ends = [sample(teacher.velocity(condition), noise[:, i], config.diffusion.sampler_steps) for i in (0, 1)]
            held_out.setdefault(name, []).append((condition, r, noise, *ends))
    return held_out


@torch.no_grad()
def validate(student: Corrector, residuals: dict[str, Residuals], held_out: dict[str, list], run: Run) -> dict[str, dict]:
    """Task -> pair (squared distance to the teacher's draw over its variance), crps, spread_skill, energy (score)."""
    def local() -> Tensor:
        sums = torch.zeros(len(residuals), 7, dtype=torch.float64, device=run.device)
        for index, name in enumerate(residuals):
            for condition, r, noise, first, second in held_out.get(name, []):
                num, unit = noise.shape[1], student.heads[name].r_std.square().mean().sqrt()
                repeated = condition.rows(torch.arange(len(r), device=r.device).repeat_interleave(num))
                draws = draw_members(student.velocity(repeated), noise.flatten(0, 1))
                states = (student.unwhiten(draws, repeated) / unit).unflatten(0, (-1, num))
                truth, size = student.unwhiten(r, condition) / unit, len(r)
                field, field_ref = residuals[name].decode(states), residuals[name].decode(truth)
                sums[index] += torch.stack([
                    (draws.unflatten(0, (-1, num))[:, 0] - first).square().mean() * size,
                    0.5 * (first - second).square().mean() * size, almost_fair_crps(field, field_ref, 1.0).sum(),
                    (1 + 1 / num) * field.var(1).mean() * size, (field.mean(1) - field_ref).square().mean() * size,
                    energy_score(states.flatten(2), truth.flatten(1)).sum(),
                    torch.tensor(float(size), device=run.device)]).double()
        return sums

    out = {}
    for name, (pair, variance, crps, spread, skill, energy, count) in zip(
            residuals, run.reduce_sum(run.agreed(local, "validating")).tolist(), strict=True):
        out[name] = {"pair": pair / max(variance, 1e-12), "crps": crps / count, "energy": energy / count,
                     "spread_skill": (spread / max(skill, 1e-12)) ** 0.5}
    return out


def gate(tuned: dict[str, dict], before: dict[str, dict]) -> float:
    """Mean CRPS ratio of the tuned student if it may be kept (below 1), else 2: every task must gain and none lose elsewhere."""
    ratios = []
    for name, now in tuned.items():
        old = before[name]
        is_better = (now["crps"] <= GAIN * old["crps"] and abs(now["spread_skill"] - 1) <= abs(old["spread_skill"] - 1)
                     and now["energy"] <= old["energy"])
        ratios.append(now["crps"] / old["crps"] if is_better else 2.0)
    return max(ratios) if max(ratios) >= 2.0 else sum(ratios) / len(ratios)
