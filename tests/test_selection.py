"""Selection on validation (ups/select.py): which weights are kept, and whether the network or its base
serves."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable

import pytest
import torch
from finished import write_stage
from torch import Tensor

from ups.common.files import DamagedError
from ups.report.sections import decisions_of, decisions_section
from ups.select import (
    Decision,
    choose,
    error_ratios,
    is_better,
    is_lost,
    lost_by_each,
    pooled,
    scores_of,
    select_network,
)
from ups.tasks import get_task

ALONE = torch.arange(64)
MEAN = [0.4, 0.7, 0.9] + [1.0] * 7  # a base that falls to the mean
MEAN_AT_ONCE = [0.7] + [0.75] * 9  # a base that knows the mean of a random future
CHAOS = [0.05, 0.15, 0.4] + [1.41] * 7  # a network that follows longer and goes on as the system does


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weight_of(*given, **more) -> float:
    """1 if the network is selected, 0 for the base alone."""
    return float(select_network("forecasts of a", *given, **more).chosen == "network")


def rollout_squares(ratio: Tensor, seed: int = 0) -> Tensor:
    """`squared_errors` of a network whose error is `ratio` (rows,) times its base's, row by row: (rows, 4, 6,
    1)."""
    base = 0.01 * noise(len(ratio), 6, 1, seed=seed).exp().double()
    return torch.stack(
        [torch.ones_like(base), torch.ones_like(base), ratio.double().view(-1, 1, 1).square() * base, base], 1
    )


def squares_of(network: list[float], base: list[float], rows: int = 64, mean: float = 0.0) -> Tensor:
    """`squared_errors` of rollouts whose pooled error by lead, relative to the variation, is about this, rows
    alike but for a tenth: (rows, 4, T, 1). mean: of the field, in units of its variation."""
    some = 1 + 0.1 * noise(rows, seed=5).double()
    ones = torch.ones(rows, len(base)).double()
    squares = [some[:, None] ** 2 * torch.tensor(part).double().square() for part in (network, base)]
    return torch.stack([(1 + mean**2) * ones, ones, *squares], 1)[..., None]


def serves(network: list[float], base: list[float]) -> float:
    return weight_of(squares_of(network, base), ALONE, 0)


def beats_its_base(sums: Tensor, groups: Tensor = ALONE) -> bool:
    return is_better(error_ratios(sums, groups, 0))


# ---------------------------------------------------------------- the one function that decides


def test_the_simplest_stable_candidate_that_ties_with_the_best_is_chosen():
    scores = {"a": 1.2, "b": 1.05, "c": 1.0, "d": math.nan}
    asked = []

    def is_stable(name: str) -> bool:
        asked.append(name)
        return name == "c"

    def within(factor: float) -> Callable[[str, str], bool]:
        return lambda name, best: scores[name] <= factor * scores[best]

    assert choose("q", scores, "rule").chosen == "c"
    assert choose("q", scores, "rule", within(1.1)).chosen == "b"
    assert choose("q", scores, "rule", within(1.1), is_stable).chosen == "c" and asked == ["b", "c"]
    assert choose("q", scores, "rule", within(1.1), lambda name: False).chosen == "c"  # the best
    assert choose("q", {"a": 1.0, "b": 1.0}, "rule").chosen == "a"


def test_a_decision_is_strict_json_and_says_what_was_chosen_over_what():
    found = choose(
        "base of a", {"a": 0.25, "b": math.inf}, "the best", intervals={"a": (0.2, 0.3)}, rows=8, seed=1
    )
    record = json.loads(json.dumps(found.described(), allow_nan=False))
    assert record["candidates"] == {"a": [0.25, 0.2, 0.3], "b": [None, None, None]}
    assert Decision.read(record) == found and found.scores == {"a": 0.25, "b": math.inf}
    with pytest.raises(ValueError, match="'c' is no candidate"):
        Decision.read(record | {"chosen": "c"})
    with pytest.raises(ValueError, match="a score is 'x'"):
        Decision.read(record | {"candidates": {"a": ["x", 0.2, 0.3]}})
    assert str(found) == "base of a: a 0.2500 [0.2000, 0.3000]; over b not finite (the best)"


def test_the_report_shows_what_was_chosen_over_what(tmp_path):
    found = choose("base of a", {"a<": 0.25, "b": 0.5}, "the best", intervals={"a<": (0.2, 0.3)}, rows=8)
    folder = tmp_path / "operator"
    write_stage(folder, {"decisions": [found.described()]}, {})
    assert decisions_of({"operator": folder}, tmp_path, ["a"]) == [found]
    page = decisions_section([found])
    for part in ("base of a", "a&lt;", "0.250", "0.200 – 0.300", "b 0.5000", "the best", "8"):
        assert part in re.sub("<[^>]*>", "", page), part
    write_stage(folder, {"decisions": [{"question": "base of a"}]}, {})
    with pytest.raises(DamagedError, match="has no readable decisions .*run make operator"):
        decisions_of({"operator": folder}, tmp_path, [])


# ---------------------------------------------------------------- network or base


def test_the_network_is_used_if_it_is_better_by_more_than_chance():
    luck = (0.5 * noise(64, seed=3)).exp()  # as often better as worse, and by as much
    ratio = 0.98 * luck / luck.mean()  # on these rows a little better in the mean: that was enough before
    network, base = (part.sqrt().mean() for part in rollout_squares(ratio).unbind(1)[2:])
    assert network < base and not beats_its_base(rollout_squares(ratio))
    assert beats_its_base(rollout_squares(0.8 * luck.clamp(0.8, 1.2)))
    # a few starts at many parameter values are a few: what looks sure of 64 is not of 4
    shared = torch.tensor([0.6, 0.7, 0.7, 1.3]).repeat(16)
    assert beats_its_base(rollout_squares(shared)) and not beats_its_base(rollout_squares(shared), ALONE % 4)


def test_of_a_driven_field_frames_of_nearly_zero_do_not_decide():
    """Some frames are nearly zero, the base too, and the network predicts the mean of what may happen. Where
    no frame vanishes, and of fields that nothing drives, all errors decide."""
    squares = rollout_squares(torch.full((64,), 0.5))
    assert weight_of(squares, ALONE, 0, is_driven=True) == weight_of(squares, ALONE, 0) == 1.0
    for part, value in ((0, 1e-10), (2, 1e-6), (3, 1e-12)):
        squares[:8, part, 2] = value
    weights = [weight_of(squares, ALONE, 0, is_driven) for is_driven in (False, True)]
    assert weights == [0.0, 1.0]
    assert "network 0.50" in str(select_network("forecasts", squares, ALONE, 0, is_driven=True))
    driven = [get_task(name).is_driven for name in ("barkley2d", "barkley2d_shown", "burgers1d")]
    assert driven == [True, True, False]
    worse = rollout_squares(torch.full((64,), 2.0))
    worse[:8, 0, 2] = 1e-10
    assert weight_of(worse, ALONE, 0, is_driven=True) == 0.0


def test_a_network_that_blows_up_from_one_start_is_not_used():
    ratio = torch.full((64,), 0.5)
    assert beats_its_base(rollout_squares(ratio))
    for large in (60.0, math.inf, math.nan):  # 60: by the median it is still the better of the two
        ratio[7] = large
        assert not beats_its_base(rollout_squares(ratio))
        assert weight_of(rollout_squares(ratio), ALONE, 0) == 0
    equal = rollout_squares(torch.ones(64))
    assert not beats_its_base(equal)
    assert not beats_its_base(torch.zeros_like(equal))  # nothing to be told by
    assert weight_of(torch.zeros_like(equal), ALONE, 0) == 0


@pytest.mark.parametrize("mean", [0.5, 1.0, 3.0])
def test_chaos_about_a_mean_is_scored_by_its_variation(mean):
    """The mean's error is less than 1 relative to such a field, and no less of the field's variation."""
    sums = squares_of(CHAOS, MEAN, mean=mean)
    assert weight_of(sums, ALONE, 0) == 1.0
    assert scores_of({"a": sums}) < scores_of({"a": squares_of([0.3, 0.6, 0.8] + [1.2] * 7, MEAN, mean=mean)})


def test_beyond_predictability_the_mean_is_no_better_than_a_realistic_rollout():
    """Of whole rollouts the base, which falls to the mean, is the better; what was learnt shows in the first
    leads. Errors above chance, a network that has blown up, still count."""
    chaotic = squares_of(CHAOS, MEAN)
    assert pooled(chaotic)["network"] > pooled(chaotic)["base"] and not beats_its_base(chaotic)
    assert serves(CHAOS, MEAN) == 1.0
    assert serves([0.4, 0.7, 0.9] + [1.41] * 7, MEAN) == 0.0  # learnt nothing
    assert serves([0.05, 0.15, 0.4] + [3.0] * 7, MEAN) == 0.0  # blown up
    assert serves(MEAN, CHAOS) == 0.0  # the other way round: the base follows longer
    assert serves(CHAOS, MEAN) == 1.0


@pytest.mark.parametrize(
    ("rows", "num_leads", "mean"), [(8, 20, 0.0), (8, 200, 0.3), (64, 10, 0.75), (64, 200, 0.75)]
)
def test_in_chaos_the_model_that_follows_longer_is_selected(rows, num_leads, mean):
    """Gaussian waves; correlations with the truth of 1 / (1 + (t / 8)^4), of the other four leads later."""
    draws, time = torch.Generator().manual_seed(0), torch.arange(1, num_leads + 1.0)
    waves = torch.randn(12, 64, generator=draws) / 12**0.5
    truth, one, other = (torch.randn(rows, num_leads, 12, generator=draws) @ waves for _ in range(3))
    for delay, is_longer in ((4.0, True), (-4.0, False)):
        known, known_on = (
            1 / (1 + (part.clamp_min(0.3) / 8) ** 4)[None, :, None] for part in (time, time - delay)
        )
        goes_on = known_on * truth + (1 - known_on**2).sqrt() * one
        falls = known * (known * truth + (1 - known**2).sqrt() * other)
        truth_squares, variation = ((truth + part).square().sum(-1) for part in (mean, 0.0))
        squares = [(part - truth).square().sum(-1) for part in (goes_on, falls)]
        for pair, is_used in ((squares, is_longer), (squares[::-1], not is_longer)):
            sums = torch.stack([truth_squares, variation, *pair], 1)[..., None].double()
            assert (weight_of(sums, torch.arange(rows), 0) > 0) is is_used


@pytest.mark.parametrize(
    ("network", "base"),
    [
        ([0.518], [0.958]),  # a steady task
        ([1.2], [1.45]),  # a first lead, neither follows the truth
        ([0.70] * 5, [0.945] * 5),  # neither ever follows
        ([0.52, 0.7, 0.8, 0.85], [0.6, 0.9, 0.95, 1.0]),
        ([0.55] * 10, [0.49] + [0.9] * 9),  # only the base follows, and only at first
        # both follow, the network knows much of what comes after
        ([0.45, 0.55, 0.6, 0.6], [0.45, 0.7, 0.9, 0.95]),
    ],
)
def test_an_error_counts_in_full_unless_both_first_followed_the_truth_and_then_lost_it(network, base):
    assert serves(network, base) == 1.0 and not is_lost(squares_of(network, base)).any()
    assert serves(base, network) == 0.0
    assert scores_of({"a": squares_of(network, base)})[0] == pooled(squares_of(network, base))["network"]


def test_a_lower_error_never_turns_the_selection_against_its_candidate():
    """At every lead but those that first follow the truth, whatever the others are."""
    levels = [0.1, 0.45, 0.6, 0.79, 0.81, 1.0, 1.41, 1.7, 1.8, 3.0]
    draw = torch.Generator().manual_seed(0)
    for _ in range(300):
        # both follow: else see the next test
        first = [levels[i] for i in torch.randint(0, 2, (2,), generator=draw)]
        network, base = (
            [start, *(levels[i] for i in torch.randint(0, 10, (4,), generator=draw))] for start in first
        )
        lead = int(torch.randint(0, 5, (1,), generator=draw))
        better = [*network]
        better[lead] = network[lead] * float(torch.rand(1, generator=draw))
        before, after = (difference(candidate, base) for candidate in (network, better))
        assert after <= before, (network, better, base)
        assert difference(base, better) >= difference(base, network)  # nor for the other


def difference(network: list[float], base: list[float]) -> float:
    """Sum over the leads that count of the network's error less its base's."""
    curves = torch.tensor([network, base]).double()[..., None]
    return float(torch.where(lost_by_each(curves).all(0), 0.0, curves[0] - curves[1]).sum())


# ---------------------------------------------------------------- which weights are kept


def test_the_score_is_the_geometric_mean_of_the_better_of_network_and_base():
    found = {"a": squares_of([0.1], [0.4], 1), "b": squares_of([math.inf], [0.3], 1)}
    size = 1 + 0.1 * float(noise(1, seed=5))
    assert scores_of(found) == (pytest.approx(math.sqrt(0.1 * 0.3) * size), math.inf)
    assert scores_of({"a": squares_of([math.inf], [math.inf], 1)}) == (math.inf, math.inf)


def test_a_sampled_task_is_scored_by_single_calls():
    """A network that follows one random future for a call, on a base that falls to the mean of all. Scores of
    whole rollouts, the fake, prefer the base."""
    early, late = [0.4] + [1.2] * 9, [0.2] + [1.3] * 9
    sums = squares_of(late, MEAN_AT_ONCE)
    assert weight_of(sums, ALONE, 0) == 0.0
    assert weight_of(sums[:, :, :1], ALONE, 0) == 1.0
    by_call = [scores_of({"a": squares_of(network, MEAN_AT_ONCE)}, ["a"]) for network in (early, late)]
    assert by_call[1] < by_call[0]
    by_rollout = [scores_of({"a": squares_of(network, MEAN_AT_ONCE)}, ["b"]) for network in (early, late)]
    assert by_rollout[0][0] == by_rollout[1][0] and by_rollout[1][1] > by_rollout[0][1]


def test_a_network_that_improves_at_any_lead_never_scores_worse_and_two_errors_never_tie():
    levels = [0.05, 0.3, 0.49, 0.51, 0.7, 0.79, 0.81, 1.0, 1.2, 1.41, 1.7, 1.8, 3.0, 10.0]
    draw = torch.Generator().manual_seed(0)
    for _ in range(300):
        base, network = (
            [levels[i] for i in torch.randint(0, len(levels), (4,), generator=draw)] for _ in range(2)
        )
        score = scores_of({"a": squares_of(network, base, 1)})
        for lead, factor in itertools.product(range(4), (0.99, 0.7, 0.3)):
            better = [*network]
            better[lead] *= factor
            assert scores_of({"a": squares_of(better, base, 1)}) < score, (network, better, base)


def test_weights_that_follow_longer_are_kept_although_the_mean_has_the_smaller_error():
    curves = [
        MEAN,
        [0.3, 0.6, 0.8] + [1.2] * 7,
        [0.2, 0.4, 0.7, 1.2] + [1.41] * 6,
        CHAOS,
        [0.05, 0.1, 0.3] + [1.41] * 7,
    ]
    found = [scores_of({"a": squares_of(curve, MEAN)}) for curve in curves]
    assert found == sorted(found, reverse=True) and len(set(found)) == len(found)
    assert scores_of({"a": squares_of([0.05, 0.15, 0.4] + [3.0] * 7, MEAN)})[1] > found[0][1]  # blown up
    far = [
        scores_of({"a": squares_of(curve + curve[-1:] * 400, MEAN + MEAN[-1:] * 400)})
        for curve in (MEAN, CHAOS)
    ]
    assert far[1] < far[0]  # however long the rollout is


def test_where_no_error_is_large_the_score_is_the_pooled_error_bit_for_bit():
    for seed in range(5):
        draws = torch.rand(64, 2, 7, 2, generator=torch.Generator().manual_seed(seed))
        sums = torch.cat([torch.ones(64, 2, 7, 2), 0.6 * draws], 1).double()
        sums[:, :, 3, 1] = 0.0  # a channel that is zero there
        assert not is_lost(sums).any()
        found = pooled(sums)
        geometric = [math.exp(math.log(error)) for error in (min(found.values()), found["network"])]
        assert scores_of({"a": sums}) == tuple(geometric)
        ratio = error_ratios(sums, ALONE, 0)["nrmse_pooled"]
        decision = select_network("forecasts", sums, ALONE, 0)
        assert decision.candidates["network"] == [ratio[end] for end in ("value", "low", "high")]
