"""The data doctor: what is wrong with a data file, and what to do about it.

It reads a file once, in blocks, and looks for the known faults of PDEBench data: withdrawn editions, fields
without dynamics, initial conditions that occur in training and in test, NaN, damaged or foreign layouts.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from ups.common.place import make_target
from ups.config.schema import Config
from ups.data.counts import count_findings
from ups.data.download import edition, md5_of
from ups.data.leakage import REMEDY, frame_digests, shared_frames
from ups.data.noise import noise_of
from ups.data.pdebench import SETTINGS, open_data, split_indices
from ups.data.written import frame_sizes, unwritten
from ups.tasks import Finding
from ups.userdata.data_checks import Extremes, horizon, mirrored, resolved, seams, stated, suspects, uneven
from ups.userdata.masks import is_wrong, mask_words, settled
from ups.userdata.trajectories import Trajectories

VERDICTS = {  # by the worst finding
    "error": "failed: do not train on it",
    "warning": "read the warnings before you train on it",
    "caution": "OK within limits: read the cautions",
    "info": "OK",
}
Start = tuple[Path, int, str]  # file, number and split of the first trajectory with an initial condition
SCAN_BYTES = 32 * 2**20  # of data read at a time, at least one trajectory
NUM_SAMPLED = 8  # trajectories, equally spaced in the file, for checks that cost more than reading
MAX_MEAN_CHANGE = 1e-2  # of a conserved mean, over the field's RMS; our solvers keep it to 1e-6
MIN_MEAN_CHANGE = 1e-3  # of a mean, over the field's RMS; a reaction moves it by more
MD5_BYTES = 10**9  # larger files are hashed on request only
MAX_ROUNDING = 0.01  # fraction of a field's variation that may be rounding
QUIET_NOISE = 0.01  # noise relative to the variation of a field, below which it needs no caution
NUM_LISTED = 5  # trajectory numbers listed per finding
FOR_USERS = (seams, stated, mirrored, resolved, uneven, horizon)


@dataclass
class Scan:
    """Results of `scan_file`. Lists of int hold trajectory numbers."""

    extremes: Extremes
    frames: list[np.ndarray] = field(default_factory=list)  # digests of all frames, per block
    initial: list[bytes] = field(default_factory=list)  # digest of each initial condition
    whole: list[bytes] = field(default_factory=list)  # digest of each trajectory
    not_finite: list[int] = field(default_factory=list)
    first_bad: str = ""  # place of the first number that is not finite
    constant: list[int] = field(default_factory=list)  # in space and time
    unwritten: list[tuple[int, str]] = field(default_factory=list)  # with the problem in words
    flat: list[int] = field(default_factory=list)  # the coefficient has one value everywhere
    # per trajectory: range of each channel's mean over time, over its RMS
    mean_changes: list[np.ndarray] = field(default_factory=list)
    lowest: np.ndarray | float = math.inf  # value of each channel
    sample: np.ndarray | None = None  # some trajectories, if all are finite


def examine(
    files: Iterable[tuple[str, Path]],
    *,
    val_fraction: float,
    test_fraction: float,
    hash_all: bool = False,
    is_user: bool = False,
    declared: Mapping[str, Callable[[], Trajectories]] | None = None,
    checks: Mapping[str, Callable[[Trajectories], Iterable[Finding]]] | None = None,
) -> Iterator[tuple[Path, list[Finding]]]:
    """Findings for each of the files (task, path). A file that cannot be read gives one error.

    val_fraction, test_fraction: of the split that leakage is tested with. hash_all: also compute the MD5 of
    large files. is_user: the files are the user's, whatever their names, so they are not compared with
    published ones. declared: task -> function that opens the files which the user declares. checks: task ->
    further checks of the whole task, given its first file, with which their findings come.
    """
    starts: dict[tuple[str, bytes], Start] = {}
    # per task and number of frames: digests and splits of each file
    frames: dict[tuple[str, int], list[tuple[np.ndarray, list[str]]]] = {}
    checks = dict(checks or {})
    for task, path in files:
        try:
            is_declared = task in (declared or {})
            data = declared[task]() if is_declared else open_data(path, task)
            scan = scan_file(data)
        except (ValueError, OSError) as error:
            yield path, [Finding("error", str(error).rstrip("."))]
            continue
        found = [Finding("info", note, "nothing") for note in data.notes]
        try:
            split = _split_of_rows(data, task, is_declared, val_fraction, test_fraction)
        except ValueError as error:
            split = ["train"] * data.num_trajectories
            found.append(Finding("error", str(error).rstrip(".")))
        # without the findings that say the same of the whole task
        found += [
            one for one in checks.pop(task, lambda _: ())(data) if one.what not in {f.what for f in found}
        ]
        if is_user:
            found += check_domain(data)
        elif not is_declared:
            found += check_edition(data, hash_all)
        first = [starts.setdefault((task, key), (path, i, split[i])) for i, key in enumerate(scan.initial)]
        leaks = [i for i, (_, _, other) in enumerate(first) if other != split[i]]
        found += [*check_facts(data, scan), *check_rows(scan, leaks, first, task, is_declared)]
        of_task = frames.setdefault((task, data.num_frames), [])  # trajectories are numbered on
        of_task.append((np.concatenate(scan.frames), split))
        digests, splits = zip(*of_task, strict=True)
        shared = "" if leaks else shared_frames(np.concatenate(digests), [*chain(*splits)])
        if shared:
            found.append(Finding("error", f"{shared}, so test results are too good", REMEDY))
        found += suspects(data, scan.extremes)
        found += [Finding("info", what, "nothing") for what in mask_words(data.mask, data.task.channels)]
        if not scan.not_finite:
            found += [*check_rounding(data, scan), *check_noise(data, scan)]
        yield path, found


def examine_configured(
    config: Config, paths: Sequence[tuple[str, Path]], declared: Mapping[str, Any], hash_all: bool = False
) -> Iterator[tuple[Path, list[Finding]]]:
    """The findings for the files (task, path) of a configuration. declared: see `examine`."""
    names = {
        name: [task for task in config.data.tasks if name in (task, config.spec(task).files_of)]
        for name, _ in paths
    }
    yield from examine(
        paths,
        hash_all=hash_all,
        val_fraction=config.data.val_fraction,
        test_fraction=config.data.test_fraction,
        is_user=config.data.source == "user",
        declared=declared,
        checks={name: partial(count_findings, config, tasks) for name, tasks in names.items()},
    )


def report(path: Path, findings: list[Finding]) -> str:
    """The findings for one file as text: a verdict in the first line, then the worst finding first."""
    findings = sorted(findings, key=lambda finding: list(VERDICTS).index(finding.severity))
    verdict = VERDICTS[findings[0].severity if findings else "info"]
    lines = [f"{path}: {verdict if path.exists() else 'missing'}"]
    return "\n".join([*lines, *(f"  {finding.severity:<7} {finding}" for finding in findings)])


def _split_of_rows(data: Trajectories, task: str, is_declared: bool, *fractions: float) -> list[str]:
    """The split of every trajectory."""
    num = data.num_trajectories
    rows_of = data.split(*fractions) if is_declared else split_indices(task, num, *fractions)
    split = ["train"] * num
    for name, rows in rows_of.items():
        for row in rows.tolist():
            split[row] = name
    return split


def scan_file(data: Trajectories) -> Scan:
    """Read all trajectories once."""
    task = data.task
    scan = Scan(Extremes(task.channels, task.offsets))
    step = max(1, SCAN_BYTES // (4 * data.num_frames * len(task.channels) * math.prod(data.space)))
    for first in range(0, data.num_trajectories, step):
        block = data.read(first, min(first + step, data.num_trajectories))
        scan.frames.append(frame_digests(block, task))
        for i, u in enumerate(block, first):
            _digest(scan, data, i, u)
            wrong = is_wrong(u[None], data.mask)[0]
            if wrong.any():
                frame, channel, *cell = (int(k) for k in np.argwhere(wrong)[0])
                where, place = data.place(i, frame)
                place = f"{place}, {task.channels[channel]}, cell {tuple(cell)}"
                scan.first_bad = scan.first_bad or place + f" of {where}" * (where != data.path)
                scan.not_finite.append(i)
                continue
            scan.extremes.add(u)
            with_gaps = np.moveaxis(u, 1, 0).reshape(len(task.channels), -1)  # NaN in the cells of a mask
            u = settled(u.reshape(*u.shape[:2], -1)).reshape(u.shape)
            flat = np.moveaxis(u, 1, 0).reshape(len(task.channels), -1)
            scan.lowest = np.minimum(scan.lowest, flat.min(1))
            if (flat.max(1) == flat.min(1)).all():
                scan.constant.append(i)
            elif problem := unwritten(data, frame_sizes(task, u)):
                scan.unwritten.append((i, problem))
            elif data.num_frames > 1:
                average = np.mean if data.mask is None else np.nanmean
                mean = average(with_gaps.reshape(len(flat), data.num_frames, -1), -1, dtype=np.float64)
                rms = np.sqrt(average(np.square(with_gaps, dtype=np.float64), 1))
                scan.mean_changes.append(np.ptp(mean, axis=1) / np.maximum(rms, np.finfo(np.float32).tiny))
    if not scan.not_finite:
        scan.sample = data.sample(NUM_SAMPLED)
    return scan


def _digest(scan: Scan, data: Trajectories, i: int, u: np.ndarray) -> None:
    """Add the digests of trajectory i, u (time, channel, *space)."""
    task = data.task
    start = u[0, : len(task.inputs)] if task.is_steady else u[0]
    # coefficients of one value everywhere are few and may be equal by chance: the key makes each unique
    is_flat = task.is_steady and start.min() == start.max()
    key = f"{i} {data.path.name}".encode()[:64] if is_flat else b""
    if is_flat:
        scan.flat.append(i)
    digest = partial(hashlib.blake2b, digest_size=16, key=key)
    scan.initial.append(digest(np.ascontiguousarray(start)).digest())
    scan.whole.append(digest(u).digest())


def check_rows(
    scan: Scan, leaks: Sequence[int], first: Sequence[tuple[Path, int, str]], task: str, is_declared: bool
) -> Iterator[Finding]:
    """Faults of single trajectories.

    leaks: trajectories that start as one in another split; first: file, number and split of the first
    trajectory with the same start, for each; is_declared: the user declares the files.
    """
    again = "repair the numbers, or leave them out" if is_declared else "generate or download the file again"
    skip = f" (float32 ends at 3e38; task.{task}.skip_missing: true leaves out such frames)" * is_declared
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


def check_rounding(data: Trajectories, scan: Scan) -> Iterator[Finding]:
    """Fields whose variation is largely rounding: of the stored numbers or, for a field without an offset
    (`Task.offsets`), of float32 in training."""
    task, u = data.task, scan.sample
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


def check_noise(data: Trajectories, scan: Scan) -> Iterator[Finding]:
    """White noise of measurement in the predicted fields, relative to their standard deviation."""
    found = noise_of(data, np.arange(data.num_trajectories))
    if not found:
        return
    for name, sigma in found.items():
        fraction = sigma / scan.sample[:, :, data.task.channels.index(name)].std(dtype=np.float64)
        yield Finding(
            "info" if fraction < QUIET_NOISE else "caution",
            f"noise: {100 * fraction:.2g} % of {name} (white, standard deviation {sigma:.3g})",
            "nothing: equations are fitted to allow for it, and the report states errors without it too",
        )
