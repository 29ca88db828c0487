"""Tasks that a user declares. They are made from facts, plain values that configurations and weights
carry."""

import re
from collections.abc import Mapping
from typing import Any

from ups.tasks.task import Place, Task

MOST_LETTERS = 64  # bytes, of a name: that of a file has 255, with what is put before and behind it
# attributes of torch's ModuleDict, which takes no module of such a name
TORCH = re.compile(
    "_.*|(get|named|register|set|requires|share|to|zero)_.*|T_destination|add_module|apply"
    "|bfloat16|buffers|call_super_init|children|clear|compile|[cimx]pu|cuda|double"
    "|dump_patches|eval|extra_repr|float|forward|half|items|keys|load_state_dict|modules|mtia"
    "|parameters|pop|state_dict|to|train|training|type|update|values"
)


def require_name(name: str) -> None:
    """Raise ValueError unless `name` can name a task: files, weights and keys of a configuration are named
    after it."""
    is_short = isinstance(name, str) and len(name.encode()) <= MOST_LETTERS
    if not is_short or not name.isidentifier() or TORCH.fullmatch(name):
        raise ValueError(
            f"{name!r:.80} cannot name a task; expected at most {MOST_LETTERS} letters, digits and _, and no "
            "name of a method of torch's modules, because files and weights are named after the task. "
            "Write another name under task and in data.tasks."
        )


def make_user_task(name: str, facts: Mapping[str, Any]) -> Task:
    """The task that `facts` declare (plain values, JSON-able). Raises ValueError for an unsuitable name.

    Keys: arrays (of `Place`), axes, boundary, domain (a pair per axis), inputs; parameters (name -> place of
    its value); positive, conserved, bounded, vector (fields); symmetries ("shift", "shift_x", "mirror");
    hidden; and, if there are any, offset (`Task.offsets`), units (`Task.units`) and forcing (fields that are
    known in advance).
    """
    require_name(name)
    if not all(isinstance(unit, str) for unit in facts.get("units", {}).values()):
        raise ValueError(f"{name} has units {facts['units']!r:.80}; expected text. Take another copy of it.")
    places = tuple(
        Place(entry["array"], tuple(entry["axes"]), tuple(entry["fields"])) for entry in facts["arrays"]
    )
    inputs = tuple(facts["inputs"])
    forcing = tuple(field for place in places for field in place.fields if field in facts.get("forcing", ()))
    is_steady = all(place.is_steady for place in places)
    fields = tuple(field for place in places for field in place.fields if field not in inputs + forcing)
    series = tuple(
        field
        for place in places
        for field in place.fields
        if field in forcing and not {*place.axes} & {*facts["axes"]}
    )
    still = () if is_steady else tuple(field for place in places if place.is_steady for field in place.fields)
    moving = tuple(field for field in fields if field not in still)
    return Task(
        name=name,
        fields=moving + still,
        inputs=inputs,
        still=still,
        forcing=forcing,
        series=series,
        ndim=len(facts["axes"]),
        axes=tuple(facts["axes"]),
        boundary=facts["boundary"],
        domain=tuple((float(low), float(high)) for low, high in facts["domain"]),
        arrays=places,
        filename="",
        parameters=tuple(facts["parameters"]),
        positive=tuple(facts["positive"]),
        conserved=tuple(facts["conserved"]),
        bounded=tuple(facts["bounded"]),
        hides=facts["hidden"],
        is_shifted=any(word.startswith("shift") for word in facts["symmetries"]),
        fixed_axes=tuple(
            axis for axis in facts["axes"] if not {"shift", f"shift_{axis}"} & {*facts["symmetries"]}
        ),
        is_symmetric="mirror" in facts["symmetries"],
        vector=tuple(facts["vector"]),
        user_facts=dict(facts),
    )
