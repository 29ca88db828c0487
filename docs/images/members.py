"""The moving picture of README: python docs/images/members.py [RUN], from the root of a clone, after
make train CONFIG=configs/excitable.yaml.

Members of UPS and exact samples of barkley2d, from a state that is not in the data."""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
from PIL import Image  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import ups  # noqa: E402
from ups.tasks import TASKS  # noqa: E402
from ups_solvers import SOLVERS  # noqa: E402

SEED, FRAMES, COLUMNS, MS = 7, 16, 4, 300
run = sys.argv[1] if len(sys.argv) > 1 else "runs/excitable"
task = TASKS["barkley2d"]
[past] = (
    SOLVERS[task.name]
    .simulate([0], seed=SEED, resolution=task.resolution, num_frames=3, parameter=None, t_end=2.0)
    .float()
)
[exact] = (
    SOLVERS[task.name]
    .exact_futures(past[-1:], COLUMNS, seed=SEED, rows=[0], num_frames=FRAMES, parameter=None, dt=1.0)
    .numpy()
)
[members] = ups.load(run).sample("barkley2d", past.numpy()[None], num_frames=FRAMES, members=COLUMNS)

start = np.broadcast_to(past[-1:].numpy(), (COLUMNS, 1, *past.shape[1:]))
rows = {name: np.concatenate([start, u], 1)[:, :, 0] for name, u in (("UPS", members), ("exact", exact))}
fig, axes = plt.subplots(2, COLUMNS, figsize=(6, 3.4), dpi=80, layout="constrained")
images = []
for line, (name, u) in zip(axes, rows.items(), strict=True):
    line[0].set_ylabel(name)
    for ax, frames in zip(line, u, strict=True):
        ax.set(xticks=[], yticks=[])
        images.append(
            (ax.imshow(frames[0].T, origin="lower", vmin=0, vmax=1, interpolation="nearest"), frames)
        )
shots = []
for t in range(FRAMES + 1):
    for image, frames in images:
        image.set_data(frames[t].T)
    fig.suptitle(f"u after {t} frame{'s' * (t != 1)}", fontsize=10)
    fig.canvas.draw()
    shots.append(Image.fromarray(np.asarray(fig.canvas.buffer_rgba())[..., :3]))
palette = shots[0].quantize(32)
first, *others = (shot.quantize(palette=palette, dither=0) for shot in shots)
first.save(Path(__file__).with_suffix(".gif"), save_all=True, append_images=others, duration=MS, loop=0)
