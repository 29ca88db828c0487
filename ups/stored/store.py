"""What every kind of file gives: its arrays by name, their sizes, parts of them, and attributes."""

import fnmatch
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from zipfile import BadZipFile

import numpy as np

MOST_CHUNK_BYTES = 2**28
MOST_RATIO = 500   # of an array to what is stored of it; fields have 1 to 20, zeros 1000
PACKED = {"scale_factor": 1.0, "add_offset": 0.0}   # attribute -> what it is where it is not said


@dataclass(frozen=True)
class Stored:
    """One array of a file. axes: the names of its axes where the file tells them, else (). is_whole: no part
    of it was left unwritten.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    axes: tuple[str, ...] = ()


def require_unpackable(path: Path, name: str, chunk: int, whole: int = 0, stored: int = 0) -> None:
    """Raise ValueError for a compressed array of which one chunk, which is read whole, or all of them are far
    more bytes than a field needs."""
    if chunk > MOST_CHUNK_BYTES:
        raise ValueError(f"{path} holds {name} in compressed chunks of {chunk / 2**20:.0f} MiB; expected at "
                         f"most {MOST_CHUNK_BYTES // 2**20}, as a chunk is read whole. Write it in smaller "
                         "ones.")
    if whole > max(MOST_CHUNK_BYTES, MOST_RATIO * stored):
        raise ValueError(f"{path} holds {name} of {whole / 2**20:.0f} MiB in {stored / 2**20:.3g}; expected "
                         f"a field, which compresses to no less than 1/{MOST_RATIO}. Write what varies.")


def natural(name: str) -> list:
    """A key that sorts frame_2 before frame_10."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name)]


def decoded(values: np.ndarray, about: Mapping[str, Any], fill: float | None = None) -> np.ndarray:
    """The numbers that packed ones stand for, by the attributes of their array (CF conventions, section 8.1
    and 2.5.1): those that are missing are NaN. fill: what stands for a missing one where no attribute says
    so."""
    missing = [number for name in ("_FillValue", "missing_value") if name in about
               for number in np.asarray(about[name]).reshape(-1)]
    missing += [fill] if fill is not None and not missing else []
    scale, offset = (np.asarray(about.get(name, usual)) for name, usual in PACKED.items())
    is_packed = any(name in about for name in PACKED)
    if values.dtype.kind not in "fiu" or not (missing or is_packed):
        return values
    lost = np.isin(values, np.asarray(missing, values.dtype)) if missing else np.zeros((), bool)
    if not (is_packed or lost.any()):
        return values
    out = values.astype(np.result_type(values.dtype, np.float32))
    out = out * scale.reshape(-1)[0] + offset.reshape(-1)[0] if is_packed else out
    return np.where(lost, out.dtype.type(np.nan), out) if lost.any() else out


class Store:
    """An open file. names(): of all its arrays; groups(pattern): what * stands for in a name such as
    "*/data"; array(name), or None; read(name, index) with an integer or slice per axis; attributes of the
    file; attribute of an object: attribute("group@name").
    """

    is_single = False   # one array, which goes by any name

    def __init__(self, path: Path):
        self.path = path

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Nothing, where nothing is held open."""

    def names(self) -> list[str]:
        raise NotImplementedError

    def array(self, name: str) -> Stored | None:
        raise NotImplementedError

    def read(self, name: str, index: tuple = ()) -> np.ndarray:
        raise NotImplementedError

    def attributes(self, name: str = "") -> dict[str, Any]:
        """Of the file, or of the array or group `name`."""
        return {}

    def groups(self, pattern: str) -> list[str]:
        """The names that stand for * in `pattern`, in natural order."""
        head, _, tail = pattern.partition("*")
        fitting = fnmatch.filter(self.names(), pattern)
        return sorted({name[len(head):len(name) - len(tail)] for name in fitting}, key=natural)

    def group_names(self, group: str) -> list[str]:
        """What lies directly in a group."""
        return []

    def value(self, place: str) -> Any:
        """The number or array at `place`: an attribute of the file, "name@attribute" of an object, or an
        array. None where there is none of these.
        """
        name, is_attribute, key = place.partition("@")
        if is_attribute:
            return self.attributes(name).get(key)
        found = self.attributes().get(place)
        return found if found is not None else self.read(place) if self.array(place) else None

    def listing(self, most: int = 8) -> str:
        """What the file holds, in words."""
        names = self.names()
        shown = [f"{name} {self.array(name).shape}" for name in names[:most]]
        return f"{', '.join(shown) or 'no array'}{f' and {len(names) - most} more' * (len(names) > most)}"


def checked(path: Path, action: Callable[[], Any], kind: str) -> Any:
    """action(), where what a library says of a damaged file becomes a ValueError that names it."""
    try:
        return action()
    except (OSError, LookupError, RuntimeError, TypeError, ArithmeticError, ValueError, EOFError,
            BadZipFile) as error:
        if isinstance(error, ValueError) and str(path) in str(error):
            raise
        raise ValueError(f"{path} is damaged, or no readable {kind} ({error}); expected a complete file. "
                         f"Write it again.") from error
