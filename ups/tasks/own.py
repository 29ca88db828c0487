"""A task that is declared and not built in: an equation of the user's, made from facts that are plain values,
so that a configuration and weights can carry them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ups.boundary import PERIODIC, along
from ups.lazy import np
from ups.tasks.task import Finding, Task

LOOKED_AT = 8   # trajectories of the check of seams
JUMP = 8.0      # times the mean difference of neighbours: no periodic field that its grid resolves jumps so
SMOOTH = 1.5    # times it: a seam as smooth as the inside


@dataclass(frozen=True)
class Place:
    """Where an array of the user's lies: its name in the file (* for the groups of trajectories), the words
    for its axes as stored (trajectory, time, channel, component, else an axis of space), and the fields it
    holds.
    """

    array: str
    axes: tuple[str, ...]
    fields: tuple[str, ...]

    @property
    def is_steady(self) -> bool:
        return "time" not in self.axes


def own_task(name: str, facts: Mapping[str, Any]) -> Task:
    """The task that `facts` (plain values, JSON-able) declare.

    arrays: of `Place`; axes, boundary, domain (a pair per axis), inputs; parameters: name -> where its value
    is; positive, conserved, bounded, symmetries ("shift", "mirror"), hidden.
    """
    places = tuple(Place(entry["array"], tuple(entry["axes"]), tuple(entry["fields"]))
                   for entry in facts["arrays"])
    inputs = tuple(facts["inputs"])
    is_steady = all(place.is_steady for place in places)
    fields = tuple(field for place in places for field in place.fields if field not in inputs)
    still = () if is_steady else tuple(field for place in places if place.is_steady for field in place.fields)
    moving = tuple(field for field in fields if field not in still)
    return Task(
        name=name, fields=moving + still, inputs=inputs, still=still, ndim=len(facts["axes"]),
        axes=tuple(facts["axes"]), boundary=facts["boundary"],
        domain=tuple((float(low), float(high)) for low, high in facts["domain"]), layout="own", arrays=places,
        filename="", parameters=tuple(facts["parameters"]), positive=tuple(facts["positive"]),
        conserved=tuple(facts["conserved"]), is_bounded=facts["bounded"], hides=facts["hidden"],
        is_shifted="shift" in facts["symmetries"], is_symmetric="mirror" in facts["symmetries"],
        vector=next((place.fields for place in places if place.axes.count("component") == 1), ()),
        checks=(seams,), own=dict(facts))


def jumps(u: Any, axis: int) -> float:
    """How much a field (..., *space) differs across the seam of an axis, over the mean difference of
    neighbours."""
    inside = np.abs(np.diff(u, axis=axis)).mean()
    return float(np.abs(u.take(0, axis) - u.take(-1, axis)).mean() / max(inside, np.finfo(np.float64).tiny))


def seams(data: Any, scan: Any) -> Iterator[Finding]:
    """Whether the field runs on where its axes are said to be periodic."""
    task, where = data.task, str(data.path)
    u = data.spread(LOOKED_AT)[1].astype(np.float64)
    for number, (axis, end) in enumerate(zip(task.axes, along(task.boundary, task.ndim), strict=True)):
        ratio = jumps(u, number - task.ndim)
        ends = [u.take(cell, number - task.ndim) for cell in (0, -1)]
        if end == PERIODIC and ratio > JUMP:
            yield Finding("error", f"{axis} is said to be periodic, and the field jumps where its ends meet, "
                                   f"by {ratio:.3g} times the difference of neighbours", where,
                          f"write task.{task.name}.boundary: no_flux (or dirichlet, outflow; one per axis as "
                          "{" + f"{axis}: no_flux" + "}), or cut the data where they repeat")
        elif end == PERIODIC and u.shape[number - task.ndim] > 2 and np.array_equal(*ends):
            yield Finding("warning", f"the first and the last cell of {axis} hold the same numbers, so a "
                                     f"periodic grid has "
                                     f"one point twice", where, f"leave the last cell of {axis} out when "
                                                                        "the file is written")
