"""DAPPER's Kuramoto-Sivashinsky set-up: a filter with UPS, trained on frames alone, and with the exact model.

    python -m bench.assimilation --folder /tmp/ks

u_t = -u u_x - u_xx - u_xxxx on [0, 32 pi), 128 cells, all observed every unit of time with a noise of 1
(`dapper/mods/KS/bocquet2019.py`, nansencenter/DAPPER). Same filter (`ups.assimilate`), observations and
first members for both; radius and inflation are about those of that file. DAPPER's own LETKF has errors of
0.14 and 0.11 with 6 and 16 members.
"""

from __future__ import annotations

import math
import time
from pathlib import Path

import torch
from torch import Tensor

import ups
from bench.command import parser_of
from bench.inversion import trained
from bench.user_data import CONFIG, write, write_config
from ups.report.tables import markdown_table
from ups_discovery.boundary import PERIODIC
from ups_discovery.seeds import generator
from ups_solvers.initial import random_stream
from ups_solvers.kuramoto import evolve, start

LENGTH, CELLS, EVERY, NOISE = 32 * math.pi, 128, 1.0, 1.0
FILMS, NUM_FRAMES, DT = 20, 61, 0.25  # to train
# members: radius, inflation
SETTINGS = {6: (30.0, 1.06), 16: (50.0, 1.02)}
SECTION = {"base": ["persistence", "equation"], "cut": 21}  # frames of a validated forecast
BURN_IN = 0.1  # of the observations, without score


def values(modes: Tensor) -> Tensor:
    return torch.fft.irfft(modes, n=CELLS, norm="forward")


class Exact:
    """The solver as a forecaster."""

    tasks = {"ks": {"fields": ["u"], "grid": [CELLS], "boundary": PERIODIC, "domain": [0.0, LENGTH]}}

    def forecast(self, task: str, u: Tensor, parameters: None, num_frames: int) -> Tensor:
        modes = torch.fft.rfft(u[:, -1, 0].double(), norm="forward")
        return values(evolve(modes, LENGTH, DT, num_frames))[:, :, None].to(u)


def films(path: Path) -> Path:
    """The configuration of films of the solver, which are written to `path`."""
    modes = start([random_stream(1, index) for index in range(FILMS)], CELLS, LENGTH)
    u = values(torch.cat([modes[:, None], evolve(modes, LENGTH, DT, NUM_FRAMES - 1)], 1))
    write(path, {"u": u.numpy()})
    return write_config(path, CONFIG, "ks", DT, domain=(0.0, LENGTH), settings=SECTION)


def scored(model, truth: Tensor, first: Tensor, y: Tensor, radius: float, inflation: float) -> tuple:
    """(RMS error of the analysis, RMS spread) after the burn-in."""
    frames = [round(EVERY / DT) * (1 + number) for number in range(len(y))]
    given = {"frames": frames, "values": y, "noise": NOISE}
    found = ups.assimilate(model, "ks", first, given, radius=radius, inflation=inflation)
    late = slice(int(BURN_IN * len(y)), None)
    rms = (found.mean - truth)[late].square().mean((1, 2)).sqrt().mean()
    return float(rms), float(found.spread[late].square().mean((1, 2)).sqrt().mean())


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="of the films and the run")
    parser.add_argument("--cycles", type=int, default=1000)
    parser.add_argument("options", nargs="*", help="of training")
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = options.folder
    model = trained(folder, films(folder / "ks.npz"), "ks", options.options)
    modes = start([random_stream(2, 0)], CELLS, LENGTH)
    truth = values(evolve(modes, LENGTH, EVERY, options.cycles))[0, :, None]
    source = generator(3, "observations")
    y = truth + NOISE * torch.randn(truth.shape, generator=source, dtype=torch.float64)
    rows = []
    for members, (radius, inflation) in SETTINGS.items():
        first = values(modes)[:, None] + torch.randn(members, 1, CELLS, generator=source, dtype=torch.float64)
        for name, one in (("exact", Exact()), ("UPS", model)):
            begin = time.process_time()
            rms, spread = scored(one, truth, first.float(), y, radius, inflation)
            seconds = time.process_time() - begin
            rows.append([str(members), name, f"{rms:.4f}", f"{spread:.4f}", f"{seconds:.0f}"])
            print(rows[-1], flush=True)
    print("\n".join(markdown_table(["members", "model", "error", "spread", "seconds"], rows)))


if __name__ == "__main__":
    main()
