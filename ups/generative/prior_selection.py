"""Selection on validation of how a steady prior samples.

    pushed      samples of the posterior of the coefficient, mapped through the operator
    diffusion   the trained diffusion, started from these plus the operator's own error, a conditional
                Gaussian, or from white noise

The posterior is linear. Of a coefficient with two values a `CellPosterior` is fitted as well, and it serves
if its samples, pushed through the operator, are better (docs/results.md). The diffusion starts at pushed
samples with the linear posterior, so that the path is short, and at white noise with a `CellPosterior`: a
start would cost ROUNDS evaluations for each row of a training batch. Fully observed rows of `pushed` also get
the operator's own error. The score is the energy score of the sampled solutions over that of `pushed`, mean
over the kinds of partial observation; a proper score favours neither narrow nor wide samples.
"""

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ups.common.mask import filled
from ups.config.schema import SteadyConfig
from ups.generative.cell_posterior import CellPosterior, two_levels
from ups.generative.corrector import METHODS, Corrector
from ups.generative.observation import PARTIAL, observe_case, row_generators
from ups.generative.residuals import SteadyResiduals, sum_by_task
from ups.generative.sampling import FieldPrediction, Sampler, predict_with_noise, sample_fields
from ups.metrics.proper import energy_score
from ups.models.windows import symmetry
from ups.select import CELLS, Decision, select_lowest
from ups.training.fit import Fit, fit_once
from ups.training.optim import fit_averaged
from ups_discovery.seeds import generator

if TYPE_CHECKING:
    from ups.training.ranks import Ranks
    from ups.training.run import Run

LOOKED_AT = 512  # training fields in which other values than two are sought
FIELDS = 32  # validation fields behind the choice of the posterior
BATCH = 32  # of the fit of a `CellPosterior`
MEMBERS = 4  # few suffice, because the mean of the fair score does not depend on their number


def fit_posteriors(
    run: "Run", residuals: dict[str, SteadyResiduals], section: SteadyConfig, seed: int
) -> tuple[dict[str, SteadyResiduals], list[Decision]]:
    """The residuals, with a `CellPosterior` where the coefficient has two values and it is better on
    validation than the linear posterior, and these decisions. A collective."""
    levels = {name: two_levels(source.training_inputs(LOOKED_AT)) for name, source in residuals.items()}
    if not any(levels.values()):
        return residuals, []
    fits = fit_once(
        run,
        "posteriors",
        {
            name: partial(_fit_cells, residuals[name], found, section, seed)
            for name, found in levels.items()
            if found
        },
        "fitting the posterior of two-valued coefficients",
    )
    out, decisions = dict(residuals), []
    for name, (facts, weights) in fits.items():
        scores = {"linear posterior": 1.0, CELLS: facts["score"]}
        what = "energy score of samples through the operator, over the linear posterior's"
        question = f"posterior of the two-valued coefficient of {name}"
        decisions.append(select_lowest(question, scores, what, FIELDS, seed))
        if decisions[-1].chosen == CELLS:
            source = residuals[name]
            cells = CellPosterior(source.posterior, levels[name], section.model, source.head.task)
            cells.load_state_dict(weights)
            out[name] = SteadyResiduals(source.operator, source.cache, cells.to(source.device).eval())
    return out, decisions


def _fit_cells(source: SteadyResiduals, levels: list[float], section: SteadyConfig, seed: int) -> Fit:
    """(validation score, weights) of a `CellPosterior`, fitted in `scale_steps` steps."""
    torch.manual_seed(generator(seed, "cells", source.name).initial_seed())
    fields, codec, steps = source.training_inputs(), source.head.input_codec, section.scale_steps
    cells = CellPosterior(source.posterior, levels, section.model, source.head.task).to(source.device)

    def loss_of(step: int) -> Tensor:
        rng = generator(seed, "cells", source.name, step)
        v = fields[torch.randint(len(fields), (BATCH,), generator=rng)]
        return cells.loss(symmetry(source.head.task, codec.space, rng)(v, codec), rng)

    stopped, ema = fit_averaged(cells, loss_of, steps, section.optim)
    if stopped is not None:
        raise ValueError(
            f"the loss of {source.name}'s cells is not finite at step {stopped}; expected finite "
            "coefficients. Look at the data with the doctor, or lower the learning rates of this stage."
        )
    ema.write(ema.averages)
    other = SteadyResiduals(source.operator, source.cache, cells.eval())
    pairs = [[pushed_score(each, case, seed) for each in (other, source)] for case in PARTIAL]
    return {"score": sum(ours / linear for ours, linear in pairs) / len(pairs)}, cells.state_dict()


@torch.no_grad()
def pushed_score(source: SteadyResiduals, case: str, seed: int) -> float:
    """Energy score of samples of the coefficient through the operator, for validation fields."""
    (guess, _, _, start), noise, u_ref = _observed(source, case, seed, FIELDS)
    return float(_score(source, source.solution(guess[:, None], start.offset.view_as(noise)), u_ref))


@torch.no_grad()
def relative_scores(
    network: Corrector, source: SteadyResiduals, case: str, seed: int, num_fields: int
) -> Tensor:
    """Energy score of each of METHODS over that of the first, (methods,), for one kind of observation of
    validation fields."""
    (prediction, noise, u_ref), scores = _observed(source, case, seed, num_fields), []
    for method in METHODS:
        network.heads[source.name].decide(method=method)
        u = sample_fields(source, Sampler(network).whitened, network, prediction, noise)
        scores.append(_score(source, u, u_ref))
    return torch.stack(scores) / scores[0]


def _observed(
    source: SteadyResiduals, case: str, seed: int, num_fields: int
) -> tuple[FieldPrediction, Tensor, Tensor]:
    """(prediction, noise, solution) of validation fields under one kind of observation."""
    rows = list(range(min(num_fields, source.windows("val")[0])))
    z_in, z_ref, parameters = source.fields("val", torch.tensor(rows))
    observation = observe_case(
        source.head.input_codec.decode(z_in[:, 0]), case, row_generators(seed, "choose", case, rows=rows)
    )
    prediction, noise = predict_with_noise(source, observation, parameters, seed, rows, MEMBERS)
    return prediction, noise, source.head.physical(z_ref[:, 0])


def _score(source: SteadyResiduals, u: Tensor, u_ref: Tensor) -> Tensor:
    """Energy score of samples u (batch, M, C, *space), mean over fields."""
    valid = source.head.codec.valid
    return energy_score(filled(u, valid), filled(u_ref, valid)).mean()


def select_method(
    network: Corrector, residuals: dict[str, SteadyResiduals], seed: int, num_fields: int, ranks: "Ranks"
) -> list[Decision]:
    """Set every head of `network` to the method that is best on validation. The decisions: scores are over
    that of `pushed`. A collective."""
    shard = {name: PARTIAL[ranks.rank :: ranks.world] for name in residuals}

    def scores_of(name: str, case: str) -> Tensor:
        return relative_scores(network, residuals[name], case, seed, num_fields)

    decisions = []
    for name, sums in zip(shard, sum_by_task(shard, scores_of, len(METHODS), ranks).tolist(), strict=True):
        scores = {method: total / len(PARTIAL) for method, total in zip(METHODS, sums, strict=True)}
        what = "energy score of samples, over that of pushed"
        decisions.append(select_lowest(f"samples of {name}", scores, what, num_fields, seed))
        network.heads[name].decide(method=decisions[-1].chosen)
    return decisions
