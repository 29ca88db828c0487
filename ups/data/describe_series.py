"""Arrays of a file that hold one number a frame beside its fields: what may be known in advance."""

from ups.config.shown import TIMES, is_even
from ups.config.words import WORDS, meant
from ups.lazy import np
from ups.stored import Store


def series_of(store: Store, axes: dict[str, list[str]]) -> dict[str, list[str]]:
    """Array -> its words, [time] or [trajectory, time], of those that are as long as the fields in `axes`
    have frames, and no coordinate. Of lengths alone those count that no axis of space has."""
    main = max(axes, key=lambda name: len(axes[name]))
    shape = store.array(main.replace("*", (store.groups(main) or [""])[0])).shape
    sizes = dict(zip(axes[main], shape, strict=True))
    space = {size for axis, size in sizes.items() if axis not in WORDS}
    if "time" not in sizes or not space or "*" in main:
        return {}
    found = {}
    for name in store.names():
        array = store.array(name)
        if name == main or array.dtype.kind != "f" or name.rsplit("/", 1)[-1] in (*TIMES, *array.axes):
            continue
        words = [meant(axis) for axis in array.axes] or ["trajectory", "time"][2 - len(array.shape):]
        lengths = {"trajectory": sizes.get("trajectory"), "time": sizes["time"]}
        fits = words in (["time"], ["trajectory", "time"]) and len(words) == len(array.shape) and all(
            lengths[word] == size for word, size in zip(words, array.shape, strict=True))
        is_sure = array.axes or sizes["time"] not in {*space, sizes.get("trajectory")}
        if fits and is_sure and not (words == ["time"] and is_even(np.asarray(store.read(name)))):
            found[name] = words
    return found
