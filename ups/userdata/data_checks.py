"""Checks of the doctor for user data: numbers that may mean missing, the resolution of the grid, and whether
the fields are as their section states (at the ends of periodic axes, in a mirror, positive, conserved,
bounded).

A value means missing without saying so if it is in many cells and far from all others: -9999, 1e20, or a 0 if
the field is never near 0. A plateau of a field is no such value: the numbers beside it lead up to it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ups.common.text import frames_ahead
from ups.tasks import Finding, Task
from ups.userdata.grid import MOST_UNEVEN
from ups_discovery.boundary import PERIODIC, along

FAR = 2.5  # standard deviations of the other values, from the nearest of them
SAMPLED = 256  # values of each channel that are kept of a trajectory, for that deviation
LOOKED_AT = 8  # values of each channel, the farthest from others
DISTINCT = 16  # of them that differ, at least: phases and indicators have few values
RESOLVED = 16  # cells of an axis from which a spectrum tells anything
CUT_OFF = 1e-3  # of the variance: Gray-Scott on 48 x 48 cells, which no model forecasts well, has 4e-3, on
# twice as fine a grid 1e-5; Burgers' shocks 7e-7 on 256 cells and 3e-3 on 64
TINY = np.finfo(np.float64).tiny
SHORT_WINDOW = 5  # frames: less than that many leads say little of a forecast
JUMP = 8.0  # times the mean difference of neighbours: more than any resolved periodic field jumps
KEPT = 1e-5  # of its RMS, that a mean may move for forecasts to keep it (ups/models/base_selection.py)
DRIFT = 1e-2  # of it: no rounding, no lossy solver, another equation
ODD = 0.1, 5.0  # correlation that a mirror forbids, and its mean over its standard error, which are no chance
BEYOND = 1e-3  # of the range of the start, that a bounded field may leave it: overshoots of a solver


class Extremes:
    """The smallest value, the largest value and zero of each channel: how often each occurs, and the distance
    to the next value."""

    def __init__(self, channels: Sequence[str], offsets: Mapping[str, float] | None = None):
        self.channels, self.offsets, self.count = tuple(channels), offsets or {}, 0
        self.kept: list[np.ndarray] = []
        self.found: list[dict[float, list[float]]] = [{} for _ in channels]  # value: [cells, distance]

    def add(self, u: np.ndarray) -> None:
        """Add a trajectory u (T, channels, *space); NaN does not count."""
        channels = np.moveaxis(u, 1, 0).reshape(len(self.found), -1)
        self.count += channels.shape[1]
        self.kept.append(channels[:, :: max(1, channels.shape[1] // SAMPLED)])
        for values, found, name in zip(channels, self.found, self.channels, strict=True):
            values = values[~np.isnan(values)]
            zero = np.float32(-self.offsets.get(name, 0.0))
            for value in {values.min(), values.max(), zero} if len(values) else ():
                apart = np.abs(values[values != value] - value)
                cells = len(values) - len(apart)
                if cells > 1 or (cells and (value == zero or value in found or value == np.round(value))):
                    before = found.setdefault(float(value), [0, np.inf])
                    before[:] = before[0] + cells, min(before[1], float(apart.min(initial=np.inf)))

    def suspects(self) -> Iterator[tuple[str, float, int, float, float]]:
        """(channel, value, how often it is there, smallest and largest of the others) of such values."""
        for channel, name in enumerate(self.channels if self.kept else ()):
            sample = np.concatenate([part[channel] for part in self.kept])
            offset = self.offsets.get(name, 0.0)
            far = sorted(self.found[channel].items(), key=lambda item: -item[1][1])[:LOOKED_AT]
            for value, (cells, apart) in far:
                rest = sample[(sample != value) & np.isfinite(sample)].astype(np.float64)
                apart = min(apart, float(np.abs(rest - value).min(initial=np.inf)))
                if cells > 1 and len(np.unique(rest)) >= DISTINCT and FAR * rest.std() < apart < np.inf:
                    low, high = rest.min() + offset, rest.max() + offset
                    yield name, float(f"{value + offset:.6g}"), cells, low, high


def may_hold_fill_values(task: Task) -> bool:
    """Whether there may be undeclared fill values: in user files, unless `missing: nan` is declared."""
    return task.user_facts is not None and "nan" not in task.user_facts.get("missing", ())


def suspects(data: Any, extremes: Extremes) -> list[Finding]:
    """Findings for numbers in a task's files that may mean missing."""
    key = f"task.{data.task.name}"
    return [
        Finding(
            "error",
            f"{name} is {value:g} in {cells} of {extremes.count} numbers and from {low:g} "
            f"to {high:g} in the others, so it seems to stand for none",
            f"write {key}.missing: {value:g}, and {key}.skip_missing: true if only some frames have "
            f"it; or {key}.missing: nan if it is a value of the field",
        )
        for name, value, cells, low, high in (extremes.suspects() if may_hold_fill_values(data.task) else ())
    ]


