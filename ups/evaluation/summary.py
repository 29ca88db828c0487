"""What the report says first, from results.json alone: a verdict per task, a paragraph, and the table of what
was compared.

Against the trivial forecast everything looks good. So the first table sets the operator beside its own base
(what is the network worth?) and beside the best network of another kind that was trained on the same data,
and counts a difference only where the paired interval is apart from none.
"""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import Any

import numpy as np

from ups.evaluation import figures
from ups.evaluation.bench_rows import NETWORKS
from ups.evaluation.gates import BASELINES
from ups.evaluation.tables import cell, number, table

PAIR = "operator / base"   # of a task's comparisons
SHARE = {"less": "<b>{} %</b>", "tie": "tie", "more": "<b>{} %</b> the base is better",
         "off": "tie: the network is switched off", "unknown": "no interval"}
# times the base's error of a conserved mean, from which the page says that the network does not keep it
LOST = 2.0


def baseline(task: dict) -> str:
    """The trivial forecast of a task."""
    return next(name for name in BASELINES if name in task["models"])


def network_share(task: dict) -> tuple[str, list[float]]:
    """(less | more | tie | off | unknown, [percent, low, high]): what the network takes off the error of its
    base, trajectory by trajectory. A tie where the interval holds zero; no numbers where it is switched off
    or there is no interval."""
    ratio = task.get("comparisons", {}).get(PAIR, {}).get("nrmse")
    if not task.get("network_is_used", True):
        return "off", []
    if ratio is None or None in ratio.values():
        return "unknown", []
    if task["num_initial_conditions"] < 2:
        return "unknown", []
    _, low, high = shares = [100 * (1 - ratio[key]) for key in ("value", "high", "low")]
    return "tie" if low <= 0 <= high else "less" if low > 0 else "more", shares


def best_other(task: dict) -> str | None:
    """The FNO or U-Net with the least error, if one was trained on these data."""
    known = {name: task["models"][name]["nrmse"]["value"] for name in NETWORKS if name in task["models"]}
    known = {name: value for name, value in known.items() if value is not None}
    return min(known, key=known.get) if known else None


def verdict(results: dict) -> str:
    """A paragraph in plain words."""
    tasks, gates = results["tasks"], results["gates"]
    failed = [gate["name"] for gate in gates if not gate["passed"]]
    total = sum(task["num_trajectories"] for task in tasks.values())
    out = [f"The operator was scored on {total:,} {results['protocol'].get('split', '')} trajectories of "
           f"{len(tasks)} task{'s' * (len(tasks) != 1)}."]
    wrong = f"{len(failed)} of {len(gates)} gates fail: {', '.join(failed)}."
    out.append(wrong if failed else f"All {len(gates)} gates pass.")
    return " ".join([*out, *_on_the_base(tasks), *_on_other_networks(tasks), *_on_the_codec(tasks),
                     *_on_the_largest_error(tasks)])


def _listed(texts: Iterable[str]) -> str:
    *some, last = texts
    return f"{', '.join(some)} and {last}" if some else last


def _on_the_base(tasks: dict) -> list[str]:
    kinds: dict[str, list[str]] = {}
    for name, task in tasks.items():
        kind, shares = network_share(task)
        kinds.setdefault(kind, []).append(f"{number(shares[0])} % on {name}" if kind == "less" else name)
    out = [words.format(_listed(kinds[kind])) for kind, words in (
        ("less", "Of its base's error the network takes off {}."), ("tie", "Operator and base alone tie on "
                                                                           "{}."),
        ("off", "The network is switched off, as validation was no better with it, on {}."),
        ("more", "The base alone is better on {}."), ("unknown", "What the network is worth is not known on "
                                                                 "{}."))
        if kind in kinds]
    for name, task in tasks.items():
        ratio = task.get("comparisons", {}).get(PAIR, {}).get("crmse")
        if task.get("conserved") and ratio and ratio["low"] is not None and ratio["low"] > LOST:
            ours, base = (number(task["models"][model]["crmse"]["value"]) for model in ("operator", "base"))
            out.append(f"On {name} the equation keeps the mean of {_listed(task['conserved'])}; the base "
                       f"keeps it to {base}, the operator to {ours}.")
    return out


