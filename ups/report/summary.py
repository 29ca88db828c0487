"""The summary of the report, from the results alone: a paragraph, and the table of what was compared.

Everything looks good beside the trivial forecast. So the table compares the operator with its own base (what
does the network add?) and with the best network of another kind trained on the same data. A difference counts
only if its paired interval excludes zero.
"""

from collections.abc import Iterable

from ups.common.text import number
from ups.evaluation.gates import error_of, horizon_of, network_gain, not_passed, trivial_of
from ups.evaluation.selected import Selection, numbers_in_words, outcome
from ups.report.bench_rows import NETWORKS
from ups.report.tables import label, render
from ups.results import Entry, Interval, Results

ON_THE_BASE = {
    "less": "The network reduces the error of its base by {}.",
    "tie": "Operator and base alone tie on {}.",
    # switched off, by `outcome` of the selection
    "off, base": "The network is not used where validation was better without it: {}.",
    "off, tie": "The network is not used where validation found no clear difference: {}.",
    "off, broken": "The network is not used where its validation error was not finite: {}.",
    "off, unknown": "The network is not used on {}.",
    "more": "The base alone is better on {}.",
    "unknown": "The gain of the network is unknown on {}.",
}
# a conserved mean is reported as lost if it moves by this fraction of its RMS
LOST = 1e-4


def _error(task: Entry, model: str | None) -> Interval:
    """The error by which the task is judged; {"value": None} if the model is missing."""
    return task.value(model, error_of(task)) or {"value": None}


def best_other(task: Entry) -> str | None:
    """The FNO or U-Net with the lower error; None if none was trained on these data."""
    errors = {name: _error(task, name)["value"] for name in NETWORKS}
    known = [name for name, error in errors.items() if error is not None]
    return min(known, key=errors.get, default=None)


def paragraph(results: Results) -> str:
    """The summary in words."""
    tasks, split = results.tasks, results.facts["protocol"].get("split", "")
    total = sum(task.number("", "num_trajectories") for task in tasks.values())
    sentences = [
        f"The operator was scored on {total:,} {split} trajectories of "
        f"{len(tasks)} task{'s' * (len(tasks) != 1)}.",
        *_on_the_gates(results.facts["gates"]),
        *_on_the_base(tasks),
        *_on_other_networks(tasks),
        *_on_the_largest_error(tasks),
    ]
    return " ".join(sentences)


def _on_the_gates(gates: list[dict]) -> list[str]:
    failed, undecided = ([gate["name"] for gate in some] for some in not_passed(gates))
    num = len(gates)
    if failed:
        out = [f"{len(failed)} of {num} gates fail: {', '.join(failed)}."]
    elif undecided:
        out = [f"{num - len(undecided)} of {num} gates pass and none fails."]
    else:
        out = [f"All {num} gates pass."]
    return out + [f"Undecided: {', '.join(undecided)}."] * bool(undecided)


def _listed(texts: Iterable[str]) -> str:
    *some, last = texts
    return f"{', '.join(some)} and {last}" if some else last


def _by_kind(named: Iterable[tuple[str, str]], words: dict[str, str]) -> list[str]:
    """A sentence for each kind that occurs in `named`, pairs (kind, name)."""
    of_kind = {kind: [name for one, name in named if one == kind] for kind in words}
    return [words[kind].format(_listed(names)) for kind, names in of_kind.items() if names]


def _on_the_base(tasks: dict[str, Entry]) -> list[str]:
    shares = {name: network_gain(task) for name, task in tasks.items()}
    out = _by_kind(
        [
            _on_one_base(name, kind, share, tasks[name].facts.get("selection"))
            for name, (kind, share) in shares.items()
        ],
        ON_THE_BASE,
    )
    for name, task in tasks.items():
        found = task.value("operator", "conservation_error")
        if found and found["low"] is not None and found["low"] > LOST:
            data = task.number("codec_floor", "conservation_error")
            out.append(
                f"On {name} the equation conserves the mean of {_listed(task.facts['conserved'])}; the "
                f"operator changes it by {number(found['value'])} of its RMS, the data by {number(data)}."
            )
    return out


def _on_one_base(name: str, kind: str, share: list[float], selection: Selection | None) -> tuple[str, str]:
    """(kind of ON_THE_BASE, the task with its numbers)."""
    if kind == "less":
        return kind, f"{number(share[0])} % on {name}"
    if kind != "off":
        return kind, name
    return f"off, {outcome(selection)}", f"{name} ({numbers_in_words(selection)})" if selection else name


def _beside(task: Entry) -> str:
    """lower | higher | level | unknown: the operator's error compared with the better of FNO and U-Net."""
    ours, theirs = (_error(task, model) for model in ("operator", best_other(task)))
    if None in (*ours.values(), *theirs.values()):
        return "unknown"
    return "lower" if ours["high"] < theirs["low"] else "higher" if theirs["high"] < ours["low"] else "level"


def _on_other_networks(tasks: dict[str, Entry]) -> list[str]:
    kinds = {name: _beside(task) for name, task in tasks.items()}
    parts = _by_kind(
        [(kind, f"{name} ({label(best_other(tasks[name]))})") for name, kind in kinds.items()],
        {"lower": "lower on {}", "higher": "higher on {}", "level": "the same within the intervals on {}"},
    )
    out = [f"Compared with the better of FNO and U-Net its error is {'; '.join(parts)}."] * bool(parts)
    unknown = [name for name, kind in kinds.items() if kind == "unknown"]
    if unknown:
        out.append(f"No FNO or U-Net was trained on {_listed(unknown)} (make bench).")
    return out


def _on_the_largest_error(tasks: dict[str, Entry]) -> list[str]:
    rows = {name: _error(task, "operator") for name, task in tasks.items()}
    broken = [name for name, row in rows.items() if row["value"] is None]
    out = [f"On {_listed(broken)} the prediction is not finite or the error undefined."] if broken else []
    name = max(rows.keys() - broken, key=lambda name: rows[name]["value"], default=None)
    if name:
        error, low, high = (number(rows[name][end]) for end in ("value", "low", "high"))
        horizon = horizon_of(tasks[name].facts)
        out.append(f"The largest error is on {name}: nRMSE {error} ({low} to {high}){horizon}.")
    return out


def overview(results: Results) -> str:
    """HTML of the first table of the page, one row per task."""
    rows = {}
    for name, task in results.tasks.items():
        kind, shares = network_gain(task)
        rows[name] = {
            "task": task,
            "horizon": horizon_of(task.facts),
            "error": error_of(task),
            "trivial": trivial_of(task),
            "kind": kind,
            "shares": shares,
            "other": best_other(task),
        }
    return render("overview.html", rows=rows, run=results.facts["run"])
