"""Solve Burgers' equation and Fisher-KPP with the packages of several authors; bench/authors.py and
bench/pays.py run this file in an environment that has them.

    PYTHON bench/authors_solvers.py AUTHOR GIVEN.npz RESULT.npz

GIVEN.npz: facts of `Problem`; `tried` (k, 2), cells per axis and steps of a frame; for each number of cells
the starts, uCELLS (n, *space), on a periodic grid of the unit interval or square. RESULT.npz: frames u0, u1,
.. (n, time, *space) float64, the start included, NaN where the method failed; and, if GIVEN has
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

    equation: str
    dt: float
    num_frames: int
    diffusivity: float
    rate: float = 0.0
    steps: int = 0


def pypde(u: np.ndarray, problem: Problem) -> np.ndarray:
    """Central finite differences of second order and an adaptive Runge-Kutta method: SciPy's, or with `steps`
    py-pde's own, which takes less time, with a tolerance of 0.01 / steps."""
    import pde

    method: dict[str, Any] = {"solver": "scipy"}
    if problem.steps:
        method = {"solver": "explicit", "adaptive": True, "tolerance": 0.01 / problem.steps}
    (law, grid), out = pypde_law(problem, u.shape[1:]), []
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
def pypde_law(problem: Problem, shape: tuple[int, ...]) -> tuple:
    """The equation, which keeps what it has compiled, and the grid."""
    import pde

    rates = {
        "burgers": "diffusivity * laplace(u) - u * d_dx(u)",
        "fisher": "diffusivity * laplace(u) + rate * u * (1 - u)",
    }
    constants = {"diffusivity": problem.diffusivity, "rate": problem.rate}
    law = pde.PDE({"u": rates[problem.equation]}, consts=constants)
    return law, pde.CartesianGrid([[0, 1]] * len(shape), shape, periodic=True)


def exponax(u: np.ndarray, problem: Problem) -> np.ndarray:
    """Fourier modes and exponential time differencing of second order."""
    import jax

    jax.config.update("jax_enable_x64", True)
    rollout = exponax_rollout(problem, u.ndim - 1, u.shape[-1])
    return np.asarray(rollout(jax.numpy.asarray(u[:, None])))[:, :, 0]


@cache
def exponax_rollout(problem: Problem, ndim: int, cells: int) -> Callable:
    import exponax
    import jax

    given, rate = {"diffusivity": problem.diffusivity}, {"reactivity": problem.rate}
    grid, num_steps = (ndim, 1.0, cells), problem.steps or 10
    if problem.equation == "burgers":
        step = exponax.stepper.Burgers(*grid, problem.dt / num_steps, **given)
    else:
        step = exponax.stepper.reaction.FisherKPP(*grid, problem.dt / num_steps, **given, **rate)
    frame = exponax.RepeatedStepper(step, num_steps)
    return jax.jit(jax.vmap(exponax.rollout(frame, problem.num_frames - 1, include_init=True)))


def phiflow(u: np.ndarray, problem: Problem) -> np.ndarray:
    """MacCormack advection or an explicit reaction, then explicit diffusion, one after the other."""
    from phi.jax import flow

    names, frame = ",".join("xy"[: u.ndim - 1]), phiflow_frame(problem, u.ndim - 1)
    values = flow.tensor(u, flow.batch("trajectory"), flow.spatial(names))
    is_vector = problem.equation == "burgers"
    if is_vector:
        values = flow.expand(values, flow.channel(vector="x"))
    order, out = ["trajectory", *names.split(","), *["vector"] * is_vector], [u]
    for _ in range(problem.num_frames - 1):
        values = frame(values)
        out.append(values.numpy(order).reshape(u.shape))
    return np.stack(out, 1)


@cache
def phiflow_frame(problem: Problem, ndim: int) -> Callable:
    from phi.jax import flow

    flow.math.set_global_precision(64)
    num_steps = problem.steps or 10
    step = problem.dt / num_steps

    def frame(values: flow.Tensor) -> flow.Tensor:
        box = flow.Box(**dict.fromkeys("xy"[:ndim], 1))
        field = flow.CenteredGrid(values, flow.extrapolation.PERIODIC, box)
        for _ in range(num_steps):
            if problem.equation == "burgers":
                field = flow.advect.mac_cormack(field, field, step)
            else:
                field = field + step * problem.rate * field * (1 - field)
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
