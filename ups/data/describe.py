"""A section that declares a file of the user's, filled from what the file shows, with a question wherever it
cannot know: `python prepare_data.py --describe my.h5`."""

import itertools
import re
from pathlib import Path

import numpy as np

from ups.boundary import DIRICHLET, NO_FLUX, PERIODIC
from ups.config.foreign import from_pdebench, is_well
from ups.config.shown import TIMES, coordinate
from ups.stored import Store, Stored, open_store
from ups.tasks.own import JUMP, jumps

SPACE = ("x", "y", "z")
SMALL = 1e-3      # of a field's spread: what counts as nothing at a wall
COUNTS = ("coordinate", "grid/", "dimensions/")   # in names of arrays that are no fields


def describe_file(path: str) -> str:
    """The section as YAML.

    Raises ValueError or FileNotFoundError for a file that is none, or holds no field.
    """
    with open_store(path) as store:
        return "\n".join(_section(store))


def _section(store: Store) -> list[str]:
    name = re.sub(r"\W+|^(?=\d)", "_", Path(store.path).stem.lower()).strip("_") or "mine"
    pattern = _pattern(Path(store.path))
    head = ["# my_data.yaml: lines that end in ? are guesses; answer them.", "include: configs/small.yaml",
            f"data: {{tasks: [{name}], source: own}}", "task:", f"  {name}:", f'    files: "{pattern}"']
    if is_well(store):
        return [*head, "    layout: well   # arrays, axes, boundary, times and parameters as the file says"]
    if store.groups("*/data") and len(store.array(f"{store.groups('*/data')[0]}/data").shape) >= 3:
        layout = from_pdebench(store)["layout"]
        axes = {array: entry["axes"] for array, entry in layout.items()}
        sure = True
    else:
        fields = _fields(store)
        if not fields:
            raise ValueError(f"{store.path} holds {store.listing()}; expected a field, floating-point "
                             f"numbers with two axes or more. Name a file that holds one.")
        axes, sure = {}, True
        for array in fields:
            axes[array], is_sure = _axes(store, array)
            sure &= is_sure
    space = [axis for axis in dict.fromkeys(itertools.chain(*axes.values())) if axis not in
             ("trajectory", "time", "channel", "component")]
    lines = [*head, "    layout:"]
    for array, words in axes.items():
        shape = store.array(array.replace("*", (store.groups(array) or [""])[0])).shape
        note = "" if sure else (f"   # of shape {shape}: are these its axes, in order? trajectory, time, "
                                "channel, component (of a vector), x, y, z")
        lines.append(f"      {_quoted(array)}: [{', '.join(words)}]{note}")
    lines += _ends(store, axes, space)
    is_steady = all("time" not in words for words in axes.values())
    if is_steady:
        lines.append(f"    inputs: [{next(iter(axes))}]   # no array has an axis of time: which one is "
                     f"given?")
    found = None if is_steady else coordinate(store, [], TIMES)
    if not is_steady and found is None:
        lines.append("    dt: 1.0   # between stored frames? The file holds no times")
    lines += _about(store, axes)
    return lines


def _fields(store: Store) -> list[str]:
    """The arrays that may be fields: of floating-point numbers, with the most axes, and those with one less.
    """
    known = {name: store.array(name) for name in store.names()}
    fitting = {name: len(array.shape) for name, array in known.items()
               if array.dtype.kind == "f" and len(array.shape) >= 2 and not _is_place(name)}
    return [name for name, rank in fitting.items() if rank >= max(fitting.values()) - 1 and rank >= 2]


def _is_place(name: str) -> bool:
    """Whether an array's name is that of a coordinate."""
    return any(part in name for part in COUNTS)


def _axes(store: Store, array: str) -> tuple[list[str], bool]:
    """Words for the axes of an array, and whether the file tells them: by names, or by the lengths of its
    coordinates; else the usual order."""
    found = store.array(array)
    if found.axes:
        return [_word(axis) for axis in found.axes], all(_word(axis) in (*SPACE, "time", "trajectory")
                                                         for axis in found.axes)
    lengths = {axis: len(place[1]) for axis in SPACE if (place := coordinate(store, [], [axis]))}
    if times := coordinate(store, [], TIMES):
        lengths["time"] = len(times[1])
    by_length = _matched(found, lengths)
    if by_length:
        return by_length, True
    rank = len(found.shape)
    if rank > 3 and found.shape[-1] <= 3 and rank - 3 >= found.shape[-1]:
        return ["trajectory", "time", *SPACE[:rank - 3], "component"], False
    return (["trajectory", "time", *SPACE[:rank - 2]] if 3 <= rank <= 5 else
            ["trajectory", "x"] if rank == 2 else ["trajectory", "time", *SPACE, "component"]), False


