"""Head and scale of the corrector (ups/generative/corrector.py), what students learn
(ups/generative/student.py), noise and conservation of ensembles."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from cases import cases
from torch import Tensor

from ups.config.load import load_config, to_dict
from ups.config.model import ModelConfig
from ups.config.schema import OptimConfig
from ups.generative.corrector import (
    LARGEST_LOG_SCALE,
    MAX_FACTS,
    Corrector,
    CorrectorFacts,
    CorrectorHead,
    ResidualBatch,
    fit_head,
    gaussian_nll,
    largest_mode,
)
from ups.generative.diffusion import PURE_NOISE, sample, sample_angles
from ups.generative.fitting import check_statistics
from ups.generative.student import (
    MID_EVERY,
    Solved,
    SolvedPool,
    endpoint_loss,
    ensemble_loss,
    mid_step,
    pool_number,
    pseudo_huber,
    solve_path,
    validate,
)
from ups.metrics.proper import fair_crps
from ups.models.rollout import member_noise
from ups.select import tuning_ratio
from ups.training.optim import split_parameters
from ups_discovery.seeds import generator

MODEL = ModelConfig(kind="flat", width=16, depth=1, modes=4, kernel_size=5, mlp_ratio=2.0)
OPTIM = OptimConfig(
    muon_lr=0.01,
    muon_momentum=0.95,
    muon_weight_decay=0.0,
    adamw_lr=0.01,
    adamw_betas=[0.9, 0.99],
    adamw_weight_decay=0.0,
    warmup_steps=10,
    decay_fraction=0.7,
    clip_norm=1.0,
    ema_decay=0.99,
    trunk_factor=1.0,
)
TASKS = [
    {"name": "burgers1d_hidden", "dim": 3, "num_conditions": 5},
    {"name": "diff_react2d", "dim": 4, "num_conditions": 2},
]
TOKENS = {"burgers1d_hidden": (8,), "diff_react2d": (6, 4)}


def noise(*shape: int, key: int | str = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(0, "test", key))


def build(precision: str = "no") -> Corrector:
    """A corrector of two tasks in which nothing is zero or one any more, as after training."""
    torch.manual_seed(0)
    corrector = Corrector({"model": to_dict(MODEL), "precision": precision, "tasks": TASKS})
    with torch.no_grad():
        for parameter in corrector.parameters():
            parameter += 0.1 * torch.randn(parameter.shape)
        for head in corrector.heads.values():
            for name in ("r_mean", "c_mean"):
                getattr(head, name).normal_()
            for name in ("r_std", "c_std"):
                getattr(head, name).uniform_(0.1, 3.0)
    return corrector


def batch_of(corrector: Corrector, name: str, size: int = 4, key: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """(r, tokens, facts) of a task, at random."""
    head = corrector.heads[name]
    return (
        noise(size, *TOKENS[name], len(head.r_std), key=key),
        noise(size, *TOKENS[name], len(head.c_std), key=key + 1),
        noise(size, 2, key=key + 2),
    )


# ---------------------------------------------------------------- the network


@pytest.mark.parametrize("name", TOKENS)
def test_whitening_and_its_inverse_are_those_of_the_formula(name):
    corrector = build()
    r, tokens, facts = batch_of(corrector, name)
    head = corrector.heads[name]
    condition = head.condition(tokens, facts)
    white = head.whiten(r, condition)
    torch.testing.assert_close(head.unwhiten(white, condition), r, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(head.whiten(head.unwhiten(r, condition), condition), r, rtol=1e-3, atol=1e-4)
    standard, mean, log_scale = condition.tokens.split([tokens.shape[-1], r.shape[-1], r.shape[-1]], -1)
    assert torch.equal(standard, (tokens - head.c_mean) / head.c_std)
    assert torch.equal(condition.facts, torch.nn.functional.pad(facts, (0, 6)))
    assert torch.equal(condition.mean, mean) and log_scale.abs().max() > 0.01 < mean.abs().max()
    by_hand = ((r - head.r_mean) / head.r_std - log_scale.exp() * mean) / log_scale.exp()
    torch.testing.assert_close(white, by_hand, rtol=1e-3, atol=1e-4)


def test_the_gaussian_on_operator_features_is_small_and_keeps_their_scale():
    torch.manual_seed(0)
    facts = CorrectorFacts(name="burgers1d_hidden", dim=3, num_conditions=21)
    deep = replace(MODEL, depth=3)
    own, head = CorrectorHead(facts, deep), CorrectorHead(replace(facts, num_features=16), deep)
    sizes = [sum(weight.numel() for weight in part.gaussian.parameters()) for part in (own, head)]
    assert sizes[1] < 0.5 * sizes[0]

    # the last feature says the mean, and varies by a thousandth of the others
    def draw(step: int) -> ResidualBatch:
        tokens = noise(64, 8, 21, key=step)
        r = tokens[..., -1:] + 0.1 * noise(64, 8, 3, key=-step - 1)
        tokens[..., -1] *= 1e-3
        return ResidualBatch(r, tokens, torch.zeros(64, 2))

    fit_head(head, draw, [draw(10**6)], 20, OPTIM, (640, 64))
    assert torch.equal(head.c_std[-16:], torch.ones(16)) and not head.c_mean[-16:].any()
    assert (head.c_std[:5] - 1).abs().max() < 0.1 and head.c_mean[:5].all()
    _, tokens, facts = draw(5)[:3]
    before = head.condition(tokens, facts).mean
    tokens[..., -8] += 1.0
    assert (head.condition(tokens, facts).mean - before).abs().max() > 1e-3


def test_the_rows_of_a_condition_are_the_conditions_of_those_rows():
    corrector = build()
    r, tokens, facts = batch_of(corrector, "diff_react2d")
    head, index = corrector.heads["diff_react2d"], torch.tensor([2, 0, 2])
    whole = head.condition(tokens, facts)
    some, again = whole.rows(index), head.condition(tokens[index], facts[index])
    assert (len(whole.facts), len(some.facts), some.name) == (4, 3, "diff_react2d")
    assert some.facts.shape == (3, MAX_FACTS)
    for key in ("tokens", "facts", "mean", "log_scale"):
        torch.testing.assert_close(getattr(some, key), getattr(again, key), rtol=1e-5, atol=1e-6)
        assert torch.equal(getattr(some, key)[0], getattr(whole, key)[2])
    angle = torch.tensor([0.3, 1.5, 0.9])
    torch.testing.assert_close(
        corrector.velocity(some)(r[index], angle), corrector.velocity(again)(r[index], angle)
    )


def test_a_bfloat16_backbone_returns_float32_and_whitening_stays_float32(monkeypatch):
    monkeypatch.setattr("ups.common.device.has_bfloat16", lambda kind: True)
    exact, rough = build(), build("bf16")
    r, tokens, facts = batch_of(exact, "burgers1d_hidden")
    angle = sample_angles(4, generator(0))
    condition = rough.heads["burgers1d_hidden"].condition(tokens, facts)
    found = rough.velocity(condition)(r, angle).detach()
    expected = exact.heads["burgers1d_hidden"].condition(tokens, facts)
    assert torch.equal(condition.mean, expected.mean) and torch.equal(condition.log_scale, expected.log_scale)
    difference = found - exact.velocity(expected)(r, angle).detach()
    assert found.dtype == torch.float32 and 1e-5 < float(difference.norm() / found.norm()) < 0.03


def test_a_student_is_rebuilt_because_a_deep_copy_loses_what_muon_trains():
    teacher = build()
    student = Corrector(teacher.description)
    student.load_state_dict(teacher.state_dict())
    counts = [len(split_parameters(model)[0]) for model in (teacher, student, copy.deepcopy(teacher))]
    num = 2 * MODEL.depth * len(TASKS)  # each task has its own
    assert counts == [num, num, 0]
    assert [p.requires_grad for p in student.parameters()] == [p.requires_grad for p in teacher.parameters()]


# ---------------------------------------------------------------- the scale


def test_the_likelihood_is_that_of_the_formula():
    """By hand: 0.5 (2/2 - 0.5)^2 + ln 2, 0.5 (3 - 1)^2 + 0; constants dropped."""
    r = torch.tensor([[2.0, 3.0]])
    mean = torch.tensor([[0.5, 1.0]])
    log_scale = torch.tensor([[math.log(2), 0.0]])
    white = r * torch.exp(-log_scale) - mean
    assert gaussian_nll(white, log_scale).tolist() == pytest.approx([(0.125 + math.log(2) + 2.0) / 2])
    expected = -torch.distributions.Normal(mean * log_scale.exp(), log_scale.exp()).log_prob(
        r
    ) - 0.5 * math.log(2 * math.pi)
    assert float(gaussian_nll(white, log_scale)) == pytest.approx(float(expected.mean()))


@pytest.mark.parametrize("kind", ["sine", "alternating", "bump", "white"])
def test_the_largest_mode_is_found_for_any_shape(kind):
    x = 2 * math.pi * torch.arange(16) / 16
    # sqrt of the largest eigenvalue of a sample covariance: 1 + sqrt(dim / n) (Marchenko and Pastur 1967)
    if kind == "white":
        assert float(largest_mode(noise(4096, 16, 1))) == pytest.approx(1 + math.sqrt(16 / 4096), abs=0.03)
        return
    # orthogonal to its own absolute value, as the sine is but for rounding
    alternating = torch.tensor([1.0, -1.0]).repeat(8)
    field = {"sine": x.sin(), "alternating": alternating, "bump": (-(x - 3).square()).exp()}[kind]
    amplitude = noise(200, 1)
    expected = float(amplitude.square().mean().sqrt() * field.norm())
    assert float(largest_mode((amplitude * field).view(200, 8, 2))) == pytest.approx(expected, rel=1e-5)
    noisy = 3 * amplitude * field + noise(200, 16, key=1)
    exact = torch.linalg.eigvalsh(noisy.T @ noisy / 200)[-1].sqrt()
    assert float(largest_mode(noisy)) == pytest.approx(float(exact), rel=1e-4)


def fitted(
    draw: Callable, steps: int, dim: int, num_conditions: int
) -> tuple[CorrectorHead, dict[str, float]]:
    torch.manual_seed(0)
    head = CorrectorHead(
        CorrectorFacts(name="burgers1d_hidden", dim=dim, num_conditions=num_conditions), MODEL
    )
    return head, fit_head(head, draw, [draw(10**6 + i) for i in range(4)], steps, OPTIM, (1000, 1000))


@torch.no_grad()
def whitened(head: CorrectorHead, r: Tensor, tokens: Tensor, facts: Tensor) -> Tensor:
    """Whitened by the corrector, independently of fit_head."""
    corrector = Corrector(
        {
            "model": to_dict(MODEL),
            "precision": "no",
            "tasks": [{"name": head.name, "dim": len(head.r_std), "num_conditions": len(head.c_std)}],
        }
    )
    corrector.heads[head.name].load_state_dict(head.state_dict())
    return corrector.heads[head.name].whitened(r, tokens, facts)[0]


def heteroscedastic(step: int) -> tuple[Tensor, Tensor, Tensor]:
    """r = s(c) xi with s from 1e-3 to 1, log-uniform, another one at every token; two further coefficients of
    even size."""
    draw = generator(3, "scale", step)
    c = torch.rand(64, 8, 1, generator=draw)
    xi = torch.randn(64, 8, 3, generator=draw)
    # the last hardly errs
    r = torch.cat([10 ** (3 * c - 3) * xi[..., :1], 20 + 5 * xi[..., 1:2], 1e-6 * xi[..., 2:]], -1)
    return r, torch.cat([4 * c + 7, torch.ones_like(c)], -1), torch.zeros(64, 2)


def test_fitting_recovers_a_scale_that_spans_three_decades_and_leaves_unit_variance():
    head, facts = fitted(heteroscedastic, 300, 3, 2)
    train = torch.cat([whitened(head, *heteroscedastic(-1 - i)) for i in range(16)])
    assert facts["std_train"] == pytest.approx(1.0, abs=0.01)
    assert facts["std_val"] == pytest.approx(1.0, abs=0.1)
    assert facts["ratio"] == pytest.approx(1.0, abs=0.05)
    parts = [heteroscedastic(10**5 + i) for i in range(32)]  # none that it was fitted on
    white = torch.cat([whitened(head, *part) for part in parts]).flatten(0, -2)
    place = torch.cat([part[1] for part in parts]).flatten(0, -2)[:, 0].argsort()
    deciles = torch.stack([rows[:, 0].std() for rows in white[place].tensor_split(10)])
    assert (deciles - 1).abs().max() < 0.1, deciles
    assert float(white[:, 1].mean()) == pytest.approx(0.0, abs=0.05)
    assert head.r_mean[1] == pytest.approx(20, abs=0.5)
    raw = torch.cat([part[0] for part in parts]).flatten(0, -2)[:, 0]
    # a scale was needed
    assert raw[place].tensor_split(10)[0].std() < 3e-3 < 0.5 < raw[place].tensor_split(10)[-1].std()
    torch.testing.assert_close(train.flatten(0, -2).std(0), torch.ones(3), rtol=1e-3, atol=0)
    assert white.isfinite().all()
    assert float(head.r_std[2]) < 1e-2
    assert all(math.isfinite(v) for v in facts.values())


def test_fitting_recovers_a_conditional_mean():
    def draw(step: int) -> tuple[Tensor, Tensor, Tensor]:
        source = generator(4, "mean", step)
        c, fact = torch.rand(64, 8, 1, generator=source), torch.randn(64, 1, generator=source)
        mean = (3 * c).sin() + fact[:, None]
        return mean + 0.1 * torch.randn(64, 8, 1, generator=source), c, fact

    head, facts = fitted(draw, 300, 1, 1)
    parts = [draw(10**5 + i) for i in range(16)]
    white = torch.cat([whitened(head, *part) for part in parts]).flatten()
    assert float(white.std()) == pytest.approx(1.0, abs=0.1)
    for key in (
        torch.cat([part[1] for part in parts]).flatten(),
        torch.cat([part[2][:, None].expand(-1, 8, -1) for part in parts]).flatten(),
    ):
        means = torch.stack([rows.mean() for rows in white[key.argsort()].tensor_split(10)])
        assert means.abs().max() < 0.3, means  # of the noise 0.1; without the mean it would be 10
    spread = float(torch.cat([draw(-1 - i)[0] for i in range(16)]).std())
    assert 0 < facts["nll"] - (0.5 + math.log(0.1 / spread)) < 0.3  # of the truth, r in units of its spread


def test_the_log_scale_is_bounded():
    head = CorrectorHead(CorrectorFacts.read(TASKS[0]), MODEL)
    with torch.no_grad():
        head.gaussian_out.bias.fill_(1e6)
        log_scale = head.condition(noise(2, 8, 5), torch.zeros(2, MAX_FACTS)).log_scale
    assert log_scale.abs().max() <= LARGEST_LOG_SCALE + 1e-5 and log_scale.exp().isfinite().all()


@pytest.mark.parametrize("times", [1.0, 0.5])
def test_residuals_that_are_zero_in_every_other_row_are_compared_by_their_mean_size(times):
    """The fake has half as large residuals where the corrector trains."""

    def kicks(step: int) -> tuple[Tensor, Tensor, Tensor]:
        draw = generator(6, "kicks", step)
        is_kicked = torch.rand(64, 1, 1, generator=draw) < 0.5
        quiet = 10 ** (-6 - 3 * torch.rand(64, 1, 1, generator=draw))
        size = torch.where(is_kicked, 1.0, quiet) * (times if step < 10**6 else 1.0)
        return size * torch.randn(64, 8, 1, generator=draw), torch.ones(64, 8, 1), torch.zeros(64, 1)

    _, facts = fitted(kicks, 2, 1, 1)
    assert facts["ratio_error"] < 0.1 and facts["ratio"] == pytest.approx(times, rel=0.15)
    limits = load_config().diffusion.min_residual_ratio, 10.0
    if times == 1.0:
        check_statistics("barkley2d", facts, *limits)
    else:
        with pytest.raises(ValueError, match="times those of validation"):
            check_statistics("barkley2d", facts, *limits)


FACTS = {"ratio": 1.0, "ratio_error": 0.02, "std_train": 1.0, "std_val": 1.0, "std_val_error": 0.02}


@pytest.mark.parametrize(("wrong", "text"), cases("corrector.overconfident"))
def test_residuals_that_would_make_a_corrector_overconfident_are_refused(wrong, text):
    diffusion = load_config().diffusion
    limits = diffusion.min_residual_ratio, diffusion.max_whitened_std
    check_statistics("burgers1d", FACTS, *limits)
    # too few trajectories to tell it from 1
    check_statistics("burgers1d", FACTS | {"ratio": 0.88, "ratio_error": 0.1}, *limits)
    check_statistics("burgers1d", FACTS | {"std_val": 1.2, "std_val_error": 0.03}, *limits)
    with pytest.raises(ValueError, match=text):
        check_statistics("burgers1d", FACTS | wrong, *limits)


# ---------------------------------------------------------------- what students learn


def test_the_pool_gives_every_batch_four_passes_and_replaces_a_quarter_per_pass():
    size, turns = 8, 12
    passes = [[pool_number(turn * size + i, size, 5) for i in range(size)] for turn in range(turns)]
    for turn, numbers in enumerate(passes):
        assert sorted(number for number, _ in numbers) == list(range(2 * turn, 2 * turn + size))
        assert all(oldest == 2 * turn for _, oldest in numbers)
    count = {
        n: sum(n in [number for number, _ in numbers] for numbers in passes) for n in range(6, 2 * turns)
    }
    assert set(count.values()) == {4}
    assert [[n - 2 * turn for n, _ in numbers] for turn, numbers in enumerate(passes)].count(
        [n for n, _ in passes[0]]
    ) < 3
    assert pool_number(77, size, 5) == passes[9][5]
    assert any(pool_number(i, size, 6) != passes[0][i] for i in range(size))


def test_pairs_are_solved_once_and_dropped_after_use():
    solved, size = [], 8

    class Told(SolvedPool):
        def solve(self, number: int, part: slice) -> tuple:
            solved.append((number, part.start, part.stop))
            return (number, part)

    pairs = Told(None, SimpleNamespace(seed=0), 1.1, size)
    for step in range(20 * size):
        number = pairs.number(step)
        assert number == pool_number(step, size, 0)[0]
        for part in (slice(0, 4), slice(4, 8)):
            assert pairs.get(number, part) == (number, part)
        assert len(pairs.kept) <= 2 * size
    assert len(solved) == len(set(solved)) == 2 * (size + 19 * size // 4)
    assert min(number for number, _, _ in pairs.kept) >= 2 * 19  # what passed is gone
    pairs.get(number, slice(0, 2))  # another micro-batch is another part
    assert solved[-1] == (number, 0, 2)


def flow(condition: Tensor) -> Callable:
    """A velocity that depends on its rows' condition (batch, 1) and on the angle."""
    return lambda x, angle: condition * x.roll(1, -1) * angle[:, None].cos() + (x * condition).tanh()


