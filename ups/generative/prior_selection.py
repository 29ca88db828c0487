"""Selection on validation of how a steady prior samples.

    pushed      samples of the linear posterior of the coefficient, mapped through the operator
    error       the same plus the operator's own error, a conditional Gaussian
    gaussian    the conditional mean and scale of the residual at the best linear guess
    diffusion   the trained diffusion, started from `error` or from `gaussian`

Before training, the start of the diffusion is selected: `error` if it is better than `gaussian`, so that the
path is short. That is so for nearly Gaussian coefficients; for a two-valued one, the samples of the linear
posterior are unlike anything that the operator was trained on. Fully observed rows of `pushed` also get the
operator's own error. The score is the energy score of the sampled solutions over that of `pushed`, mean over
the kinds of partial observation; a proper score favours neither narrow nor wide samples.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ups.generative.corrector import METHODS, Corrector
from ups.generative.observation import PARTIAL, observe_case, row_generators
from ups.generative.residuals import SteadyResiduals, sum_by_task
from ups.generative.sampling import Sampler, predict_with_noise, sample_fields
from ups.metrics.mask import filled
from ups.metrics.proper import energy_score

MEMBERS = 4  # few suffice, because the mean of the fair score does not depend on their number


@torch.no_grad()
def relative_scores(
    network: Corrector,
    source: SteadyResiduals,
    case: str,
    seed: int,
    num_fields: int,
    methods: Sequence[str],
) -> Tensor:
    """Energy score of each of `methods` over that of the first, (methods,), for one kind of observation of
    validation fields."""
    head, rows = network.heads[source.name], list(range(min(num_fields, source.windows("val")[0])))
    z_in, z_ref, parameters = source.fields("val", torch.tensor(rows))
    observation = observe_case(
        source.head.input_codec.decode(z_in[:, 0]), case, row_generators(seed, "choose", case, rows=rows)
    )
    prediction, noise = predict_with_noise(source, observation, parameters, seed, rows, MEMBERS)
    u_ref, valid, scores = source.head.physical(z_ref[:, 0]), source.head.codec.valid, []
    for method in methods:
        head.method = method
        u = sample_fields(source, Sampler(network, 0).whitened, network, prediction, noise)
        scores.append(energy_score(filled(u, valid), filled(u_ref, valid)).mean())
    return torch.stack(scores) / scores[0]


def select_start(
    network: Corrector, residuals: dict[str, SteadyResiduals], seed: int, num_fields: int, ranks: Any
) -> None:
    """Set where the diffusion of every head of an untrained `network` starts. A collective."""
    select_method(network, residuals, seed, num_fields, ranks, ("error", "gaussian"))
    for name, source in residuals.items():
        head = network.heads[name]
        head.description["start"] = "pushed" if head.method == "error" else "gaussian"
        head.method, source.is_pushed = "diffusion", head.is_pushed


def select_method(
    network: Corrector,
    residuals: dict[str, SteadyResiduals],
    seed: int,
    num_fields: int,
    ranks: Any,
    methods: Sequence[str] = METHODS,
) -> dict[str, dict[str, float]]:
    """Set every head of `network` to the best of `methods` on validation; task -> method -> its score over
    that of the first. A collective."""
    shard = {name: PARTIAL[ranks.rank :: ranks.world] for name in residuals}
    totals = sum_by_task(
        shard,
        lambda name, case: relative_scores(network, residuals[name], case, seed, num_fields, methods),
        len(methods),
        ranks,
    )
    scores = {
        name: {method: total / len(PARTIAL) for method, total in zip(methods, sums, strict=True)}
        for name, sums in zip(shard, totals, strict=True)
    }
    for name, by_method in scores.items():
        network.heads[name].method = min(by_method, key=by_method.__getitem__)  # the first of equal ones
    return scores