def _on_other_networks(tasks: dict) -> list[str]:
    better, worse, level, unknown = [], [], [], []
    for name, task in tasks.items():
        other, ours = best_other(task), task["models"]["operator"]["nrmse"]
        theirs = task["models"][other]["nrmse"] if other else {}
        if not other or None in (*ours.values(), *theirs.values()):
            unknown.append(name)
            continue
        apart = ours["high"] < theirs["low"] or theirs["high"] < ours["low"]
        group = level if not apart else better if ours["value"] < theirs["value"] else worse
        group.append(f"{name} ({figures.NAMES[other]})")
    parts = [f"{words} on {_listed(names)}" for words, names in
             (("lower", better), ("higher", worse), ("the same within the intervals", level)) if names]
    out = [f"Beside the better of FNO and U-Net its error is {'; '.join(parts)}."] if parts else []
    if unknown:
        where = "these data" if len(unknown) == len(tasks) else _listed(unknown)
        out.append(f"No FNO or U-Net was trained on {where} (make bench).")
    return out


def _on_the_codec(tasks: dict) -> list[str]:
    floors = {name: task["models"].get("codec_floor", {}).get("nrmse", {}).get("value")
              for name, task in tasks.items()}
    known = {name: floor / tasks[name]["models"]["operator"]["nrmse"]["value"]
             for name, floor in floors.items()
             if floor is not None and tasks[name]["models"]["operator"]["nrmse"]["value"]}
    if not known:
        return []
    name = max(known, key=known.get)
    return [f"The codec's reconstruction error is at most {100 * known[name]:.2g} % of the operator's "
            f"({name})."]


def _on_the_largest_error(tasks: dict) -> list[str]:
    errors = {name: task["models"]["operator"]["nrmse"]["value"] for name, task in tasks.items()}
    broken, out = [name for name, value in errors.items() if value is None], []
    if broken:
        out.append(f"On {_listed(broken)} the prediction is not finite or the error undefined.")
    if len(broken) < len(errors):
        name = max((name for name in errors if name not in broken), key=errors.get)
        row, task = tasks[name]["models"]["operator"], tasks[name]
        entry, growth, by_field = row["nrmse"], row["error_growth"], row.get("nrmse_by_field", [])
        text = f"The largest error is on {name}: nRMSE {number(entry['value'])}"
        text += f" ({number(entry['low'])} to {number(entry['high'])})"
        if len(by_field) > 1 and None not in by_field:
            text += f", most of it in {task['fields'][int(np.argmax(by_field))]}"
        if len(growth) > 1 and None not in (growth[0], growth[-1]):
            text += (f", from {number(growth[0])} at the first to {number(growth[-1])} at the last predicted "
                     "frame")
        out.append(text + ".")
    return out


def verdicts(results: dict) -> str:
    """HTML: per task whether its model can be used, in words."""
    rows = [f"<li><em class={'pass' if entry['usable'] else 'fail'}>{html.escape(name)}</em> "
            f"{html.escape(entry['words'])}</li>"
            for name, entry in results["verdicts"].items()]
    return f"<ul class=verdicts>{''.join(rows)}</ul>"


def overview(results: dict) -> str:
    """HTML: the first table, one row per task."""
    head = ("nRMSE", "UPS operator", "base alone", "network takes off the base's error", "best FNO or U-Net",
            "trivial forecast",
            "error of the mean, operator", "error of the mean, base", "codec floor", "trajectories")
    rows = []
    for name, task in results["tasks"].items():
        models, text, (kind, shares) = task["models"], html.escape(name), network_share(task)
        base, other, trivial = models.get("base", {}), best_other(task), baseline(task)
        share = f"<span>{SHARE[kind].format(*map(number, shares))}</span>"
        share += f"<small>{number(shares[1])} – {number(shares[2])} %</small>" if shares else ""
        beside = f"{cell(models[other]['nrmse'])}<i>{_origin(other, models[other])}</i>" if other else (
            f"not trained<i>make bench TASK={text} RUN={html.escape(results['run'])}</i>")
        kept = (f"<i>conserved: {html.escape(', '.join(task['conserved']))}</i>" if task.get("conserved")
                else "")
        rows.append([f'<a href="#{text}">{text}</a>', cell(models["operator"]["nrmse"]),
                     cell(base.get("nrmse")),
                     share, beside, f"{cell(models[trivial]['nrmse'])}<i>{figures.NAMES[trivial]}</i>",
                     cell(models["operator"].get("crmse")) + kept, cell(base.get("crmse")),
                     cell(models.get("codec_floor", {}).get("nrmse")), number(task["num_trajectories"])])
    return table(head, rows)


def _origin(model: str, row: dict[str, Any]) -> str:
    seconds = row.get("train_seconds")
    return figures.NAMES[model] + (f", trained {number(seconds)} s" if seconds is not None else "")
