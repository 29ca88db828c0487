"""Distributions known in closed form, and models of them that are trained, distilled and checked in seconds.

The losses, samplers, starts and scores are those of ups/; an MLP replaces the backbone. The parameters of
every problem are random functions of SEED. Checks return the criteria that a model fails, as "name: value
outside [low, high]": none for a correct model, and each negative control fails the criterion made for it."""

from __future__ import annotations

import copy
import functools
import math
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ups.generative.corrector import LARGEST_LOG_SCALE, gaussian_nll, largest_mode
from ups.generative.diffusion import PURE_NOISE, Velocity, diffusion_loss, sample, sample_angles
from ups.generative.student import Solved, endpoint_loss, mid_step, sample_student, solve_path
from ups.metrics.proper import energy_distance
from ups.training.optim import EMA
from ups_discovery.seeds import generator
from ups_solvers.darcy_grf import LinearObservation, apply_covariance

SEED = int(os.environ.get("UPS_TEST_SEED") or secrets.randbits(31))
STEPS = 16  # of the sampler: 32 evaluations
TURN = mid_step(1.1, STEPS)
MID_ANGLE = PURE_NOISE * (1 - TURN / STEPS)  # the student's second
BATCH = 512
Generator = torch.Generator


def posterior(observation: LinearObservation) -> tuple[Tensor, Tensor]:
    """Mean m (n, n) and covariance P (n^2, n^2) of g given the observation, float64; for grids whose n^2 x
    n^2 fits."""
    n, (cross, factor) = observation.resolution, observation.factors()
    gain = torch.cholesky_solve(cross, factor)
    prior = apply_covariance(torch.eye(n * n, dtype=torch.float64).view(n * n, n, n)).flatten(-2)
    return (observation.values.double() @ gain).view(n, n), prior - cross.T @ gain


def stream(*keys: int | str) -> Generator:
    """A generator that depends on SEED and `keys` alone."""
    return generator(SEED, *keys)


def uniform(low: float, high: float, draws: Generator) -> float:
    return low + (high - low) * float(torch.rand((), generator=draws, dtype=torch.float64))


def sign(draws: Generator) -> int:
    return 1 if uniform(0, 1, draws) < 0.5 else -1


def normal(*shape: int, draws: Generator) -> Tensor:
    return torch.randn(*shape, generator=draws)


def ar1(dim: int, rho: float) -> Tensor:
    """Covariance rho^|i - j|, float64."""
    index = torch.arange(dim, dtype=torch.float64)
    return rho ** (index[:, None] - index).abs()


@functools.cache
def ar1_factor(dim: int, rho: float) -> Tensor:
    return torch.linalg.cholesky(ar1(dim, rho)).float()


def ar1_noise(count: int, rho: float, draws: Generator) -> Tensor:
    """Normal (count, 8) with covariance rho^|i - j|."""
    return normal(count, 8, draws=draws) @ ar1_factor(8, rho).T


# ---- closed forms


def gaussian_velocity(mean: float, std: float | Tensor) -> Velocity:
    """The exact F of r ~ N(mean, std^2), every element on its own.

    With var = std^2 cos^2 + sin^2: E[r | x] = mean + std^2 cos (x - mean cos) / var, F = (cos x - E[r | x]) /
    sin; for mean 0 that is x cos sin (1 - std^2) / var."""

    def evaluate(x: Tensor, angle: Tensor) -> Tensor:
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        var = std**2 * cos**2 + sin**2
        return (x * cos * sin * (1 - std**2) - mean * sin) / var

    return evaluate


def midpoint_factor(std: float, num_steps: int, start: float = PURE_NOISE) -> float:
    """What the production sampler must multiply x by, for r ~ N(0, std^2): product over steps of length d =
    start / num_steps

    1 - d g(angle - d/2) (1 - d/2 g(angle)),      g = cos sin (1 - std^2) / (std^2 cos^2 + sin^2).
    """

    def g(angle: float) -> float:
        cos, sin = math.cos(angle), math.sin(angle)
        return cos * sin * (1 - std**2) / (std**2 * cos**2 + sin**2)

    step = start / num_steps
    return math.prod(
        1 - step * g(start - (i + 0.5) * step) * (1 - step / 2 * g(start - i * step))
        for i in range(num_steps)
    )


