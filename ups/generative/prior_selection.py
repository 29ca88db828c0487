"""Selection of the samples of a steady prior on validation, from the simplest to the most complex:

    pushed      samples of the coefficient from its linear posterior, through the operator; where it is fully
                observed, with the operator's own error
    diffusion   the trained diffusion, started from these samples with the operator's own error

The score is the energy score of the sampled solutions over that of `pushed`, mean over the kinds of partial
observation; a proper score favours neither narrow nor wide samples.
"""

import torch
from torch import Tensor

from ups.common.mask import filled
from ups.generative.corrector import METHODS, Corrector
from ups.generative.observation import PARTIAL, observe_case, row_generators
from ups.generative.residuals import SteadyResiduals, sum_by_task
from ups.generative.sampling import Sampler, predict_with_noise, sample_fields
from ups.metrics.proper import energy_score
from ups.select import Decision, choose
from ups.training.fit import RanksOfRun

MEMBERS = 4  # few suffice, because the mean of the fair score does not depend on their number


@torch.no_grad()
def relative_scores(
    network: Corrector, source: SteadyResiduals, case: str, seed: int, num_fields: int
) -> Tensor:
    """Energy score of each of METHODS over that of the first, (methods,), for one kind of observation of
    validation fields."""
    rows, valid = list(range(min(num_fields, source.windows("val")[0]))), source.head.codec.valid
    z_in, z_ref, parameters = source.fields("val", torch.tensor(rows))
    observation = observe_case(
        source.head.input_codec.decode(z_in[:, 0]), case, row_generators(seed, "choose", case, rows=rows)
    )
    prediction, noise = predict_with_noise(source, observation, parameters, seed, rows, MEMBERS)
    u_ref, scores = filled(source.head.physical(z_ref[:, 0]), valid), []
    for method in METHODS:
        network.heads[source.name].method = method
        u = sample_fields(source, Sampler(network).whitened, network, prediction, noise)
        scores.append(energy_score(filled(u, valid), u_ref).mean())
    return torch.stack(scores) / scores[0]


def select_method(
    network: Corrector, residuals: dict[str, SteadyResiduals], seed: int, num_fields: int, ranks: RanksOfRun
) -> list[Decision]:
    """Set every head of `network` to the method that is best on validation. The decisions: scores are over
    that of `pushed`. A collective."""
    shard = {name: PARTIAL[ranks.rank :: ranks.world] for name in residuals}
    totals = sum_by_task(
        shard,
        lambda name, case: relative_scores(network, residuals[name], case, seed, num_fields),
        len(METHODS),
        ranks,
    )
    decisions = []
    for name, sums in zip(shard, totals, strict=True):
        scores = {method: total / len(PARTIAL) for method, total in zip(METHODS, sums, strict=True)}
        rule = "the lowest energy score of samples, over that of pushed"
        decisions.append(choose(f"samples of {name}", scores, rule, rows=num_fields, seed=seed))
        network.heads[name].method = decisions[-1].chosen
    return decisions
