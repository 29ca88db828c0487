"""The prior of a two-valued coefficient (darcy2d) against its exact posterior: half or a tenth observed.

    OMP_NUM_THREADS=1 python -m bench.two_valued --steps 600 --fields 8 --seed 0

Samples of the coefficient by `CellPosterior` and by `LinearPosterior` (values cut at the range of the data)
and exact ones are mapped to solutions by the solver, so no error of an operator is in these numbers. The
exact posterior is that of the generator's 15 parameters: sequential Monte Carlo (Del Moral, Doucet and Jasra
2006) with the likelihood exp(-l |y - A a|^2), l raised so that half of the particles count, Metropolis steps
of one bump after each, and in the end only particles that fit all observed cells. Its error is that of a
second run with other numbers. Fields are validation fields: none is of the training.

Writes bench/results/two_valued.json: for every case the energy score relative to the linear posterior's
(against exact samples, so without the chance of one truth), and the ratio of the variance of log u, summed
over cells and mean over fields, to that of the exact posterior; `fields` has both of every field. Without
the reference, on `--calibration` more fields: the variance over the squared error of the mean, 1 if the
ensemble is calibrated, with a 95 % interval over fields.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import torch
from torch import Tensor

from ups.config.load import load_config
from ups.config.model import ModelConfig
from ups.generative.cell_posterior import CellPosterior, two_levels
from ups.generative.linear_posterior import LinearPosterior
from ups.generative.observation import Observation, as_linear, observe_case, row_generators
from ups.metrics.intervals import as_interval, bootstrap, halves
from ups.tasks import TASKS
from ups.training.environment import describe_environment
from ups.training.optim import fit_averaged
from ups_discovery.seeds import generator
from ups_solvers import darcy
from ups_solvers.darcy_grf import LinearObservation
from ups_solvers.initial import cell_centres

DATA_SEED, SIZE, TRAINING = 2022, 32, 3200
PARTICLES, MOVES, LAST_MOVES = 256, 60, 300
SCALES = (1e-3, 1.0)  # of a Metropolis step of a bump, log-uniform
COLDEST = 1e30  # l at which 40 rounds of moves have found no particle that fits: all begin again
CASES = ("points_50", "points_10")
BATCH, MEMBERS = 32, 32
OUT = Path(__file__).parent / "results" / "two_valued.json"


def bump(theta: Tensor) -> Tensor:
    """exp(-r^2 / s) on the grid of centres and widths theta (n, 3) in the unit cube: (n, SIZE, SIZE)."""
    squared = (darcy.MAX_SQUARED_WIDTH * theta[:, 2:]).clamp_min(1e-9)
    x, y = ((-(cell_centres(SIZE).float() - theta[:, i : i + 1]).square() / squared).exp() for i in (0, 1))
    return x[:, :, None] * y[:, None, :]


def exact_samples(observation: LinearObservation, rng: torch.Generator) -> Tensor:
    """PARTICLES samples of the coefficient given exact values of cells: (n, SIZE, SIZE), by SMC."""
    while (found := anneal(observation, rng)) is None:
        print("no particle fits: begun again", flush=True)
    return found


def anneal(observation: LinearObservation, rng: torch.Generator) -> Tensor | None:
    """One run of `exact_samples`; None if no particle fits the observed cells."""
    theta = torch.rand(PARTICLES, 3, darcy.NUM_BUMPS, generator=rng)
    parts = torch.stack([bump(theta[:, :, i]) for i in range(darcy.NUM_BUMPS)], 1)
    cells, values = observation.cells[:, 0], observation.values.float()

    def coefficient(total: Tensor) -> Tensor:
        return torch.where(total > darcy._mean_of_bumps(), darcy.HIGH, darcy.LOW)

    def misfit(total: Tensor) -> Tensor:
        return (coefficient(total).flatten(1)[:, cells] - values).square().sum(1)

    far, inverse = misfit(parts.sum(1)), 0.0
    while not math.isinf(inverse):
        if inverse > COLDEST and not bool((far < 1e-6).any()):
            return None
        excess, is_last = (far - far.min()).double(), bool((far < 1e-6).float().mean() > 0.5)

        def count(step: float, excess: Tensor = excess) -> float:
            weight = (-step * excess).exp()
            return float(weight.sum().square() / weight.square().sum())

        low, high = 0.0, 4 * inverse + 1e3
        for _ in range(0 if is_last else 40):
            middle = (low + high) / 2
            low, high = (middle, high) if count(middle) > PARTICLES / 2 else (low, middle)
        weight = (far < 1e-6).double() if is_last else (-low * excess).exp()
        inverse = math.inf if is_last else inverse + low
        place = (torch.arange(PARTICLES) + torch.rand((), generator=rng)).double() / PARTICLES
        kept = torch.searchsorted((weight / weight.sum()).cumsum(0), place).clamp_max(PARTICLES - 1)
        theta, parts, far = theta[kept], parts[kept], far[kept]
        for _ in range(LAST_MOVES if is_last else MOVES):
            i = int(torch.randint(darcy.NUM_BUMPS, (), generator=rng))
            low, high = map(math.log, SCALES)
            scale = (low + (high - low) * torch.rand(PARTICLES, 1, generator=rng)).exp()
            moved = (theta[:, :, i] + scale * torch.randn(PARTICLES, 3, generator=rng)) % 2
            moved = torch.where(moved > 1, 2 - moved, moved)  # reflected at the faces of the cube
            other = bump(moved)
            far_moved = misfit(parts.sum(1) - parts[:, i] + other)
            uniform = torch.rand(PARTICLES, generator=rng).log()
            is_taken = far_moved < 1e-6 if is_last else uniform < -inverse * (far_moved - far)
            theta[:, :, i] = torch.where(is_taken[:, None], moved, theta[:, :, i])
            parts[:, i] = torch.where(is_taken[:, None, None], other, parts[:, i])
            far = torch.where(is_taken, far_moved, far)
    return coefficient(parts.sum(1)).double()


def fit_cells(v: Tensor, linear: LinearPosterior, steps: int, seed: int) -> CellPosterior:
    """As train_steady.py fits it."""
    torch.manual_seed(seed)
    model = ModelConfig(kind="flat", width=48, depth=3, modes=8, kernel_size=7, mlp_ratio=2.0)
    optim = load_config(None).steady.optim
    cells = CellPosterior(linear, two_levels(v), model, TASKS["darcy2d"])

    def loss_of(step: int) -> Tensor:
        if step % 200 == 0:
            print(f"step {step} of {steps}, {time.process_time():.0f} processor s", flush=True)
        rng = generator(seed, "cells", step)
        batch = v[torch.randint(len(v), (BATCH,), generator=rng)]
        turns, is_mirrored = torch.randint(4, (2,), generator=rng).tolist()
        batch = torch.rot90(batch, turns, (2, 3))
        return cells.loss(batch.flip(2) if is_mirrored % 2 else batch, rng)

    _, ema = fit_averaged(cells, loss_of, steps, optim)
    ema.write(ema.averages)
    return cells.eval()


def compare(u: Tensor, exact: Tensor) -> tuple[float, float]:
    """(fair energy score against exact samples, variance of log u) of samples (n, SIZE, SIZE)."""
    flat, other = u.flatten(1), exact.flatten(1)
    among = torch.cdist(flat, flat).sum() / (2 * len(flat) * (len(flat) - 1))
    return float(torch.cdist(flat, other).mean() - among) / SIZE, float(u.log().flatten(1).var(0).sum())


def calibration(log_u: list[Tensor], truth: Tensor) -> dict[str, float]:
    """Variance of ensembles log_u (M, H, W), one per field, over the squared error of their means at truth
    (n, H, W), less what M members leave, summed over cells and fields: {value, low, high}, 1 if calibrated.
    """
    num = len(log_u[0])
    variance = torch.stack([one.var(0) for one in log_u])
    error = (torch.stack([one.mean(0) for one in log_u]) - truth).square() * (num / (num + 1))
    moments = torch.stack([part.flatten(1).sum(1) for part in (variance, error)], 1)
    return as_interval(bootstrap(moments, lambda mean: halves(mean)[:, 0], 1000, 0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--fields", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--calibration", type=int, default=96)
    options = parser.parse_args()
    num = TRAINING + options.fields + options.calibration
    rows = list(range(TRAINING, TRAINING + options.fields))
    others = list(range(TRAINING + options.fields, num))
    a = torch.stack([darcy.sample_coefficient(DATA_SEED, i, SIZE) for i in range(num)])
    mean, std = float(a[:TRAINING].mean()), float(a[:TRAINING].std())
    v = ((a - mean) / std).float()[:, None]
    started = time.process_time()
    linear = LinearPosterior.fit(v[:TRAINING:4])
    cells = fit_cells(v[:TRAINING], linear, options.steps, options.seed)
    out = {
        "fit_cpu_seconds": round(time.process_time() - started, 1),
        "cases": {},
        "fields": {},
        "calibration": {},
    }

    def solutions(v: Tensor) -> Tensor:
        return darcy.solve((v.double() * std + mean).clamp(darcy.LOW, darcy.HIGH), torch.ones(()), batch=16)

    def sampled(case: str, rows: list[int]) -> tuple[Observation, dict[str, Tensor]]:
        """The observation of fields, and samples (n, MEMBERS, 1, SIZE, SIZE) of both posteriors."""
        observation = observe_case(v[rows], case, row_generators(options.seed, case, rows=rows))
        shape = len(rows), MEMBERS, 2, 1, SIZE, SIZE
        noise = torch.randn(shape, generator=generator(options.seed, "noise", case))
        laws = {"linear": linear, "cells": cells}
        return observation, {name: law(observation, noise).samples for name, law in laws.items()}

    def truth_of(rows: list[int]) -> Tensor:
        return solutions(v[rows, 0]).log()

    for case in CASES:
        _, samples = sampled(case, others)
        calibrated = {
            name: calibration([solutions(one[:, 0]).log() for one in part], truth_of(others))
            for name, part in samples.items()
        }
        print(case, calibrated, f"{time.process_time():.0f} processor s", flush=True)
        observation, samples = sampled(case, rows)
        totals: dict[str, list[tuple[float, float]]] = {}
        log_u = []
        for i, row in enumerate(rows):
            linear_observation = LinearObservation(**as_linear(observation, i, mean, std))
            exact, again = (
                exact_samples(linear_observation, generator(options.seed, "exact", case, row, run))
                for run in (0, 1)
            )
            u, u_again = (solutions((part - mean) / std) for part in (exact, again))
            log_u.append(u.log())
            totals.setdefault("exact, second run", []).append(compare(u_again, u))
            totals.setdefault("exact", []).append((compare(u_again, u)[0], compare(u, u)[1]))
            for name, part in samples.items():
                totals.setdefault(name, []).append(compare(solutions(part[i, :, 0]), u))
            found = {name: found[-1] for name, found in totals.items()}
            print(case, row, found, f"{time.process_time():.0f} processor s", flush=True)
        means = {name: torch.tensor(found).double().mean(0).tolist() for name, found in totals.items()}
        out["cases"][case] = {
            name: {
                "energy_score_over_linear": score / means["linear"][0],
                "variance_over_exact": variance / means["exact"][1],
            }
            for name, (score, variance) in means.items()
            if name != "exact"
        }
        out["fields"][case] = totals
        out["calibration"][case] = calibrated | {"exact": calibration(log_u, truth_of(rows))}
    out |= {
        "options": vars(options),
        "split": "val",
        "environment": describe_environment(1, torch.device("cpu")),
    }
    OUT.write_text(json.dumps(out, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({key: out[key] for key in ("cases", "calibration")}, indent=1))


if __name__ == "__main__":
    main()
