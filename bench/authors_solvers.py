"""Solve Burgers' equation and Fisher-KPP with the packages of several authors; bench/authors.py runs this
file in an environment that has them.

    PYTHON bench/authors_solvers.py AUTHOR GIVEN.npz RESULT.npy

GIVEN.npz: u (n, *space), values on a periodic grid of the unit interval or square; equation, dt (between
frames), num_frames and the coefficients. RESULT.npy: (n, time, *space) float64, the start included. Every
author solves on the given grid by the method that the package offers first, with sub-steps of a frame where
its step is fixed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np

NUM_STEPS = 10  # of a frame, with packages of a fixed step


def pypde(
    u: np.ndarray, equation: str, dt: float, num_frames: int, coefficients: dict[str, float]
) -> np.ndarray:
    """Central finite differences of second order and an adaptive Runge-Kutta method."""
    import pde

    rates = {
        "burgers": "diffusivity * laplace(u) - u * d_dx(u)",
        "fisher": "diffusivity * laplace(u) + rate * u * (1 - u)",
    }
    grid = pde.CartesianGrid([[0, 1]] * (u.ndim - 1), u.shape[1:], periodic=True)
    law = pde.PDE({"u": rates[equation]}, consts=coefficients)
    out = []
    for start in u:
        storage = pde.MemoryStorage()
        law.solve(
            pde.ScalarField(grid, start),
            t_range=dt * (num_frames - 1),
            solver="scipy",
            backend="numpy",
            tracker=storage.tracker(dt),
        )
        out.append(np.array(storage.data))
    return np.stack(out)


def exponax(
    u: np.ndarray, equation: str, dt: float, num_frames: int, coefficients: dict[str, float]
) -> np.ndarray:
    """Fourier modes and exponential time differencing of second order."""
    import jax

    jax.config.update("jax_enable_x64", True)
    import exponax

    steppers = {
        "burgers": lambda *grid: exponax.stepper.Burgers(*grid, diffusivity=coefficients["diffusivity"]),
        "fisher": lambda *grid: exponax.stepper.reaction.FisherKPP(
            *grid, diffusivity=coefficients["diffusivity"], reactivity=coefficients["rate"]
        ),
    }
    step = steppers[equation](u.ndim - 1, 1.0, u.shape[-1], dt / NUM_STEPS)
    frame = exponax.RepeatedStepper(step, NUM_STEPS)
    rollout = jax.jit(jax.vmap(exponax.rollout(frame, num_frames - 1, include_init=True)))
    return np.asarray(rollout(jax.numpy.asarray(u[:, None])))[:, :, 0]


def phiflow(
    u: np.ndarray, equation: str, dt: float, num_frames: int, coefficients: dict[str, float]
) -> np.ndarray:
    """MacCormack advection or an explicit reaction, then explicit diffusion, one after the other."""
    from phi import flow

    names = ",".join("xy"[: u.ndim - 1])
    box = flow.Box(**dict.fromkeys(names.split(","), 1))
    flow.math.set_global_precision(64)
    values = flow.tensor(u, flow.batch("trajectory"), flow.spatial(names))
    if equation == "burgers":
        values = flow.expand(values, flow.channel(vector="x"))
    field = flow.CenteredGrid(values, flow.extrapolation.PERIODIC, box)
    step, out = dt / NUM_STEPS, [u]
    for _ in range(num_frames - 1):
        for _ in range(NUM_STEPS):
            if equation == "burgers":
                field = flow.advect.mac_cormack(field, field, step)
            else:
                field = field + step * coefficients["rate"] * field * (1 - field)
            field = flow.diffuse.explicit(field, coefficients["diffusivity"], step)
        order = ["trajectory", *names.split(","), *["vector"] * (equation == "burgers")]
        out.append(field.values.numpy(order).reshape(u.shape))
    return np.stack(out, 1)


AUTHORS: dict[str, Callable[..., np.ndarray]] = {"pypde": pypde, "exponax": exponax, "phiflow": phiflow}


def main() -> None:
    author, given, result = sys.argv[1:]
    with np.load(given) as file:
        fields = {name: file[name] for name in file.files}
    u, equation = fields.pop("u"), str(fields.pop("equation"))
    dt, num_frames = float(fields.pop("dt")), int(fields.pop("num_frames"))
    np.save(result, AUTHORS[author](u, equation, dt, num_frames, {k: float(v) for k, v in fields.items()}))


if __name__ == "__main__":
    main()
