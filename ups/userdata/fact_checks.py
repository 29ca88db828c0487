"""Checks of the doctor for user data: whether the fields are as their section states, at the ends of periodic
axes, in a mirror, and in what is positive, conserved and bounded."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from ups.tasks import Finding
from ups_discovery.boundary import PERIODIC, along

LOOKED_AT = 8  # trajectories
JUMP = 8.0  # times the mean difference of neighbours: more than any resolved periodic field jumps
KEPT = 1e-5  # of its RMS, that a mean may move for forecasts to keep it (ups/models/base_selection.py)
DRIFT = 1e-2  # of it: no rounding, no lossy solver, another equation
ODD = 0.1, 5.0  # correlation that a mirror forbids, and its mean over its standard error, which are no chance
BEYOND = 1e-3  # of the range of the start, that a bounded field may leave it: overshoots of a solver


def jumps(u: Any, axis: int) -> float:
    """The jump of a field (..., *space) where the ends of an axis meet, over the mean difference of
    neighbours."""
    inside = np.abs(np.diff(u, axis=axis)).mean()
    return float(np.abs(u.take(0, axis) - u.take(-1, axis)).mean() / max(inside, np.finfo(np.float64).tiny))


def _states(data: Any) -> Any:
    """Some trajectories (n, time, channel, *space), float64, without forcing, which may be rough."""
    task = data.task
    u = data.stratified_rows(LOOKED_AT)[1][:, :, : len(task.channels) - len(task.forcing)]
    return u.astype(np.float64)


def seams(data: Any, scan: Any) -> Iterator[Finding]:
    """Whether the field is continuous where the ends of periodic axes meet."""
    task, u = data.task, _states(data)
    for number, (axis, end) in enumerate(zip(task.axes, along(task.boundary, task.ndim), strict=True)):
        ratio = jumps(u, number - task.ndim)
        ends = [u.take(cell, number - task.ndim) for cell in (0, -1)]
        if end == PERIODIC and ratio > JUMP:
            yield Finding(
                "error",
                f"{axis} is said to be periodic, and the field jumps where its ends meet, "
                f"by {ratio:.3g} times the difference of neighbours",
                f"write task.{task.name}.boundary: no_flux (or dirichlet, outflow; one per axis as "
                "{" + f"{axis}: no_flux" + "}), or cut the data where they repeat",
            )
        elif end == PERIODIC and u.shape[number - task.ndim] > 2 and np.array_equal(*ends):
            yield Finding(
                "warning",
                f"the first and the last cell of {axis} hold the same numbers, so a "
                "periodic grid has one point twice",
                f"write task.{task.name}.repeated: [{axis}]",
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
    u = _states(data)
    middle, change = (u[:, 1:] + u[:, :-1]) / 2, np.diff(u, axis=1)
    for number, axis in enumerate(task.axes):
        slope = np.gradient(middle, axis=number + 3)
        for channel, name in enumerate(task.moving):
            turned = name in task.vector[number :: task.ndim]
            for word, odd in (("its slope", slope), ("itself times its slope", middle * slope))[: 2 - turned]:
                a, b = (part[:, :, channel].reshape(len(u), -1) for part in (change, odd))
                found = (a * b).sum(1) / np.maximum(np.sqrt((a**2).sum(1) * (b**2).sum(1)), 1e-300)
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
        u = data.stratified_rows(LOOKED_AT)[1][:, :, task.channels.index(name)].astype(np.float64)
        u = u.reshape(*u.shape[:2], -1)
        low, high = u[:, 0].min(1), u[:, 0].max(1)
        beyond = np.maximum(u.max((1, 2)) - high, low - u.min((1, 2))).max() / max((high - low).max(), 1e-300)
        if beyond > BEYOND:
            yield Finding(
                "error",
                f"{name} is said to be bounded, and leaves the range of its start by {beyond:.2g} of it",
                f"leave {name} out of {key}.bounded",
            )
