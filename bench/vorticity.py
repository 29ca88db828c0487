"""Generate the usual flow of neural operators as user data: a file and a section that describes it.

    python -m bench.vorticity   # data/vorticity/flow.npy and flow.yaml
    make train CONFIG=data/vorticity/flow.yaml ARGS="operator.train.steps=400"
    make bench CONFIG=data/vorticity/flow.yaml TASK=flow BUDGET=180

Vorticity on the unit torus, w_t + V.grad w = nu lap w + 0.1 (sin + cos)(2 pi (x + y)), nu = 1e-3, from
Gaussian fields of covariance 7^1.5 (49 - lap)^-2.5 (Li et al. 2021, arXiv 2010.08895, section 5.3). Solved on
128 x 128 and stored on 64 x 64, 31 frames at intervals of one unit of time. The section states only names,
length and periodicity of the axes, and the time step.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from bench.command import parser_of
from ups.common.place import ROOT

CELLS, STRIDE, STEPS, VISCOSITY = 128, 2, 100, 1e-3  # of the solver; steps a unit of time
SECTION = """include: {include}
run: {{name: vorticity}}
cache: {{root: cache/vorticity}}
data: {{tasks: [flow], source: user}}
task:
  flow:
    files: "{file}"
    layout: {{omega: [trajectory, time, x, y]}}
    boundary: periodic
    domain: [0, 1]
    dt: 1.0
"""


def start(rows: int, seed: int, n: int = CELLS) -> Tensor:
    """Return Gaussian fields (rows, n, n); their covariance does not depend on n."""
    draw = torch.Generator().manual_seed(seed)
    k = torch.fft.fftfreq(n, 1 / n, dtype=torch.float64)
    size = 7**0.75 * (49 + 4 * math.pi**2 * (k[:, None] ** 2 + k**2)) ** -1.25
    size[0, 0] = 0
    return torch.fft.ifft2(
        torch.fft.fft2(torch.randn(rows, n, n, generator=draw, dtype=torch.float64)) * size * n
    ).real


def solve(w: Tensor, frames: int, nu: float = VISCOSITY, steps: int = STEPS) -> Tensor:
    """Return the frames after w (rows, n, n) as (rows, frames, n, n): dealiased Fourier modes, Heun's method
    on the exact exponential of the viscosity.
    """
    n = w.shape[-1]
    k = 2 * math.pi * torch.fft.fftfreq(n, 1 / n, dtype=torch.float64)
    kx, ky = k[:, None], k[: n // 2 + 1].abs()
    square, kept = kx**2 + ky**2, (kx.abs() < 2 * math.pi * n / 3) & (ky < 2 * math.pi * n / 3)
    stream, decay = torch.where(square > 0, 1 / square.clamp_min(1e-9), 0.0), torch.exp(-nu * square / steps)
    x = torch.arange(n, dtype=torch.float64) / n
    phase = 2 * math.pi * (x[:, None] + x)
    force, found = torch.fft.rfft2(0.1 * (phase.sin() + phase.cos())), []

    def slope(w: Tensor) -> Tensor:
        u, v = (torch.fft.irfft2(1j * part * stream * w, s=(n, n)) for part in (ky, -kx))
        along, across = (torch.fft.irfft2(1j * part * w, s=(n, n)) for part in (kx, ky))
        return force - kept * torch.fft.rfft2(u * along + v * across)

    w = torch.fft.rfft2(w)
    for _ in range(frames):
        found.append(torch.fft.irfft2(w, s=(n, n)))
        for _ in range(steps):
            first = slope(w)
            w = decay * (w + first / (2 * steps)) + slope(decay * (w + first / steps)) / (2 * steps)
    return torch.stack(found, 1)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--trajectories", type=int, default=60)
    parser.add_argument("--frames", type=int, default=31)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=ROOT / "data" / "vorticity")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    parts = tqdm(start(args.trajectories, args.seed).split(4), desc="solving")
    u = torch.cat([solve(w, args.frames)[..., ::STRIDE, ::STRIDE] for w in parts])
    np.save(args.folder / "flow.npy", u.float().numpy())
    text = SECTION.format(include=ROOT / "configs" / "small.yaml", file=args.folder / "flow.npy")
    (args.folder / "flow.yaml").write_text(text, encoding="utf-8")
    print(f"{args.folder / 'flow.npy'}: {tuple(u.shape)}; {args.folder / 'flow.yaml'} describes it")


if __name__ == "__main__":
    main()
