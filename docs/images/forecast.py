"""The picture at the top of the README: python docs/images/forecast.py, from the root of a clone.

Truth: the solvers of ups_solvers, from starts of another seed than that of the training data (data.seed)."""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import ups  # noqa: E402
from ups_solvers import SOLVERS

SEED = 7


def solve(task: str, *, resolution: int, num_frames: int, parameter: float, t_end: float) -> np.ndarray:
    """One solution of the task's solver, (frames, channel, *space)."""
    [u] = SOLVERS[task].simulate(
        [0], seed=SEED, resolution=resolution, num_frames=num_frames, parameter=parameter, t_end=t_end
    )
    return np.asarray(u, dtype="float32")


model = ups.load("pretrained")
burgers = solve("burgers1d", resolution=256, num_frames=32, parameter=0.01, t_end=1.55)
burgers_pred = model.forecast("burgers1d", burgers[0], {"Nu": 0.01}, num_frames=31)
gas = solve("cfd2d", resolution=32, num_frames=13, parameter=0.01, t_end=0.6)
gas_pred = model.forecast("cfd2d", gas[0], num_frames=12)
[darcy] = solve("darcy2d", resolution=64, num_frames=1, parameter=1.0, t_end=1.0)
darcy_pred = model.forecast("darcy2d", darcy[:1])

rows = (  # name, input, truth, forecast, their axes
    (
        "Burgers, u(t, x)\n31 frames",
        np.broadcast_to(burgers[0], (31, 256)),
        burgers[1:, 0],
        burgers_pred[:, 0],
        ("x", "t"),
    ),
    ("compressible flow, Vx\nat t = 0.6, 12 frames", gas[0, 2], gas[-1, 2], gas_pred[-1, 2], ("x", "y")),
    ("Darcy flow,\na(x, y) to u(x, y)", darcy[0], darcy[1], darcy_pred.reshape(64, 64), ("x", "y")),
)
fig, axes = plt.subplots(3, 4, figsize=(9, 6.2), layout="constrained")
for line, (name, given, truth, forecast, (across, up)) in zip(axes, rows, strict=True):
    low, high = float(truth.min()), float(truth.max())
    error = forecast - truth
    largest = float(np.abs(error).max())
    nrmse = float(np.linalg.norm(error) / np.linalg.norm(truth))
    for ax, field, limits, cmap in (
        (line[0], given, (None, None), "viridis"),
        (line[1], truth, (low, high), "viridis"),
        (line[2], forecast, (low, high), "viridis"),
        (line[3], error, (-largest, largest), "RdBu_r"),
    ):
        image = ax.imshow(field, origin="lower", aspect="auto", vmin=limits[0], vmax=limits[1], cmap=cmap)
        ax.set(xticks=[], yticks=[], xlabel=across)
        bar = fig.colorbar(image, ax=ax)
        bar.ax.tick_params(labelsize=7)
        bar.formatter.set_powerlimits((-2, 3))
    line[0].set_ylabel(f"{name}\n{up}", fontsize=9)
    print(f"{name.splitlines()[0]}: relative L2 error {nrmse:.1e}")
for ax, title in zip(axes[0], ("input", "solver", "UPS forecast", "difference"), strict=True):
    ax.set_title(title)
fig.savefig(Path(__file__).with_suffix(".png"), dpi=110)
