"""The picture of bands in the README: python docs/images/band.py, after the `make operator` of docs/trust.md.

Truth: the solver of steady diffusion, for the coefficient of a start of another seed, to three powers."""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import ups  # noqa: E402
from ups_solvers import SOLVERS

CELLS, SEED = 32, 7
x = (np.arange(CELLS) + 0.5) / CELLS
task, model = "darcy2d_grf", ups.load("runs/trust")
solver, codec = SOLVERS[task], model.operator.head(task).codec
known = solver.simulate([0], seed=SEED, resolution=CELLS, num_frames=1, parameter=1.0, t_end=1.0)[:, 0, :1]
fig, axes = plt.subplots(2, 3, figsize=(9, 4), sharex=True, layout="constrained")
for (field, error), power in zip(axes.T, (1, 1.5, 2), strict=True):
    a = known**power
    truth = np.asarray(solver.integrate(a, parameter=1.0, dt=None, num_frames=0)).reshape(CELLS, CELLS)
    found = model.forecast(task, np.asarray(a)[0], error=True, extrapolate=True)
    u, low, high = (np.reshape(one, (CELLS, CELLS)) for one in (found.u, found.low, found.high))
    row = np.abs(truth - u).max(1).argmax()  # with the largest error
    field.plot(x, truth[row], "k", label="solver")
    field.plot(x, u[row], "--", color="#0072b2", label="forecast")
    field.set_title(f"coefficient to the power {power:g}: {found.verdict}", fontsize=10)
    ends = (low - u)[row], (high - u)[row]
    error.fill_between(x, *ends, color="#0072b2", alpha=0.25, linewidth=0, label="band")
    error.plot(x, (truth - u)[row], "k", linewidth=1, label="solver less forecast")
    error.ticklabel_format(axis="y", scilimits=(-2, 2))
    error.set(xlabel="x")
    rms = float(np.sqrt(np.mean(np.square(truth - u))) / codec.std.item())
    error.set_title(f"expected error {found.error:.1e}, true {rms:.1e}", fontsize=9)
    print(f"{power}: {found.verdict}, {found.reason}")
for row in axes:
    row[0].legend(fontsize=7)
fig.savefig(Path(__file__).with_suffix(".png"), dpi=75)