@dataclass
class Mixture:
    """r = two normals in one dimension with total mean 0 and variance 1; its ODE is a map between
    quantiles."""

    weights: Tensor
    means: Tensor
    stds: Tensor

    @classmethod
    def draw(cls, draws: Generator) -> Mixture:
        weight = uniform(0.35, 0.65, draws)
        weights, means = torch.tensor([weight, 1 - weight]).double(), torch.tensor([-1.0, 1.0]).double()
        stds = torch.tensor([uniform(0.3, 0.5, draws), uniform(0.3, 0.5, draws)]).double()
        means = means - (weights * means).sum()
        total = (weights * (means**2 + stds**2)).sum().sqrt()
        return cls(weights, means / total, stds / total)

    def sample(self, count: int, draws: Generator) -> Tensor:
        which = (torch.rand(count, generator=draws) > self.weights[0]).long()
        return (self.means[which] + self.stds[which] * torch.randn(count, generator=draws)).float()[:, None]

    def noisy(self, angle: Tensor) -> tuple[Tensor, Tensor]:
        """Means and variances (batch, 2) of the components of x at `angle` (batch,)."""
        cos, sin = angle.double().cos()[:, None], angle.double().sin()[:, None]
        return cos * self.means, cos**2 * self.stds**2 + sin**2

    def velocity(self, x: Tensor, angle: Tensor) -> Tensor:
        """The exact F (batch, 1): the components' own, weighted by their posterior probability."""
        means, variances = self.noisy(angle)
        share = (self.weights.log() - (x - means) ** 2 / (2 * variances) - variances.log() / 2).softmax(1)
        own = [
            gaussian_velocity(float(m), float(s))(x, angle)
            for m, s in zip(self.means, self.stds, strict=True)
        ]
        return (share * torch.cat(own, 1)).sum(1, keepdim=True).to(x.dtype)

    def cumulative(self, x: Tensor, angle: Tensor) -> Tensor:
        means, variances = self.noisy(angle)
        return (self.weights * torch.special.ndtr((x - means) / variances.sqrt())).sum(1, keepdim=True)

    def endpoint(self, x: Tensor, angle: Tensor) -> Tensor:
        """F_0^{-1}(F_angle(x)) (batch, 1) float64, by bisection: the ODE keeps the order of its paths in one
        dimension."""
        target = self.cumulative(x.double(), angle)
        low, high = torch.full_like(target, -20.0), torch.full_like(target, 20.0)
        for _ in range(60):
            middle = (low + high) / 2
            below = self.cumulative(middle, torch.zeros_like(angle)) < target
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return (low + high) / 2


# ---- problems: conditions c and residuals r given c


@dataclass
class Bimodal:
    """r = k a v + b c + s(c) L noise: one sign k for all dimensions, v a pattern of signs, s from 0.1 a to
    0.4 a, LL' = AR(1)."""

    pattern: Tensor
    size: float
    offset: float
    rho: float
    slope: int
    dim: int = 8
    num_conditions: int = 1

    @classmethod
    def draw(cls, draws: Generator) -> Bimodal:
        pattern = torch.tensor([float(sign(draws)) for _ in range(8)])
        return cls(
            pattern,
            uniform(0.9, 1.1, draws),
            sign(draws) * uniform(0.2, 0.4, draws),
            uniform(0.7, 0.85, draws),
            sign(draws),
        )

    def conditions(self, count: int, draws: Generator) -> Tensor:
        return 2 * torch.rand(count, 1, generator=draws) - 1

    def std(self, c: Tensor) -> Tensor:
        return self.size * (0.25 + 0.1444 * self.slope * c[..., :1])

    def residuals(self, c: Tensor, draws: Generator) -> Tensor:
        sides = (torch.rand(len(c), 1, generator=draws) < 0.5).float() * 2 - 1
        noise = self.pattern * ar1_noise(len(c), self.rho, draws)
        return sides * self.size * self.pattern + self.offset * c + self.std(c) * noise

    def places(self) -> list[Tensor]:
        return [torch.tensor([self.slope * c]) for c in (-0.9, 0.9)]


