"""What the report says first, from results.json alone: a verdict per task, a paragraph, and the table of what
was compared.

Against the trivial forecast everything looks good. So the first table sets the operator beside its own base
(what is the network worth?) and beside the best network of another kind that was trained on the same data,
and counts a difference only where the paired interval is apart from none.
"""

import html
from collections.abc import Iterable
from typing import Any

from ups.common.formatting import number
from ups.evaluation.gates import network_share, trivial_of
from ups.evaluation.selected import Selection, numbers_in_words, outcome
from ups.report.bench_rows import NETWORKS
from ups.report.tables import cell, label, table

SHARE = {
    "less": "<b>{} %</b>",
    "tie": "tie",
    "more": "<b>{} %</b> the base is better",
    "off": "the network is not used",
    "unknown": "no interval",
}
ON_THE_BASE = {
    "less": "Of its base's error the network takes off {}.",
    "tie": "Operator and base alone tie on {}.",
    # switched off, by `outcome` of the selection
    "off, base": "The network is not used where validation was better without it: {}.",
    "off, tie": "The network is not used where validation found no clear difference: {}.",
    "off, broken": "The network is not used where its validation error was not finite: {}.",
    "off, unknown": "The network is not used on {}.",
    "more": "The base alone is better on {}.",
    "unknown": "What the network is worth is not known on {}.",
}
# of its RMS, that a conserved mean moves: from there the page says that the operator does not keep it
LOST = 1e-4


def _nrmse(task: dict, model: str) -> float | None:
    """None where it is not finite, or the model is not there."""
    return task["models"].get(model, {}).get("nrmse", {}).get("value")


def best_other(task: dict) -> str | None:
    """The FNO or U-Net with the least error, if one was trained on these data."""
    known = [name for name in NETWORKS if _nrmse(task, name) is not None]
    return min(known, key=lambda name: _nrmse(task, name), default=None)


def verdict(results: dict) -> str:
    """A paragraph in plain words."""
    tasks, gates = results["tasks"], results["gates"]
    failed = [gate["name"] for gate in gates if not gate["passed"]]
    total = sum(task["num_trajectories"] for task in tasks.values())
    return " ".join(
        [
            f"The operator was scored on {total:,} {results['protocol'].get('split', '')} trajectories of "
            f"{len(tasks)} task{'s' * (len(tasks) != 1)}.",
            f"{len(failed)} of {len(gates)} gates fail: {', '.join(failed)}."
            if failed
            else f"All {len(gates)} gates pass.",
            *_on_the_base(tasks),
            *_on_other_networks(tasks),
            *_on_the_codec(tasks),
            *_on_the_largest_error(tasks),
        ]
    )


def _listed(texts: Iterable[str]) -> str:
    *some, last = texts
    return f"{', '.join(some)} and {last}" if some else last


def _by_kind(named: Iterable[tuple[str, str]], words: dict[str, str]) -> list[str]:
    """The words of each kind that there is, of the names, (kind, name), that are of it."""
    of_kind = {kind: [name for one, name in named if one == kind] for kind in words}
    return [words[kind].format(_listed(names)) for kind, names in of_kind.items() if names]


def _on_the_base(tasks: dict) -> list[str]:
    shares = {name: network_share(task) for name, task in tasks.items()}
    out = _by_kind(
        [
            _on_one_base(name, kind, share, tasks[name].get("selection"))
            for name, (kind, share) in shares.items()
        ],
        ON_THE_BASE,
    )
    for name, task in tasks.items():
        found = task["models"]["operator"].get("drift")
        if found and found["low"] is not None and found["low"] > LOST:
            data = task["models"]["codec_floor"]["drift"]["value"]
            out.append(
                f"On {name} the equation keeps the mean of {_listed(task['conserved'])}; the operator "
                f"moves it by {number(found['value'])} of its RMS, the data by {number(data)}."
            )
    return out


def _on_one_base(name: str, kind: str, share: list[float], selection: Selection | None) -> tuple[str, str]:
    """(a kind of ON_THE_BASE, the task with the numbers behind it)."""
    if kind == "less":
        return kind, f"{number(share[0])} % on {name}"
    if kind != "off":
        return kind, name
    return f"off, {outcome(selection)}", f"{name} ({numbers_in_words(selection)})" if selection else name


