"""Arrays of a file that hold one number a frame beside its fields: what may be known in advance."""

from ups.common.lazy import np
from ups.userdata.axis_names import WORDS, meant
from ups.userdata.inspect_file import TIMES, is_even
from ups.userdata.patterns import in_groups
from ups.userdata.readers import Store


def series_of(store: Store, axes: dict[str, list[str]]) -> dict[str, list[str]]:
    """Array -> its words, [time] or [trajectory, time], of those that are as long as the fields in `axes`
    have frames, and no coordinate. Of lengths alone those count that no axis of space has."""
    main = max(axes, key=lambda name: len(axes[name]))
    sizes = dict(zip(axes[main], store.array(store.first(main)).shape, strict=True))
    space = {size for axis, size in sizes.items() if axis not in WORDS}
    if "time" not in sizes or not space:
        return {}
    found = {}
    for name in in_groups(store, list(store.names())):
        array = store.array(store.first(name))
        if name == main or array.dtype.kind != "f" or name.rsplit("/", 1)[-1] in (*TIMES, *array.axes):
            continue
        words = [meant(axis) for axis in array.axes] or ["trajectory", "time"][2 - len(array.shape) :]
        is_series = words in (["time"], ["trajectory", "time"]) and len(words) == len(array.shape)
        fits = is_series and all(
            sizes.get(word) == size for word, size in zip(words, array.shape, strict=True)
        )
        is_sure = array.axes or sizes["time"] not in {*space, sizes.get("trajectory")}
        values = np.asarray(store.read(store.first(name))) if fits and is_sure else np.zeros(0)
        if values.size and not (words == ["time"] and is_even(values)):
            found[name] = words
    return found
