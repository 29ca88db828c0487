"""What the report says first, from results.json alone: a verdict per task, a paragraph, and the table of what
was compared.

Against the trivial forecast everything looks good. So the first table sets the operator beside its own base
(what is the network worth?) and beside the best network of another kind that was trained on the same data,
and counts a difference only where the paired interval is apart from none.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

import numpy as np

from ups.evaluation import figures
from ups.evaluation.bench_rows import NETWORKS
from ups.evaluation.gates import trivial_of
from ups.evaluation.tables import cell, number, table

PAIR = "operator / base"   # of a task's comparisons
SHARE = {"less": "<b>{} %</b>", "tie": "tie", "more": "<b>{} %</b> the base is better",
         "off": "tie: the network is switched off", "unknown": "no interval"}
# times the base's error of a conserved mean, from which the page says that the network does not keep it
LOST = 2.0


def _nrmse(task: dict, model: str) -> float | None:
    """None where it is not finite, or the model is not there."""
    return task["models"].get(model, {}).get("nrmse", {}).get("value")


def network_share(task: dict) -> tuple[str, list[float]]:
    """(less | more | tie | off | unknown, [percent, low, high]): what the network takes off the error of its
    base, trajectory by trajectory. A tie where the interval holds zero; no numbers where it is switched off
    or there is no interval."""
    ratio = task.get("comparisons", {}).get(PAIR, {}).get("nrmse")
    if not task.get("network_is_used", True):
        return "off", []
    if ratio is None or None in ratio.values() or task["num_initial_conditions"] < 2:
        return "unknown", []
    _, low, high = shares = [100 * (1 - ratio[key]) for key in ("value", "high", "low")]
    return "tie" if low <= 0 <= high else "less" if low > 0 else "more", shares


def best_other(task: dict) -> str | None:
    """The FNO or U-Net with the least error, if one was trained on these data."""
    known = {name: error for name in NETWORKS if (error := _nrmse(task, name)) is not None}
    return min(known, key=known.get, default=None)


def verdict(results: dict) -> str:
    """A paragraph in plain words."""
    tasks, gates = results["tasks"], results["gates"]
    failed = [gate["name"] for gate in gates if not gate["passed"]]
    total = sum(task["num_trajectories"] for task in tasks.values())
    return " ".join([
        f"The operator was scored on {total:,} {results['protocol'].get('split', '')} trajectories of "
        f"{len(tasks)} task{'s' * (len(tasks) != 1)}.",
        f"{len(failed)} of {len(gates)} gates fail: {', '.join(failed)}." if failed else
        f"All {len(gates)} gates pass.",
        *_on_the_base(tasks), *_on_other_networks(tasks), *_on_the_codec(tasks),
        *_on_the_largest_error(tasks)])


def _listed(texts: Sequence[str]) -> str:
    *some, last = texts or [""]
    return f"{', '.join(some)} and {last}" if some else last


def _on_the_base(tasks: dict) -> list[str]:
    kinds: dict[str, list[str]] = {}
    for name, task in tasks.items():
        kind, shares = network_share(task)
        kinds.setdefault(kind, []).append(f"{number(shares[0])} % on {name}" if kind == "less" else name)
    out = [words.format(_listed(kinds[kind])) for kind, words in (
        ("less", "Of its base's error the network takes off {}."),
        ("tie", "Operator and base alone tie on {}."),
        ("off", "The network is switched off, as validation was no better with it, on {}."),
        ("more", "The base alone is better on {}."),
        ("unknown", "What the network is worth is not known on {}."))
        if kind in kinds]
    for name, task in tasks.items():
        ratio = task.get("comparisons", {}).get(PAIR, {}).get("crmse")
        if task.get("conserved") and ratio and ratio["low"] is not None and ratio["low"] > LOST:
            ours, base = (number(task["models"][model]["crmse"]["value"]) for model in ("operator", "base"))
            out.append(f"On {name} the equation keeps the mean of {_listed(task['conserved'])}; the base "
                       f"keeps it to {base}, the operator to {ours}.")
    return out


def _on_other_networks(tasks: dict) -> list[str]:
    level = "the same within the intervals"
    kinds: dict[str, list[str]] = {"lower": [], "higher": [], level: [], "unknown": []}
    for name, task in tasks.items():
        other, ours = best_other(task), task["models"]["operator"]["nrmse"]
        theirs = task["models"][other]["nrmse"] if other else {}
        kind = ("unknown" if not other or None in (*ours.values(), *theirs.values())
                else "lower" if ours["high"] < theirs["low"] else "higher" if theirs["high"] < ours["low"]
                else level)
        kinds[kind].append(name if kind == "unknown" else f"{name} ({figures.NAMES[other]})")
    unknown = kinds.pop("unknown")
    parts = [f"{kind} on {_listed(names)}" for kind, names in kinds.items() if names]
    where = "these data" if len(unknown) == len(tasks) else _listed(unknown)
    return [*([f"Beside the better of FNO and U-Net its error is {'; '.join(parts)}."] if parts else []),
            *([f"No FNO or U-Net was trained on {where} (make bench)."] if unknown else [])]


def _on_the_codec(tasks: dict) -> list[str]:
    shares = {name: floor / ours for name, task in tasks.items() if (ours := _nrmse(task, "operator"))
              and (floor := _nrmse(task, "codec_floor")) is not None}
    name = max(shares, key=shares.get, default=None)
    return [f"The codec's reconstruction error is at most {100 * shares[name]:.2g} % of the operator's "
            f"({name})."] if name else []


def _on_the_largest_error(tasks: dict) -> list[str]:
    errors = {name: _nrmse(task, "operator") for name, task in tasks.items()}
    broken = [name for name, value in errors.items() if value is None]
    out = [f"On {_listed(broken)} the prediction is not finite or the error undefined."] if broken else []
    name = max((name for name in errors if name not in broken), key=errors.get, default=None)
    if name:
        row = tasks[name]["models"]["operator"]
        low, high, by_field = row["nrmse"]["low"], row["nrmse"]["high"], row.get("nrmse_by_field", [])
        first, last = row["error_growth"][0], row["error_growth"][-1]
        text = (f"The largest error is on {name}: nRMSE {number(errors[name])} ({number(low)} to "
                f"{number(high)})")
        if len(by_field) > 1 and None not in by_field:
            text += f", most of it in {tasks[name]['fields'][int(np.argmax(by_field))]}"
        if len(row["error_growth"]) > 1 and None not in (first, last):
            text += f", from {number(first)} at the first to {number(last)} at the last predicted frame"
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
        base, other, trivial = models.get("base", {}), best_other(task), trivial_of(task)
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
