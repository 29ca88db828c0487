"""What serves as the prior of a steady task: of everything a trained one could draw by, the best on
validation.

    pushed      draws of the linear posterior of the coefficient, pushed through the operator
    error       the same with the operator's own error, a conditional Gaussian
    gaussian    the conditional mean and scale of what the operator leaves at the best guess, alone
    diffusion   the path that was learnt, from `error` or from `gaussian`

The path begins where it is the shorter: at `error` if that is better than `gaussian`, before a step is
trained. It is where the coefficient is nearly Gaussian; a two-valued one is not, and the operator was never
shown what its linear posterior draws. Where all is seen, `pushed` has the operator's own error, too.
Judged by the energy score of the solutions drawn, over that of `pushed`, mean over the kinds of partial
observation: it is proper, so none is favoured for being narrow or wide.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ups.generative.corrector import BY, Corrector
from ups.generative.draws import Sampler, draw_solutions, predict_draws
from ups.generative.observation import PARTIAL, observe_case, row_generators
from ups.generative.residuals import SteadyResiduals, summed
from ups.metrics.mask import filled
from ups.metrics.proper import energy_score

MEMBERS = 4  # the score is fair: its mean does not depend on how many


@torch.no_grad()
def score_each(
    network: Corrector, source: SteadyResiduals, case: str, seed: int, num_fields: int, ways: Sequence[str]
) -> Tensor:
    """Energy score of each of `ways` over that of the first, (ways,), in one kind of observation of
    validation fields."""
    head, rows = network.heads[source.name], list(range(min(num_fields, source.windows("val")[0])))
    z_in, z_ref, parameters = source.fields("val", torch.tensor(rows))
    observation = observe_case(
        source.head.input_codec.decode(z_in[:, 0]), case, row_generators(seed, "choose", case, rows=rows)
    )
    predicted, noise = predict_draws(source, observation, parameters, seed, rows, MEMBERS)
    u_ref, valid, found = source.head.physical(z_ref[:, 0]), source.head.codec.valid, []
    for by in ways:
        head.by = by
        u = draw_solutions(source, Sampler(network, 0).whitened, network, predicted, noise)
        found.append(energy_score(filled(u, valid), filled(u_ref, valid)).mean())
    return torch.stack(found) / found[0]


def choose_starts(
    network: Corrector, residuals: dict[str, SteadyResiduals], seed: int, num_fields: int, ranks: Any
) -> None:
    """Sets where the paths of `network`, of which no step is trained, begin. A collective."""
    choose_draws(network, residuals, seed, num_fields, ranks, ("error", "gaussian"))
    for name, source in residuals.items():
        head = network.heads[name]
        head.description["start"], head.by = "pushed" if head.by == "error" else "gaussian", "diffusion"
        source.is_pushed = head.is_pushed


def choose_draws(
    network: Corrector,
    residuals: dict[str, SteadyResiduals],
    seed: int,
    num_fields: int,
    ranks: Any,
    ways: Sequence[str] = BY,
) -> dict[str, dict[str, float]]:
    """Sets every head of `network` to draw by what is best on validation; task -> each of `ways` -> its score
    over that of the first. A collective."""
    mine = {name: PARTIAL[ranks.rank :: ranks.world] for name in residuals}
    totals = summed(
        mine,
        lambda name, case: score_each(network, residuals[name], case, seed, num_fields, ways),
        len(ways),
        ranks,
    )
    scores = {
        name: {by: total / len(PARTIAL) for by, total in zip(ways, sums, strict=True)}
        for name, sums in zip(mine, totals, strict=True)
    }
    for name, found in scores.items():
        network.heads[name].by = min(found, key=found.__getitem__)  # of equal ones the first
    return scores
