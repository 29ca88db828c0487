"""What --describe refuses with the lines of Python that convert it: scenes of PhiFlow, frames that lie apart,
staggered grids and uneven steps. Names of a file stand in these lines as literals of Python (repr)."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from glob import escape
from itertools import islice, permutations
from pathlib import Path

import numpy as np

from ups.userdata.describe_axes import MOST_FIELDS, NUMBER, Guess, are_alike, fields_of, require_few
from ups.userdata.describe_coordinates import lists_of
from ups.userdata.describe_files import pattern_of, sibling_files
from ups.userdata.describe_lines import Line
from ups.userdata.inspect_file import rises
from ups.userdata.layout import field_of
from ups.userdata.readers import Store

FEWEST = 3  # frames of a film
FRAMES = 8  # arrays of one shape whose names count them: more than the fields or species of a system
# what stands before the number of a frame, and the names of its time
COUNTED = re.compile(r"t|time\w*?|frames?|steps?|snap\w*?|iter\w*?|it|cycle|dump|output|plt", re.IGNORECASE)
TIME = re.compile(r"(sim\w*_)?(t|time)", re.IGNORECASE)
# the points of an axis, behind its name: xC and xF or x_caa and x_faa (Oceananigans), XC and XG (MITgcm),
# xi_rho and xi_u (ROMS), xh and xq (MOM6), west_east and west_east_stag (WRF)
CENTRE = r"C|c|h|rho|[ac]{3}|center|centre"
FACE = r"F|f|G|g|q|U|u|V|v|w|l|psi|[af]{3}|face|edge|inner|outer|left|right|stag"
POINT = re.compile(rf"(?P<axis>\w+?)_?(?:(?P<centre>{CENTRE})|(?P<face>{FACE}))")
SAME = {"xi_v": "xi_rho", "eta_u": "eta_rho"}  # ROMS: other names of the same points


def require_films(store: Store) -> None:
    """Raise ValueError, with the lines that convert it, for a file that holds its frames apart, an array for
    each time, or fields on a staggered grid whose axes have names."""
    require_few(store, [NUMBER.sub("#", name) for name in store.first_names()])  # before all are looked at
    if {"data", "dim_names", "dim_types"} <= {*store.names()}:
        raise ValueError(_scene_words(Path(store.path)))
    if words := _frames_words(store):
        raise ValueError(words)
    require_few(store, store.names())
    if words := _staggered_words(store):
        raise ValueError(words)


def require_no_scene(path: Path) -> None:
    """Raise ValueError, with the lines that convert it, for a scene of PhiFlow, or a file in one."""
    folder = path if path.is_dir() else path.parent
    is_frame = path.is_dir() or re.search(r"_\d+\.npz$", path.name)
    if is_frame and (folder / "description.json").is_file() and any(folder.glob("*_[0-9]*.npz")):
        raise ValueError(_scene_words(path))


def _scene_words(path: Path) -> str:
    folder = (path if path.is_dir() else path.parent).resolve()
    frames = [re.fullmatch(r"(.+)_\d+\.npz", file.name) for file in folder.iterdir()]
    fields = sorted({one[1] for one in frames if one})
    scenes = NUMBER.sub("*", folder.name) if (folder / "description.json").is_file() else folder.name
    lines = [
        "import pathlib, numpy",
        "fields = {}",
        f"for name in {fields}:",
        f"    scenes = sorted(pathlib.Path({str(folder.parent)!r}).glob({scenes!r}))",
        "    runs = [sorted(scene.glob(name + '_[0-9]*.npz')) for scene in scenes]",
        "    about = numpy.load(runs[0][0])",
        "    axes, space = [*about['dim_names']], [*about['dim_names'][about['dim_types'] == 'spatial']]",
        "    u = numpy.stack([[numpy.load(path)['data'] for path in run] for run in runs])",
        "    u = numpy.moveaxis(u, 2 + axes.index('vector'), 0) if 'vector' in axes else u[None]",
        "    for number, part in enumerate(u):",
        "        if str(about.get('field_type')) == 'StaggeredGrid':  # from faces to centres",
        "            part = (part + numpy.roll(part, -1, 2 + number)) / 2",
        "            part = part[(slice(None), slice(None)) + (slice(-1),) * len(space)]",
        "        fields[name + '_' + space[number] if len(u) > 1 else name] = part if runs[1:] else part[0]",
        "    if 'lower' in about:",
        "        for axis, low, high, n in zip(space, about['lower'], about['upper'], part.shape[2:]):",
        "            fields[axis] = low + (high - low) * (numpy.arange(n) + 0.5) / n",
        f"numpy.savez({_written(folder)!r}, **fields)",
    ]
    return (
        f"{path} is {'a scene' if path.is_dir() else 'one frame of a scene'} of PhiFlow; expected the frames "
        f"of a run in one array, which numpy.load(path)['data'] of each are. "
        f"{_text(folder, lines)}"
    )


def _written(path: Path, suffix: str = "npz") -> str:
    return f"{path.stem}_converted.{suffix}"


def _text(path: Path, lines: Iterable[str], suffix: str = "npz") -> str:
    code = "\n".join(f"    {line}" for line in lines)
    return f"Run these lines in Python, and describe {_written(path, suffix)}:\n{code}"


def _converting(path: Path, lines: Iterable[str], suffix: str = "npz") -> str:
    """The lines in words, for all files whose names differ in numbers."""
    opening, *lines = lines
    if len(sibling_files(path)) > 1:
        pattern = "*".join(map(escape, Path(pattern_of(path)[0]).name.split("*")))
        loop = f"for path in sorted(pathlib.Path({str(path.parent)!r}).glob({pattern!r})):"
        opening, lines = f"{opening}, pathlib", [loop, *(f"    {line}" for line in lines)]
    return _text(path, (opening, *lines), suffix)


def _expressions(path: Path, suffix: str = "npz") -> tuple[str, str]:
    """(Python expression of the path of the file, of the path of the converted one) for `_converting`."""
    if len(sibling_files(path)) > 1:
        return "path", f"path.stem + '_converted.{suffix}'"
    return repr(str(path)), repr(_written(path, suffix))


def _opening(path: Path) -> list[str]:
    """The lines that open a file, as UPS does."""
    opened = f"file = ups.userdata.readers.open_store({_expressions(path)[0]})"
    return ["import re, numpy, ups.userdata.readers", opened]


def _saving(path: Path, entries: Mapping[str, str]) -> list[str]:
    """The lines that write arrays, by their expressions."""
    named = [f"    {name!r}: {value}," for name, value in entries.items()]
    return [f"numpy.savez({_expressions(path)[1]}, **{{", *named, "})"]


@dataclass(frozen=True)
class Series:
    """Arrays whose names differ in a number: number -> name, which is head, number and tail."""

    head: str
    tail: str
    names: dict[str, str]

    @property
    def key(self) -> str:
        key = field_of(self.tail.replace("/", "_") or self.head.rstrip("/"))
        return "u" if not self.tail and COUNTED.fullmatch(key) and self.head[-1:] != "/" else key

    @property
    def is_counted(self) -> bool:
        """Whether the word before the number is one for frames."""
        return bool(re.search(rf"(^|[\W_])({COUNTED.pattern})[\W_]*$", self.head, re.IGNORECASE))

    def place(self, number: str = "n") -> str:
        return " + ".join(
            [*[repr(self.head)] * bool(self.head), number, *[repr(self.tail)] * bool(self.tail)]
        )

    def of_all(self, what: str = "file.whole({})") -> str:
        return f"numpy.stack([{what.format(self.place())} for n in numbers])"


def _series(names: Iterable[str]) -> list[Series]:
    found: dict[tuple[str, str], dict[str, str]] = {}
    for name in names:
        for match in NUMBER.finditer(name):
            found.setdefault((name[: match.start()], name[match.end() :]), {})[match[0]] = name
    return sorted((Series(*form, names) for form, names in found.items()), key=lambda one: -len(one.names))


def saved_times(store: Store, fields: Iterable[str]) -> list[Line]:
    """A question, with the lines that stack them, where the fields of a file may be saved times of one: three
    or more of one shape whose names differ in a number."""
    for frames in (series := _series(fields)):
        names = [*frames.names.values()]
        if len(names) >= FEWEST and len({store.array(name).shape for name in names}) == 1:
            beside = [one for one in series if one.names.keys() == frames.names.keys()]
            what = f"or are {', '.join(names[:2])}, .. one field at {len(names)} saved times?"
            text = f"{what} {_stacking(store, frames, beside, _times(store, frames, beside))}"
            return [Line(note=line) for line in text.split("\n")]
    return []


def _frames_words(store: Store) -> str:
    """The refusal of a file with an array for each time, "" for another."""
    series = _series(store.names())
    for frames in series[:MOST_FIELDS]:
        shapes = {store.array(name).shape for name in frames.names.values()}
        beside = [one for one in series if one.names.keys() == frames.names.keys()]
        if len(frames.names) < FEWEST or len(shapes) > 1 or max(*shapes.pop(), 1, 1) == 1:
            continue
        times = _times(store, frames, beside)
        if times or _are_frames(store, frames, beside):
            first, second, *_ = frames.names.values()
            shape = store.array(first).shape
            pattern = f"{frames.head}*{frames.tail}"
            runs = f" If each is a run: layout: {{{pattern!r}: [time, x]}}." * (len(shape) > 1)
            return (
                f"{store.path} holds {len(frames.names)} arrays {first}, {second}, .. of shape {shape}; "
                f"expected one with an axis of time, which numpy.stack makes of frames.{runs} "
                f"{_stacking(store, frames, beside, times)}"
            )
    return ""


def _are_frames(store: Store, frames: Series, beside: Sequence[Series]) -> bool:
    """Whether the names, or the numbers, tell that each array is a frame; those in groups may be runs."""
    if any(TIME.fullmatch(one.key) for one in beside):  # each run has its times
        return False
    if frames.is_counted:
        return True
    if frames.tail.startswith("/") or len(frames.names) < FRAMES:
        return False
    first = [np.asarray(store.read(name), np.float64) for name in islice(frames.names.values(), FRAMES)]
    return bool(frames.head) or are_alike(np.stack(first))


def _times(store: Store, frames: Series, beside: Sequence[Series]) -> dict[str, str]:
    """The expression of the times of frames: numbers or attributes beside them, or those in their names."""
    group = frames.tail.startswith("/")
    for one in beside:
        if TIME.fullmatch(one.key) and all(
            store.array(name).shape in ((), (1,)) for name in one.names.values()
        ):
            return {"t": f"{one.of_all()}.ravel()"}
    holder = Series(frames.head, "", {n: f"{frames.head}{n}" for n in frames.names}) if group else frames
    numbers = sorted(frames.names, key=float)
    for key in filter(TIME.fullmatch, store.attributes(holder.names[numbers[0]])):
        about = (store.attributes(holder.names[number]) for number in numbers)
        values = [np.asarray(one.get(key, np.nan)) for one in about]
        if all(value.size == 1 and value.dtype.kind in "fiu" for value in values):
            if rises(np.asarray([value.reshape(-1)[0] for value in values])):
                return {"t": f"{holder.of_all(f'file.attributes({{}})[{key!r}]')}.ravel()"}
    if frames.is_counted and any("." in number for number in numbers):
        return {"t": "[float(n) for n in numbers]"}
    return {}


def _stacking(store: Store, frames: Series, beside: Sequence[Series], times: Mapping[str, str]) -> str:
    path, entries = Path(store.path), dict(times)
    for one in beside:
        array = store.array(first := next(iter(one.names.values())))
        if math.prod(array.shape) == 1 or len({store.array(name).shape for name in one.names.values()}) > 1:
            continue
        values = (
            np.asarray(store.read(first)).reshape(-1) if max(array.shape) == math.prod(array.shape) else ()
        )
        is_list = one.tail and len(values) and (rises(values) or rises(values[::-1]))
        key = one.key if one.key not in entries else field_of(f"{one.head}{one.tail}".replace("/", "_"))
        entries[key] = f"file.whole({one.place('numbers[0]')})" if is_list else one.of_all()
    lists = lists_of(store, {name for one in beside for name in one.names.values()})
    others = {field_of(name): f"file.whole({name!r})" for name in lists}
    pattern = f"{re.escape(frames.head)}([0-9.]+){re.escape(frames.tail)}"
    lines = [
        *_opening(path),
        f"found = [re.fullmatch({pattern!r}, name) for name in file.names()]",
        "numbers = sorted((one[1] for one in found if one), key=float)",
        *_saving(path, {**others, **entries}),
    ]
    return _converting(path, lines)


def _staggered_words(store: Store) -> str:
    """The refusal of fields along axes whose names tell centres from faces, "" for others."""
    fields = [name for name in fields_of(store) if len(store.first_array(name).axes) > 1 and "*" not in name]
    sizes = {
        axis: size
        for name in fields
        for axis, size in zip(store.array(name).axes, store.array(name).shape, strict=True)
    }
    if not (pairs := _centres_of(sizes)):
        return ""
    path = Path(store.path)
    inner = {pairs[face] for face in pairs if sizes[face] < sizes[pairs[face]] and face not in SAME}
    opened, written = _expressions(path, "nc")
    lines = ["import xarray", f"file = xarray.open_dataset({opened}, decode_times=False)", "fields = {}"]
    for name in fields:
        value = f"file[{name!r}]"
        for axis in store.array(name).axes:
            if axis in inner or (axis in SAME and pairs[axis] in inner):
                value += f".isel({{{axis!r}: slice(1, -1)}})"
            if axis not in pairs:
                continue
            if axis not in SAME:
                is_periodic = sizes[axis] == sizes[pairs[axis]]
                value += f".pad({{{axis!r}: (0, 1)}}, mode='wrap')" * is_periodic
                value += f".rolling({{{axis!r}: 2}}).mean().isel({{{axis!r}: slice(1, None)}})"
            value += f".drop_vars({axis!r}, errors='ignore').rename({{{axis!r}: {pairs[axis]!r}}})"
        lines.append(f"fields[{name!r}] = {value}")
    lines.append(f"xarray.Dataset(fields).to_netcdf({written})")
    face, centre = next(iter(pairs.items()))
    wraps = any(sizes[face] == sizes[pairs[face]] for face in pairs if face not in SAME)
    walls = " If the axis is not periodic, write mode='edge' in place of 'wrap'." * wraps
    return (
        f"{path} holds fields along {centre} and others along {face}, a staggered grid; expected all at the "
        f"same points, the means (rolling) of neighbours.{walls} {_converting(path, lines, 'nc')}"
    )


def _centres_of(sizes: Mapping[str, int]) -> dict[str, str]:
    """Axis of faces -> axis of the centres between them, of those that a file names."""
    found = {face: centre for face, centre in SAME.items() if {face, centre} <= {*sizes}}
    for centre, face in permutations(sizes, 2):
        one, other = POINT.fullmatch(centre), POINT.fullmatch(face)
        is_centre = centre == (other and other["axis"]) or (
            one and other and one["centre"] and one["axis"] == other["axis"]
        )
        if is_centre and other["face"] and abs(sizes[centre] - sizes[face]) <= 1:
            found.setdefault(face, centre)
    return found


def require_same_points(guess: Guess) -> None:
    """Raise ValueError, with the lines that convert it, for arrays of which some have a cell more along an
    axis of space: a staggered grid without names."""
    store, path = guess.store, Path(guess.store.path)
    shapes = {array: dict(zip(words, guess.shape(array), strict=True)) for array, words in guess.axes.items()}
    least = {axis: min(shape[axis] for shape in shapes.values() if axis in shape) for axis in guess.space}
    longer = {
        array: [axis for axis in guess.space if shape.get(axis, 0) == least[axis] + 1]
        for array, shape in shapes.items()
    }
    differ = [shape[axis] - least[axis] for shape in shapes.values() for axis in guess.space if axis in shape]
    if not any(longer.values()) or {*differ} - {0, 1} or any("*" in array for array in shapes):
        return
    faces = {least[axis] + 1 for axes in longer.values() for axis in axes}
    lists = {
        field_of(name): f"file.whole({name!r})"
        for name, values in lists_of(store, guess.axes).items()
        if len(values) not in faces or len(values) in shapes[guess.array].values()
    }
    fields = {
        field_of(array): f"centred(file.whole({array!r}), {[guess.axes[array].index(axis) for axis in axes]})"
        for array, axes in longer.items()
    }
    lines = [
        *_opening(path),
        "def centred(u, axes):",
        "    for axis in axes:  # means of neighbours",
        "        n = u.shape[axis]",
        "        u = (u.take(range(n - 1), axis) + u.take(range(1, n), axis)) / 2",
        "    return u",
        *_saving(path, lists | fields),
    ]
    [(array, axes), *_] = [(array, axes) for array, axes in longer.items() if axes]
    raise ValueError(
        f"{path} holds {array} on {least[axes[0]] + 1} points along {axes[0]} and others on "
        f"{least[axes[0]]}, a staggered grid; expected all at the same points, the means of neighbours. "
        f"{_converting(path, lines)}"
    )


def resampling(guess: Guess, axis: str, name: str) -> str:
    """The lines that interpolate the fields of a file to equal steps along an axis."""
    fields = {
        field_of(array): f"interp1d(x, file.whole({array!r}), axis={words.index(axis)})(even)"
        for array, words in guess.axes.items()
        if axis in words
    }
    places = {word: found for word, (found, _) in guess.coordinates.items() if word != axis}
    places |= {"t": guess.names["time"]} if "time" in guess.names else {}
    kept = {word: f"file.whole({found!r})" for word, found in places.items()}
    path = Path(guess.store.path)
    lines = [
        *_opening(path),
        "from scipy.interpolate import interp1d",
        f"x = file.whole({name!r}).ravel()",
        "even = numpy.linspace(x.min(), x.max(), x.size)",
        *_saving(path, kept | fields | {axis: "even"}),
    ]
    return _converting(path, lines) * ("*" not in guess.array)
