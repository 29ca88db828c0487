"""Offsets of fields whose mean dominates their variation, such as a pressure of 101325 Pa with waves of 0.01.

An offset, a round number near the mean, is subtracted in float64 before anything is cast to float32. Relative
errors are then relative to the variation. Without it float32 rounds the variation away, and an error relative
to the mean looks small for any forecast.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ups.common.lazy import np
from ups.tasks import Place
from ups.userdata.inspect_file import ConfigError, require_known
from ups.userdata.layout import Layout
from ups.userdata.masks import with_nan
from ups.userdata.readers import Store, open_store

# Mean over standard deviation from which the mean dominates: 99.6 % of the mean square. Twice the largest of
# PDEBench's fields (8.3, the height of shallow water), so that its definition of nRMSE holds for all of them.
DOMINANT = 16.0
ROUNDING = 1.0  # times the precision of the stored numbers: less variation than that is a constant
SAMPLES = 8  # trajectories of the sample, spread over all files
SAMPLED_CELLS = {1: 4096, 2: 128, 3: 32}  # per axis, of a sampled frame


def offsets(key: str, section: Mapping[str, Any], paths: Sequence[str], layout: Layout) -> dict[str, float]:
    """Field -> offset, of the fields that have one: from the section, else from a sample of the files.

    Fields whose logarithm is learnt (positive; the solution of a steady task with a prior) and components of
    vectors, which a mirror turns round, have none. Raises ValueError for an offset of what is no
    field, and for a positive field whose mean dominates.
    """
    given, fields = section["offset"], layout.fields
    require_known(f"{key}.offset", given, fields, "fields of the layout")
    found = {
        field: value
        for field, value in dominant(
            paths, layout.places, layout.axes, section["first_frame"], section["missing"]
        ).items()
        if field not in given and field not in section["vector"]
    }
    if positive := [field for field in found if field in section["positive"]]:
        raise ConfigError(
            f"{key}.positive: it names {positive[0]}, whose mean is about {found[positive[0]]:g} and more "
            f"than {DOMINANT:g} times its variation; expected fields that vary over orders of magnitude. "
            f"Leave {positive[0]} out of positive, and it is counted from that mean; or write offset: "
            f"{{{positive[0]}: 0}} to learn its logarithm all the same."
        )
    if layout.is_steady and section["reserve"]:  # its prior is of the logarithm of its solution
        found = {field: value for field, value in found.items() if field in section["inputs"]}
    return found | {name: float(value) for name, value in given.items() if value}


def dominant(
    paths: Sequence[str],
    places: Sequence[Place],
    axes: Sequence[str],
    first_frame: int = 0,
    missing: Sequence[str] = (),
) -> dict[str, float]:
    """Field -> its mean, rounded to a tenth of its variation, for fields whose mean dominates."""
    moments: dict[str, np.ndarray] = {}  # field -> numbers, sum and sum of squares about the first, that one
    precision = dict.fromkeys((field for place in places for field in place.fields), 0.0)
    some = [paths[i] for i in sorted({round(i) for i in np.linspace(0, len(paths) - 1, SAMPLES)})]
    for path in some:
        with open_store(path) as store:
            for place in places:
                count = max(1, SAMPLES // len(some))
                for values in sampled_frames(store, place, axes, count, first_frame, missing):
                    for field, u in zip(place.fields, values, strict=True):
                        precision[field] = max(precision[field], float(np.finfo(u.dtype).eps))
                        u = np.asarray(u, np.float64)
                        u = u[np.abs(u) < 1e150]  # beyond it squares overflow
                        if u.size:
                            shift = moments[field][3] if field in moments else u[0]
                            moments[field] = moments.get(field, 0) + np.array(
                                [u.size, (u - shift).sum(), np.square(u - shift).sum(), 0.0]
                            )
                            moments[field][3] = shift
    found = {}
    for field, (num, first, second, shift) in moments.items():
        mean, std = shift + first / num, math.sqrt(max(0.0, second / num - (first / num) ** 2))
        if abs(mean) >= DOMINANT * std > 0 and std > ROUNDING * precision[field] * abs(mean):
            found[field] = float(round(mean, 1 - math.floor(math.log10(std))))
    return found


def sampled_frames(
    store: Store,
    place: Place,
    axes: Sequence[str],
    count: int,
    first_frame: int = 0,
    missing: Sequence[str] = (),
) -> "Iterator[np.ndarray]":
    """Some frames (fields, cells) of `count` trajectories of an array; none if the file has no such array."""
    names = store.runs(place.array)
    for name in (names[number] for number in _some(len(names), count)):
        stored = store.array(name)
        if stored is None or len(stored.shape) != len(place.axes) or stored.dtype.kind not in "fiub":
            continue
        sizes = dict(zip(place.axes, stored.shape, strict=True))
        frames = range(min(first_frame, sizes.get("time", 1) - 1), sizes.get("time", 1))
        for number in _some(sizes.get("trajectory", 1), 1 if len(names) > 1 else count):
            for frame in _some(len(frames), 3):
                at = {
                    "trajectory": slice(number, number + 1),
                    "time": slice(frames[frame], frames[frame] + 1),
                }
                step = {axis: -(-sizes[axis] // SAMPLED_CELLS[len(axes)]) for axis in axes if axis in sizes}
                index = tuple(at.get(axis, slice(None, None, step.get(axis))) for axis in place.axes)
                block = with_nan(np.asarray(store.read(name, index)), missing)
                inner = sorted(
                    (i for i, axis in enumerate(place.axes) if axis in ("channel", "component")),
                    key=lambda i: place.axes[i],
                )
                yield np.moveaxis(block, inner, range(len(inner))).reshape(len(place.fields), -1)


def _some(num: int, count: int) -> list[int]:
    """At most `count` of `num` places, spread from the first to the last."""
    return sorted({round(i) for i in np.linspace(0, num - 1, count)}) if num else []
