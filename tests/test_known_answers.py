"""Diffusion, distillation and ensembles against distributions known in closed form, and fakes that must be
caught.

Problems are random, but fixed in `make test`; UPS_TEST_SEED repeats a run. Teacher and student pass the
checks of tests/known_answers.py, and each negative control fails the criterion made for it.
"""

import math

import known_answers as known
import pytest
import torch
from known_answers import SEED, STEPS, names, normal, stream, uniform

from ups.generative.diffusion import PURE_NOISE, diffuse, sample, sample_angles
from ups.metrics.calibration import spread_skill
from ups.metrics.proper import fair_crps
from ups.models.rollout import member_noise, rollout

pytestmark = pytest.mark.drawn

NUM = 8192  # draws per place: the standard error of a spread is 0.8 %


@pytest.fixture(autouse=True)
def seed():
    print(f"repeat with UPS_TEST_SEED={SEED}")


# ---- T1: the sampler, exactly


STDS = (0.05, 0.1, 0.3, 0.6, 1.0, 3.0, 10.0)


@pytest.mark.parametrize("num_steps", [1, 2, 7, 16, 64])
def test_the_sampler_multiplies_a_gaussian_by_the_product_of_its_steps(num_steps):
    draws = stream("T1", num_steps)
    x = normal(8, 3, draws=draws).double()
    for std in (*STDS, math.exp(uniform(-3, 2, draws))):
        got = sample(known.gaussian_velocity(0.0, std), x, num_steps)
        torch.testing.assert_close(got, known.midpoint_factor(std, num_steps) * x, rtol=1e-5, atol=0)
        start = uniform(0.05, 1.5, draws)  # and from every angle
        got = sample(known.gaussian_velocity(0.0, std), x, num_steps, torch.full((8,), start).double())
        factor = known.midpoint_factor(std, num_steps, float(torch.tensor(start).double()))
        torch.testing.assert_close(got, factor * x, rtol=1e-5, atol=0)


# ---- T2 to T4: one dimension, learnt


def angles_of_training(*keys):
    """4096 angles as a diffusion is trained at, every other one pure noise."""
    angle = sample_angles(4096, stream(*keys))
    angle[::2] = PURE_NOISE
    return angle


def test_the_sampler_of_an_exact_mixture_is_its_quantile_map():
    mixture = known.Mixture.draw(stream("T4"))
    draws = stream("T4", "starts")
    angle = angles_of_training("T4", "angle").double().clamp(max=PURE_NOISE)
    x = diffuse(mixture.sample(4096, draws), normal(4096, 1, draws=draws), angle.float()).double()
    exact = mixture.endpoint(x, angle)
    errors = [float((sample(mixture.velocity, x, num, angle) - exact).abs().mean()) for num in (32, 64, 128)]
    # second order gives 16
    assert errors[1] < 2e-3 and errors[2] < 5e-4 and errors[0] / errors[2] > 8, errors


# ---- T6, T8: two modes in eight dimensions


@pytest.fixture(scope="module")
def bimodal():
    model = known.learn(known.Bimodal.draw(stream("bimodal")), "bimodal", 1400, width=64)
    return model, known.distill(model, known.build_pool(model, 2**14), "student", 1200)


@pytest.fixture(scope="module")
def truths(bimodal):
    problem = bimodal[0].problem
    return [problem.residuals(c.expand(NUM, -1), stream("truth", i)) for i, c in enumerate(problem.places())]


@pytest.fixture(scope="module")
def teacher_draws(bimodal):
    """(noise, draws of the teacher), each (places, NUM, 8)."""
    model = bimodal[0]
    noise = torch.stack([model.noise(NUM, "T6", i) for i in range(2)])
    return noise, torch.stack(
        [model.from_teacher(c, z) for c, z in zip(model.problem.places(), noise, strict=True)]
    )


@pytest.fixture(scope="module")
def exact_draws(bimodal, teacher_draws):
    """The teacher's draws with 64 steps from the first 2048 noises of each place: what students are paired
    with."""
    model, noise = bimodal[0], teacher_draws[0][:, :2048]
    return torch.stack(
        [model.from_teacher(c, z, 64) for c, z in zip(model.problem.places(), noise, strict=True)]
    )


def from_student(model, student, noise, second=None):
    """(places, n, 8) from noise of that shape."""
    return torch.stack(
        [
            model.from_student(student, c, noise[i], None if second is None else second[i])
            for i, c in enumerate(model.problem.places())
        ]
    )


def failures_of(model, r, truths):
    """Failures per place."""
    return [
        known.check_bimodal(model.problem, c, r[i], truths[i]) for i, c in enumerate(model.problem.places())
    ]


def test_the_teacher_samples_both_modes_and_nothing_between(bimodal, truths, teacher_draws):
    assert failures_of(bimodal[0], teacher_draws[1], truths) == [[], []]
    assert failures_of(bimodal[0], truths, truths) == [[], []]


