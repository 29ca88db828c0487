"""Files of the user are opened and read in a process of their own, the reading process.

One process serves a command and all its files. A file that crashes a library or needs more than the budget
(budget.py) ends that process: the error names the file, and the next file gets a new process.
"""

import builtins
import contextlib
import io
import itertools
import math
import os
import pickle
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from ups.common.files import DamagedError
from ups.common.lazy import np
from ups.common.place import ROOT, require_posix
from ups.userdata.readers import budget
from ups.userdata.readers.store import Store, Stored

COMMAND = "from ups.userdata.readers import serve_files; serve_files()"
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")  # which need room each
REMEDY = "Leave that file out, or copy its arrays into a new one."
MOST_REMEMBERED = 4  # files, each of up to budget.MOST_NAMES arrays of 0.7 kB
SMALL, MOST_SMALL = 2**14, 128  # numbers of an array that is read as a whole, and such arrays that are kept
NUMBERS = ("read", "whole", "rows")  # the methods that give the numbers of arrays
# what messages between both processes are made of, besides numbers, text and mappings, by module
MESSAGES = {
    "builtins": {"slice", "complex", "str", "bytes"},
    "numpy": {"dtype", "ndarray", "_reconstruct", "_frombuffer", "scalar"},
    "pathlib": {"PosixPath"},
    "ups": {"Stored", "DamagedError"},
}


Reply = tuple[Exception | None, Any]  # the error of a request, its answer


class Messages(pickle.Unpickler):
    """Messages from the other process. A file may have taken over the reading process, so nothing but plain
    values, arrays and errors is made of what it sends."""

    def find_class(self, module: str, name: str) -> Any:
        found = getattr(builtins, name, None) if module == "builtins" else None
        is_error = isinstance(found, type) and issubclass(found, Exception)
        if not is_error and name not in MESSAGES.get(module.partition(".")[0], ()):
            raise pickle.UnpicklingError(f"{module}.{name} in a message of the reading process")
        return super().find_class(module, name)


class ReadingProcess:
    """A running process that answers calls of the methods of its open files. command: of Python, which calls
    `serve`."""

    def __init__(self, command: str = "") -> None:
        require_posix("reading files of data")
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", command or COMMAND],  # -P: imports nothing that lies beside the data
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pipesize=2**20,
            env={**os.environ, **ONE_THREAD, "PYTHONPATH": path},
        )
        self.owner, self.lock = os.getpid(), threading.Lock()
        self.closed: list[int] = []  # files to close before the next request
        self.numbers = itertools.count()  # of files that are opened

    def call(self, path: Path | str, *request: Any) -> Any:
        """The answer to a request (method, number of an open file, arguments). Raises its error, and
        DamagedError if the process died of the file."""
        with self.lock, self._ended_by(path):
            message, self.closed = (os.getcwd(), self.closed, request), []
            pickle.dump(message, self.process.stdin, pickle.HIGHEST_PROTOCOL)
            self.process.stdin.flush()
            error, answer = Messages(self.process.stdout).load()
        if error is not None:
            raise error
        return answer

    @contextlib.contextmanager
    def _ended_by(self, path: Path | str) -> Iterator[None]:
        try:
            yield
        except (EOFError, BrokenPipeError):
            raise DamagedError(f"{path} {self._death()}. {REMEDY}") from None
        except pickle.UnpicklingError as error:
            self.end()  # what follows in the pipe is not known
            raise DamagedError(
                f"{path} took over the process that reads it ({error}); expected plain values. "
                "Leave that file out, and ask where it came from."
            ) from None
        except BaseException:  # of a signal: the next call would take the answer for its own
            self.end()
            raise

    def _death(self) -> str:
        code = self.process.wait()
        if code == -signal.SIGXCPU:
            return (
                f"needs too long; expected that it is open within {budget.SECONDS} s and read at more than "
                f"{budget.SPEED // 2**20} MiB/s"
            )
        name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return f"ended the process that reads it ({name}); expected a file that its library can read"

    def end(self) -> None:
        """End the process, and leave none behind."""
        if self.owner == os.getpid():
            self.process.kill()
            self.process.wait()
            self.process.stdin.close()
            self.process.stdout.close()


_running: ReadingProcess | None = None


def running() -> ReadingProcess:
    """The reading process of this process, started if there is none. A fork has one of its own."""
    global _running  # noqa: PLW0603, one per process
    if _running is None or _running.owner != os.getpid() or _running.process.poll() is not None:
        _running = ReadingProcess()
    return _running


@lru_cache(MOST_REMEMBERED)
def _answers(path: Path, *identity: int) -> dict[tuple, Any]:
    """What the reading process said of a file, by request: a command opens a file again and again."""
    return {}


def _identity(path: Path) -> tuple[Path | int, ...]:
    """What changes with a file; () of a folder, which does not tell."""
    with contextlib.suppress(OSError):
        found = path.stat()
        if stat.S_ISREG(found.st_mode):
            return path, found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
    return ()


