"""The data doctor's checks of one file: each yields findings."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import yaml

from ups.common.place import make_target
from ups.data.doctor_scan import Scan
from ups.data.download import edition, md5_of
from ups.data.family_checks import check_family
from ups.data.noise import noise_of
from ups.data.pdebench import SETTINGS
from ups.data.written import MIN_FRACTION
from ups.tasks import Finding
from ups.userdata.data_checks import affordable, horizon, resolved, uneven, walls
from ups.userdata.fact_checks import mirrored, orders, seams, stated
from ups.userdata.trajectories import Trajectories
from ups_discovery.boundary import PERIODIC, along

NUM_SAMPLED = 8  # trajectories, equally spaced in the file, for checks that cost more than reading
MAX_MEAN_CHANGE = 1e-2  # of a conserved mean, over the field's RMS; our solvers keep it to 1e-6
FROZEN_FRACTION = 0.5  # more frames than these equal the one before: worth a note
# no resolved field has so many alternations in a row of its second difference, each above ROUGH of its range
ALTERNATIONS = 3
ROUGH = 0.02
WALL_WINDOWS = 4  # windows of ALTERNATIONS cells, beginning a cell apart, that count as at a wall
RARE = 1e-3  # fraction of windows that may alternate by chance
MD5_BYTES = 10**9  # larger files are hashed on request only
MAX_ROUNDING = 0.01  # fraction of a field's variation that may be rounding
QUIET_NOISE = 0.01  # noise relative to the variation of a field, below which it needs no caution
NUM_LISTED = 5  # trajectory numbers listed per finding
FOR_USERS = (seams, orders, stated, mirrored, resolved, affordable, walls, uneven, horizon)


def check_rows(
    scan: Scan, leaks: Sequence[int], first: Sequence[tuple[Path, int, str]], task: str, is_declared: bool
) -> Iterator[Finding]:
    """Faults of single trajectories.

    leaks: trajectories that start as one in another split; first: file, number and split of the first
    trajectory with the same start, for each; is_declared: the user declares the files.
    """
    again = "repair the numbers, or leave them out" if is_declared else "generate or download the file again"
    skip = f" (task.{task}.skip_missing: true leaves out such frames)" * is_declared
    copied: dict[bytes, int] = {}
    earlier = [copied.setdefault(digest, i) for i, digest in enumerate(scan.whole)]
    copies = [(i, j) for i, j in enumerate(earlier) if i != j]
    leak = [f"{i} as {first[i][1]} of {first[i][0].name}" for i in leaks[:1]]
    unwritten = "".join(problem for _, problem in scan.unwritten[:1])
    for severity, rows, what, do in (
        ("error", scan.not_finite, f"trajectories hold NaN or Inf (first: {scan.first_bad})", again + skip),
        (
            "error",
            scan.constant,
            "trajectories are constant in space and time",
            "remove them or generate the file again",
        ),
        (
            "error",
            [i for i, _ in scan.unwritten],
            f"trajectories were never written, or not wholly (first: {unwritten})",
            again,
        ),
        ("info", scan.flat, "coefficients have one value everywhere, alike by chance", "nothing"),
        (
            "warning",
            [i for i, _ in copies],
            f"trajectories repeat an earlier one exactly (first: {copies[:1]})",
            "train with fewer, different ones; an error estimate counts them twice",
        ),
        (
            "error",
            leaks,
            f"trajectories start as one in another split does (first: {', '.join(leak)}), so test results "
            "are too good",
            "remove the repeated trajectories or report test results on the others only; "
            "generate several files with one data.seed and equal num_trajectories",
        ),
    ):
        if rows:
            listed = f"{', '.join(map(str, rows[:NUM_LISTED]))}{', ..' * (len(rows) > NUM_LISTED)}"
            yield Finding(severity, f"{len(rows)} {what}", do, where=f"trajectories {listed}")


def check_facts(data: Trajectories, scan: Scan) -> Iterator[Finding]:
    """Disagreements of file name, attributes and numbers, and the task's own checks."""
    task, named = data.task, data.task.parameter_in(data.path.name)
    if named is not None and not np.isclose(named, data.parameter, rtol=1e-4, atol=0):
        yield Finding(
            "error",
            f"the file name says {task.parameters[0]} = {named}, its attribute {data.parameter}",
            "find out which is true and correct the other",
        )
    for name, value in _stated_numbers(data).items():
        wanted = dict(task.constants).get(name)
        if wanted is not None and not np.isclose(value, wanted, rtol=1e-4, atol=0):
            yield Finding(
                "error",
                f"the file says {name} = {value:g}, and {task.name} has {wanted:g}",
                "name the right task in data.tasks, or correct the file",
            )
    median = float(np.median(np.max(scan.mean_changes, 1))) if scan.mean_changes else 0.0
    if task.user_facts is None and task.conserved == task.fields and median > MAX_MEAN_CHANGE:
        yield Finding(
            "error",
            f"the mean of a trajectory moves by {median:.2g} of its RMS, and {task.name} conserves it: "
            "this is another equation, such as reacdiff1d, or an open boundary",
            "name the right task in data.tasks",
        )
    if scan.frozen_fraction > FROZEN_FRACTION:
        yield Finding(
            "info",
            f"{scan.frozen_fraction:.0%} of the frames equal the one before",
            "nothing if the field has come to rest; persistence will look good, so compare with it",
        )
    yield from _check_still_cells(data, scan)
    if not scan.not_finite:
        for check in FOR_USERS if task.user_facts is not None else (check_family,):
            yield from check(data, scan)


