"""Figures of ensemble forecasts: members beside the truth, and whether the spread is calibrated.

A sample is one trajectory: u_ref (T, C, *space); members: {model: (M, T, C, *space)}; times (T,): lead
times; fields: names of the C channels; axes, coordinates: name and (cells,) centres of every space axis;
label. A sample of a steady prior has cases instead: {case: {"observed": (*space), NaN where nothing is
observed, "u_ref": (C, *space), "members": (M, C, *space)}}.
entry: of the ensembles of a task (ups.results); what it does not have is not drawn.
"""

from collections.abc import Collection, Mapping

import numpy as np
from matplotlib.figure import Figure

from ups.report.drawing import (
    DASHED,
    FIELD_MAP,
    INK,
    INPUT_MAP,
    SPREAD_MAP,
    axis_labels,
    color,
    colour_bar,
    colours,
    finish,
    lead_title,
    maps,
    pick_leads,
    plotted,
    styled,
)
from ups.report.figures import field_errors
from ups.report.tables import MODELS, label
from ups.results import OBSERVED

FEATURED = (
    "corrector",
    "exact",
    "starts",
    "student_1",
    "waves",
    "student_2",
    "scoring",
    "dressed_conditional",
    "dressed",
    "dressed_resampled",
    "analogs",
)
NUM_LINES = 8  # members drawn as lines
LEADS = 3
LEAD_PANELS = (
    ("CRPS", "crps", "log"),
    ("spread / error of the mean", "ssr", "linear"),
    ("CRPS over that of exact draws", "crps_over_exact", "linear"),
)


def featured(models: Collection[str], count: int) -> list[str]:
    """The first `count` models in the order of FEATURED, then models without a name of their own."""
    return [*[name for name in FEATURED if name in models], *[name for name in models if name not in MODELS]][
        :count
    ]


def case_name(case: str) -> str:
    """A case of ups.generative.observation.CASES in words."""
    case = case.removeprefix(OBSERVED)
    kind, _, number = case.partition("_")
    words = {
        "none": "nothing observed",
        "full": "all observed",
        "points": f"{number} % of cells",
        "coarse": f"means of {number}×{number}",
        "noisy": f"all, noise {number}",
    }
    return words.get(kind, case) if number or kind in ("none", "full") else case


@styled
def fan(sample: dict, field: int) -> Figure:
    """1D: truth, operator, members and their central 50 % and 90 % intervals over x; leads in columns, models
    in rows. Quantiles are at i / (M + 1) (Weibull)."""
    ref, x = plotted(sample, sample["u_ref"], field), plotted(sample, sample["coordinates"], 0)
    models, leads = featured(sample["members"], 3), pick_leads(len(ref), LEADS)
    drawn = {
        model: plotted(sample, sample["members"][model], field)
        for model in {*models, "operator"} & sample["members"].keys()
    }
    fig = Figure(figsize=(9.2, 0.7 + 2.0 * len(models)))
    axes = fig.subplots(len(models), len(leads), sharex=True, sharey="col", squeeze=False)
    for row, model in zip(axes, models, strict=True):
        for ax, lead in zip(row, leads, strict=True):
            members, shade = drawn[model][:, lead], color(model)
            for level, alpha in ((0.9, 0.2), (0.5, 0.34)):
                ends = np.quantile(members, [(1 - level) / 2, (1 + level) / 2], axis=0, method="weibull")
                ax.fill_between(
                    x, *ends, color=shade, alpha=alpha, linewidth=0, label=f"{100 * level:.0f} % of members"
                )
            lines = ax.plot(x, members[:NUM_LINES].T, color=shade, linewidth=0.5, alpha=0.75)
            lines[0].set_label("members")
            if "operator" in drawn:
                ax.plot(
                    x,
                    drawn["operator"][0, lead],
                    color=color("operator"),
                    linewidth=1.2,
                    linestyle=DASHED,
                    label=label("operator"),
                )
            ax.plot(x, ref[lead], color=INK, linewidth=1.4, label="truth")
            finish(
                ax,
                title=lead_title(sample["times"][lead]) if model == models[0] else "",
                xlabel=axis_labels(sample)[0] if model == models[-1] else "",
            )
        row[0].set_ylabel(f"{label(model)}\n{sample['fields'][field]}")
    handles, names = axes[0, 0].get_legend_handles_labels()
    fig.legend(handles, names, loc="outside lower center", ncols=len(names))
    return fig


