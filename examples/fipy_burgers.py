"""Burgers' equation in 1D by FiPy (implicit upwind volumes), on a grid four times coarser, corrected.

    make corrector SOLVER=examples.fipy_burgers:coarse FINE=examples.fipy_burgers:fine \
        STARTS=examples.fipy_burgers:starts RUN=burgers_fipy \
        OPTIONS="--dt 0.05 --length 16 --symmetries shift,mirror --vector u --ratio 8 --horizons 3" \
        ARGS="operator.train.batch_size=2 operator.train.steps=1600"
    python examples/fipy_burgers.py                # with its weights
"""

import functools

import fipy
import numpy as np

NAME, DT, FULL, LENGTH, NU = "burgers_fipy", 0.05, 4096, 16, 2e-3


@functools.cache
def equation(cells: int):
    """(variable, equation, number of steps in DT) on [0, LENGTH), periodic."""
    u = fipy.CellVariable(mesh=fipy.PeriodicGrid1D(nx=cells, dx=LENGTH / cells), hasOld=True)
    speed = 0.5 * u.faceValue * [[1.0]]
    law = fipy.TransientTerm() + fipy.UpwindConvectionTerm(coeff=speed) == fipy.DiffusionTerm(coeff=NU)
    return u, law, 1 if cells <= FULL // 4 else cells // (32 * LENGTH)


def step(u):
    """The state after DT, (batch, 1, cells)."""
    field, law, num = equation(u.shape[-1])
    out = np.empty(u.shape)
    for row, one in enumerate(u):
        field.setValue(one[0])
        for _ in range(num):
            field.updateOld()
            law.solve(var=field, dt=DT / num)
        out[row, 0] = field.value
    return out


coarse = fine = step  # the grid is that of u


def starts(num: int = 16, cells: int = 2 * FULL, seed: int = 0) -> np.ndarray:
    """Sums of waves of at least a quarter, largest values 0.1 to 1, as decayed waves are states, too."""
    draw, x = np.random.default_rng(seed), (np.arange(cells) + 0.5) / cells
    a, phase = draw.standard_normal((2, num, 4 * LENGTH, 1))
    u = (a * np.sin(2 * np.pi * np.arange(1, 4 * LENGTH + 1)[:, None] * x + 6 * phase)).sum(1)
    return (u / abs(u).max(-1, keepdims=True) * 10 ** -draw.random((num, 1)))[:, None]


if __name__ == "__main__":
    import ups

    correct, u = ups.corrector(f"runs/{NAME}", step=coarse), starts(1, FULL // 4, seed=1)
    for _ in range(60):
        u = correct(u)
    print(f"RMS of u after {60 * DT:g}: {np.sqrt((u**2).mean()):.4f}", dict(correct.counts))