def _beside(task: dict) -> str:
    """lower | higher | level | unknown: the operator's error beside that of the best network of another
    kind."""
    ours, theirs = (
        task["models"].get(model, {}).get("nrmse", {"value": None})
        for model in ("operator", best_other(task))
    )
    if None in (*ours.values(), *theirs.values()):
        return "unknown"
    return "lower" if ours["high"] < theirs["low"] else "higher" if theirs["high"] < ours["low"] else "level"


def _on_other_networks(tasks: dict) -> list[str]:
    kinds = {name: _beside(task) for name, task in tasks.items()}
    parts = _by_kind(
        [(kind, f"{name} ({label(best_other(tasks[name]))})") for name, kind in kinds.items()],
        {"lower": "lower on {}", "higher": "higher on {}", "level": "the same within the intervals on {}"},
    )
    return [
        *([f"Beside the better of FNO and U-Net its error is {'; '.join(parts)}."] if parts else []),
        *_by_kind(
            [(kind, name) for name, kind in kinds.items()],
            {"unknown": "No FNO or U-Net was trained on {} (make bench)."},
        ),
    ]


def _on_the_codec(tasks: dict) -> list[str]:
    errors = {
        name: [_nrmse(task, model) for model in ("codec_floor", "operator")] for name, task in tasks.items()
    }
    shares = {name: floor / ours for name, (floor, ours) in errors.items() if ours and floor is not None}
    name = max(shares, key=shares.get, default=None)
    return (
        [
            f"The codec's reconstruction error is at most {100 * shares[name]:.2g} % of the operator's "
            f"({name})."
        ]
        if name
        else []
    )


def _on_the_largest_error(tasks: dict) -> list[str]:
    rows = {name: task["models"]["operator"]["nrmse"] for name, task in tasks.items()}
    broken = [name for name, row in rows.items() if row["value"] is None]
    out = [f"On {_listed(broken)} the prediction is not finite or the error undefined."] if broken else []
    name = max(rows.keys() - broken, key=lambda name: rows[name]["value"], default=None)
    if name:
        error, low, high = (number(rows[name][end]) for end in ("value", "low", "high"))
        out.append(f"The largest error is on {name}: nRMSE {error} ({low} to {high}).")
    return out


def verdicts(results: dict) -> str:
    """HTML: per task whether its model can be used, in words."""
    rows = [
        f"<li><em class={'pass' if entry['usable'] else 'fail'}>{html.escape(name)}</em> "
        f"{html.escape(entry['words'])}</li>"
        for name, entry in results["verdicts"].items()
    ]
    return f"<ul class=verdicts>{''.join(rows)}</ul>"


def overview(results: dict) -> str:
    """HTML: the first table, one row per task."""
    head = (
        "nRMSE",
        "UPS operator",
        "base alone",
        "network takes off the base's error",
        "best FNO or U-Net",
        "trivial forecast",
        "error of the mean, operator",
        "error of the mean, base",
        "codec floor",
        "trajectories",
    )
    rows = []
    for name, task in results["tasks"].items():
        models, text, (kind, shares) = task["models"], html.escape(name), network_share(task)
        base, other = models.get("base", {}), best_other(task)
        trivial = "".join(f"{cell(models[name]['nrmse'])}<i>{label(name)}</i>" for name in trivial_of(task))
        share = f"<span>{SHARE[kind].format(*map(number, shares))}</span>"
        share += f"<small>{number(shares[1])} – {number(shares[2])} %</small>" if shares else ""
        beside = (
            f"{cell(models[other]['nrmse'])}<i>{_origin(other, models[other])}</i>"
            if other
            else (f"not trained<i>make bench TASK={text} RUN={html.escape(results['run'])}</i>")
        )
        drift = models["operator"].get("drift")
        kept = (
            f"<i>conserved: {html.escape(', '.join(task['conserved']))}, to {number(drift['value'])}</i>"
            if drift
            else ""
        )
        rows.append(
            [
                f'<a href="#{text}">{text}</a>',
                cell(models["operator"]["nrmse"]),
                cell(base.get("nrmse")),
                share,
                beside,
                trivial,
                cell(models["operator"].get("crmse")) + kept,
                cell(base.get("crmse")),
                cell(models.get("codec_floor", {}).get("nrmse")),
                number(task["num_trajectories"]),
            ]
        )
    return table(head, rows)


def _origin(model: str, row: dict[str, Any]) -> str:
    seconds = row.get("train_seconds")
    return label(model) + (f", trained {number(seconds)} s" if seconds is not None else "")
