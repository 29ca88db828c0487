"""Ensembles of a corrected task: the corrector, its students, and the cheap ensembles that they must beat.

    operator (B0)              z_pred alone
    dressed (B1)               z_pred + N(mean_k, std_k^2)
    dressed_conditional (B2)   z_pred + Gaussian noise with the conditional mean and scale
    waves                      the same with the covariance of residuals in wave space: the linear part of the
                               corrector
    dressed_resampled (B3)     z_pred + a random residual of a reserved trajectory
    scoring (B4)               one evaluation of a network trained by scores, without a teacher
    corrector                  the diffusion, 2 sampler_steps evaluations
    student_1, student_2       its student in one and two evaluations

All use the same noise, a function of seed, row, start and lead (`ups.models.rollout.member_noise`), so that
student and teacher can be paired.
"""

import math
import statistics
import timeit
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.flop_counter import FlopCounterMode

from ups.data.schedule import Schedule
from ups.evaluation.truth import Truth, affordable
from ups.generative.corrector import CorrectorHead, load_corrector
from ups.generative.residuals import TransientResiduals, residual_schedule
from ups.generative.sampling import (
    SAMPLERS,
    Sampler,
    Starts,
    block_size,
    sample_members,
    samplers_of,
    two_noises,
)
from ups.metrics.ensembles import compare_ensembles
from ups.metrics.intervals import Resamples, Scores
from ups.models.operator import Operator
from ups.models.rollout import name_starts
from ups.models.windows import symmetry
from ups.results import Entry
from ups_discovery.seeds import generator

BANK = 1024  # residuals for B3
TIMED = 3  # calls per measured time; the median is taken
MANY = 16  # evaluations per state
CHEAP = ("operator", "dressed", "dressed_conditional", "waves", "dressed_resampled")


def load_samplers(
    run_dir: Path, stages: Iterable[str], device: torch.device, operator: Operator | None = None
) -> dict[str, Sampler]:
    """Name -> sampler, of all networks of these finished stages of a run. Raises as `load_corrector`."""
    by_stage = [samplers_of(stage, load_corrector(run_dir / stage, device, operator)) for stage in stages]
    return {name: some[name] for name in SAMPLERS for some in by_stage if name in some}


def needs_many(entry: Entry, model: str) -> bool:
    """Whether a model needs MANY evaluations per state and is scored on the first cases alone: the corrector,
    33 calls a frame, took half of a report. 24 starts give its CRPS over that of exact samples to 2 %."""
    return (entry.number(model, "evaluations_per_state") or 0) > MANY


def compare_common(scores: Scores, baseline: Scores, resamples: Resamples) -> dict[str, dict]:
    """`compare_ensembles` on the first cases, which both have."""
    count = min(len(scores["crps"]), len(baseline["crps"]))
    both = ({key: value[:count] for key, value in part.items()} for part in (scores, baseline))
    return compare_ensembles(*both, resamples[:count])


def resampled(bank: Tensor, noise: Tensor) -> Tensor:
    """An entry of `bank` for each number of `noise`: the index is drawn from the normal CDF of the noise."""
    return bank[(torch.special.ndtr(noise.double()) * len(bank)).long().clamp_max(len(bank) - 1)]