@pytest.mark.parametrize(
    ("mid_angle", "steps", "turn"), [(1.1, 16, 5), (1.1, 4, 1), (1.56, 16, 1), (0.01, 16, 15), (1.1, 1, 0)]
)
def test_a_path_from_its_middle_has_the_same_end(mid_angle, steps, turn):
    x, condition = noise(32, 5), noise(32, 1, key=1)
    assert mid_step(mid_angle, steps) == turn
    passed, end = solve_path(flow(condition), x, steps, turn)
    torch.testing.assert_close(end, sample(flow(condition), x, steps), rtol=0, atol=0)
    rest = sample(flow(condition), passed, steps - turn, PURE_NOISE * (1 - turn / steps))
    torch.testing.assert_close(end, rest, rtol=1e-4, atol=1e-5)


def test_one_row_in_four_starts_at_mid_angle_on_every_process():
    start, passed, steps = noise(8, 3), noise(8, 3, key=1), range(2 * MID_EVERY)
    whole = Solved(None, start, slice(0, 8), start, passed, None)
    halves = [
        Solved(None, start[part], part, start[part], passed[part], None)
        for part in (slice(0, 4), slice(4, 8))
    ]
    seen = torch.zeros(8)
    for step in steps:
        x, angle = whole.pairs(step, 1.1)
        is_mid = angle < PURE_NOISE
        assert is_mid.sum() == 2 and torch.equal(x, torch.where(is_mid[:, None], passed, start))
        assert angle.dtype == torch.float32 and torch.equal(angle[is_mid], torch.full((2,), 1.1))
        for place, both in enumerate(zip(*(half.pairs(step, 1.1) for half in halves), strict=True)):
            assert torch.equal(torch.cat(both), (x, angle)[place])
        seen += is_mid
    assert (seen == 2).all()


