"""What each part of the operator is worth: change one thing, train for the same processor time, compare on
validation.

    python -m bench.ablate --task burgers1d diff_react2d darcy2d --budget 60 --seeds 0 1

Reads the latent cache of the configuration (`make cache`); writes bench/out/ablate_*.json after every run.
Training is that of bench/ours.py, but the bases are fitted once per task and seed and shared: the budget pays
for gradient steps only.

error: pooled nRMSE of validation rollouts with the network on, the best of the points where bench/ours.py may
select weights; base: that of the base alone at the same point (a learnt base trains along); ratio: mean error
over seeds over standard's. standard_again repeats standard last: a ratio no further from 1 than its own is
noise of the clock. No variant was tuned anew."""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable
from functools import cache, partial, reduce
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench import ours
from bench.compare import OUT, number, save
from ups.common.boundary import PERIODIC
from ups.config import DEFAULT_OVERLAY, Config, load_config
from ups.data.cache import open_cache
from ups.models.backbone import Block
from ups.models.base_selection import select_base
from ups.models.operator import Operator

HEAD_DIM, WINDOW = (
    32,
    8,
)  # channels per attention head (3 heads at the default width); tokens per axis of a window


class Absent(nn.Module):
    """Zero, in place of a mixing."""

    def forward(self, x: Tensor, boundary: str) -> Tensor:
        return x.new_zeros(())


class PlainBlock(nn.Module):
    """A block of one task with the MLP down(silu(up h)) in place of the gated one, hidden 1.5 times wider: as
    many parameters."""

    def __init__(self, block: Block):
        super().__init__()
        (own,) = block.own.values()
        width, hidden = own.down.out_features, 3 * own.down.in_features // 2
        self.spectral, self.local = block.spectral, block.local
        self.mixing, self.modulation = own.mixing, own.modulation
        self.up, self.down = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)
        self.up.weight.is_hidden_matrix = self.down.weight.is_hidden_matrix = True

    def forward(self, x: Tensor, condition: Tensor, boundary: str, task: str = "") -> Tensor:
        shape = (x.shape[0], *[1] * (x.ndim - 2), -1)
        shift1, scale1, gate1, shift2, scale2, gate2 = (
            m.view(shape) for m in self.modulation(condition).chunk(6, -1)
        )
        h = F.rms_norm(x, x.shape[-1:]) * (1 + scale1) + shift1
        x = x + gate1 * (self.mixing(h) if self.mixing is not None else self.spectral(h, boundary))
        h = F.rms_norm(x, x.shape[-1:]) * (1 + scale2) + shift2
        return x + gate2 * self.down(F.silu(self.up(h + self.local(h, boundary))))