def _check_still_cells(data: Trajectories, scan: Scan) -> Iterator[Finding]:
    """Cells that never change, except at the ends of an axis, where walls may be."""
    still = np.equal(scan.low, scan.high)
    if not still.ndim:  # no trajectory was finite
        return
    inside = (slice(None), *[slice(1, -1) if size > 2 else slice(None) for size in data.space])
    for name, cells in zip(data.task.moving, still[inside], strict=True):
        if MIN_FRACTION < (fraction := cells.mean()) < 1:
            yield Finding(
                "info",
                f"{fraction:.0%} of the cells of {name} hold one number in every frame of every trajectory",
                "nothing if these are walls, solids or land; else they were never written",
            )


def check_domain(data: Trajectories) -> Iterator[Finding]:
    """Coordinates, of cells or of nodes on both ends, that do not span the task's domain, for which its bases
    are made."""
    task = data.task
    for axis, (low, high) in zip(task.axes, task.spans, strict=True) if task.user_facts is None else ():
        x = data.coordinates.get(axis, np.zeros(1))
        length = float(x[-1] - x[0])
        if len(x) > 1 and not any(
            math.isclose(length * factor, high - low, rel_tol=0.02) for factor in (1.0, len(x) / (len(x) - 1))
        ):
            yield Finding(
                "error",
                f"{axis} runs from {x[0]:g} to {x[-1]:g}, and {task.name} is on {low:g} to {high:g}",
                "declare the file in a section of its own (python -m ups describe), which takes its domain",
            )


