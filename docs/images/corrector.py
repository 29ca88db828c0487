"""The picture of docs/corrector.md: python docs/images/corrector.py, from the root of a clone.

Error against the processor seconds of a run, on grids with and without correction, from
bench/results/corrector/."""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
from matplotlib.ticker import NullFormatter  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from bench.corrector import FOLDER, GRIDS  # noqa: E402

CURVES = {  # columns of one curve -> its label and style
    tuple(GRIDS): ("the solver", {"color": "black", "marker": "o"}),
    ("corrected",): ("corrected", {"color": "tab:red", "marker": "s"}),
    ("fno",): ("corrected by an FNO", {"color": "tab:blue", "marker": "^"}),
    ("alone",): ("a network without the solver", {"color": "tab:green", "marker": "D"}),
}
records = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.json"))]
fig, axes = plt.subplots(
    2, len(records), figsize=(3.2 * len(records), 5.4), sharex="col", layout="constrained", squeeze=False
)
for record, column in zip(records, axes.T, strict=True):
    rows = {one["key"]["column"]: one["row"] for one in record["entries"]}
    num = len(rows["full"]["seconds"])  # starts; rivals on others are in the table alone
    rows = {name: row for name, row in rows.items() if len(row["seconds"]) == num}
    last = column[len(rows["full"]["errors"][:2]) - 1]  # with a horizon
    column[1].set_visible(last is column[1])
    for place, (ax, times) in enumerate(zip(column, ("the trained steps", "three times these"), strict=True)):
        for names, (label, style) in CURVES.items():
            some = [rows[name] for name in names if name in rows and place < len(rows[name]["errors"])]
            seconds, errors = (
                (
                    [np.mean(part) for part in parts]
                    for parts in zip(*((row["seconds"], row["errors"][place]) for row in some), strict=True)
                )
                if some
                else ([], [])
            )
            ax.plot(seconds, errors, label=label, **style)
            for row, x, y in zip(some, seconds, errors, strict=True):
                ax.annotate(f" {row['cells']}", (x, y), fontsize=7, va="bottom")
        ax.set(xscale="log", yscale="log", title=f"{record['task']}\n{times}" if place == 0 else times)
        ax.title.set_fontsize(9)
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_minor_formatter(NullFormatter())
    last.tick_params(labelbottom=True)
    last.set_xlabel("processor seconds of a run")
for ax in axes[:, 0]:
    ax.set_ylabel("nRMSE")
fig.legend(
    *axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8, frameon=False
)
fig.savefig(Path(__file__).with_suffix(".png"), dpi=110)
