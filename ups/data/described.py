"""The doctor on the files of a configuration, and on a section that --describe is about to print."""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ups.common.place import ROOT
from ups.config.load import load_config
from ups.config.schema import Config
from ups.data.counts import count_findings
from ups.data.doctor import examine
from ups.data.sources import open_user
from ups.tasks import Finding
from ups.userdata.describe import describe_file
from ups.userdata.describe_lines import Line, written

SCANNED = 2**22  # numbers, which the doctor reads in a second


def examine_configured(
    config: Config, paths: Sequence[tuple[str, Path]], declared: Mapping[str, Any], hash_all: bool = False
) -> Iterator[tuple[Path, list[Finding]]]:
    """The doctor's findings for the files (task, path) of a configuration. declared: see `examine`."""
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


def describe_and_examine(path: str) -> str:
    """The section of `describe_file`, which the loader reads; below it, as comments, what the doctor refuses
    in data of moderate size. Raises ValueError or FileNotFoundError."""
    text = describe_file(path)
    if not (ROOT / "configs").is_dir():  # installed without a clone: nothing here loads a section or trains
        return text
    with TemporaryDirectory() as folder:
        own = Path(folder) / "my_data.yaml"
        own.write_text(text, encoding="utf-8")
        config = load_config(own)
    [name] = config.data.tasks
    data = open_user(config, name)
    if data.num_trajectories * data.num_frames * len(data.task.channels) * math.prod(data.space) > SCANNED:
        return text
    [(_, findings)] = examine_configured(config, [(name, Path(path))], {name: lambda: data})
    refused = [finding for finding in findings if finding.severity in ("error", "warning")]
    notes = [
        Line(note=f"the doctor refuses this: {one.what}. To do: {one.do or 'see docs/own_data.md'}?")
        for one in refused
    ]
    return "\n".join([text, *[written(notes)] * bool(notes)])
