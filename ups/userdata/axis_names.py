"""The words for the axes of an array that a configuration declares, and whether they are the file's."""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ups.tasks import Place
from ups.userdata.inspect_file import coordinate, wrong

if TYPE_CHECKING:
    from ups.userdata.readers import Store

WORDS = ("trajectory", "time", "channel", "component", "single")  # of axes; any other is one of space
# what these words are called elsewhere: none of them is an axis of space
CALLED = {
    "t": "time",
    "times": "time",
    "frame": "time",
    "frames": "time",
    "sample": "trajectory",
    "samples": "trajectory",
    "batch": "trajectory",
    "run": "trajectory",
    "member": "trajectory",
    "traj": "trajectory",
    "trajectories": "trajectory",
    "b": "trajectory",
    "n": "trajectory",
    "case": "trajectory",
    "ensemble": "trajectory",
    "realization": "trajectory",
    "seed": "trajectory",
    "realisation": "trajectory",
    "simulation": "trajectory",
    "sim": "trajectory",
    "channels": "channel",
    "c": "channel",
    "field": "channel",
    "variable": "channel",
    "var": "channel",
    "fields": "channel",
    "variables": "channel",
    "vars": "channel",
    "components": "component",
    "comp": "component",
    "vector": "component",
    "vec": "component",
}
SPACE = {
    *"xyzrs",
    "lat",
    "lon",
    "latitude",
    "longitude",
    "theta",
    "phi",
    "depth",
    "height",
    "level",
    "row",
    "column",
    "i",
    "j",
    "k",
}  # usual names of axes of space; others need a domain of their own


def meant(axis: str) -> str:
    """What a name of an axis means."""
    return CALLED.get(axis.lower(), axis.lower() if axis.lower() in WORDS else axis)


def check_words(
    key: str, said: Mapping[str, Any], places: Sequence[Place], axes: Sequence[str], store: "Store"
) -> None:
    """That no word stands for another axis than the file's own name of it, an axis of an unusual name has a
    domain or coordinates of its own, and components along axes out of the order x, y, z are named."""
    for place in places:
        array = store.first(place.array)
        for word, stored in zip(place.axes, store.array(array).axes, strict=False):
            name = meant(stored).lower()
            if name != word.lower() and name in {axis.lower() for axis in place.axes}:
                raise wrong(
                    f"{key}.layout.{place.array}",
                    f"the file calls {stored} what it calls {word}",
                    f"the order in which {store.path} has its axes, {', '.join(store.array(array).axes)}",
                    "Correct the order of the words.",
                )
        is_turned = {*axes} <= {*"xyz"} and [*axes] != sorted(axes)
        if "component" in place.axes and is_turned and not said["vector"]:
            names = [f"{place.fields[0]}_{axis}" for axis in axes]
            raise wrong(
                f"{key}.layout.{place.array}",
                f"its axes are stored in the order {', '.join(axes)}, "
                "and nothing says whether its components are, too",
                "a name for each component",
                f"Write fields: {sorted(names)} in the order in which they are stored, and "
                f"{key}.vector: {names}, the component along each axis.",
            )
    strange = [axis for axis in axes if axis.lower() not in SPACE and not re.fullmatch(r"[xyz]_?\d?", axis)]
    if (
        strange
        and len(axes) > 1
        and not isinstance(said["domain"], Mapping)
        and coordinate(store, places, [strange[0]]) is None
    ):
        raise wrong(
            f"{key}.layout",
            f"it names an axis {strange[0]!r} beside {axes[axes[0] == strange[0]]}",
            "trajectory, time, channel, component, or an axis of space with a domain of its own",
            f"Correct the word, or write domain: {{{strange[0]}: [0, 1], ..}}.",
        )