class Ensembles:
    """All samplers of the residual of one task; `names`: those of CHEAP first.

    residuals, truth: of the same cache. samplers: of the networks, with the corrector.
    """

    def __init__(self, residuals: TransientResiduals, truth: Truth, samplers: dict[str, Sampler], seed: int):
        self.residuals, self.truth, self.device, self.seed = residuals, truth, residuals.device, seed
        self.corrector = samplers["corrector"].network
        self.samplers = {"waves": Sampler(self.corrector, 0)} | samplers
        self.head = self.corrector.heads[residuals.name]
        self.names = list(dict.fromkeys((*CHEAP, *samplers)))
        batch = Schedule({residuals.name: residuals.windows("reserved")}, BANK, seed + 4).batch(0)
        parts = zip(batch.rows.split(128), batch.starts.split(128), strict=True)
        self.bank = torch.cat(
            [
                residuals.batch("reserved", rows, starts, generator(seed, "bank", i))[0]
                for i, (rows, starts) in enumerate(parts)
            ]
        )

    def count_calls(self, function: Callable[[], object]) -> int:
        """Calls of networks other than the operator while `function` runs, by the class of the module, so
        that a copy of a network is counted as well."""
        calls, operator = [], self.residuals.operator.backbone
        networks = {type(sampler.network.backbone) for sampler in self.samplers.values()} | {type(operator)}

        def count(module: nn.Module, *_: object) -> None:
            if module is not operator and type(module) in networks:
                calls.append(module)

        handle = register_module_forward_hook(count)
        try:
            function()
        finally:
            handle.remove()
        return len(calls)

    def head_of(self, model: str) -> CorrectorHead:
        """The head that samples; for cheap ensembles the corrector's, which has their mean and scale."""
        return self.samplers[model if model in self.samplers else "corrector"].network.heads[self.head.name]

    def residual(
        self,
        model: str,
        tokens: Tensor,
        facts: Tensor,
        noise: Tensor,
        second: Tensor,
        shuffle: Tensor | None = None,
    ) -> Tensor:
        """One residual (rows, *tokens, dim), latent units, for each row of noise and second noise.

        tokens, facts: conditions (cases, ...); each case has rows / cases neighbouring rows. shuffle
        (cases,): the network gets the conditions of these cases; mean and scale stay those of the case, so
        only the network's part is lost.
        """
        if model == "operator":
            return torch.zeros_like(noise)
        if model == "dressed":
            return self.head.marginal_mean + self.head.marginal_std * noise
        if model == "dressed_resampled":
            return resampled(self.bank, noise.flatten(1)[:, 0])
        if model in self.samplers:
            sampler = self.samplers[model]
            given = self.residuals, tokens, facts, noise, second, shuffle
            return sampler.network.call(type(sampler).residual, sampler, *given)
        every = torch.arange(len(tokens), device=noise.device).repeat_interleave(len(noise) // len(tokens))
        return self.head.unwhiten(noise, self.head.gaussian_condition(tokens, facts).rows(every))

    def noise(self, rows: Tensor, lead: int, num_members: int) -> tuple[Tensor, Tensor]:
        """Noise and second noise (rows * members, *tokens, dim)."""
        key = self.seed, rows.tolist(), lead, num_members
        return tuple(part.flatten(0, 1) for part in two_noises(self.bank.shape[1:], *key, ..., self.device))


@torch.no_grad()
def rollouts(ensembles: Ensembles, model: str, rows: Tensor, num_frames: int, num_members: int) -> Tensor:
    """Ensemble rollouts from the context frames: (rows, members, num_frames, C, *space), physical units."""
    source, truth, parts = ensembles.residuals, ensembles.truth, []
    num_members = 1 if model == "operator" else num_members
    for some in truth.cache.row_blocks(rows, num_frames * num_members, len(rows)):
        given = truth.given(some, source.head.codec)
        names = name_starts(some.tolist(), truth.frames(some, truth.context - 1, 1)[:, 0])
        states = len(some) * num_members  # in calls of one size, so that none has to be padded
        size = math.ceil(states / math.ceil(states / block_size(source.head.codec, ensembles.device)))
        z = sample_members(
            source,
            partial(ensembles.residual, model),
            Starts(given, truth.cache.parameters[some], names, truth.forced(some, source.head, num_frames)),
            num_frames,
            num_members,
            ensembles.seed,
            ensembles.head_of(model).sample_error,
            size,
        )
        parts.append(truth.task.predicted(source.head.physical(z)).cpu())
    return torch.cat(parts)


@dataclass(frozen=True)
class SampledWindows:
    """Single steps from windows all along the evaluated trajectories.

    samples: model -> residuals (count, M, *tokens, dim). truth (count, *tokens, dim): the true latent
    residual. u_ref (count, 1, C, *space): the residual of the field, normalised, from the data; it
    includes the codec's error, which no sample has. rows: positions in the split. law (count, K, 1, C,
    *space): as u_ref, of exact samples; None if not requested or not known.
    """

    samples: dict[str, Tensor]
    truth: Tensor
    u_ref: Tensor
    rows: Tensor
    law: Tensor | None = None


@torch.no_grad()
def one_step(
    ensembles: Ensembles,
    count: int,
    num_members: int,
    names: Sequence[str],
    is_shuffled: bool = False,
    num_exact: int = 0,
) -> SampledWindows:
    """One step from each of `count` windows of the evaluated split.

    Windows are sampled as in training, half of them where the residual is large; uniform ones would leave all
    scores to a handful of first frames. is_shuffled: networks get the conditions of other windows, to test
    that these matter. num_exact: exact samples of each window, at most.
    """
    source, truth, device = ensembles.residuals, ensembles.truth, ensembles.device
    cache, codec = truth.cache, source.head.codec
    windows = residual_schedule({source.name: source}, truth.split, count, ensembles.seed + 5).batch(0)
    parts, laws, size = [], [], max(1, block_size(codec, device) // num_members)
    for places, starts in zip(windows.rows.split(size), windows.starts.split(size), strict=True):
        key = (ensembles.seed, "test", len(parts))
        r, tokens, facts, _ = source.batch(truth.split, places, starts, generator(*key))
        noise, second = ensembles.noise(torch.arange(len(r)) + len(parts) * size, -1, num_members)
        shuffle = torch.arange(len(tokens), device=device).roll(1) if is_shuffled else None
        samples = [
            ensembles.residual(name, tokens, facts, noise, second, shuffle).unflatten(0, (-1, num_members))
            for name in names
        ]
        # the fields that are predicted, normalised, under the symmetry of `TransientResiduals.batch`; the
        # codec's residual is rounding at full rank, and counts twice if a shift is no multiple of its patches
        rows, frames = cache.split[truth.split][places], starts + source.train_from + source.head.history
        move = symmetry(truth.task, codec.space, generator(*key))
        u = move(codec.normalise(truth.frames(rows, frames, 1).to(device)), codec)
        kept = codec.encode(move(codec.decode(cache.batch(rows, frames, 1, device)), codec))
        u_ref = source.decode(r) + (u - codec.decode(kept))
        parts.append((r, u_ref, *samples))
        if num_exact and truth.task.has_known_law:
            num = affordable(num_exact, count * u_ref[0].nbytes)
            now, numbers = truth.frames(rows, frames - 1, 1)[:, 0], rows * cache.num_frames + frames
            drawn = truth.draws(rows, now, numbers, ensembles.seed + 2, 1, num)
            law = move(codec.normalise(drawn.flatten(1, 2).to(device)), codec)
            laws.append(law.unflatten(1, drawn.shape[1:3]) + (u_ref - u)[:, None])
    r, u_ref, *samples = map(torch.cat, zip(*parts, strict=True))
    law = torch.cat(laws) if laws else None
    return SampledWindows(dict(zip(names, samples, strict=True)), r, u_ref, windows.rows, law)


@torch.no_grad()
def costs_per_state(ensembles: Ensembles, model: str, batch_size: int) -> dict[str, float]:
    """Costs of a rollout step per state: ms_per_state, median over TIMED calls with operator and decoding;
    evaluations_per_state, calls of the network that samples; operations_per_state, of all matrix products
    and convolutions."""
    source, truth = ensembles.residuals, ensembles.truth
    rows = truth.cache.split[truth.split][:batch_size]
    z = truth.cache.batch(rows, 0, 1 + source.head.history, ensembles.device)
    parameters = source.head.parameters_of(truth.cache, rows, source.head.history - 1, 3)
    noise, second = ensembles.noise(rows, 0, 1)
    last_pred = source.frame(source.predict(z, parameters)[0])  # a rollout reuses it

    def step() -> None:
        z_pred, tokens, facts = source.predict(z, parameters, last_pred=last_pred)
        z_next = z_pred + ensembles.residual(model, tokens, facts, noise, second)
        source.decode(z_next).cpu()  # waits for the device

    seconds = timeit.repeat(step, number=1, repeat=TIMED + 1)[1:]  # the first warms up
    with FlopCounterMode(display=False) as operations:
        calls = ensembles.count_calls(step)
    return {
        "ms_per_state": 1e3 * statistics.median(seconds) / len(rows),
        "evaluations_per_state": float(calls),
        "operations_per_state": operations.get_total_flops() / len(rows),
    }
