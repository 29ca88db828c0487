"""The data doctor's checks of one file: each yields findings."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from ups.common.place import make_target
from ups.data.doctor_scan import Scan
from ups.data.download import edition, md5_of
from ups.data.noise import noise_of
from ups.data.pdebench import SETTINGS
from ups.tasks import Finding
from ups.userdata.data_checks import horizon, mirrored, resolved, seams, stated, uneven
from ups.userdata.trajectories import Trajectories

NUM_SAMPLED = 8  # trajectories, equally spaced in the file, for checks that cost more than reading
MAX_MEAN_CHANGE = 1e-2  # of a conserved mean, over the field's RMS; our solvers keep it to 1e-6
MIN_MEAN_CHANGE = 1e-3  # of a mean, over the field's RMS; a reaction moves it by more
MD5_BYTES = 10**9  # larger files are hashed on request only
MAX_ROUNDING = 0.01  # fraction of a field's variation that may be rounding
QUIET_NOISE = 0.01  # noise relative to the variation of a field, below which it needs no caution
NUM_LISTED = 5  # trajectory numbers listed per finding
FOR_USERS = (seams, stated, mirrored, resolved, uneven, horizon)


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
    for name, wanted in task.constants:
        value = data.attributes.get(name, wanted)
        if isinstance(value, int | float) and not np.isclose(value, wanted, rtol=1e-4, atol=0):
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
    is_reacting = bool(dict(task.constants).get("rho")) and not task.conserved
    if is_reacting and scan.mean_changes and median < MIN_MEAN_CHANGE:
        yield Finding(
            "warning",
            f"the mean of a trajectory stays (it moves by {median:.1g} of its RMS), and a reaction moves "
            "it: as in the published files (PDEBench issue 94), or another equation, such as burgers1d",
            "name the right task in data.tasks, or set data.source=generate, which solves its equation",
        )
    if not scan.not_finite:
        for check in FOR_USERS if task.user_facts is not None else ():
            yield from check(data, scan)


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
