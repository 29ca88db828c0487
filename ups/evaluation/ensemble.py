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
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ups.config import Config
from ups.data.schedule import Schedule
from ups.generative.corrector import load_corrector
from ups.generative.draws import STATES, WAYS, Sampler, draw_rollout, two_noises
from ups.generative.residuals import TransientResiduals, schedule_of
from ups.seeds import generator

BANK = 1024           # residuals that B3 draws from
TIMED = 20            # calls behind a time per state


class Ensembles:
    """Every way to draw the residual of one task that the finished stages asked for give.

    samplers: name -> how a network draws; evaluations: of a network, since it was set to 0.
    """

    def __init__(self, config: Config, residuals: TransientResiduals, device: torch.device):
        self.config, self.residuals, self.device, self.name = config, residuals, device, residuals.name
        self.seed, self.split = config.run.seed, config.evaluate.split
        networks = {name: load_corrector(config.run_dir / name, device) for name in ("diffusion", "consistency", "rival")
                    if name in config.evaluate.stages and (config.run_dir / name / "done.json").is_file()}
        self.samplers = {name: Sampler(networks[stage], draw) for name, (stage, draw) in WAYS.items() if stage in networks}
        self.corrector = networks["diffusion"]
        self.head = self.corrector.heads[self.name]
        self.evaluations = 0
        for network in networks.values():
            network.backbone.register_forward_hook(self._count)
        self.names = ["operator", "dressed", "dressed_conditional", "dressed_resampled", *self.samplers]
        self.bank = self._fill_bank()

    def _count(self, *_: object) -> None:
        self.evaluations += 1

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
        known = condition
        if shown is not None:
            known = replace(condition, tokens=condition.tokens[shown], facts=condition.facts[shown])
        every = torch.arange(len(tokens), device=noise.device).repeat_interleave(len(noise) // len(tokens))
        if model != "dressed_conditional":
            options = {"num_steps": num_steps} if num_steps else {}
            noise = self.samplers[model].whitened(known.rows(every), noise, second, **options)
        return self.corrector.unwhiten(noise, condition.rows(every))

    def noise(self, rows: Tensor, lead: int, num_members: int) -> tuple[Tensor, Tensor]:
        """Noise and second noise (rows * members, *tokens, dim)."""
        return two_noises(self.bank.shape[1:], self.seed, rows, lead, num_members, self.device)


@torch.no_grad()
def rollouts(ensembles: Ensembles, model: str, rows: Tensor, num_frames: int, num_members: int) -> Tensor:
    """Ensemble rollouts of a time-dependent task from its context: (rows, members, num_frames, C, *space), physical units."""
    source, parts = ensembles.residuals, []
    num_members = 1 if model == "operator" else num_members
    for some in rows.split(max(1, STATES // num_members)):
        context = source.cache.batch(some, 0, ensembles.config.context(ensembles.name), ensembles.device)
        z = draw_rollout(source, partial(ensembles.residual, model), context, source.cache.parameters[some], num_frames,
                         num_members, partial(ensembles.noise, some, num_members=num_members), ensembles.config.evaluate.conserve)
        parts.append(source.head.physical(z).cpu())
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
        noise, second = ensembles.noise(keys, -1, num_members)
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
    z, known = cache.batch(rows, 0, 1 + source.head.history, device), source.head.known(cache.parameters[rows])
    noise, second = ensembles.noise(rows, 0, 1)
    seconds = []
    for _ in range(TIMED + 2):
        ensembles.evaluations = 0
        if device.type == "cuda":
            torch.cuda.synchronize()
        begun = time.perf_counter()
        z_pred, tokens, facts = source.predict(z, known)
        z_next = z_pred + ensembles.residual(model, tokens, facts, noise, second)
        source.decode(z_next).cpu()
        seconds.append(time.perf_counter() - begun)
    return 1e3 * sorted(seconds[2:])[TIMED // 2] / len(rows), float(ensembles.evaluations)