def _panels(ref: np.ndarray, members: np.ndarray, count: int, scale: dict) -> list[tuple]:
    """(title, values, colours) of truth, mean of members (M, ...), the first `count` members, their spread
    (zero for one member) and the error of the mean; spread and error share a scale."""
    mean = members.mean(0)
    spread, error = members.std(0, ddof=1) if len(members) > 1 else 0 * mean, np.abs(mean - ref)
    own = colours(SPREAD_MAP, spread, error)
    return [
        ("truth", ref, scale),
        ("mean", mean, scale),
        *[(f"member {i + 1}", member, scale) for i, member in enumerate(members[:count])],
        ("spread", spread, own),
        ("error of mean", error, own),
    ]


def _barred(sample: dict, rows: Mapping[str, list[tuple]], field: int, first: int) -> Figure:
    """Maps of `_panels` from column `first` on, with their colour bars."""
    fig, axes = maps(sample, rows)
    for row in axes:  # spread and error differ by decades from row to row
        colour_bar(row[-2:], "", 3, aspect=12)
    for columns, text in ((axes[:, :first], "observed"), (axes[:, first:-2], sample["fields"][field])):
        if columns.size:  # as wide as its columns
            colour_bar(
                columns,
                text,
                3 * columns.shape[1],
                orientation="horizontal",
                fraction=0.03,
                aspect=12 * columns.shape[1],
            )
    return fig


@styled
def members_2d(sample: dict, model: str, field: int) -> Figure:
    """2D: truth, mean, two members, spread and error of the mean, leads in rows."""
    ref, members = (plotted(sample, u, field) for u in (sample["u_ref"], sample["members"][model]))
    leads = pick_leads(len(ref), LEADS)
    scale = colours(FIELD_MAP, ref[leads], members[:, leads])
    return _barred(
        sample,
        {lead_title(sample["times"][lead]): _panels(ref[lead], members[:, lead], 2, scale) for lead in leads},
        field,
        0,
    )


@styled
def steady_cases(sample: dict, field: int) -> Figure | None:
    """Steady prior in 2D: for each case (rows) the observed part of the coefficient, truth, mean, one member,
    spread and error of the mean of the solution. None in 1D."""
    if len(sample["axes"]) == 1:
        return None
    drawn = {
        case: [
            plotted(sample, u, at)
            for u, at in (([entry["observed"]], 0), (entry["u_ref"], field), (entry["members"], field))
        ]
        for case, entry in sample["cases"].items()
    }
    observed_scale = colours(INPUT_MAP, *[observed for observed, _, _ in drawn.values()])
    scale = colours(FIELD_MAP, *[u for _, ref, members in drawn.values() for u in (ref, members[0])])
    return _barred(
        sample,
        {
            case_name(case): [("observed", observed, observed_scale), *_panels(ref, members, 1, scale)]
            for case, (observed, ref, members) in drawn.items()
        },
        field,
        1,
    )


def field_to_show(sample: dict) -> int:
    """The field in which the mean of the first featured model has the largest relative error."""
    model = (featured(sample["members"], 1) or list(sample["members"]))[0]
    errors = field_errors(
        {"u_ref": sample["u_ref"], "u_pred": np.asarray(sample["members"][model], dtype=float).mean(0)}
    )
    return int(np.argmax(np.nan_to_num(errors, nan=-1.0, posinf=np.inf)))
