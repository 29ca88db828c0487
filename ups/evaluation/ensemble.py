"""Ensembles of a corrected task: the corrector, its student, and the cheap ensembles that they must beat.

    operator (B0)              z_pred alone
    dressed (B1)               z_pred + N(mean_k, std_k^2)
    dressed_conditional (B2)   z_pred + N of the conditional mean and scale
    dressed_resampled (B3)     z_pred + a residual of a reserved trajectory, drawn at random, whole
    rival (B4)                 one evaluation of a network trained by scores, without a teacher
    corrector                  the diffusion, 2 sampler_steps evaluations
    student_1, student_2       its student in one and two evaluations

All start from the same noise: `ups.models.rollout.member_noise` of (seed, row, lead), so that student and teacher can be paired.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ups.config import Config
from ups.data.schedule import Schedule
from ups.generative.corrector import Condition, load_corrector
from ups.generative.diffusion import sample
from ups.generative.residuals import Residuals, TransientResiduals, schedule_of
from ups.generative.student import sample_student
from ups.models.rollout import conserve, ensemble_rollout, member_noise
from ups.seeds import generator

BANK = 1024           # residuals that B3 draws from
STATES = 512          # states in one call of a network
TIMED = 20            # calls behind a time per state

Draw = Callable[[Condition, Tensor, Tensor], Tensor]   # (conditions, noise, second noise) -> whitened residuals


class Ensembles:
    """Every way to draw the residual of one task. models: name -> evaluations of the network per state."""

    def __init__(self, config: Config, residuals: Residuals, device: torch.device):
        self.config, self.residuals, self.device, self.name = config, residuals, device, residuals.name
        self.seed, self.split = config.run.seed, config.evaluate.split
        self.corrector = load_corrector(config.run_dir / "diffusion", device)
        self.head = self.corrector.heads[self.name]
        networks = {name: load_corrector(config.run_dir / name, device) for name in ("consistency", "rival")
                    if name in config.evaluate.stages and (config.run_dir / name / "done.json").is_file()}
        self.evaluations = 0
        for network in (self.corrector, *networks.values()):
            network.backbone.register_forward_hook(self._count)
        self.draws: dict[str, Draw] = {"dressed_conditional": lambda c, noise, second: noise,
                                       "corrector": partial(self._teacher, config.diffusion.sampler_steps)}
        if "consistency" in networks:
            student = networks["consistency"]
            self.draws["student_1"] = lambda c, noise, second: sample_student(student.velocity(c), noise)
            self.draws["student_2"] = lambda c, noise, second: sample_student(student.velocity(c), noise,
                                                                              config.consistency.mid_angle, second)
        if "rival" in networks:
            self.draws["rival"] = lambda c, noise, second: sample_student(networks["rival"].velocity(c), noise)
        self.names = ["operator", "dressed", "dressed_conditional", "dressed_resampled",
                      *[name for name in ("rival", "corrector", "student_1", "student_2") if name in self.draws]]
        self.bank = self._fill_bank()

    def _count(self, *_: object) -> None:
        self.evaluations += 1

    def _teacher(self, num_steps: int, condition: Condition, noise: Tensor, second: Tensor) -> Tensor:
        return sample(self.corrector.velocity(condition), noise, num_steps)

    def _fill_bank(self) -> Tensor:
        schedule = Schedule({self.name: self.residuals.windows("reserved")}, BANK, self.seed + 4)
        batch = schedule.batch(0)
        parts = zip(batch.rows.split(128), batch.starts.split(128), strict=True)
        return torch.cat([self.residuals.draw("reserved", rows, starts, generator(self.seed, "bank", i))[0]
                          for i, (rows, starts) in enumerate(parts)])

    def residual(self, model: str, tokens: Tensor, facts: Tensor, noise: Tensor, second: Tensor, num_steps: int = 0,
                 shown: Tensor | None = None) -> Tensor:
        """One residual per row of noise, second (rows, *tokens, dim), latent units. num_steps > 0: of the corrector's sampler.

        tokens, facts: conditions (cases, ...), of rows / cases neighbouring rows each. shown: cases whose conditions the network
        is shown in place of its own. Mean and scale stay those of the case: what is lost then is what the network knows beyond
        them, nothing for the conditional Gaussian alone.
        """
        if model == "operator":
            return torch.zeros_like(noise)
        if model == "dressed":
            return self.head.marginal_mean + self.head.marginal_std * noise
        if model == "dressed_resampled":
            uniform = torch.special.ndtr(noise.flatten(1)[:, 0].double())     # the noise as a uniform number picks the residual
            return self.bank[(uniform * len(self.bank)).long().clamp_max(len(self.bank) - 1)]
        condition = self.corrector.condition(self.name, tokens, facts)
        draw = partial(self._teacher, num_steps) if num_steps else self.draws[model]
        known = condition
        if shown is not None:
            known = replace(condition, tokens=condition.tokens[shown], facts=condition.facts[shown])
        every = torch.arange(len(tokens), device=noise.device).repeat_interleave(len(noise) // len(tokens))
        return self.corrector.unwhiten(draw(known.rows(every), noise, second), condition.rows(every))

    def noise(self, rows: Tensor, lead: int, num_members: int) -> tuple[Tensor, Tensor]:
        """Noise and second noise (rows, members, *tokens, dim)."""
        shape = self.bank.shape[1:]
        return tuple(member_noise(shape, self.seed, rows.tolist(), lead, num_members, key).to(self.device)
                     for key in ("noise", "second"))


@torch.no_grad()
def rollouts(ensembles: Ensembles, model: str, rows: Tensor, num_frames: int, num_members: int) -> Tensor:
    """Ensemble rollouts of a time-dependent task from its context: (rows, members, num_frames, C, *space), physical units."""
    source: TransientResiduals = ensembles.residuals
    cache, head, config, device = source.cache, source.head, ensembles.config, ensembles.device
    num_members, parts = 1 if model == "operator" else num_members, []
    for some in rows.split(max(1, STATES // num_members)):
        parameters = cache.parameters[some].repeat_interleave(num_members, 0)
        context = cache.batch(some, 0, config.context(ensembles.name), device)
        context = torch.cat([context[:, :1], context], 1)          # where nothing is before the first frame: no change
        start = head.codec.denormalise(head.codec.decode(context[:, -1])).repeat_interleave(num_members, 0)

        def step(z: Tensor, lead: int, some: Tensor = some, parameters: Tensor = parameters, start: Tensor = start) -> Tensor:
            z_pred, tokens, facts = source.predict(z, parameters)
            noise, second = (part.flatten(0, 1) for part in ensembles.noise(some, lead, num_members))
            z_next = z_pred + ensembles.residual(model, tokens, facts, noise, second)
            z_next = z_next.unflatten(-1, (head.bundle, -1)).movedim(-2, 1)
            if not config.evaluate.conserve:
                return z_next
            u = conserve(head.task, head.physical(z_next), start)
            return head.codec.encode(head.codec.normalise(u))

        z = ensemble_rollout(step, context, num_frames, 1 + head.history, num_members)
        parts.append(head.codec.denormalise(head.codec.decode(z)).cpu())
    return torch.cat(parts)


@torch.no_grad()
def one_step(ensembles: Ensembles, count: int, num_members: int, names: list[str], num_steps: int = 0,
             shuffle: bool = False) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """One call from `count` windows of the evaluated split: model -> residuals (count, M, *tokens, dim), and their facts.

    facts: truth (count, *tokens, dim), rows (positions, as groups), starts. num_steps > 0: of the corrector's sampler. Windows
    are drawn as in training, half of them where the residual is large: drawn evenly, a handful of first frames would decide every
    score. shuffle: the network is shown the conditions of other windows, to see that they matter.
    """
    source = ensembles.residuals
    windows = schedule_of({ensembles.name: source}, ensembles.split, count, ensembles.seed + 5).batch(0)
    out: dict[str, list] = {name: [] for name in names}
    truths = []
    size = max(1, STATES // num_members)
    for first, (rows, starts) in enumerate(zip(windows.rows.split(size), windows.starts.split(size), strict=True)):
        r, tokens, facts = source.draw(ensembles.split, rows, starts, generator(ensembles.seed, "test", first))
        truths.append(r)
        keys = torch.arange(len(rows)) + first * size
        noise, second = (part.flatten(0, 1) for part in ensembles.noise(keys, -1, num_members))
        shown = torch.arange(len(tokens), device=noise.device).roll(1) if shuffle else None
        for name in names:
            draws = ensembles.residual(name, tokens, facts, noise, second, num_steps, shown).unflatten(0, (-1, num_members))
            out[name].append(draws[:, :1] if name == "operator" else draws)
    return {name: torch.cat(part) for name, part in out.items()}, {"truth": torch.cat(truths), "rows": windows.rows,
                                                                        "starts": windows.starts}


@torch.no_grad()
def milliseconds_per_state(ensembles: Ensembles, model: str, batch_size: int) -> tuple[float, float]:
    """(median over TIMED calls of the time per step and state, operator and decoding included; evaluations per state)."""
    source: TransientResiduals = ensembles.residuals
    cache, device = source.cache, ensembles.device
    rows = cache.split[ensembles.split][:batch_size]
    z, parameters = cache.batch(rows, 0, 1 + source.head.history, device), cache.parameters[rows]
    noise, second = (part.flatten(0, 1) for part in ensembles.noise(rows, 0, 1))
    seconds = []
    for _ in range(TIMED + 2):
        ensembles.evaluations = 0
        if device.type == "cuda":
            torch.cuda.synchronize()
        begun = time.perf_counter()
        z_pred, tokens, facts = source.predict(z, parameters)
        z_next = z_pred + ensembles.residual(model, tokens, facts, noise, second)
        source.decode(z_next).cpu()
        seconds.append(time.perf_counter() - begun)
    return 1e3 * sorted(seconds[2:])[TIMED // 2] / len(rows), float(ensembles.evaluations)