@dataclass
class LinearSDE:
    """z' = A z + Q noise; the operator knows A, the residual is Q noise."""

    a: Tensor
    q: Tensor
    dim: int = 3
    num_conditions: int = 3

    @classmethod
    def draw(cls, draws: Generator) -> LinearSDE:
        rotation = torch.linalg.qr(normal(3, 3, draws=draws).double())[0]
        q = torch.linalg.qr(normal(3, 3, draws=draws).double())[0] @ torch.diag(
            torch.tensor([0.3, 0.5, 0.8]).double()
        )
        return cls(uniform(0.75, 0.9, draws) * rotation, q)

    def stationary(self) -> Tensor:
        """The covariance S = A S A' + Q Q'."""
        s = torch.zeros_like(self.q)
        for _ in range(400):
            s = self.a @ s @ self.a.T + self.q @ self.q.T
        return s

    def conditions(self, count: int, draws: Generator) -> Tensor:
        return normal(count, 3, draws=draws) @ torch.linalg.cholesky(self.stationary()).float().T

    def residuals(self, c: Tensor, draws: Generator) -> Tensor:
        return normal(len(c), 3, draws=draws) @ self.q.float().T


# ---- learning


class Net(nn.Module):
    """F(x, angle | c): an MLP of 3 hidden layers; zero at the start, as the backbone is."""

    def __init__(
        self, dim: int, num_conditions: int, draws: Generator, width: int = 128, num_out: int | None = None
    ):
        super().__init__()
        sizes = [dim + num_conditions + 3, width, width, width, num_out or dim]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:], strict=False))
        # twice torch's default bound: half as many training steps are needed
        for layer in self.layers:
            bound = 2 * layer.in_features**-0.5
            nn.init.uniform_(layer.weight, -bound, bound, generator=draws)
            nn.init.uniform_(layer.bias, -bound, bound, generator=draws)
        nn.init.zeros_(self.layers[-1].weight)
        nn.init.zeros_(self.layers[-1].bias)

    def forward(self, x: Tensor, angle: Tensor, c: Tensor) -> Tensor:
        log_tan = angle.tan().abs().clamp(0.02, 50.0).log() / math.log(50.0)
        hidden = torch.cat([x, c, angle.cos()[:, None], angle.sin()[:, None], log_tan[:, None]], 1)
        for layer in self.layers[:-1]:
            hidden = nn.functional.silu(layer(hidden))
        return self.layers[-1](hidden)

    def given(self, c: Tensor) -> Velocity:
        """The velocity of conditions c (batch, C), or of one condition (C,) for every row."""
        return lambda x, angle: self(x, angle, c.expand(len(x), -1))


def train(
    net: nn.Module, loss: Callable[[Generator], Tensor], num_steps: int, draws: Generator, lr: float = 8e-3
) -> dict:
    """Minimise the mean of loss(draws) and leave the averaged weights in `net`; {first, last}: mean loss of
    50 steps.

    A gradient that is not finite is an error, not a step.
    """
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr, betas=(0.9, 0.99), weight_decay=0.0, fused=True)
    ema, losses = EMA(net, 0.99), []
    for step in range(num_steps):
        optimizer.param_groups[0]["lr"] = lr * min(
            (step + 1) / 50, 0.5 + 0.5 * math.cos(math.pi * step / num_steps)
        )
        value = loss(draws).mean()
        optimizer.zero_grad()
        value.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0, error_if_nonfinite=True)
        optimizer.step()
        ema.update()
        losses.append(float(value.detach()))
    ema.write(ema.averages)
    return {"first": sum(losses[:50]) / 50, "last": sum(losses[-50:]) / 50}