def test_the_pair_loss_weighs_whitened_and_scaled_differences_equally():
    """Refuses what counts white numbers alone, where an error that carries no size costs as much as one that
    is all."""
    y, size = noise(6, 4), torch.tensor([2.0, 1e-3, 1e-3, 1e-3])

    def loss_with(error, size):  # f = -F at pi/2
        return endpoint_loss(lambda x, angle: -(y + error), 0 * y, torch.full((6,), PURE_NOISE), y, size)

    small, large = torch.tensor([0.0, 1, 0, 0]), torch.tensor([1.0, 0, 0, 0])
    torch.testing.assert_close(loss_with(small, 1.0), loss_with(large, 1.0))
    assert (loss_with(large, size) > 2 * loss_with(small, size)).all()
    torch.testing.assert_close(loss_with(large, 1.0), pseudo_huber(large.expand(6, 4)), rtol=1e-4, atol=1e-6)


STANDING = {"crps": 1.0, "spread_skill": 0.9, "energy": 2.0, "variance": 0.8}


@pytest.mark.parametrize(("change", "ratio"), cases("corrector.tuning"))
def test_tuning_passes_only_if_one_score_improves_and_none_worsens(change, ratio):
    assert tuning_ratio({"a": STANDING | change}, {"a": STANDING}) == pytest.approx(ratio)