class Foreign(Store):
    """A file that is open in the reading process. It is opened again where another file ended that."""

    def __init__(self, path: Path):
        super().__init__(path)
        self.process, self.numbers, identity = None, {}, _identity(path)
        self.known = _answers(*identity) if identity else {}
        self.small = lru_cache(MOST_SMALL)(lambda name: self._call("read", name))
        self._open()

    def _open(self) -> None:
        self.process = running()
        self.number = next(self.process.numbers)
        self.is_single = self.process.call(self.path, "open", self.number, self.path)

    def _call(self, method: str, *arguments: Any) -> Any:
        if self.process is not running():
            self._open()
        return self.process.call(self.path, method, self.number, *arguments)

    def _once(self, *request: Any) -> Any:
        if request not in self.known:
            self.known[request] = self._call(*request)
        return self.known[request]

    def close(self) -> None:
        self.process.closed.append(self.number)

    @property
    def listed(self) -> dict[str, Stored]:
        return self._once("listed")

    def first_names(self) -> list[str]:
        return self._call("first_names")

    def array(self, name: str) -> Stored | None:
        return self.known.get(("listed",), {}).get(name) or self._once("array", name)

    def those(self, names: tuple[str, ...]) -> dict[str, Stored]:
        found = self._once("those", names)
        self.known |= {("array", name): array for name, array in found.items()}
        return found

    def attributes(self, name: str = "") -> dict[str, Any]:
        return dict(self._once("attributes", name))

    def group_names(self, group: str) -> list[str]:
        return self._once("group_names", group)

    def read(self, name: str, index: tuple = ()) -> "np.ndarray":
        found = self.array(name)
        if found is not None and math.prod(found.shape) <= SMALL:  # --describe reads many parts of these
            return self.small(name)[index].copy()
        return self._call("read", name, index)

    def whole(self, name: str) -> "np.ndarray":
        if name not in self.numbers:
            self.numbers[name] = self._call("whole", name)
            self.numbers[name].flags.writeable = False
        return self.numbers[name]

    def require_whole(self, name: str) -> None:
        self._call("require_whole", name)


def serve(opened: Callable[..., Store]) -> None:
    """Answer requests on stdin until it ends. opened: opens the file at a path, or at an address."""
    import resource

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the parent's to obey: it ends this one
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    stores: dict[int, Store] = {}
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            folder, closed, request = Messages(sys.stdin.buffer).load()
            os.chdir(folder)
            for number in closed:
                with contextlib.suppress(Exception):  # the next request is about another file
                    stores.pop(number).close()
            pickle.dump(_reply(stores, opened, request), answers, pickle.HIGHEST_PROTOCOL)
            answers.flush()


def _reply(stores: dict[int, Store], opened: Callable[..., Store], request: tuple) -> Reply:
    """The reply to a request."""
    method, number, *arguments = request
    path = arguments[0] if method == "open" else stores[number].path
    try:
        if method == "open":
            budget.begin()
            stores[number] = store = opened(*arguments)
            store.used = budget.used()
            return None, store.is_single
        store = stores[number]
        budget.begin(*(0, 0) if method in NUMBERS else store.used)
        if method in ("listed", "first_names") and path.is_file():
            budget.allow(work=path.stat().st_size)
        if method in NUMBERS:
            store.allow(*arguments)
        answer = store.listed if method == "listed" else getattr(store, method)(*arguments)
        if method not in NUMBERS:
            store.used = budget.used()
        if method == "attributes":
            answer = {key: value for key, value in answer.items() if is_plain(value)}
        if method == "listed" and len(answer) > budget.MOST_NAMES:
            raise DamagedError(
                f"{path} holds {len(answer)} arrays; expected at most {budget.MOST_NAMES}. Write fewer, with "
                "an axis of runs or times, or split the file."
            )
    except (MemoryError, RecursionError) as error:
        return DamagedError(
            f"{path} needs more than {budget.MEMORY // 2**20} MiB beside its numbers, or nests without end "
            f"({type(error).__name__}); expected a file of fields. {REMEDY}"
        ), None
    except Exception as error:  # also of a library, for a file that its authors did not think of
        is_clear = type(error).__module__ in ("builtins", DamagedError.__module__) and str(path) in str(error)
        if is_clear and isinstance(error, ValueError | OSError):
            return error, None
        return ValueError(
            f"{path} cannot be read ({type(error).__name__}: {str(error)[:500]!r}); expected a sound file. "
            f"{REMEDY}"
        ), None
    return None, answer


def is_plain(value: Any) -> bool:
    """Whether an attribute can be sent: text and numbers can, references within an HDF5 file cannot."""
    try:
        Messages(io.BytesIO(pickle.dumps(value))).load()
    except (TypeError, pickle.PickleError):
        return False
    return True
