"""Sections of report.html about ensembles: self-contained HTML to hand to
`ups.evaluation.report.write_report(sections=[(title, html)])`.

    ensemble_section(entry, sample, "burgers1d")     an ensemble forecast of a time-dependent task
    steady_section(entry, sample, "darcy2d_grf")     a steady prior given part of the coefficient

entry of a forecast: {"task", "members": M, "times": [T], "models": {model: ROW}, "comparisons": {"A vs B":
{metric: number with interval}}, "words": [paragraphs]}, ROW of ups.metrics.ensembles.summarise_ensemble plus
"evaluations_per_state" and "ms_per_state". entry of a steady prior: {"task", "members", "cases": {case:
{model: ROW}}, "words"}, ROW with crps, ssr, nrmse_mean, exact (distance, trace): numbers, with or without
interval. Samples as ups.evaluation.figures_ensemble describes them. A metric, figure or model that is not
there is left out; null is shown as a dash.
"""

from __future__ import annotations

import html
from typing import Any

from ups.evaluation import figures, figures_ensemble
from ups.evaluation.tables import COSTS, COUNTS, cell, is_interval, metric_name, number, table
from ups.metrics.ensembles import ENSEMBLES
from ups.metrics.intervals import Metric

EXACT = (   # of a steady prior, where the exact posterior is known
    Metric("distance", "distance to exact", "energy distance to the exact posterior, in units of its spread"),
    Metric("trace", "variance over exact", "total variance over that of the exact posterior", best=1.0),
)
ROWS = {metric.name: metric for metric in (*ENSEMBLES, *COSTS) if metric.label}
STEADY = {metric.name: metric for metric in (*EXACT, *ROWS.values())}
CAPTIONS = {
    "by_lead": "Scores by lead time, two with 95 % intervals; grey: spread within 10 % of the error.",
    "spread_and_skill": "Spread and error of the ensemble mean by lead time, physical units; calibrated "
                        "where they coincide.",
    "rank_histograms": "Rank of the truth among the sorted members. Flat: calibrated; high ends: too sure; a "
                       "hump: too unsure; a slope: biased.",
    "reliability": "Does the spread know where the error is? Points in bins of predicted spread; equal on "
                   "the diagonal.",
    "spectrum_errors": "Error of the energy spectra of single members and sampled residuals, in decades; "
                       "lines: 95 % intervals.",
}
BEST = '<b style="color:var(--good)" title="best of the row">'


def _value(found: Any) -> float | None:
    return found["value"] if is_interval(found) else found


def _marked(cells: list[Any], best: str | float | None) -> list[str]:
    """The cells as HTML, the best one marked: the smallest, or the closest to a calibrated ensemble's; none
    if all are equal."""
    texts = [cell(value) for value in cells]
    known = {i: value for i, value in enumerate(map(_value, cells)) if value is not None}
    distance = ({i: value if best == "low" else abs(value - best) for i, value in known.items()}
                if best is not None else {})
    if len(set(distance.values())) > 1:
        first = min(distance, key=distance.get)
        text = texts[first] if "<b>" in texts[first] else f"<b>{texts[first]}</b>"
        texts[first] = text.replace("<b>", BEST).replace("</b>", " *</b>")
    return texts


def _model_table(models: dict) -> str:
    """Metrics in rows, models in columns, as the other tables of the report."""
    names, rows = figures_ensemble.ordered(models), []
    for metric in ROWS.values():
        cells = [models[model].get(metric.name) for model in names]
        if any(_value(value) is not None for value in cells) and (metric.name not in COUNTS or any(cells)):
            rows.append([metric_name(metric), *_marked(cells, metric.best)])
    return table(["", *[html.escape(figures_ensemble.label(model)) for model in names]], rows)


def _comparison_table(comparisons: dict) -> str:
    """Paired ratios, below 1 is better than the second model."""
    metrics = [metric for metric in ROWS.values() if any(metric.name in row for row in comparisons.values())]
    rows = [[html.escape(name), *[cell(row.get(metric.name)) for metric in metrics]]
            for name, row in comparisons.items()]
    return table(["ratio, paired", *map(metric_name, metrics)], rows)


def _words(entry: dict) -> str:
    return "".join(f"<p>{html.escape(text)}</p>" for text in entry.get("words", []))


