"""Power of the gate on samples: how often fakes of exact samples are refused, and exact samples pass.

    python -m bench.power [--task burgers1d_forced] [--starts 40 100] [--of 400] [--climate]

Members are exact samples from starts of the invariant measure, changed as `fakes` says; the gate is that of
the report (`samples` of ups/evaluation/claims.py), with the law known or, with --no-law, one trajectory as
the data. Each set of starts is scored once, so `--of` 400 gives ten sets of 40. The operator's forecast is
the mean of the law. With --climate it is the gate on long rollouts, of one member.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from bench.command import parser_of
from ups.data.generate import solver_of
from ups.evaluation.claims import ENSEMBLE
from ups.evaluation.gates import gate, outcome
from ups.evaluation.transient import LONG
from ups.metrics.climate import climate
from ups.metrics.intervals import Resamples
from ups.metrics.likeness import likeness
from ups.results import Entry
from ups.tasks import get_task
from ups_solvers import barkley

MEMBERS, SAMPLES = 10, 32
WORLDS = {  # cells, leads, time between frames, parameter
    "burgers1d_forced": (64, 10, 0.025, 0.01),
    "barkley2d": (32, 4, 1.0, None),
}
CLAIMS = {claim.name: claim for claim in ENSEMBLE}


class World(NamedTuple):
    """Samples (starts, M, T, C, *space) of one task: law, three ensembles, and the data (starts, T, C,
    *space)."""

    task: str
    start: Tensor
    law: Tensor
    members: Tensor
    again: Tensor
    other: Tensor
    same_seeds: Tensor
    data: Tensor


def starts_of(name: str, count: int) -> Tensor:
    cells, _, _, parameter = WORLDS[name]
    settings = {"resolution": cells, "num_frames": 1, "parameter": parameter, "t_end": 1.0}
    return solver_of(get_task(name)).trajectory(7, [*range(count)], **settings)[:, 0].float()


def futures(
    name: str, start: Tensor, num: int, seed: int, rows: list[int] | None = None, horizons: int = 1
) -> Tensor:
    _, leads, dt, parameter = WORLDS[name]
    facts = {"num_frames": horizons * leads, "parameter": parameter, "dt": dt}
    rows = [*range(len(start))] if rows is None else rows
    return solver_of(get_task(name)).exact_futures(start, num, seed=seed, rows=rows, **facts).float()


def make_world(name: str, count: int) -> World:
    start = starts_of(name, count)
    draw = partial(futures, name, start)
    ensembles = (draw(MEMBERS, seed) for seed in (2, 3, 5))
    return World(name, start, draw(SAMPLES, 1), *ensembles, draw(MEMBERS, 2, [0] * count), draw(1, 4)[:, 0])


def long_world(name: str, count: int) -> tuple[Tensor, Tensor]:
    """(starts, five exact samples of each beyond the scored leads)."""
    start = starts_of(name, count)
    return start, futures(name, start, 5, 1, horizons=LONG)[:, :, WORLDS[name][1] :]


def in_turn(size: int, axis: int, like: Tensor, one: float, two: float) -> Tensor:
    """one and two in turn along an axis."""
    values = torch.where(torch.arange(size) % 2 == 0, one, two)
    return values.view([-1 if place == axis else 1 for place in range(like.ndim)])


def from_wave(d: Tensor, wave: int, times: float) -> Tensor:
    """The energy times `times` from that wave on, along the last axis."""
    modes = torch.fft.rfft(d)
    modes[..., wave:] *= times**0.5
    return torch.fft.irfft(modes, n=d.shape[-1])


def smoothed(x: Tensor) -> Tensor:
    """Means of every cell and its neighbours."""
    rolled = sum(x.roll(move, axis) for axis in range(4, x.ndim) for move in (-1, 1))
    return (x + rolled) / (1 + 2 * (x.ndim - 4))


def fakes(world: World) -> dict[str, Tensor]:
    x, law, leads = world.members, world.law, world.members.shape[2]
    mean, rng = law.mean(1, keepdim=True), torch.Generator().manual_seed(0)
    d, size = x - mean, law.std(1, keepdim=True)
    activity = world.start.flatten(1).std(1)
    strong = (activity > activity.median()).view(-1, *[1] * (x.ndim - 1))
    normal = torch.randn(len(x), MEMBERS, SAMPLES, generator=rng) / (SAMPLES - 1) ** 0.5
    gaussian = torch.einsum("njk,nk...->nj...", normal, law - mean)
    order = torch.randperm(MEMBERS, generator=rng)

    def permuted(lead: int) -> Tensor:
        return torch.cat([x[:, :, :lead], x[:, order, lead:]], 2)

    out = {
        "exact": x,
        "exact, other noise": world.again,
        "x1.26 and x0.64 in turn by start": mean + in_turn(len(x), 0, x, 1.26, 0.64) * d,
        "x1.25 and x0.75 in turn by start": mean + in_turn(len(x), 0, x, 1.25, 0.75) * d,
        "x1.25 and x0.75 in turn by lead": mean + in_turn(leads, 2, x, 1.25, 0.75) * d,
        "deviations of another start": mean + d.roll(1, 0),
        "half of the energy from wave 4 on": mean + from_wave(d, 4, 0.5),
        "x1.5 of the energy from wave 4 on": mean + from_wave(d, 4, 1.5),
        "the same seeds for all starts": world.same_seeds,
        "x1.25 in strong, x0.78 in weak states": mean + torch.where(strong, 1.25, 0.78) * d,
        **{f"x{times}": mean + times * d for times in (1.12, 0.88, 1.2, 1.3, 0.7)},
        "Gaussian, exact mean and covariance": mean + gaussian,
        "permuted at half time": permuted(leads // 2),
        "permuted at lead 2": permuted(2),
        "antithetic": torch.cat([x[:, :5], 2 * mean - x[:, :5]], 1),
        "bias of 0.3 standard deviations": x + 0.3 * size,
        "common deviations": x + 0.5 * (world.other[:, :1] - mean),
        "truth in one member": torch.cat([world.data[:, None], x[:, 1:]], 1),
        "truth + 0.3 deviations": from_truth(world, x),
        "smoothed over neighbouring cells": smoothed(x),
        "white noise": mean + size * torch.randn(x.shape, generator=rng),
        "the mean alone": mean.expand_as(x),
        "a quarter of the box of other members": torch.cat(
            [part[:, torch.randperm(MEMBERS, generator=rng)] for part in x.split(x.shape[-1] // 4, -1)], -1
        ),
        "the nearest other start": x[nearest(world.start.flatten(1), world.start.flatten(1), 1)[:, 0]],
        "those nearest to the truth": near_truth(world),
        "the same seed at every lead": one_seed(world),
    }
    if world.task == "barkley2d":  # a second ensemble would have the same kicks
        out |= kicked(world, rng)
    return out


def unlisted(world: World) -> dict[str, Tensor]:
    """Ten fakes written after margins and figures were fixed, before any was judged."""
    x, law = world.members, world.law
    mean, other = law.mean(1, keepdim=True), world.other[:, :1]
    d, size, starts = x - mean, law.std(1, keepdim=True), (len(x), *[1] * (x.ndim - 1))
    activity = world.start.flatten(1).std(1).view(starts)
    strong, left = activity > activity.median(), torch.arange(x.shape[-1]) < x.shape[-1] // 2
    turn = torch.linspace(0, torch.pi / 2, x.shape[2]).view(-1, *[1] * (x.ndim - 3))
    return {
        "deviations a quarter of the box away": mean + d.roll(x.shape[-1] // 4, -1),
        "three members are copies of three others": torch.cat([x[:, :3], x[:, :-3]], 1),
        "one lead late": torch.cat([x[:, :, :1], x[:, :, :-1]], 2),
        "deviations pass to those of another member": mean + turn.cos() * d + turn.sin() * d.roll(1, 1),
        "x0.5 and x1.32 in turn by member": mean + in_turn(MEMBERS, 1, x, 0.5, 1.32) * d,
        "deviations cut at 1.5 standard deviations": mean + torch.minimum(d.abs(), 1.5 * size) * d.sign(),
        "left half of one member, right half of another": torch.where(left, x, x.roll(1, 1)),
        "bias of 0.3 in strong, -0.3 in weak states": x + torch.where(strong, 0.3, -0.3) * size,
        "a third of the variance common": mean + (2 / 3) ** 0.5 * d + (1 / 3) ** 0.5 * (other - mean),
        "x1.2 in the left, x0.77 in the right half": mean + torch.where(left, 1.2, 0.77) * d,
    }


def nearest(x: Tensor, y: Tensor, num: int) -> Tensor:
    """For each row of x the `num` nearest rows of y (..., rows, numbers), other than itself."""
    apart = torch.cdist(x, y)
    return torch.where(apart > 0, apart, torch.inf).topk(num, largest=False).indices


def near_truth(world: World) -> Tensor:
    """Of three ensembles the members nearest to the truth."""
    every = torch.cat([world.members, world.again, world.other], 1)
    kept = nearest(world.data[:, None].flatten(2), every.flatten(2), MEMBERS)[:, 0]
    return torch.stack([one[some] for one, some in zip(every, kept, strict=True)])


def one_seed(world: World) -> Tensor:
    """Members whose noise is that of the first lead again and again."""
    u, frames = world.start.repeat_interleave(MEMBERS, 0), []
    for _ in range(world.law.shape[2]):
        frames.append(u := futures(world.task, u, 1, 2)[:, 0, 0])
    return torch.stack(frames, 1).unflatten(0, (-1, MEMBERS))


def from_truth(world: World, x: Tensor) -> Tensor:
    """Members around a centre near the truth, from which the truth is as far as a member; another centre in
    every ensemble."""
    return world.data[:, None] + 0.3 * (x - world.again[:, :1])


def kicked(world: World, rng: torch.Generator) -> dict[str, Tensor]:
    """Fakes of barkley2d, with other kicks."""
    original, width = barkley.sample_kicks, barkley.SIDE / 4

    def draw(change, num: int = MEMBERS) -> Tensor:
        changed = lambda stream, *settings: change(stream, *original(stream, *settings))  # noqa: E731
        with patch.object(barkley, "sample_kicks", changed):
            return futures(world.task, world.start, num, 9)

    def some(share: float, stream, steps: np.ndarray, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        kept = stream.random(len(steps)) > share
        return steps[kept], places[kept]

    x, quiet = world.members, draw(lambda _, steps, places: (steps[:0], places[:0]), 1)
    is_eighth = (torch.arange(len(x)) % 8 == 0).view(-1, *[1] * (x.ndim - 1))

    def moved(reach: int) -> Tensor:
        waves = (x - quiet).flatten(0, 1)
        moves = torch.randint(-reach, reach + 1, (len(waves), 2), generator=rng).tolist()
        pairs = zip(waves, moves, strict=True)
        return quiet + torch.stack([wave.roll(move, (-2, -1)) for wave, move in pairs]).view_as(x)

    return {
        "v of another member": torch.cat([x[:, :, :, :1], x[:, :, :, 1:].roll(1, 1)], 3),
        "30 % of the kicks dropped": draw(partial(some, 0.3)),
        "half of the kicks dropped": draw(partial(some, 0.5)),
        "kicks in the left half": draw(lambda _, steps, places: (steps, places / [1, 2])),
        "every eighth start without kicks": torch.where(is_eighth, quiet, x),
        "never two kicks in a frame": draw(lambda _, steps, places: (steps[:1], places[:1])),
        "kicks at 16 places": draw(lambda _, steps, places: (steps, (places // width + 0.5) * width)),
        "waves moved by up to 4 cells": moved(4),
        "waves at random places": moved(x.shape[-1] // 2),
    }


def late_fakes(x: Tensor, start: Tensor) -> dict[str, Tensor]:
    """Changed rollouts (starts, 1, T, C, *space), T the leads beyond the scored ones."""
    mean, size = x.mean(), x.std()
    growth = torch.linspace(1, 7, x.shape[2]).sqrt().view(-1, *[1] * (x.ndim - 3))
    return {
        "exact": x,
        "variance that grows, 4 in the mean": mean + growth * (x - mean),
        **{f"variance x{times}": mean + times**0.5 * (x - mean) for times in (4.6, 4.0, 1.5, 0.67)},
        "a drift of 0.3 standard deviations": x + 0.3 * size,
        "frozen after the scored leads": x[:, :, :1].expand_as(x),
        "half of the start in every frame": mean
        + 0.75**0.5 * (x - mean)
        + 0.5 * (start[:, None, None] - mean),
        "smoothed over neighbouring cells": smoothed(x),
        "3.5 times the energy from wave 8 on": from_wave(x, 8, 3.5),
    }


def judge(world: World, members: Tensor, again: Tensor | None, rows: slice) -> str:
    """Outcome of the gate on some of the starts: pass, FAIL or UNDECIDED. again: the second ensemble, if no
    law is known."""
    law, forecast = world.law[rows], world.law[rows].mean(1)
    known = {"law": law} if again is None else {"again": again[rows][:, :, :4]}
    found = likeness(members[rows], world.data[rows], "periodic", forecast, Resamples(300, 0), **known)
    return decided("samples", found, members[rows])


def judge_late(members: Tensor, law: Tensor, start: Tensor | None, rows: slice) -> str:
    """Outcome of the gate on long rollouts; without start, law is the data."""
    of_start = None if start is None else start[rows]
    found = climate(members[rows], law[rows], of_start, "periodic", Resamples(300, 0))
    return decided("climate", found, members[rows])


def decided(name: str, found: dict[str, dict[str, list]], members: Tensor) -> str:
    claim, (leads, fields) = CLAIMS[name], members.shape[2:4]
    entry = Entry("t", "ensembles", {"fields": ["u", "v"][:fields], "times": [*range(leads)]})
    entry.add("m", {"likeness": found}, claim.case)
    figure = claim.figure(entry, "m")
    return outcome(gate("diffusion", f"{name}/t/m", "", figure, *claim.bounds("m"), count=len(members)))


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--task", choices=WORLDS, default="burgers1d_forced")
    parser.add_argument("--starts", type=int, nargs="+", default=[40, 100])
    parser.add_argument("--of", type=int, default=400)
    parser.add_argument("--no-law", action="store_true")
    parser.add_argument("--climate", action="store_true")
    args = parser.parse_args()
    head = (f"{count} starts: refused, undecided, passed" for count in args.starts)
    print(f"| fake | {' | '.join(head)} |")
    if args.climate:
        start, u = long_world(args.task, args.of)
        law, of_start = (u[:, 4:5], None) if args.no_law else (u[:, 1:4], start)
        every = late_fakes(u[:, :1], start)
        judges = {name: partial(judge_late, members, law, of_start) for name, members in every.items()}
    else:
        world = make_world(args.task, args.of)
        second = fakes(world._replace(members=world.again, again=world.other)) if args.no_law else {}
        every = fakes(world) | ({} if args.no_law else unlisted(world))
        judges = {name: partial(judge, world, members, second.get(name)) for name, members in every.items()}
    for name, judged in judges.items():
        cells = []
        for count in args.starts:
            sets = [slice(first, first + count) for first in range(0, args.of - count + 1, count)]
            found = [judged(rows) for rows in sets]
            cells.append(", ".join(str(found.count(one)) for one in ("FAIL", "UNDECIDED", "pass")))
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