def test_tuning_passes_only_if_every_task_gains():
    better, before = STANDING | {"crps": 0.8}, {"a": STANDING, "b": STANDING}
    assert tuning_ratio({"a": better, "b": STANDING | {"crps": 0.9}}, before) == pytest.approx(0.85)
    assert (
        tuning_ratio({"a": better, "b": STANDING}, before)
        is tuning_ratio({"a": STANDING, "b": better}, before)
        is None
    )


@pytest.mark.parametrize(
    ("factor", "shift", "pair", "variance"),
    [(1.0, 0.0, 0.0, 1.0), (0.5, 0.0, 0.25, 0.25), (-1.0, 0.0, 4.0, 1.0), (1.0, 2.0, 4.0, 1.0)],
)
def test_validation_measures_pairs_and_variance_in_latent_units(factor, shift, pair, variance):
    """Where most whitened numbers carry no size, they do not count; a student that follows them alone is
    refused."""
    size = torch.tensor([10.0] + [1e-3] * 7)  # physical, of the numbers of a residual

    def velocity(condition):  # at pure noise a draw is -F
        return lambda x, angle: -torch.where(size > 1, factor * x + shift, 0.0 * x)

    head = SimpleNamespace(r_std=torch.ones(8), unwhiten=lambda r, condition: size * r)
    student = SimpleNamespace(heads={"t": head}, velocity=velocity)
    condition = SimpleNamespace(name="t")
    condition.rows = lambda index: condition
    white = noise(40000, 4, 8)
    ranks = SimpleNamespace(device="cpu", agreed=lambda work, _: work(), reduce_sum=lambda sums: sums)
    found = validate(
        student,
        {"t": SimpleNamespace(decode=lambda z: z)},
        {"t": [(condition, noise(40000, 8, key=1), white, white[:, 0], white[:, 1])]},
        ranks,
    )["t"]
    assert found["pair"] == pytest.approx(pair, abs=0.02 + 0.03 * pair)
    assert found["variance"] == pytest.approx(variance, rel=0.05)