def _stated_numbers(data: Trajectories) -> dict[str, float]:
    """The numbers a file states about its generation: its attributes, and its generator's `config`."""
    try:
        config = yaml.safe_load(data.attributes.get("config", ""))
    except yaml.YAMLError:
        config = None
    section = config.get("sim", config) if isinstance(config, dict) else {}
    stated = (section if isinstance(section, dict) else {}) | data.attributes
    return {
        name: float(value)
        for name, value in stated.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def check_edition(data: Trajectories, hash_all: bool) -> Iterator[Finding]:
    """Whether a file with a published name is the published file, by its MD5."""
    name, published = data.path.name, data.task.published
    if SETTINGS in data.attributes or name not in published:
        return
    md5 = md5_of(data.path) if hash_all or data.path.stat().st_size <= MD5_BYTES else None
    if md5 is None:
        yield Finding(
            "info",
            "the MD5 was not compared with the published one",
            "add --md5 to do so (reads the file again)",
        )
    elif md5 == published[name][1]:
        yield Finding("info", "the MD5 is the published one", "nothing")
    else:
        what, old = f"the MD5 {md5} is not the published {published[name][1]}", edition(name, md5)
        yield (
            Finding(
                "error", f"{what}. {old.rstrip('. ')}", f"delete it and run `{make_target('data')}` again"
            )
            if old
            else Finding("warning", what, "make sure you know where it comes from")
        )


def check_rounding(data: Trajectories) -> Iterator[Finding]:
    """Fields whose variation is largely rounding: of the stored numbers or, for a field without an offset
    (`Task.offsets`), of float32 in training."""
    task, (_, u) = data.task, data.stratified_rows(NUM_SAMPLED)
    for channel, name in enumerate(task.channels):
        values, offset = u[:, :, channel].astype(np.float64), task.offsets.get(name, 0.0)
        mean, std = offset + values.mean(), values.std()
        step = max(data.precision(name), np.finfo(np.float32).eps * (not offset))
        fraction = step * abs(mean) / math.sqrt(12) / max(std, np.finfo(np.float64).tiny)
        if MAX_ROUNDING < fraction < 1:  # more: the field is constant
            if data.precision(name) > 1e-12:
                cause = "the files hold it"
                do = f"write the files in float64, or without the mean of {name}"
            else:
                cause = "it is trained on"
                do = (
                    f"leave {name} out of task.{task.name}.positive and vector, or write the files without "
                    "its mean"
                )
            yield Finding(
                "error" if fraction > 10 * MAX_ROUNDING else "warning",
                f"{fraction:.0%} of the variation of {name} is rounding: its mean {mean:.6g} is "
                f"{abs(mean) / std:.2g} times its variation, and {cause} in float32",
                do,
            )


def check_wall_noise(data: Trajectories) -> Iterator[Finding]:
    """Fields that alternate from cell to cell next to a wall and not elsewhere, in the second half of some
    trajectories."""
    ends = along(data.task.boundary, data.task.ndim)
    if {*ends} == {PERIODIC} or data.task.is_steady or min(data.space) < 4 * WALL_WINDOWS:
        return
    _, u = data.stratified_rows(NUM_SAMPLED)
    u = u[:, data.num_frames // 2 :, : len(data.task.fields)].astype(np.float64)
    limit = ROUGH * np.ptp(u, axis=tuple(range(3, u.ndim)), keepdims=True)
    wall, inside = [], []  # fractions of windows that alternate
    for axis in (axis for axis, end in enumerate(ends, 3) if end != PERIODIC):
        bend = np.diff(np.moveaxis(u, axis, -1), 2)
        is_large = np.abs(bend) > np.moveaxis(limit, axis, -1)
        turns = (bend[..., 1:] * bend[..., :-1] < 0) & is_large[..., 1:] & is_large[..., :-1]
        runs = np.lib.stride_tricks.sliding_window_view(turns, ALTERNATIONS, -1).all(-1)
        wall += [runs[..., :WALL_WINDOWS].mean(), runs[..., -WALL_WINDOWS:].mean()]
        inside += [runs[..., WALL_WINDOWS:-WALL_WINDOWS].mean()]
    if max(wall) > max(10 * max(inside), RARE):
        yield Finding(
            "warning",
            f"the field alternates from cell to cell at a wall ({max(wall):.1%} of the places looked at "
            f"there, {max(inside):.1%} elsewhere): noise of the grid, not of the equation",
            "look at the boundary condition and the time step of the solver that made it",
        )


def check_noise(data: Trajectories) -> Iterator[Finding]:
    """White noise of measurement in the predicted fields, relative to their standard deviation."""
    found = noise_of(data, np.arange(data.num_trajectories))
    if not found:
        return
    _, u = data.stratified_rows(NUM_SAMPLED)
    for name, sigma in found.items():
        fraction = sigma / u[:, :, data.task.channels.index(name)].std(dtype=np.float64)
        yield Finding(
            "info" if fraction < QUIET_NOISE else "caution",
            f"noise: {100 * fraction:.2g} % of {name} (white, standard deviation {sigma:.3g})",
            "nothing: equations are fitted to allow for it, and the report states errors without it too",
        )
