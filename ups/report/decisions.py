"""What validation decided in the stages of a run, as a table of the report."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from markupsafe import Markup

from ups.common.files import DamagedError
from ups.common.place import make_target
from ups.generative.validation import validated_samplers
from ups.report.tables import Row, render
from ups.select import Decision, select_sampler
from ups.training.artifact import read_stage

HEAD = ("question", "chosen", "its score", "others", "rule", "trajectories")
NUM_OTHERS = 4  # in a row of the table


def decisions_of(folders: Mapping[str, Path], run: Path, tasks: Iterable[str]) -> list[Decision]:
    """The decisions of finished stages (stage -> folder), as their config.json has them, and those on the
    samplers of `tasks` in a run. Stages of older versions have none."""
    found = []
    for stage, folder in folders.items():
        records = read_stage(folder, stage).description.get("decisions", [])
        try:
            found += map(Decision.read, records)
        except (TypeError, ValueError) as error:
            raise DamagedError(
                f"{folder}/config.json has no readable decisions ({error!s:.100}); expected those that this "
                f"version writes. Take another copy of the stage, or run {make_target(stage)} again."
            ) from error
    samplers = {name: validated_samplers(run, name) for name in tasks}
    return found + [select_sampler(name, scores) for name, scores in samplers.items() if scores]


def decisions_section(decisions: Sequence[Decision]) -> Markup:
    """The questions, what was chosen over what, and the rules."""
    rows = [
        Row(
            one.question,
            [
                one.chosen,
                dict(zip(("value", "low", "high"), one.candidates[one.chosen], strict=True)),
                "; ".join(map(one.words, one.others[:NUM_OTHERS])),
                one.rule,
                one.rows,
            ],
        )
        for one in decisions
    ]
    return render("decisions.html", head=HEAD, rows=rows)
