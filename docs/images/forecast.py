"""The picture and the numbers at the top of the README: python docs/images/forecast.py [RUN], from the
project's root."""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import ups  # noqa: E402

u0 = np.sin(2 * np.pi * np.arange(256) / 256)[None]  # (channel, x)
model = ups.load(sys.argv[1] if sys.argv[1:] else "runs/small")
u = model.forecast("burgers1d", u0, {"Nu": 0.01}, num_frames=30)  # (30, 1, 256)
print(u[[0, 9, 29]].max((1, 2)).round(3))

dt, x = model.tasks["burgers1d"]["dt"], (np.arange(256) + 0.5) / 256
fig, axes = plt.subplots(1, 2, figsize=(9, 2.8), width_ratios=(1, 1.2), layout="constrained")
axes[0].plot(x, u0[0], color="0.6", label="t = 0, given")
for frame, color in ((9, "tab:blue"), (29, "tab:red")):
    axes[0].plot(x, u[frame, 0], color=color, label=f"t = {(frame + 1) * dt:.2f}")
axes[0].set(xlabel="x", ylabel="u")
axes[0].legend(frameon=False)
image = axes[1].imshow(
    np.concatenate([u0, u[:, 0]]), origin="lower", aspect="auto", extent=(0, 1, 0, 30 * dt), cmap="RdBu_r"
)
axes[1].set(xlabel="x", ylabel="t")
fig.colorbar(image, ax=axes[1], label="u")
fig.savefig(Path(__file__).with_suffix(".png"), dpi=110)