SCALES = (0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0)


@pytest.mark.parametrize("tokens", [(8,), (4, 4), (3,)])
def test_the_loss_of_the_stage_scoring_is_least_for_the_true_spread(tokens):
    """Among members k times as wide as the truth; in expectation, the same draws for every k."""
    truth, members = noise(3000, *tokens, 2), noise(3000, 4, *tokens, 2, key=1)
    rotation = torch.linalg.qr(noise(2, 2, key=2)).Q
    losses = [float(ensemble_loss(k * members, truth, lambda z: z @ rotation).mean()) for k in SCALES]
    assert losses.index(min(losses)) == SCALES.index(1.0), losses


def test_the_loss_of_the_stage_scoring_depends_on_joint_structure():
    """Truth: all tokens equal; members: right at every token, but independent."""
    truth, members = noise(3000, 1, 1).expand(-1, 8, 1), noise(3000, 4, 1, 1, key=1).expand(-1, -1, 8, -1)
    wrong = noise(3000, 4, 8, 1, key=2)
    right = float(ensemble_loss(members, truth, lambda z: z).mean())
    assert float(ensemble_loss(wrong, truth, lambda z: z).mean()) > 1.05 * right
    assert float(fair_crps(wrong, truth).mean()) == pytest.approx(
        float(fair_crps(members, truth).mean()), rel=0.05
    )


