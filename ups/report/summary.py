"""The first table of the report.

Everything looks good beside the trivial forecast. So the table compares the operator with its own base (what
does the network add?) and with the best network of another kind trained on the same data. A difference counts
only if its paired interval excludes zero.
"""

from ups.evaluation.gates import error_of, horizon_of, network_gain, trivial_of
from ups.report.bench_rows import NETWORKS
from ups.report.tables import render
from ups.results import Entry, Results


def best_other(task: Entry) -> str | None:
    """The FNO or U-Net with the lower error; None if none was trained on these data."""
    errors = {name: task.value(name, error_of(task)) for name in NETWORKS}
    known = {name: error["value"] for name, error in errors.items() if error and error["value"] is not None}
    return min(known, key=known.get, default=None)


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
