"""The data doctor: what is wrong with a data file, and what to do about it.

Reads a file once, in pieces. Looks for what has gone wrong with PDEBench data: withdrawn editions, fields
without dynamics, initial conditions that appear in training and in test, NaN, damaged or foreign layouts.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import yaml

from ups.common.boundary import PERIODIC, along
from ups.common.files import parts_of
from ups.data.download import edition, md5_of
from ups.data.leakage import REMEDY, Shared, frame_digests, shared_frames
from ups.data.pdebench import SETTINGS, Trajectories, open_data, split_indices
from ups.data.written import SHARE, Written
from ups.tasks import Finding
from ups.userdata.data_checks import Extremes, affordable, resolved, suspects
from ups.userdata.masks import is_wrong, mask_words, settled
from ups.userdata.reader import UserTrajectories

BLOCK_BYTES = 32 * 2**20
LOOKED_AT = 8  # trajectories, spread over the file, of checks that cost more than reading
DRIFT = 1e-2  # of a conserved mean, over the field's RMS; ours keep it to 1e-6
# in a row, of the second difference, each above ROUGH of the range: no resolved field does it
ALTERNATIONS = 3
ROUGH = 0.02
WALL_WINDOWS = 4  # how many windows of them, which begin a cell apart, are at a wall
RARE = 1e-3  # of the windows, which may alternate by chance
# a frame is unchanged if no cell moves by this share of the largest value: published ReacDiff files
FROZEN_CHANGE = 1e-5
FROZEN_SHARE = 0.5  # stay equal to 4 digits for 90 % of their frames (PDEBench issue 94)
MD5_BYTES = 10**9  # larger files are hashed on request only
ROUNDED = 0.01  # share of a field's variation that may be rounding
SHOWN = 5  # indices listed per finding


def examine(
    files: Iterable[tuple[str, Path]],
    *,
    val_fraction: float,
    test_fraction: float,
    hash_all: bool = False,
    is_own: bool = False,
    declared: Mapping[str, Callable[[], UserTrajectories]] | None = None,
    checks: Mapping[str, Callable[[], Iterable[Finding]]] | None = None,
) -> Iterator[tuple[Path, list[Finding]]]:
    """What is to be said about each of the files (task, path). A file that cannot be read gives one error;
    nothing is raised for its sake.

    val_fraction, test_fraction: of the split that leakage is judged by. hash_all: compute the MD5 of large
    files too. is_own: the user's files, whatever their names: not compared with the published ones. declared:
    how the files of tasks that the user declares are opened. checks: further ones of a task as a whole, whose
    findings are given with its first file.
    """
    seen: dict[tuple[str, bytes], tuple[Path, int, str]] = {}
    earlier: dict[str, list[tuple[np.ndarray, list[str]]]] = {}  # frames of the task's files, parts
    checks = dict(checks or {})
    for task, path in files:
        try:
            is_declared = task in (declared or {})
            data = declared[task]() if is_declared else open_data(path, task)
            scan = _scan(data)
        except (ValueError, OSError) as error:
            yield path, [Finding("error", str(error).rstrip("."), str(path), "")]
            continue
        split = dict.fromkeys(range(data.num_trajectories), "train")  # where there are too few to split
        found = [Finding("info", note, str(path), "nothing") for note in data.notes]
        try:
            shares = (val_fraction, test_fraction)
            parts = data.split(*shares) if is_declared else split_indices(task, len(split), *shares)
            split = {int(i): name for name, rows in parts.items() for i in rows}
        except ValueError as error:
            found.append(Finding("error", str(error).rstrip("."), str(path), ""))
        # the same text where the split of the whole task is refused for the same reason
        found += [one for one in checks.pop(task, tuple)() if one.what not in {f.what for f in found}]
        again = (
            "repair the numbers, or leave them out" if is_declared else "generate or download the file again"
        )
        skip = f" (task.{task}.skip_missing: true leaves out such frames)" * is_declared
        found += _of_domain(data) if is_own else [] if is_declared else _edition(data, hash_all)
        first = [
            seen.setdefault((task, digest), (path, i, split[i])) for i, digest in enumerate(scan.initial)
        ]
        leaks = [i for i, (_, _, part) in enumerate(first) if part != split[i]]
        found += [*_of_data(data, scan), *_of_rows(scan, leaks, first, again, skip)]
        frames = earlier.setdefault(task, [])
        frames.append((np.concatenate(scan.frames), [split[i] for i in range(len(split))]))
        if not leaks and (shared := _shared(frames)):
            found.append(Finding("error", f"{shared}, so test results are too good", str(path), REMEDY))
        if not any(finding.severity == "error" for finding in found):
            found += _wall_noise(data)
        found += suspects(data, scan.extremes)
        found += [
            Finding("info", what, str(path), "nothing") for what in mask_words(data.mask, data.task.channels)
        ]
        if not scan.not_finite:
            found += _rounding(data)
        shared = [other.name for other, _, _ in first if other != path]
        if shared and not leaks:
            found.append(
                Finding(
                    "info",
                    f"{len(shared)} initial conditions are those of {shared[0]} too",
                    f"{path}",
                    "nothing: the split is by index, so they are in the same split of both files",
                )
            )
        yield path, found


def report(path: Path, findings: list[Finding]) -> str:
    """The findings on one file as text, the worst first, with a verdict in the first line."""
    verdicts = {
        "error": "ill: do not train on it",
        "warning": "doubtful: read the warnings",
        "caution": "sound within limits: read the cautions",
        "info": "sound",
    }
    findings = sorted(findings, key=lambda finding: list(verdicts).index(finding.severity))
    verdict = verdicts[findings[0].severity if findings else "info"]
    lines = [f"{path}: {verdict if all(part.exists() for part in parts_of(path)) else 'missing'}"]
    for finding in findings:
        where = f" [{finding.where}]" if finding.where != str(path) else ""
        lines.append(
            f"  {finding.severity:<7} {finding.what}{where}."
            + (f" To do: {finding.do}." if finding.do else "")
        )
    return "\n".join(lines)


def _shared(files: list[tuple[np.ndarray, list[str]]]) -> Shared | None:
    """What parts of the split share in the files of a task that have as many frames as the last one; numbers
    of trajectories count on from file to file."""
    alike = [(digests, parts) for digests, parts in files if digests.shape[1] == files[-1][0].shape[1]]
    return shared_frames(
        np.concatenate([digests for digests, _ in alike]), [part for _, parts in alike for part in parts]
    )


@dataclass
class _Scan:
    frames: list[np.ndarray] = field(default_factory=list)  # digests
    initial: list[bytes] = field(default_factory=list)
    whole: list[bytes] = field(default_factory=list)
    not_finite: list[int] = field(default_factory=list)
    constant: list[int] = field(default_factory=list)
    unwritten: list[tuple[int, str]] = field(default_factory=list)
    flat: list[int] = field(default_factory=list)  # of a coefficient
    first_bad: str = ""
    frozen_share: float = 0.0
    # of every trajectory, how far the mean of each channel moves, over its RMS
    drift: list[np.ndarray] = field(default_factory=list)
    lowest: np.ndarray | float = math.inf  # value of each channel
    extremes: Extremes | None = None
    low: np.ndarray | float = math.inf  # of each cell of the predicted fields, over all frames
    high: np.ndarray | float = -math.inf


def _scan(data: Trajectories) -> _Scan:
    """One pass over the file; a block is as many trajectories as BLOCK_BYTES holds, at least one."""
    task = data.task
    scan, frozen, writing = _Scan(extremes=Extremes(task.channels, task.offsets)), 0.0, Written(task, data)
    step = max(1, BLOCK_BYTES // (4 * data.num_frames * len(task.channels) * math.prod(data.space)))
    for first in range(0, data.num_trajectories, step):
        block = data.read(first, min(first + step, data.num_trajectories))
        scan.frames.append(frame_digests(block, task))
        for i, u in enumerate(block, first):
            start = u[0, : len(task.inputs)] if task.is_steady else u[0]
            # coefficients of one value everywhere are few, and alike by chance: each counts as its own
            is_flat = task.is_steady and start.min() == start.max()
            own = f"{i} {data.path.name}".encode()[:64] if is_flat else b""
            scan.flat += [i] if is_flat else []
            digest = partial(hashlib.blake2b, digest_size=16, key=own)
            scan.initial.append(digest(np.ascontiguousarray(start)).digest())
            scan.whole.append(digest(u).digest())
            wrong = is_wrong(u[None], data.mask)[0]
            if wrong.any():
                frame, channel, *cell = (int(k) for k in np.argwhere(wrong)[0])
                where, place = data.place(i, frame)
                place = f"{place}, {task.channels[channel]}, cell {tuple(cell)}"
                scan.first_bad = scan.first_bad or place + f" of {where}" * (where != data.path)
                scan.not_finite.append(i)
                continue
            scan.extremes.add(u)
            known = np.moveaxis(u, 1, 0).reshape(len(task.channels), -1)
            u = settled(u.reshape(*u.shape[:2], -1)).reshape(u.shape)
            flat = np.moveaxis(u, 1, 0).reshape(len(task.channels), -1)
            scan.lowest = np.minimum(scan.lowest, flat.min(1))
            moving = u[:, len(task.inputs) :][:, : len(task.moving)]
            scan.low, scan.high = np.minimum(scan.low, moving.min(0)), np.maximum(scan.high, moving.max(0))
            if (flat.max(1) == flat.min(1)).all():
                scan.constant.append(i)
            elif problem := writing.add(i, u):
                scan.unwritten.append((i, problem))
            elif data.num_frames > 1:
                states = u[:, : len(task.inputs + task.fields)]  # forcing goes on where they stand still
                change = np.abs(np.diff(states, axis=0)).reshape(data.num_frames - 1, -1).max(1)
                frozen += float((change <= FROZEN_CHANGE * np.abs(states).max()).mean())
                average = np.mean if data.mask is None else np.nanmean
                mean = average(known.reshape(len(flat), data.num_frames, -1), -1, dtype=np.float64)
                rms = np.sqrt(average(np.square(known, dtype=np.float64), 1))
                scan.drift.append(np.ptp(mean, axis=1) / np.maximum(rms, np.finfo(np.float32).tiny))
    scan.unwritten += [start] if (start := writing.unstarted()) else []
    scan.frozen_share = frozen / data.num_trajectories
    return scan


def _of_rows(
    scan: _Scan, leaks: list[int], first: list[tuple[Path, int, str]], again: str, skip: str
) -> Iterator[Finding]:
    """What is wrong with single trajectories. leaks: those that start as one of another split; first: file,
    number and split of the first trajectory that starts as each does; again: what to do about numbers that
    are none; skip: and, but for those that were never written, which key leaves them out."""
    known: dict[bytes, int] = {}
    earlier = [known.setdefault(digest, i) for i, digest in enumerate(scan.whole)]
    copies = [(i, j) for i, j in enumerate(earlier) if i != j]
    leak = [f"{i} as {first[i][1]} of {first[i][0].name}" for i in leaks[:1]]
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
            "trajectories were never written, or not wholly "
            f"(first: {''.join(what for _, what in scan.unwritten[:1])})",
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
            where = f"trajectories {', '.join(map(str, rows[:SHOWN]))}{', ..' * (len(rows) > SHOWN)}"
            yield Finding(severity, f"{len(rows)} {what}", where, do)


def _of_data(data: Trajectories, scan: _Scan) -> Iterator[Finding]:
    """What the file's name and its numbers as a whole say: parameter, conserved mean, rest, the task's own
    checks."""
    task, where, named = data.task, str(data.path), data.task.parameter_in(data.path.name)
    if named is not None and not np.isclose(named, data.parameter, rtol=1e-4, atol=0):
        yield Finding(
            "error",
            f"the file name says {task.parameters[0]} = {named}, its attribute {data.parameter}",
            where,
            "find out which is true and mend the other",
        )
    for name, value in _stated(data).items():
        wanted = dict(task.constants).get(name)
        if wanted is not None and not np.isclose(value, wanted, rtol=1e-4, atol=0):
            yield Finding(
                "error",
                f"the file says {name} = {value:g}, and {task.name} has {wanted:g}",
                where,
                "name the right task in data.tasks, or mend what is wrong in the file",
            )
    median = float(np.median(np.max(scan.drift, 1))) if scan.drift else 0.0
    if task.user_facts is None and task.conserved == task.fields and median > DRIFT:
        yield Finding(
            "error",
            f"the mean of a trajectory moves by {median:.2g} of its RMS, and {task.name} "
            "conserves it: this is another equation, such as reacdiff1d, or an open "
            "boundary",
            where,
            "name the right task in data.tasks",
        )
    if scan.frozen_share > FROZEN_SHARE:
        yield Finding(
            "info",
            f"{scan.frozen_share:.0%} of the frames equal the one before",
            where,
            "nothing if the field has come to rest; persistence will look good, so compare with it",
        )
    # cells at the ends of an axis may be on walls
    inside = (slice(None), *[slice(1, -1) if size > 2 else slice(None) for size in data.space])
    still = np.equal(scan.low, scan.high)
    for name, cells in zip(task.moving, still[inside] if still.ndim else (), strict=bool(still.ndim)):
        if SHARE < (share := cells.mean()) < 1:
            yield Finding(
                "info",
                f"{share:.0%} of the cells of {name} hold one number in every frame of every trajectory",
                where,
                "nothing if these are walls, solids or land; else they were never written",
            )
    for check in (
        () if scan.not_finite else (*task.checks, *[resolved, affordable] * (task.user_facts is not None))
    ):
        yield from check(data, scan)


def _of_domain(data: Trajectories) -> Iterator[Finding]:
    """Whether coordinates, of cells or of nodes on both ends, span what the task's domain does: its bases
    know no other."""
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
                str(data.path),
                "declare the file in a section of its own "
                "(python prepare_data.py --describe), which takes its domain",
            )


def _stated(data: Trajectories) -> dict[str, float]:
    """The numbers that a file says it was made with: its attributes, and its generator's `config`."""
    try:
        config = yaml.safe_load(data.attributes.get("config", ""))
    except yaml.YAMLError:
        config = None
    section = config.get("sim", config) if isinstance(config, dict) else {}
    said = (section if isinstance(section, dict) else {}) | data.attributes
    return {
        name: float(value)
        for name, value in said.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def _edition(data: Trajectories, hash_all: bool) -> Iterator[Finding]:
    """Whether a file with a published name is the published file (by MD5)."""
    name, where, published = data.path.name, str(data.path), data.task.published
    if SETTINGS in data.attributes or name not in published:
        return
    md5 = md5_of(data.path) if hash_all or data.path.stat().st_size <= MD5_BYTES else None
    if md5 is None:
        yield Finding(
            "info",
            "the MD5 was not compared with the published one",
            where,
            "add --md5 to do so (reads the file again)",
        )
    elif md5 == published[name][1]:
        yield Finding("info", "the MD5 is the published one", where, "nothing")
    else:
        what, old = f"the MD5 {md5} is not the published {published[name][1]}", edition(name, md5)
        yield (
            Finding("error", f"{what}. {old.rstrip('. ')}", where, "delete it and run `make data` again")
            if old
            else Finding("warning", what, where, "make sure you know where it comes from")
        )


def _rounding(data: Trajectories) -> Iterator[Finding]:
    """How much of a field's variation is rounding of the numbers that the file holds, or, where its mean is
    not subtracted before (`Task.offsets`), of those that are trained on."""
    task, (_, u) = data.task, data.stratified_rows(LOOKED_AT)
    for channel, name in enumerate(task.channels):
        values, offset = u[:, :, channel].astype(np.float64), task.offsets.get(name, 0.0)
        mean, std = offset + values.mean(), values.std()
        step = max(data.precision(name), np.finfo(np.float32).eps * (not offset))
        share = step * abs(mean) / math.sqrt(12) / max(std, np.finfo(np.float64).tiny)
        if ROUNDED < share < 1:  # more: a constant
            kept = "the files hold it" if data.precision(name) > 1e-12 else "it is trained on"
            do = (
                f"write the files in float64, or without the mean of {name}"
                if data.precision(name) > 1e-12
                else f"leave {name} out of task.{task.name}.positive and vector, or write the files "
                "without its mean"
            )
            yield Finding(
                "error" if share > 10 * ROUNDED else "warning",
                f"{share:.0%} of the variation of {name} is rounding: its mean {mean:.6g} is "
                f"{abs(mean) / std:.2g} times its variation, and {kept} in float32",
                str(data.path),
                do,
            )


def _wall_noise(data: Trajectories) -> Iterator[Finding]:
    """Whether the second half of some trajectories alternates from cell to cell next to a wall, and not
    elsewhere."""
    ends = along(data.task.boundary, data.task.ndim)
    if {*ends} == {PERIODIC} or data.task.is_steady or min(data.space) < 4 * WALL_WINDOWS:
        return
    _, u = data.stratified_rows(LOOKED_AT)
    u = u[:, data.num_frames // 2 :, : len(data.task.fields)].astype(np.float64)
    limit = ROUGH * np.ptp(u, axis=tuple(range(3, u.ndim)), keepdims=True)
    wall, inside = [], []  # shares of windows that alternate
    for axis in (axis for axis, end in enumerate(ends, 3) if end != PERIODIC):
        bend = np.diff(np.moveaxis(u, axis, -1), 2)
        large = np.abs(bend) > np.moveaxis(limit, axis, -1)
        turns = (bend[..., 1:] * bend[..., :-1] < 0) & large[..., 1:] & large[..., :-1]
        runs = np.lib.stride_tricks.sliding_window_view(turns, ALTERNATIONS, -1).all(-1)
        wall += [runs[..., :WALL_WINDOWS].mean(), runs[..., -WALL_WINDOWS:].mean()]
        inside += [runs[..., WALL_WINDOWS:-WALL_WINDOWS].mean()]
    if max(wall) > max(10 * max(inside), RARE):
        yield Finding(
            "warning",
            f"the field alternates from cell to cell at a wall ({max(wall):.1%} of the "
            f"places looked at there, {max(inside):.1%} elsewhere): noise of the grid, "
            "not of the equation",
            str(data.path),
            "look at the boundary condition and the time step of the solver that made it",
        )
