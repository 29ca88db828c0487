"""The budget of a file in the reading process (process.py): memory and seconds of computing.

The system ends what goes beyond it: an allocation fails (RLIMIT_DATA) or the process dies (RLIMIT_CPU). A
file has SECONDS until it is known, and every request has MEMORY. Time for what the file holds, and memory for
sizes that were checked, are granted on top. Waiting for a slow disk costs nothing. In any other process
nothing is limited.
"""

import math
import os
import sys
import time
from functools import lru_cache

MEMORY = 2**28  # bytes beyond the numbers that are read
SECONDS = 3  # xarray and zarr open an ordinary file in 0.1
SPEED = 2**23  # bytes a second: bz2, the slowest codec in use, unpacks 2**24
OBJECT_BYTES = 2**14  # of work for every group, array or chunk that a file really holds: 2 ms
MOST_NAMES = 2**17  # arrays of one file; 10,000 runs of 10 arrays each are fewer

_begun: tuple[int, float] | None = None  # bytes and seconds used when the request began
_granted = [0, 0]  # on top of MEMORY and SECONDS: bytes of memory, bytes to read
_set: dict[int, int] = {}  # limits that the system holds


def begin(seconds: float = 0.0, work: int = 0) -> None:
    """Start a request about a file that used `seconds` before, and was granted time to read `work` bytes."""
    global _begun  # noqa: PLW0603, limits are those of the process
    _begun, _granted[:] = (_memory_in_use(), time.process_time() - seconds), (0, work)
    _limit()


def used() -> tuple[float, int]:
    """What `begin` needs for the next request about the same file."""
    return time.process_time() - _begun[1], _granted[1]


def allow(memory: int = 0, work: int = 0) -> None:
    """Grant the request room for `memory` bytes and time to read `work` bytes, if it has not more already."""
    if _begun is not None and (memory > _granted[0] or work > _granted[1]):
        _granted[:] = max(memory, _granted[0]), max(work, _granted[1])
        _limit()


def allow_object() -> None:
    """Grant time for one more object of a file."""
    _granted[1] += OBJECT_BYTES
    if _begun is not None and _granted[1] % SPEED < OBJECT_BYTES:  # the limit counts seconds
        _limit()


def restart() -> None:
    """Do not count what was used so far, such as the import of a library."""
    if _begun is not None:
        begin(work=_granted[1])


def _limit() -> None:
    import resource  # not on Windows, where nothing is read in a process of its own

    limits = {resource.RLIMIT_CPU: math.ceil(_begun[1] + SECONDS + _granted[1] / SPEED)}
    if _begun[0]:
        limits[resource.RLIMIT_DATA] = _begun[0] + MEMORY + _granted[0]
    for kind, limit in limits.items():
        if _set.get(kind) != limit:
            hard = resource.getrlimit(kind)[1]
            resource.setrlimit(kind, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
            _set[kind] = limit


def _memory_in_use() -> int:
    """Bytes that RLIMIT_DATA counts; 0 where the system does not tell (macOS) or limits only the heap."""
    if not sys.platform.startswith("linux"):
        return 0
    return int(os.pread(_statm(), 99, 0).split()[5]) * os.sysconf("SC_PAGE_SIZE")


@lru_cache(1)
def _statm() -> int:
    """This process's use of memory, as an open file: opening it takes ten times as long as reading it."""
    return os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