@cache
def rotation(sizes: tuple[int, ...], is_periodic: bool, num_pairs: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines (tokens, num_pairs): each axis turns its share by its lowest wave numbers, whole
    turns if periodic."""
    waves = torch.arange(1, num_pairs // len(sizes) + 1) * math.pi * (2 if is_periodic else 1)
    grids = torch.meshgrid(*[torch.arange(n) / n for n in sizes], indexing="ij")
    angle = torch.cat([grid.flatten()[:, None] * waves for grid in grids], -1)
    angle = F.pad(angle, (0, num_pairs - angle.shape[1]))  # what does not divide stands still
    return angle.cos(), angle.sin()


class Attention(nn.Module):
    """Softmax attention in place of SpectralMixing: over all tokens, or within fixed windows of `window`
    tokens per axis.

    Queries and keys normalised (Henry et al. 2020, arXiv 2010.04245) and rotated (Su et al. 2021, arXiv
    2104.09864)."""

    def __init__(self, width: int, window: float = math.inf):
        super().__init__()
        self.window, self.num_heads = window, max(1, width // HEAD_DIM)
        self.qkv = nn.Parameter(torch.randn(3, width, width) / math.sqrt(width))
        self.out = nn.Parameter(torch.randn(width, width) / math.sqrt(width))
        self.gain = nn.Parameter(torch.ones(2, width // self.num_heads))
        self.qkv.is_hidden_matrix = self.out.is_hidden_matrix = True

    def forward(self, x: Tensor, boundary: str) -> Tensor:
        """(batch, *tokens, width) to the same shape."""
        shape, n, dim = x.shape, x.ndim - 2, self.gain.shape[1]
        sizes = tuple(min(self.window, size) for size in shape[1:-1])
        for axis in range(n, 0, -1):
            x = x.unflatten(axis, (-1, sizes[axis - 1]))
        order = [
            0,
            *range(1, 2 * n, 2),
            *range(2, 2 * n + 1, 2),
            2 * n + 1,
        ]  # batch, windows, tokens inside, width
        x = x.permute(order)
        cos, sin = rotation(sizes, boundary == PERIODIC and sizes == shape[1:-1], dim // 2)
        qkv = F.linear(x.flatten(0, n).flatten(1, -2), self.qkv.flatten(0, 1)).unflatten(
            -1, (3, self.num_heads, dim)
        )
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (batch windows, heads, tokens, dim) each
        turned = []
        for part, gain in zip((q, k), self.gain, strict=True):
            a, b = (F.rms_norm(part, (dim,)) * gain).chunk(2, -1)
            turned.append(torch.cat([a * cos - b * sin, a * sin + b * cos], -1))
        with torch.autocast(x.device.type, enabled=False):  # on CPU 1.5 to 3.5 times as fast as in bf16
            out = F.scaled_dot_product_attention(*turned, v.float())
        out = F.linear(out.transpose(1, 2).flatten(2), self.out).view(x.shape)
        return out.permute(sorted(range(len(order)), key=order.__getitem__)).reshape(shape)


def replace(part: str, make: Callable[[int], nn.Module], operator: Operator) -> None:
    """make(width) in place of `part` of every block, of spectral mixing also in three dimensions."""
    for block in operator.backbone.blocks:
        setattr(block, part, make(operator.width))
        for module in block.modules() if part == "spectral" else ():
            if hasattr(module, "mixing"):
                module.mixing = None


def ungate(operator: Operator) -> None:
    operator.backbone.blocks = nn.ModuleList(PlainBlock(block) for block in operator.backbone.blocks)


def unflag(operator: Operator) -> None:
    """Nothing is left to Muon: AdamW takes every parameter, at its own rate."""
    for parameter in operator.parameters():
        parameter.is_hidden_matrix = False


# A variant is one change to the operator just built, or one number of its configuration times a factor.
MODIFIED: dict[str, Callable[[Operator], None]] = {
    "no_spectral": partial(replace, "spectral", lambda width: Absent()),
    "attention": partial(replace, "spectral", Attention),
    "window_attention": partial(replace, "spectral", partial(Attention, window=WINDOW)),
    "no_local": partial(replace, "local", lambda width: Absent()),
    "no_gate": ungate,
    "adamw": unflag,
}
SCALED = {
    "width_x0.5": ("model.width", 0.5),
    "width_x1.5": ("model.width", 1.5),
    "depth_x0.5": ("model.depth", 0.5),
    "depth_x1.5": ("model.depth", 1.5),
    "no_unroll": ("unroll_fraction", 0.0),
    "no_ema": ("optim.ema_decay", 0.0),
}
VARIANTS = ("standard", *MODIFIED, *SCALED, "standard_again")


def configure(name: str, path: Path | None, overrides: list[str]) -> Config:
    """The configuration with the number that the variant scales."""
    config = load_config(path, overrides)
    key, factor = SCALED.get(name, ("model.width", 1.0))
    value = reduce(getattr, key.split("."), config.operator)
    return load_config(path, [*overrides, f"operator.{key}={type(value)(factor * value)}"])


def table(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per variant: means over its seeds, ratio of the mean error to standard's, and the ratios seed by
    seed."""
    standard, rows = {run["seed"]: run["error"] for run in runs if run["variant"] == "standard"}, []
    for name in dict.fromkeys(run["variant"] for run in runs):
        mine = [run for run in runs if run["variant"] == name]
        mean = {
            key: sum(run[key] for run in mine) / len(mine)
            for key in ("error", "base", "steps", "step_ms", "num_parameters")
        }
        ratio = sum(run["error"] for run in mine) / sum(standard[run["seed"]] for run in mine)
        rows.append(
            {
                "variant": name,
                **mean,
                "ratio": ratio,
                "ratios": [run["error"] / standard[run["seed"]] for run in mine],
            }
        )
    return rows


def ablate(task: str, args: argparse.Namespace) -> dict[str, Any]:
    """Train and score every variant and seed of one task; print and save the table."""
    config = load_config(args.config, args.overrides)
    data, path = (
        open_cache(config, task),
        OUT / f"ablate_{task}_{args.budget:g}s_{time.strftime('%m%d-%H%M%S')}.json",
    )
    names = [
        n
        for n in VARIANTS
        if n in ("standard", *args.variants) and not (n == "no_unroll" and data.task.is_steady)
    ]
    result = {
        "kind": "ablate",
        **vars(args),
        "task": task,
        "config": str(args.config),
        "torch": torch.__version__,
        "load": os.getloadavg()[0],
        "runs": [],
    }
    print(
        f"{task}: {len(names) * len(args.seeds) * args.budget / 60:.0f} min of gradient steps, processor "
        f"seconds of one thread"
    )
    for seed in args.seeds:
        head, scores = select_base(
            data, config.operator.base_steps, config.context(task), seed, torch.device("cpu")
        )
        for name in names:
            trained = ours.train_ours(
                configure(name, args.config, args.overrides),
                task,
                args.budget,
                seed,
                fitted=(head, min(scores.values())),
                modify=MODIFIED.get(name),
            )
            best = min(
                (point for point in trained.history if "network" in point), key=lambda point: point["network"]
            )
            result["runs"].append(
                {
                    "variant": name,
                    "seed": seed,
                    "error": best["network"],
                    "base": best["base"],
                    **{key: value for key, value in vars(trained).items() if not key.startswith("predict")},
                }
            )
            result["table"] = table(result["runs"])
            save(path, result)
            print(f"  seed {seed} {name:16} {number(best['network'])} {trained.steps:6d} steps", flush=True)
    print(
        f"{'variant':16}     error  ratio  {'by seed':{7 * len(args.seeds)}}     base  params  steps ms/step"
    )
    for row in result["table"]:
        print(
            f"{row['variant']:16} {number(row['error'])} {row['ratio']:6.3f} "
            f"{''.join(f' {r:6.3f}' for r in row['ratios'])} "
            f"{number(row['base'])} {row['num_parameters'] / 1e3:6.0f}k {row['steps']:6.0f} "
            f"{row['step_ms']:7.1f}"
        )
    print(f"wrote {path}\n", flush=True)
    return result


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", nargs="+", required=True)
    parser.add_argument(
        "--budget", type=float, required=True, help="seconds of gradient steps per variant and seed"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument(
        "--variants", nargs="+", default=VARIANTS, choices=VARIANTS, help="standard is always run"
    )
    parser.add_argument("--config", type=Path, default=DEFAULT_OVERLAY)
    overrides = [text for text in argv if "=" in text and not text.startswith("-")]
    args = parser.parse_args(
        [text for text in argv if text not in overrides], argparse.Namespace(overrides=overrides)
    )
    torch.set_num_threads(1)  # the clock counts all threads
    return [ablate(task, args) for task in args.task]


if __name__ == "__main__":
    main()