# ---------------------------------------------------------------- noise and ensembles


def test_noise_is_a_function_of_seed_row_lead_and_key_alone():
    together = member_noise((3, 2), 1, [4, 9, 2], 5, 6)
    assert together.shape == (3, 6, 3, 2)
    assert torch.equal(together[1:2], member_noise((3, 2), 1, [9], 5, 6))
    assert torch.equal(together.flip(0), member_noise((3, 2), 1, [2, 9, 4], 5, 6))
    assert torch.equal(together, member_noise((3, 2), 1, [4, 9, 2], 5, 6))


def test_noise_is_independent_over_rows_members_leads_keys_and_seeds():
    parts = [
        member_noise((2000,), seed, [0, 1], lead, 2, key).flatten(0, 1)
        for seed in (0, 1)
        for lead in (-1, 0, 1)
        for key in ("noise", "second")
    ]
    draws = torch.cat(parts)
    correlation = torch.corrcoef(draws) - torch.eye(len(draws))
    assert correlation.abs().max() < 0.11 and len(draws) == 48  # 1128 pairs; standard deviation 0.022
    assert (draws.mean(1).abs() < 0.1).all() and ((draws.std(1) - 1).abs() < 0.07).all()


def test_facts_of_a_corrector_are_saved_as_they_were_read_and_a_change_of_one_is_saved_too():
    description = {"model": to_dict(MODEL), "precision": "no", "tasks": [dict(task) for task in TASKS]}
    network = Corrector(description)
    assert network.description == description
    network.heads[TASKS[0]["name"]].decide(sample_error=0.1)
    assert network.description["tasks"][0] == TASKS[0] | {"sample_error": 0.1}
    assert Corrector(network.description).heads[TASKS[0]["name"]].sample_error == 0.1
    with pytest.raises(ValueError, match="have the dim missing; expected what this version records"):
        CorrectorFacts.read({key: value for key, value in TASKS[0].items() if key != "dim"})