def ensemble_section(entry: dict, sample: dict, name: str) -> str:
    """HTML of one ensemble forecast: what it says in words, table, ratios, a case as a forecaster sees it,
    calibration.

    Raises ValueError when the entry has no models or its times do not fit the lists by lead.
    """
    models, times = entry.get("models", {}), list(entry.get("times", []))
    if not models:
        raise ValueError(f"no models in the ensemble entry of {name!r}; expected {{model: row}} under "
                         "'models' in ensemble_section. Pass the rows of "
                         "ups.metrics.ensembles.summarise_ensemble.")
    wrong = [model for model, row in models.items() if len(row.get("crps_by_lead", times)) != len(times)]
    if wrong:
        raise ValueError(f"{len(times)} times but lists of another length in {', '.join(wrong)}; expected "
                         f"one time per predicted frame of {name!r} in ensemble_section. Cut the context "
                         "frames from both.")
    members = f"{entry['members']} members; " if "members" in entry else ""
    out = [_words(entry), _model_table(models),
           f"<p class=note>{html.escape(name)}: {members}* marks the best of a row. Below a number: its 95 % "
           "bootstrap interval over trajectories. A dash: undefined for so few members, or not finite.</p>"]
    if entry.get("comparisons"):
        out.append(_comparison_table(entry["comparisons"]) + "<p class=note>Same trajectories; below 1 the "
                                                             "first is better.</p>")
    if sample and sample.get("members"):
        field = figures_ensemble.field_to_show(sample)
        what = f"{sample['fields'][field]} of {name}, trajectory with {sample['label']}"
        if len(sample["u_ref"].shape) == 3:
            caption = (f"{what}: truth, operator, members and the intervals that hold the central 50 % and "
                       "90 % of them.")
            out.append(figures.to_html(figures_ensemble.fan(sample, field), caption))
        else:
            for model in figures_ensemble.featured(sample["members"], 2):
                caption = (f"{what}, {figures_ensemble.label(model)}: mean, two members, their spread, the "
                           "error of the mean.")
                out.append(figures.to_html(figures_ensemble.members_2d(sample, model, field), caption))
    out += [figures.to_html(figures_ensemble.by_lead(models, times), CAPTIONS["by_lead"]),
            figures.to_html(figures_ensemble.spread_and_skill(models, times), CAPTIONS["spread_and_skill"]),
            figures.to_html(figures_ensemble.rank_histograms(models), CAPTIONS["rank_histograms"]),
            figures.to_html(figures_ensemble.reliability(models), CAPTIONS["reliability"]),
            figures.to_html(figures_ensemble.spectrum_errors(models), CAPTIONS["spectrum_errors"])]
    return "".join(out)


def steady_section(entry: dict, sample: dict, name: str) -> str:
    """HTML of a steady prior: a table of cases, and per case what was seen, the truth and what the ensemble
    makes of it.

    Raises ValueError when the entry has no cases or the sample is not 2D.
    """
    cases = entry.get("cases", {})
    if not cases:
        raise ValueError(f"no cases in the steady entry of {name!r}; expected {{case: {{model: row}}}} under "
                         "'cases' in steady_section. Pass one row per observation case and model.")
    cases = {case: {model: {**row, **row.get("exact", {})} for model, row in by_model.items()}
             for case, by_model in cases.items()}
    everything = {model: row for by_model in cases.values() for model, row in by_model.items()}
    rows, models = [], figures_ensemble.ordered(everything)
    metrics = [metric for metric in STEADY.values() if any(
        _value(row.get(metric.name)) is not None for by_model in cases.values() for row in by_model.values())]
    for case, by_model in cases.items():
        names = [model for model in models if model in by_model]
        columns = [_marked([by_model[model].get(metric.name) for model in names], metric.best)
                   for metric in metrics]
        for i, model in enumerate(names):
            case_cell = html.escape(figures_ensemble.case_name(case)) if i == 0 else ""
            rows.append([case_cell, html.escape(figures_ensemble.label(model)),
                         *[column[i] for column in columns]])
    out = [_words(entry), table(["observed", "model", *map(metric_name, metrics)], rows)]
    members = f"{number(entry['members'])} members; " if "members" in entry else ""
    out.append(f"<p class=note>{html.escape(name)}: {members}* marks the best model of a case.</p>")
    if sample and sample.get("cases"):
        shapes = {case: tuple(shown["observed"].shape) for case, shown in sample["cases"].items()}
        if any(len(shape) != 2 for shape in shapes.values()):
            raise ValueError(f"observed fields have shapes {shapes}; expected (nx, ny) in steady_section. "
                             "Pass 2D fields, NaN where nothing was seen.")
        caption = (f"{sample['fields'][0]} of {name}, {sample['label']}; grey cells were not seen. Spread "
                   "and error share the scale of their row.")
        out.append(figures.to_html(figures_ensemble.steady_cases(sample, 0), caption))
    return "".join(out)
