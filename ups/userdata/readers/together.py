"""Several files as one: each holds other fields of the same runs, as in archives of climate data."""

import contextlib
import re
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ups.common.files import TOGETHER
from ups.userdata.readers.store import Store, Stored

MOST = 2**16  # numbers of a coordinate; longer ones are not compared
STEP_TOLERANCE = 1e-3  # of its step, by which coordinates may differ


class Together(Store):
    """The arrays of several open files. If two files hold arrays of one name, 1/NAME is the array of the
    first file, and so on. Raises ValueError if coordinates that they share differ.
    """

    def __init__(self, paths: Sequence[Path], opened: Callable[[Path], Store]):
        super().__init__(Path(TOGETHER.join(map(str, paths))))
        with contextlib.ExitStack() as stack:
            self.stores = [stack.enter_context(opened(path)) for path in paths]
            self._require_one_grid()
            self.open_files = stack.pop_all()

    def close(self) -> None:
        self.open_files.close()

    @cached_property
    def holding(self) -> dict[str, list[int]]:
        """Name of an array -> the places of the files that hold it. A single array has the name of its file,
        without numbers at the end."""
        found: dict[str, list[int]] = {}
        for number, store in enumerate(self.stores):
            for name in store.names():
                if store.is_single:
                    name = re.sub(r"[\W_]*\d+(\.real|\.imag)?$", r"\1", name)
                found.setdefault(name, []).append(number)
        return found

    def _names(self) -> list[str]:
        found = []
        for name, numbers in self.holding.items():
            is_alone = len(numbers) == 1
            found += [
                name if is_alone or len(self.stores[number].array(name).shape) < 2 else f"{number + 1}/{name}"
                for number in numbers
            ]
        return list(dict.fromkeys(found))

    def _holding(self, name: str) -> tuple[Store, str] | None:
        """The file that holds an array, and the array's name there."""
        number, _, inside = name.partition("/")
        if number.isdigit() and 0 < int(number) <= len(self.stores) and inside:
            store = self.stores[int(number) - 1]
            if store.array(inside) is not None:
                return store, inside
        return (self.stores[self.holding[name][0]], name) if name in self.holding else None

    def _array(self, name: str) -> Stored | None:
        found = self._holding(name)
        return None if found is None else found[0].array(found[1])

    def _read(self, name: str, index: tuple) -> np.ndarray:
        store, inside = self._holding(name)
        return store.read(inside, index)

    def _require_whole(self, name: str) -> None:
        store, inside = self._holding(name)
        store.require_whole(inside)

    def attributes(self, name: str = "") -> dict[str, Any]:
        if name:
            found = self._holding(name)
            return {} if found is None else found[0].attributes(found[1])
        return {key: value for store in reversed(self.stores) for key, value in store.attributes().items()}

    def group_names(self, group: str) -> list[str]:
        return list(dict.fromkeys(name for store in self.stores for name in store.group_names(group)))

    def _require_one_grid(self) -> None:
        first: dict[str, tuple[Store, np.ndarray, str]] = {}
        for store in self.stores:
            for name in () if store.is_single else store.names():
                shape = store.array(name).shape
                if len(shape) != 1 or shape[0] > MOST or store.array(name).dtype.kind not in "fiu":
                    continue
                values = np.asarray(store.read(name), np.float64)
                unit = str(store.attributes(name).get("units", ""))
                other, expected, other_unit = first.setdefault(name, (store, values, unit))
                step = np.abs(np.diff(expected)).min(initial=np.inf)
                allowed = (
                    STEP_TOLERANCE * step
                    if np.isfinite(step)
                    else STEP_TOLERANCE * np.abs(expected).max(initial=0)
                )
                is_same = (unit, values.shape) == (other_unit, expected.shape)
                if not (is_same and (np.abs(values - expected) <= allowed).all()):
                    raise ValueError(
                        f"{name} of {store.path} is {_in_words(values, unit)}, and of {other.path} "
                        f"{_in_words(expected, other_unit)}; expected the same, as files that go together "
                        "hold fields "
                        "of the same runs. Correct the patterns of files, or cut or resample some."
                    )


def _in_words(values: np.ndarray, unit: str) -> str:
    ends = f" from {values[0]:g} to {values[-1]:g}" * bool(len(values))
    return f"{len(values)} numbers{ends}{f' {unit}' * bool(unit)}"