def test_the_student_samples_both_modes_in_one_evaluation_and_in_two(bimodal, truths, teacher_draws):
    model, student = bimodal
    second = torch.stack([model.noise(NUM, "second", i) for i in range(2)])
    assert failures_of(model, from_student(model, student, teacher_draws[0]), truths) == [[], []]
    assert failures_of(model, from_student(model, student, teacher_draws[0], second), truths) == [[], []]


def test_the_student_is_its_teachers_map(bimodal, teacher_draws, exact_draws):
    model, student = bimodal
    noise, r = teacher_draws
    assert not known.check_pairing(from_student(model, student, noise[:, :2048]), exact_draws)
    assert not known.check_pairing(r[:, :2048], exact_draws)


def test_the_mean_alone_is_caught(bimodal, truths, exact_draws):  # N1
    model, _ = bimodal
    mean = torch.stack([(model.problem.offset * c).expand(NUM, 8) for c in model.problem.places()])
    for failures in failures_of(model, mean, truths):
        assert {"gap", "coherence", "component std", "energy distance"} <= names(failures)
    assert {"pair error", "pair correlation", "use of noise"} <= names(
        known.check_pairing(mean[:, :2048], exact_draws)
    )


def test_a_student_with_frozen_noise_is_caught(bimodal, truths, teacher_draws, exact_draws):  # N5
    model, student = bimodal
    fake = from_student(model, student, teacher_draws[0][:, :1].expand(-1, NUM, -1))
    for failures in failures_of(model, fake, truths):
        assert {"fraction", "component std", "energy distance"} <= names(failures)
    assert {"pair error", "pair correlation", "use of noise"} <= names(
        known.check_pairing(fake[:, :2048], exact_draws)
    )


# ---- T9: a linear stochastic equation, rolled out


ROWS, MEMBERS, LEADS = 4096, 6, 5


def check_rollout(problem, draw):
    """Failures of an ensemble whose residuals are draw(z, noise): covariance, spread/skill and CRPS at every
    lead, 5 % each."""
    truth_draws = stream("T9", "truth")
    start = problem.conditions(ROWS, truth_draws)
    path, z = [], start
    for _ in range(LEADS):
        z = z @ problem.a.float().T + problem.residuals(z, truth_draws)
        path.append(z)

    def step(window, lead):
        z = window[:, -1]
        return (z @ problem.a.float().T + draw(z, lead))[:, None]

    members = rollout(step, start.repeat_interleave(MEMBERS, 0)[:, None], LEADS, 1)
    members = members.unflatten(0, (-1, MEMBERS))
    truth = torch.stack(path, 1)
    variance, error = (
        value[:, :, 0].mean(0) for value in spread_skill(members[:, :, :, None], truth[:, :, None])
    )
    crps = (
        fair_crps(members.movedim(2, 0).flatten(0, 1), truth.movedim(1, 0).flatten(0, 1))
        .view(LEADS, -1)
        .mean(1)
    )
    measured, limits, mean, covariance = {}, {}, start.double(), torch.zeros_like(problem.q)
    for lead in range(LEADS):
        mean = mean @ problem.a.T
        covariance = problem.a @ covariance @ problem.a.T + problem.q @ problem.q.T
        found = torch.cov((members[:, :, lead].double() - mean[:, None]).flatten(0, 1).T)
        measured |= {
            f"covariance {lead}": float((found - covariance).norm() / covariance.norm()),
            f"spread over skill {lead}": float(
                (variance[lead] * (MEMBERS + 1) / MEMBERS / error[lead]).sqrt()
            ),
            f"crps {lead}": float(crps[lead] / (covariance.diagonal().sqrt().mean() / math.sqrt(math.pi))),
        }
        limits |= {
            f"covariance {lead}": (0.0, 0.05),
            f"spread over skill {lead}": (0.95, 1.05),
            f"crps {lead}": (0.95, 1.05),
        }
    return known.failed(measured, limits)


@pytest.fixture(scope="module")
def equation():
    return known.LinearSDE.draw(stream("equation"))


def noise_at(lead):
    return member_noise((3,), SEED, range(ROWS), lead, MEMBERS).flatten(0, 1)


def test_an_exact_corrector_spreads_as_the_stochastic_equation_at_every_lead(equation):
    covariance = equation.q @ equation.q.T
    std = covariance.diagonal().sqrt()
    values, vectors = torch.linalg.eigh(covariance / std[:, None] / std)
    vectors, own = vectors.float(), known.gaussian_velocity(0.0, values.sqrt().float())

    def draw(z, lead, frozen=False):
        noise = noise_at(0 if frozen else lead)
        return sample(lambda x, angle: own(x @ vectors, angle) @ vectors.T, noise, STEPS) * std.float()

    assert not check_rollout(equation, draw)
    # noise must be new at every lead
    repeated = names(check_rollout(equation, lambda z, lead: draw(z, lead, frozen=True)))
    assert "covariance 0" not in repeated and repeated & {f"covariance {lead}" for lead in range(1, LEADS)}
    silent = names(check_rollout(equation, lambda z, lead: 0 * z))
    assert {"covariance 0", "spread over skill 0", "crps 0"} <= silent