@dataclass
class Scale:
    """The conditional scale step: r / std = e^h (m + r~), m and h by maximum likelihood; or nothing at
    all."""

    mean: Tensor
    std: Tensor
    head: Net | None = None

    def gaussian(self, c: Tensor) -> tuple[Tensor, Tensor]:
        if self.head is None:
            return torch.zeros(()), torch.zeros(())
        none = c.new_zeros(len(c), 0)
        mean, raw = self.head(none, c.new_zeros(len(c)), c).chunk(2, 1)
        return mean, LARGEST_LOG_SCALE * torch.tanh(raw / LARGEST_LOG_SCALE)

    @torch.no_grad()
    def whiten(self, r: Tensor, c: Tensor) -> Tensor:
        mean, log_scale = self.gaussian(c)
        return (r - self.mean) / self.std * torch.exp(-log_scale) - mean

    @torch.no_grad()
    def unwhiten(self, r: Tensor, c: Tensor) -> Tensor:
        """c (batch, C), or one condition (C,)."""
        mean, log_scale = self.gaussian(c.expand(len(r), -1))
        return self.mean + self.std * log_scale.exp() * (mean + r)


def fit_scale(problem, key: str, num_steps: int) -> Scale:
    draws = stream(key, "scale")
    c = problem.conditions(2**15, draws)
    r = problem.residuals(c, draws)
    scale = Scale(r.mean(0), r.std(0))
    head = Net(0, problem.num_conditions, draws, width=64, num_out=2 * problem.dim)
    scale.head = head

    def loss(draws: Generator) -> Tensor:
        c = problem.conditions(BATCH, draws)
        mean, log_scale = scale.gaussian(c)
        white = (problem.residuals(c, draws) - scale.mean) / scale.std * torch.exp(-log_scale) - mean
        return gaussian_nll(white, log_scale)

    train(head, loss, num_steps, draws)
    return scale


@dataclass
class Model:
    """A teacher, and students of it, of one problem. log: what training said of each, under its name."""

    problem: object
    key: str
    scale: Scale
    teacher: Net
    untrained: Net
    log: dict = field(default_factory=dict)

    def draw(self, count: int, draws: Generator) -> tuple[Tensor, Tensor]:
        """(c, whitened residual)."""
        c = self.problem.conditions(count, draws)
        return c, self.scale.whiten(self.problem.residuals(c, draws), c)

    def restored(self, c: Tensor, whitened: Tensor) -> Tensor:
        return self.scale.unwhiten(whitened, c)

    def noise(self, count: int, *keys: int | str) -> Tensor:
        return normal(count, self.problem.dim, draws=stream(self.key, "noise", *keys))

    def from_teacher(self, c: Tensor, noise: Tensor, num_steps: int = STEPS) -> Tensor:
        return self.restored(c, sample(self.teacher.given(c), noise, num_steps))

    @torch.no_grad()
    def from_student(self, student: Net, c: Tensor, noise: Tensor, second: Tensor | None = None) -> Tensor:
        """In one evaluation, or in two when there is a `second` noise."""
        return self.restored(c, sample_student(student.given(c), noise, MID_ANGLE, second))


def learn(problem, key: str, num_steps: int, scale_steps: int = 400, width: int = 128) -> Model:
    """A teacher of `problem`, trained by the production loss. scale_steps: of the conditional mean and scale;
    0: residuals are not whitened."""
    scale = fit_scale(problem, key, scale_steps) if scale_steps else Scale(torch.zeros(()), torch.ones(()))
    teacher = Net(problem.dim, problem.num_conditions, stream(key, "weights"), width)
    model = Model(problem, key, scale, teacher, copy.deepcopy(teacher))
    largest = float(largest_mode(model.draw(4096, stream(key, "modes"))[1]))

    def loss(draws: Generator) -> Tensor:
        c, r = model.draw(BATCH, draws)
        return diffusion_loss(
            teacher.given(c), r, normal(*r.shape, draws=draws), sample_angles(len(r), draws, largest)
        )

    model.log["teacher"] = train(teacher, loss, num_steps, stream(key, "teacher"))
    model.log["largest"] = largest
    return model


@dataclass
class Pool:
    """Starts, conditions and the teacher's endpoints."""

    x: Tensor
    angle: Tensor
    c: Tensor
    y: Tensor


