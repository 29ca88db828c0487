"""Burgers' equation in 2D by PhiFlow (semi-Lagrangian), on a grid four times coarser, corrected.

    make corrector SOLVER=examples.phiflow_burgers:coarse FINE=examples.phiflow_burgers:fine \
        STARTS=examples.phiflow_burgers:starts RUN=burgers_phiflow \
        OPTIONS="--dt 0.05 --frames 17 --length 2 --symmetries shift,mirror \
            --fields u,v --vector u,v --horizons 3" \
        ARGS="operator.train.batch_size=3 operator.train.steps=1200 operator.model.width=64 \
            operator.unroll_fraction=0.2"
    python examples/phiflow_burgers.py             # with its weights
"""

import math

import numpy as np
from phi.flow import PERIODIC, Box, CenteredGrid, advect, batch, channel, diffuse, spatial, tensor

NAME, DT, FULL, LENGTH, NU = "burgers_phiflow", 0.05, 256, 2, 1.5e-3
AXES = batch("b"), channel(vector="x,y"), spatial("x,y")


def step(u):
    """The velocity after DT, (batch, 2, cells, cells); as many steps as explicit diffusion needs."""
    cells = u.shape[-1]
    num = math.ceil(4 * NU * DT * (cells / LENGTH) ** 2)
    field = CenteredGrid(tensor(u, *AXES), PERIODIC, Box(x=LENGTH, y=LENGTH), x=cells, y=cells)
    for _ in range(num):
        field = advect.semi_lagrangian(field, field, DT / num)
        field = diffuse.explicit(field, NU, DT / num)
    return field.values.numpy("b,vector,x,y")


coarse = fine = step  # the grid is that of u


def starts(num: int = 28, cells: int = FULL, seed: int = 0) -> np.ndarray:
    """Sums of sixteen waves of at most three periods a unit and axis, largest values 0.3 to 1."""
    draw, x, most = np.random.default_rng(seed), (np.arange(cells) + 0.5) / cells, 3 * LENGTH
    waves = draw.integers(-most, most + 1, (16, 2, num, 2, 1, 1))
    a, phase = draw.standard_normal((2, 16, num, 2, 1, 1))
    angles = (2 * np.pi * (k * x[:, None] + m * x) for k, m in waves)
    u = sum(one * np.sin(angle + 6 * shift) for one, angle, shift in zip(a, angles, phase, strict=True))
    size = draw.uniform(0.3, 1, (num, 1, 1, 1))
    return (u / abs(u).max((1, 2, 3), keepdims=True) * size).astype("float32")


if __name__ == "__main__":
    import ups

    correct, u = ups.corrector(f"runs/{NAME}", step=coarse), starts(1, FULL // 4, seed=1)
    for _ in range(80):
        u = correct(u)
    print(f"RMS velocity after {80 * DT:g}: {np.sqrt((u**2).mean()):.4f}", dict(correct.counts))