def _word(axis: str) -> str:
    """What a name of an axis means."""
    lower = axis.lower()
    if lower in ("t", "time", "times", "frame", "frames"):
        return "time"
    if lower in ("trajectory", "sample", "samples", "batch", "b", "n", "run", "member", "trajectories"):
        return "trajectory"
    return "channel" if lower in ("c", "channel", "channels", "field", "variable") else axis


def _matched(array: Stored, lengths: dict[str, int]) -> list[str]:
    """The words of an array where each length belongs to one axis alone, and at most one axis is left, that
    of trajectories; else [].
    """
    if "x" not in lengths:
        return []
    words = []
    for size in array.shape:
        fitting = [axis for axis, length in lengths.items()
                   if length == size or (axis == "time" and length == size + 1)]
        if len(fitting) > 1 or (fitting and array.shape.count(size) > 1):
            return []
        words.append(fitting[0] if fitting else "trajectory")
    return words if words.count("trajectory") <= 1 and set(lengths) <= set(words) else []


def _ends(store: Store, axes: dict[str, list[str]], space: list[str]) -> list[str]:
    """Boundary and domain, guessed from the field."""
    array, words = next(iter(axes.items()))
    u, ends, domain = _sample(store, array, words), {}, {}
    for axis in space:
        at = words.index(axis) if axis in words else None
        if at is None:
            ends[axis] = PERIODIC
            continue
        spread = float(u.std()) or 1.0
        walls = max(float(np.abs(u.take(cell, at)).mean()) for cell in (0, -1))
        ends[axis] = DIRICHLET if walls < SMALL * spread else PERIODIC if jumps(u, at) < JUMP else NO_FLUX
        if coordinate(store, [], [axis]) is None:
            domain[axis] = [0.0, 1.0]
    shown = next(iter(ends.values())) if len({*ends.values()}) == 1 else "{" + ", ".join(
        f"{axis}: {end}" for axis, end in ends.items()) + "}"
    lines = [f"    boundary: {shown}   # as the ends of the field look: periodic, no_flux, dirichlet or "
             f"outflow?"]
    if domain:
        spans = ", ".join(f"{axis}: {span}" for axis, span in domain.items())
        lines.append(f"    domain: {{{spans}}}   # from where to where? The file holds no such coordinates")
    return lines


def _sample(store: Store, array: str, words: list[str]) -> np.ndarray:
    """The first trajectory of an array at its last frame, with its axes, float64."""
    name = array.replace("*", (store.groups(array) or [""])[0])
    index = tuple(slice(0, 1) if word == "trajectory" else slice(-1 + n, n) if word == "time" else slice(None)
                  for word, n in zip(words, store.array(name).shape, strict=True))
    return np.asarray(store.read(name, index), np.float64)


def _about(store: Store, axes: dict[str, list[str]]) -> list[str]:
    """Questions that no file answers, and numbers that may be parameters."""
    numbers = [key for key, value in store.attributes().items()
               if np.asarray(value).dtype.kind in "fiu" and np.asarray(value).size == 1]
    known = {name: store.array(name) for name in store.names()}
    lists = [name for name, array in known.items() if len(array.shape) == 1 and array.dtype.kind in "fiu"
             and name.rsplit("/", 1)[-1] not in (*TIMES, *SPACE) and not _is_place(name)]
    places = [(_quoted(name.rsplit("/", 1)[-1]), _quoted(name)) for name in (numbers + lists)[:3]]
    values = "{" + ", ".join(f"{name}: {place}" for name, place in places) + "}"
    first = next(iter(axes))
    return [*[f"    parameters: {values}   # does the equation depend on these?"] * bool(numbers or lists),
            f"    # positive: [{first}]       # always above zero, over orders of magnitude?",
            f"    # conserved: [{first}]      # is its mean over space kept?",
            "    # symmetries: [shift, mirror]   # is a shifted (along periodic axes), a mirrored solution a "
            "solution? Not of a forced flow"]


def _quoted(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z]\w*", name) else f'"{name}"'


def _pattern(path: Path) -> str:
    """The file, or where its name ends in a number and others do too, all of them."""
    stem = re.sub(r"\d+$", "*", path.stem)
    pattern = path.with_name(f"{stem}{path.suffix}")
    return str(pattern if "*" in stem and len(list(path.parent.glob(pattern.name))) > 1 else path)