def build_pool(model: Model, count: int, *keys: int | str) -> Pool:
    draws = stream(model.key, "pool", *keys)
    c, r = model.draw(count, draws)
    start = normal(*r.shape, draws=draws)
    parts = torch.arange(count).split(4096)  # a batch that stays in the processor's cache
    solved = [solve_path(model.teacher.given(c[part]), start[part], STEPS, TURN) for part in parts]
    passed, y = (torch.cat(part) for part in zip(*solved, strict=True))
    return Pool(*Solved(None, r, slice(0, count), start, passed, y).pairs(0, MID_ANGLE), c, y)


def distill(model: Model, pool: Pool, name: str, num_steps: int) -> Net:
    """A student that starts as the teacher and learns the endpoints."""
    student = copy.deepcopy(model.teacher)

    def loss(draws: Generator) -> Tensor:
        rows = torch.randint(len(pool.y), (BATCH,), generator=draws)
        return endpoint_loss(student.given(pool.c[rows]), pool.x[rows], pool.angle[rows], pool.y[rows])

    model.log[name] = train(student, loss, num_steps, stream(model.key, name), 4e-3)
    return student


# ---- checks


Measured = dict[str, float]
Limits = dict[str, tuple[float, float]]


def failed(measured: Measured, limits: Limits) -> list[str]:
    """Criteria that are not met, NaN included."""
    assert measured.keys() == limits.keys()
    return [
        f"{name}: {measured[name]:.4g} outside [{low:.4g}, {high:.4g}]"
        for name, (low, high) in limits.items()
        if not low <= measured[name] <= high
    ]


def names(failures: list[str]) -> set[str]:
    return {failure.split(":")[0] for failure in failures}


def measure_bimodal(problem: Bimodal, c: Tensor, r: Tensor) -> Measured:
    """r (n, 8) drawn at one condition c. component std is relative to the true one."""
    at = (r - problem.offset * c) * problem.pattern / problem.size
    side = at.mean(1).sign()
    spread = (at * side[:, None]).std(0).square().mean().sqrt() * problem.size / problem.std(c)
    return {
        "fraction": float((side > 0).float().mean()),
        "gap": float((at.abs() < 0.5).float().mean()),
        "coherence": float((at.sign().sum(1).abs() == 8).float().mean()),
        "component std": float(spread),
    }


def check_bimodal(problem: Bimodal, c: Tensor, r: Tensor, truth: Tensor) -> list[str]:
    """truth (n, 8): draws at c. The component's spread may double where it is a tenth of the whole, and grow
    by a fifth else."""
    exact = measure_bimodal(problem, c, truth)
    is_narrow = float(problem.std(c)) < 0.2
    return failed(
        measure_bimodal(problem, c, r) | {"energy distance": energy_distance(r[:2048], truth[:2048])},
        {
            "fraction": (0.42, 0.58),
            "gap": (0.0, exact["gap"] + 0.06),
            "coherence": (exact["coherence"] - 0.05, 1.0),
            "component std": (0.8, 2.0 if is_narrow else 1.2),
            "energy distance": (-0.05, 0.05),
        },
    )


def check_pairing(student: Tensor, teacher: Tensor, largest: float = 0.10) -> list[str]:
    """Both (places, n, 8) from the same noise, one condition per place. largest: error of a student that
    follows.

    pair error: mean |student - teacher|^2 / mean Var(teacher), 0 for equal maps, 1 for the ensemble mean, 2
    for an independent sample. pair correlation: of deviations from the mean over members. use of noise:
    Var(student) / Var(teacher)."""
    student, teacher = student.double().flatten(2), teacher.double().flatten(2)
    ours, theirs = (u - u.mean(1, keepdim=True) for u in (student, teacher))
    of_student, of_teacher = (float(u.square().mean()) for u in (ours, theirs))
    return failed(
        {
            "pair error": float((student - teacher).square().mean()) / of_teacher,
            "pair correlation": float((ours * theirs).mean()) / max(of_student * of_teacher, 1e-30) ** 0.5,
            "use of noise": of_student / of_teacher,
        },
        {
            "pair error": (0.0, largest),
            "pair correlation": (0.85, 1.0 + 1e-9),
            "use of noise": (0.9, 1 / 0.9),
        },
    )