def resolved(data: Any, scan: Any) -> Iterator[Finding]:
    """Whether the grid resolves what changes: the fraction of waves of two to three cells."""
    task, u = data.task, scan.sample.astype(np.float64)
    u = u[:, :, len(task.inputs) :][:, :, : len(task.moving)]
    u = u - u.mean(0 if task.is_steady else 1, keepdims=True)
    for number, (axis, end) in enumerate(zip(task.axes, along(task.boundary, task.ndim), strict=True), 3):
        along_axis = np.moveaxis(u, number, -1)
        if end != PERIODIC:  # a mirror image behind the wall goes on without a jump
            along_axis = np.concatenate([along_axis, along_axis[..., ::-1]], -1)
        size = along_axis.shape[-1]
        power = np.square(np.abs(np.fft.rfft(along_axis)))[..., 1:]
        power = np.moveaxis(power, 2, 0).reshape(len(task.moving), -1, size // 2).mean(1)
        fractions = power[:, math.ceil(size / 3) - 1 :].sum(1) / np.maximum(power.sum(1), TINY)
        worst = int(fractions.argmax())
        if u.shape[number] >= RESOLVED and fractions[worst] > CUT_OFF:
            over = "samples" if task.is_steady else "time"
            what = (
                f"waves of two to three cells along {axis} hold {fractions[worst]:.1%} of the variance of "
                f"{task.moving[worst]} about its mean over {over}: the grid cuts its spectrum off, or "
                "the data are noisy"
            )
            yield Finding(
                "caution",
                what,
                "expect forecasts to miss that part and what "
                "comes of it; a finer grid, or smoother data, may be needed",
            )


def horizon_words(data: Any) -> str:
    """How far ahead the report judges forecasts, in frames and in units of time; "" of a steady task."""
    if data.task.is_steady:
        return ""
    num, unit = data.num_frames - 1, dict(data.task.units).get("time")
    return f"forecasts are judged up to {frames_ahead(num, num * data.dt, unit)}"


def horizon(data: Any, scan: Any) -> Iterator[Finding]:
    """How far ahead the report judges forecasts: their quality is of this horizon alone."""
    words, key = horizon_words(data), f"task.{data.task.name}"
    is_short = data.is_cut and data.num_frames <= SHORT_WINDOW
    if words:
        yield Finding(
            "caution" if is_short else "info",
            words + f", as windows hold {data.num_frames} frames" * is_short,
            f"raise {key}.cut, and data.test_fraction with it so that six windows are of test; or add frames"
            if is_short
            else "nothing",
        )


def uneven(data: Any, scan: Any) -> Iterator[Finding]:
    """How uneven the cells are that count as equal."""
    for axis, (place, ratio) in data.files[0].uneven.items():
        yield Finding(
            "caution" if ratio < MOST_UNEVEN else "warning",
            f"the steps of {place} differ {ratio:.3g}-fold and count as equal: derivatives along {axis} are "
            "wrong by as much",
            f"resample the fields to equal steps along {axis}, as numpy.interp does"
            + (", or accept that" if ratio < MOST_UNEVEN else ""),
        )


def jumps(u: Any, axis: int) -> float:
    """The jump of a field (..., *space) where the ends of an axis meet, over the mean difference of
    neighbours."""
    inside = np.abs(np.diff(u, axis=axis)).mean()
    return float(np.abs(u.take(0, axis) - u.take(-1, axis)).mean() / max(inside, np.finfo(np.float64).tiny))


def _states(data: Any, scan: Any) -> Any:
    """Some trajectories (n, time, channel, *space), float64, without forcing, which may be rough."""
    task = data.task
    return scan.sample[:, :, : len(task.channels) - len(task.forcing)].astype(np.float64)


def seams(data: Any, scan: Any) -> Iterator[Finding]:
    """Whether the field is continuous where the ends of periodic axes meet."""
    task, u = data.task, _states(data, scan)
    for number, (axis, end) in enumerate(zip(task.axes, along(task.boundary, task.ndim), strict=True)):
        ratio = jumps(u, number - task.ndim)
        if end == PERIODIC and ratio > JUMP:
            yield Finding(
                "error",
                f"{axis} is said to be periodic, and the field jumps where its ends meet, "
                f"by {ratio:.3g} times the difference of neighbours",
                f"write task.{task.name}.boundary: no_flux (or dirichlet, outflow; one per axis as "
                "{" + f"{axis}: no_flux" + "}), or cut the data where they repeat",
            )


def mirrored(data: Any, scan: Any) -> Iterator[Finding]:
    """Whether the mirror image of a solution may be a solution.

    A mirror changes the sign of du/dt du/dx for every field, and of du/dt u du/dx for fields that keep their
    sign, so the mean of both must be zero. A wave that travels one way fails the first test; a velocity that
    carries itself fails the second, unless it is named as a vector.
    """
    task = data.task
    if not task.is_symmetric or task.is_steady:
        return
    u = _states(data, scan)
    middle, change = (u[:, 1:] + u[:, :-1]) / 2, np.diff(u, axis=1)
    for number, axis in enumerate(task.axes):
        slope = np.gradient(middle, axis=number + 3)
        for channel, name in enumerate(task.moving):
            odd = {"its slope": slope}
            if name not in task.vector[number :: task.ndim]:  # it keeps its sign
                odd["itself times its slope"] = middle * slope
            for word, product in odd.items():
                found = _correlations(change[:, :, channel], product[:, :, channel])
                error = found.std(ddof=1) / np.sqrt(len(u)) if len(u) > 1 else np.inf
                if abs(found.mean()) > max(ODD[0], ODD[1] * error):
                    yield Finding(
                        "error",
                        f"mirrored along {axis}, {name} is no solution: its change goes with {word} "
                        f"(correlation {found.mean():.2f}), which a mirror turns round",
                        f"name the fields that it turns in task.{task.name}.vector, one per axis, "
                        f"or leave mirror out of task.{task.name}.symmetries",
                    )
                    break


def _correlations(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """The correlation about zero of two arrays (rows, ...), for every row."""
    a, b = one.reshape(len(one), -1), other.reshape(len(other), -1)
    return (a * b).sum(1) / np.maximum(np.sqrt((a**2).sum(1) * (b**2).sum(1)), 1e-300)


def stated(data: Any, scan: Any) -> Iterator[Finding]:
    """Whether the data are positive, conserved and bounded where the section states it."""
    task, key = data.task, f"task.{data.task.name}"
    for name in task.positive:
        if (lowest := scan.lowest[task.channels.index(name)]) <= 0:
            yield Finding(
                "error",
                f"{name} is said to be positive, and goes down to {lowest:.3g}",
                f"leave {name} out of {key}.positive, or mend the files",
            )
    drifts = np.median(scan.mean_changes, 0) if scan.mean_changes else []
    for name in task.conserved if scan.mean_changes else ():
        drift = drifts[task.channels.index(name)]
        moves = f"the mean of {name} moves by {drift:.2g} of its RMS"
        if drift <= KEPT:
            yield Finding("info", f"{moves}: it is conserved, and forecasts will keep it", "nothing")
        elif drift <= DRIFT:
            yield Finding(
                "warning",
                f"{moves}, and is said to be conserved: forecasts are held to it up to {KEPT:g} only",
                f"leave {name} out of {key}.conserved, or save "
                "what a conservative solver gives, on all of its cells",
            )
        else:
            yield Finding(
                "error", f"{moves}, and is said to be conserved", f"leave {name} out of {key}.conserved"
            )
    for name in task.bounded:
        u = scan.sample[:, :, task.channels.index(name)].astype(np.float64)
        u = u.reshape(*u.shape[:2], -1)
        low, high = u[:, 0].min(1), u[:, 0].max(1)
        beyond = np.maximum(u.max((1, 2)) - high, low - u.min((1, 2))).max() / max((high - low).max(), 1e-300)
        if beyond > BEYOND:
            yield Finding(
                "error",
                f"{name} is said to be bounded, and leaves the range of its start by {beyond:.2g} of it",
                f"leave {name} out of {key}.bounded",
            )
