"""The golden table shows any change of a decision, a weight or an error, and no change of times."""

import json

import pytest
from golden_table import ROOT, differences, flat

STORED = json.loads((ROOT / "tests/golden/small.json").read_text(encoding="utf-8"))


def test_times_are_left_out_and_the_rest_has_a_place():
    found = {"tasks": {"a": {"nrmse": {"value": 0.1}, "seconds": 3.0, "fields": ["u"], "unit": None}}}
    assert dict(flat(found)) == {"tasks/a/nrmse/value": 0.1, "tasks/a/fields": ["u"], "tasks/a/unit": None}


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("operator/weights", "0"),
        ("operator/burgers1d/base/kind", "equation"),
        ("operator/burgers1d/network_weight", 0.5),
        ("operator/decisions/base of advection1d/chosen", "persistence"),
        ("operator/advection1d/parameter_values", [0.4, 1.1]),
    ],
)
def test_a_change_of_any_kind_is_a_difference(place, value):
    assert STORED[place] != value and differences(STORED, STORED) == []
    [line] = differences(STORED | {place: value}, STORED)
    assert line.startswith(f"{place}: {value!r:.20}")
    missing = {key: one for key, one in STORED.items() if key != place}
    assert len(differences(missing, STORED)) == len(differences(STORED, missing)) == 1
