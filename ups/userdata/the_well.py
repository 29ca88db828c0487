"""The layout called well: the keys of a section, read from the attributes of a file of The Well
(docs/data_format.md of github.com/PolymathicAI/the_well): groups t0_fields, t1_fields, t2_fields of
scalars, vectors and tensors, dimensions, boundary_conditions and scalars; attributes state what varies.
"""

from typing import Any

from ups.common.lazy import np
from ups.userdata.readers import Store
from ups_discovery.boundary import NO_FLUX, OUTFLOW, PERIODIC

RANKS = {"t0_fields": 0, "t1_fields": 1, "t2_fields": 2}
ENDS = {"periodic": PERIODIC, "wall": NO_FLUX, "open": OUTFLOW}


def words(value: Any) -> list[str]:
    """The texts of an attribute, whatever their kind."""
    found = [] if value is None else np.asarray(value).ravel().tolist()
    return [one.decode(errors="replace") if isinstance(one, bytes) else str(one) for one in found]


def is_well(store: Store) -> bool:
    is_marked = "n_spatial_dims" in store.attributes()
    return is_marked and bool(words(store.attributes("dimensions").get("spatial_dims")))


def from_well(store: Store) -> dict[str, Any]:
    """The keys for a file of The Well. Raises ValueError for another file, or a grid that is not
    cartesian."""
    about, space = store.attributes(), store.plain(words(store.attributes("dimensions").get("spatial_dims")))
    grid = words([about.get("grid_type", "cartesian")])[0]
    if not is_well(store) or grid != "cartesian":
        what = f"a {grid} grid" if is_well(store) else "no dimensions/spatial_dims"
        raise ValueError(
            f"{store.path} has {what}; expected the layout of The Well on a cartesian grid. "
            "Write the arrays with their axes in place of layout: well."
        )
    layout = {}
    for group, rank in RANKS.items():
        for name in store.plain(words(store.attributes(group).get("field_names"))):
            place, attributes = f"{group}/{name}", store.attributes(f"{group}/{name}")
            varying = np.ravel(attributes.get("dim_varying", [True] * len(space)))
            axes = [
                word
                for word, varies in (("trajectory", "sample_varying"), ("time", "time_varying"))
                if attributes.get(varies, True)
            ]
            axes += [axis for axis, does in zip(space, varying, strict=True) if does] + ["component"] * rank
            layout[place] = {"axes": axes, "fields": [name]}
    ends = {axis: _end(store, axis) for axis in space}
    return {
        "layout": layout,
        "boundary": ends,
        "times": "dimensions/time",
        "parameters": _parameters(store, store.plain(words(about.get("simulation_parameters")))),
    }


def _end(store: Store, axis: str) -> str:
    """The boundary of an axis in a file of The Well; outflow if the file states none."""
    for name in store.group_names("boundary_conditions"):
        attributes = store.attributes(f"boundary_conditions/{name}")
        if axis in words(attributes.get("associated_dims")):
            return ENDS.get(words([attributes.get("bc_type", "open")])[0].lower(), OUTFLOW)
    return OUTFLOW


def _parameters(store: Store, names: list[str]) -> dict[str, str]:
    """The simulation's parameters that are numbers of a file or of a trajectory."""
    found = {}
    for name in names:
        array = store.array(f"scalars/{name}")
        varies = store.attributes(f"scalars/{name}").get("time_varying")
        if array is not None and len(array.shape) <= 1 and not varies:
            found[name] = f"scalars/{name}"
        elif array is None and name in store.attributes():
            found[name] = name
    return found
