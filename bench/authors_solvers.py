"""Solve u_t + u u_x = nu u_xx with the packages of several authors; bench/authors.py runs this file in an
environment that has them.

    PYTHON bench/authors_solvers.py AUTHOR GIVEN.npz RESULT.npz

GIVEN.npz: facts of `Problem`; `tried` (k, 2), cells per axis and steps of a frame; for each number of cells
the starts, uCELLS (n, x), on a periodic grid of the unit interval. RESULT.npz: frames u0, u1, .. (n, time, x)
float64, the start included, NaN where the method failed; and, if GIVEN has
`is_measured`, seconds (k, 2): processor time per trajectory of all in one batch and of single ones, after a
call in which packages compile what they can.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np

ENOUGH_S, NUM_REPEATS = 0.3, 5  # a measurement ends after so many seconds or calls


@dataclass(frozen=True)
class Problem:
    """dt: between frames. steps: of a frame; 0 for what the package does by itself."""

    dt: float
    num_frames: int
    diffusivity: float
    steps: int = 0


def pypde(u: np.ndarray, problem: Problem) -> np.ndarray:
    """Central finite differences of second order and an adaptive Runge-Kutta method: SciPy's, or with `steps`
    py-pde's own, which takes less time, with a tolerance of 0.01 / steps."""
    import pde

    method: dict[str, Any] = {"solver": "scipy"}
    if problem.steps:
        method = {"solver": "explicit", "adaptive": True, "tolerance": 0.01 / problem.steps}
    (law, grid), out = pypde_law(problem, u.shape[1]), []
    for start in u:
        storage = pde.MemoryStorage()
        law.solve(
            pde.ScalarField(grid, start),
            t_range=problem.dt * (problem.num_frames - 1),
            backend="numpy",
            tracker=storage.tracker(problem.dt),
            **method,
        )
        out.append(np.array(storage.data))
    return np.stack(out)


@cache
def pypde_law(problem: Problem, cells: int) -> tuple:
    """The equation, which keeps what it has compiled, and the grid."""
    import pde

    constants = {"diffusivity": problem.diffusivity}
    law = pde.PDE({"u": "diffusivity * laplace(u) - u * d_dx(u)"}, consts=constants)
    return law, pde.CartesianGrid([[0, 1]], [cells], periodic=True)


def exponax(u: np.ndarray, problem: Problem) -> np.ndarray:
    """Fourier modes and exponential time differencing of second order."""
    import jax

    jax.config.update("jax_enable_x64", True)
    rollout = exponax_rollout(problem, u.shape[-1])
    return np.asarray(rollout(jax.numpy.asarray(u[:, None])))[:, :, 0]


@cache
def exponax_rollout(problem: Problem, cells: int) -> Callable:
    import exponax
    import jax

    num_steps = problem.steps or 10
    step = exponax.stepper.Burgers(1, 1.0, cells, problem.dt / num_steps, diffusivity=problem.diffusivity)
    frame = exponax.RepeatedStepper(step, num_steps)
    return jax.jit(jax.vmap(exponax.rollout(frame, problem.num_frames - 1, include_init=True)))


def phiflow(u: np.ndarray, problem: Problem) -> np.ndarray:
    """MacCormack advection, then explicit diffusion."""
    from phi.jax import flow

    frame, out = phiflow_frame(problem), [u]
    values = flow.tensor(u, flow.batch("trajectory"), flow.spatial("x"))
    values = flow.expand(values, flow.channel(vector="x"))
    for _ in range(problem.num_frames - 1):
        values = frame(values)
        out.append(values.numpy(["trajectory", "x", "vector"]).reshape(u.shape))
    return np.stack(out, 1)


@cache
def phiflow_frame(problem: Problem) -> Callable:
    from phi.jax import flow

    flow.math.set_global_precision(64)
    num_steps = problem.steps or 10
    step = problem.dt / num_steps

    def frame(values: flow.Tensor) -> flow.Tensor:
        field = flow.CenteredGrid(values, flow.extrapolation.PERIODIC, flow.Box(x=1))
        for _ in range(num_steps):
            field = flow.advect.mac_cormack(field, field, step)
            field = flow.diffuse.explicit(field, problem.diffusivity, step)
        return field.values

    return flow.math.jit_compile(frame)


AUTHORS: dict[str, Callable[[np.ndarray, Problem], np.ndarray]] = {
    "pypde": pypde,
    "exponax": exponax,
    "phiflow": phiflow,
}


def seconds_of(call: Callable[[], Any]) -> float:
    """Processor seconds of a call, the median of several."""
    found: list[float] = []
    while len(found) < NUM_REPEATS and sum(found) < ENOUGH_S:
        started = time.process_time()
        call()
        found.append(time.process_time() - started)
    return float(np.median(found))


def main() -> None:
    author, given, result = sys.argv[1:]
    with np.load(given) as file:
        fields = {name: file[name] for name in file.files}
    facts = {name: fields[name].item() for name in Problem.__annotations__ if name in fields}
    solve, out, seconds = AUTHORS[author], {}, []
    for place, (cells, steps) in enumerate(fields["tried"]):
        u, problem = fields[f"u{cells}"], Problem(**facts, steps=int(steps))
        try:
            out[f"u{place}"] = solve(u, problem)
        except RuntimeError:  # a step of py-pde became too small
            out[f"u{place}"] = np.full((len(u), problem.num_frames, *u.shape[1:]), np.nan)
        seconds.append([np.inf, np.inf])
        if "is_measured" in fields and np.isfinite(out[f"u{place}"]).all():
            solve(u[:1], problem)  # compiled for one
            seconds[-1] = [
                seconds_of(partial(solve, u, problem)) / len(u),
                seconds_of(partial(solve, u[:1], problem)),
            ]
    np.savez(result, seconds=seconds, **out)


if __name__ == "__main__":
    main()
