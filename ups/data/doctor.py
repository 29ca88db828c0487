"""The data doctor: what is wrong with a data file, and what to do about it.

It reads a file once, in blocks, and looks for the known faults of PDEBench data: withdrawn editions, fields
without dynamics, initial conditions that occur in training and in test, NaN, damaged or foreign layouts.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ups.config.schema import Config
from ups.data.counts import count_findings
from ups.data.doctor_checks import (
    check_domain,
    check_edition,
    check_facts,
    check_noise,
    check_rounding,
    check_rows,
)
from ups.data.doctor_scan import scan_file
from ups.data.leakage import REMEDY, Shared, shared_frames
from ups.data.pdebench import open_data, split_indices
from ups.tasks import Finding
from ups.userdata.data_checks import suspects
from ups.userdata.masks import mask_words
from ups.userdata.trajectories import Trajectories

VERDICTS = {  # by the worst finding
    "error": "failed: do not train on it",
    "warning": "read the warnings before you train on it",
    "caution": "OK within limits: read the cautions",
    "info": "OK",
}
Start = tuple[Path, int, str]  # file, number and split of the first trajectory with an initial condition


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
    frames: dict[str, list[tuple[np.ndarray, list[str]]]] = {}  # per task: digests and splits of each file
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
        frames.setdefault(task, []).append((np.concatenate(scan.frames), split))
        if not leaks and (shared := _shared_frames(frames[task])):
            found.append(Finding("error", f"{shared}, so test results are too good", REMEDY))
        found += suspects(data, scan.extremes)
        found += [Finding("info", what, "nothing") for what in mask_words(data.mask, data.task.channels)]
        if not scan.not_finite:
            found += [*check_rounding(data), *check_noise(data)]
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
    for finding in findings:
        where = f" [{finding.where}]" if finding.where else ""
        advice = f" To do: {finding.do}." if finding.do else ""
        lines.append(f"  {finding.severity:<7} {finding.what}{where}.{advice}")
    return "\n".join(lines)


def _split_of_rows(data: Trajectories, task: str, is_declared: bool, *fractions: float) -> list[str]:
    """The split of every trajectory."""
    num = data.num_trajectories
    rows_of = data.split(*fractions) if is_declared else split_indices(task, num, *fractions)
    split = ["train"] * num
    for name, rows in rows_of.items():
        for row in rows.tolist():
            split[row] = name
    return split


def _shared_frames(files: list[tuple[np.ndarray, list[str]]]) -> Shared | None:
    """Frames that two splits share, among the files of a task with as many frames as the last one;
    trajectories are numbered on from file to file."""
    alike = [(digests, split) for digests, split in files if digests.shape[1] == files[-1][0].shape[1]]
    return shared_frames(
        np.concatenate([digests for digests, _ in alike]), [name for _, split in alike for name in split]
    )
