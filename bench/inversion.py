"""Starts, coefficients and parameters from noisy observations, by UPS and by the exact solver in its place.

    python -m bench.inversion --folder /tmp/inversion

Observed are 10 % of the cells, with a noise of 5 % of the standard deviation. `ups.invert` with UPS, and with
the solver in place of the operator (its prior, steps and derivatives in forward mode are the same). Columns:
median relative error by UPS over that by the solver of the same case, the same of the mean, and the fraction
of truths (all cells, all cases) inside the 90 % intervals of both.
"""

from __future__ import annotations

import itertools
import math
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

import ups
from bench.command import parser_of, run_scripts
from bench.user_data import CONFIG, random_waves, write, write_config
from ups.common.place import ROOT
from ups.forecaster import Forecaster
from ups.models.head import TaskHead
from ups.report.tables import markdown_table
from ups_discovery.boundary import PERIODIC
from ups_discovery.seeds import generator
from ups_solvers import SOLVERS
from ups_solvers.darcy import apply_operator, solve
from ups_solvers.modes import coefficients, step

FRACTION, NOISE = 0.1, 0.05
CELLS, DIFFUSIVITY, RATES, DT, NUM_FRAMES, STEPS = 128, 0.005, (1.0, 5.0), 0.1, 10, 10


def evolved(
    u: Tensor, diffusivity: Any, nonlinear: Callable[[Tensor], Tensor], dt: float, count: int, num: int
):
    """The next `count` frames of u_t = diffusivity u_xx + N(u) on [0, 1), (n, count, cells), by `num` steps a
    frame. u (n, cells), diffusivity (n, 1); differentiable."""
    n = u.shape[-1]
    k = 2 * math.pi * torch.arange(n // 2 + 1, dtype=torch.float64)
    parts = coefficients(-diffusivity * k.square(), dt / num)
    modes, frames = torch.fft.rfft(u, norm="forward"), []
    for _ in range(count):
        for _ in range(num):
            modes = step(modes, nonlinear, parts)
        frames.append(torch.fft.irfft(modes, n=n, norm="forward"))
    return torch.stack(frames, 1)


def fisher(u: Tensor, raw: Tensor, count: int) -> Tensor:
    """u_t = D u_xx + rate u (1 - u), of u and its rate (n, 2, cells)."""
    rate = u[:, 1].mean(1, keepdim=True)

    def reaction(modes: Tensor) -> Tensor:
        v = torch.fft.irfft(modes, n=CELLS, norm="forward")
        return rate * torch.fft.rfft(v * (1 - v), norm="forward")

    diffusivity = torch.full_like(rate, DIFFUSIVITY)
    later = evolved(u[:, 0], diffusivity, reaction, DT, count, STEPS)
    return torch.stack([later, u[:, 1:].expand_as(later)], 2)


def burgers(u: Tensor, raw: Tensor, count: int, dt: float = 0.05) -> Tensor:
    """u_t + u u_x = (Nu / pi) u_xx, of averages over cells."""
    n = u.shape[-1]
    k = torch.arange(n // 2 + 1, dtype=torch.float64)
    average, is_kept = torch.sinc(k / n), k * 3 < n

    def flux(modes: Tensor) -> Tensor:
        v = torch.fft.irfft(modes * is_kept, n=n, norm="forward")
        return -1j * math.pi * k * torch.fft.rfft(v * v, norm="forward") * is_kept

    start = torch.fft.irfft(torch.fft.rfft(u[:, 0]) / average, n=n)
    later = evolved(start, raw[:, :1] / math.pi, flux, dt, count, 20)
    return torch.fft.irfft(torch.fft.rfft(later) * average, n=n)[:, :, None]


class Darcy(torch.autograd.Function):
    """The solution (n, x, y) of -div(a grad u) = 1, with its derivative in forward mode."""

    @staticmethod
    def forward(a: Tensor) -> Tensor:
        return solve(a, torch.ones(()), is_smooth=True, batch=16)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.save_for_forward(inputs[0], output)

    @staticmethod
    def jvp(ctx: Any, change: Tensor) -> Tensor:
        a, u = ctx.saved_tensors
        return solve(a, -apply_operator(change, u), is_smooth=True, batch=16)  # linear in a


def darcy(a: Tensor, raw: Tensor, count: int) -> Tensor:
    return Darcy.apply(a[:, 0])[:, None, None]


def exact(head: TaskHead, solver: Callable[[Tensor, Tensor, int], Tensor]) -> SimpleNamespace:
    """A model whose operator is the solver, of fields in physical units, float64."""

    def forecast(w: Tensor, task: str, raw: Tensor, num_frames: int, forcing: None = None) -> Tensor:
        u = head.input_codec.denormalise(w[:, -1].double())
        return head.codec.normalise(solver(u, raw, num_frames))

    return SimpleNamespace(operator=SimpleNamespace(head=lambda task: head, forecast=forecast))


def trained(folder: Path, config: Path, task: str, options: list[str]) -> Forecaster:
    run = folder / task
    if not (run / "operator" / "done.json").is_file():
        usual = ["operator.train.steps=600", "operator.train.validate_every=600"]
        options = [f"run.root={folder}", f"run.name={task}", f"cache.root={folder}/cache", *usual, *options]
        run_scripts(config, options, "prepare_data", "prepare_cache", "train_operator")
    return ups.load(run)


def observed(u: Tensor, source: torch.Generator) -> dict[str, Any]:
    """Observations of u (frames, C, *space), of its first field."""
    mask = torch.rand(u.shape[2:], generator=source) < FRACTION
    noise = NOISE * float(u[:, 0].std())
    y = torch.full_like(u, torch.nan)
    y[:, 0] = torch.where(mask, u[:, 0] + noise * torch.randn(u[:, 0].shape, generator=source), torch.nan)
    return {"values": y, "noise": noise}


Given = tuple[dict[str, Any], list[str], dict[str, Tensor]]  # observations, unknowns, truth


def case_of_burgers(number: int, model: Forecaster) -> Given:
    source = generator(number, "burgers")
    nu = math.exp(math.log(0.02) + math.log(4) * float(torch.rand((), generator=source)))
    times = {"num_frames": 12, "t_end": 0.55, "parameter": nu}
    u = SOLVERS["burgers1d"].simulate([number], seed=5, resolution=256, **times)[0, 1:]
    given = observed(u, source) | {"frames": [*range(11)]}
    return given, ["u0", "Nu"], {"u0": u[0], "Nu": torch.tensor(nu)}


def fisher_starts(numbers: range, seed: int) -> Tensor:
    u = 0.5 + 0.4 * random_waves(numbers, seed, 4, CELLS, 1, PERIODIC)
    rate = RATES[0] + (RATES[1] - RATES[0]) * torch.rand(len(numbers), 1, generator=generator(seed, "rate"))
    return torch.stack([u, rate.double().expand(-1, CELLS)], 1)


def case_of_fisher(number: int, model: Forecaster) -> Given:
    start = fisher_starts(range(200), 7)[number : number + 1]
    u = torch.cat([start, fisher(start, None, NUM_FRAMES)[0]]).float()
    given = observed(u, generator(number, "fisher")) | {"frames": [*range(NUM_FRAMES + 1)]}
    return given, ["u0"], {"u0": u[0]}


def case_of_darcy(number: int, model: Forecaster) -> Given:
    shape = {"resolution": model.tasks["darcy2d_grf"]["grid"][0], "num_frames": 1, "t_end": 1.0}
    u = SOLVERS["darcy2d_grf"].simulate([number], seed=5, parameter=1.0, **shape)[0]
    return observed(u[:, 1:], generator(number, "darcy")), ["u0"], {"u0": u[0, :1]}


def models(folder: Path, task: str) -> Forecaster:
    if task == "fisher":
        start = fisher_starts(range(120), 6)
        u = torch.cat([start[:, None], fisher(start, None, NUM_FRAMES)], 1)
        path = folder / "fisher.npz"
        write(path, {"u": u[:, :, 0].numpy(), "rate": start[:, 1].numpy()})
        layout = {"u": ["trajectory", "time", "x"], "rate": ["trajectory", "x"]}
        config = write_config(path, CONFIG, "fisher", DT, settings={"layout": layout})
        return trained(folder, config, task, [])
    options = [f"data.tasks=[{task}]", f"data.root={folder}/data", *OPTIONS[task]]
    return trained(folder, ROOT / "configs" / "small.yaml", task, options)


CASES = {
    "burgers1d": (case_of_burgers, burgers),
    "fisher": (case_of_fisher, fisher),
    "darcy2d_grf": (case_of_darcy, darcy),
}
OPTIONS = {
    "darcy2d_grf": ["task.darcy2d_grf.num_trajectories=400"],
    # between two errors are 30 times these
    "burgers1d": ["task.burgers1d.num_trajectories=300", "task.burgers1d.parameters=[0.01,0.02,0.04,0.1]"],
}


def compared(found: Mapping[str, Tensor], task: str) -> dict[str, Tensor]:
    """What is compared of unknowns: of fisher the rate is the mean of a field."""
    if task == "fisher":
        return {"u0": found["u0"][..., :1, :], "rate": found["u0"][..., 1, :].mean(-1)}
    return {"log a": found["u0"].log()} if task == "darcy2d_grf" else dict(found)


def row_of(folder: Path, task: str, cases: int) -> list[list[str]]:
    model = models(folder, task)
    case_of, solver = CASES[task]
    both = model, exact(model.operator.head(task), solver)
    figures: dict[str, list] = {}  # unknown -> (error, inside) of UPS, of the solver, of UPS ..
    seconds, ends = [], torch.tensor([0.05, 0.95]).double()
    for number, one in itertools.product(range(cases), both):
        given, unknown, truth = case_of(number, model)
        begin = time.process_time()
        found = ups.invert(one, task, given, unknown, members=256)
        seconds.append(time.process_time() - begin)
        best, samples = compared(found.values, task), compared(found.samples, task)
        for name, true in compared(truth, task).items():
            true = true.double()
            error = (best[name] - true).square().mean().sqrt() / true.square().mean().sqrt()
            low, high = samples[name].double().quantile(ends, 0)
            inside = ((low <= true) & (true <= high)).double().mean()
            figures.setdefault(name, []).append((float(error), float(inside)))
        last = {name: values[-1] for name, values in figures.items()}
        print(number, f"{seconds[-1]:.1f} s", found.misfit, found.is_converged, last, flush=True)
    rows = []
    for name, values in figures.items():
        e, i = np.reshape(values, (-1, 2, 2)).transpose(2, 0, 1)
        rms = np.sqrt(np.square(e).mean(0))
        ratios = np.median(e[:, 0] / e[:, 1]), rms[0] / rms[1], *i.mean(0)
        numbers = (f"{np.median(e[:, 1]):.4f}", *(f"{value:.3f}" for value in ratios))
        rows.append([task, name, str(cases), *numbers, f"{np.mean(seconds[::2]):.1f}"])
    return rows


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="of the runs")
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--tasks", nargs="+", default=[*CASES])
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows = [row for task in options.tasks for row in row_of(options.folder, task, options.cases)]
    head = "task; unknown; cases; error by the solver; over it; of RMS; inside; by the solver; s".split("; ")
    print("\n".join(markdown_table(head, rows)))


if __name__ == "__main__":
    main()
