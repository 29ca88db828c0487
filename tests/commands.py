"""Commands as a user runs them, in processes of their own."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# of the `make test` around the tests, which no command of theirs inherits
OF_MAKE = (
    "MAKEFLAGS MFLAGS MAKELEVEL CONFIG RUN RUNS ARGS TOPOLOGY STAGE STAGES TASK UPS_EXPECT_WORLD".split()
)

# of a page -> what runs in its place, with this interpreter
WORDS = {
    "make": f"make PYTHON={sys.executable}",
    "python": sys.executable,
    "accelerate": f"{sys.executable} -m accelerate.commands.accelerate_cli",
    "ups": f"{sys.executable} -m ups",
}


def inherited() -> dict[str, str]:
    """The environment of a command: ups of this clone, one thread."""
    kept = {name: value for name, value in os.environ.items() if name not in OF_MAKE}
    return kept | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def run(
    *words: object, cwd: Path = ROOT, timeout: float = 120, **variables: str
) -> subprocess.CompletedProcess:
    """A command with its output as text; it reads nothing. variables: more of its environment."""
    return subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env=inherited() | variables,
        capture_output=True,
        text=True,
        timeout=timeout,
        stdin=subprocess.DEVNULL,
    )


def python(*words: object, **options) -> subprocess.CompletedProcess:
    return run(sys.executable, *words, **options)


def make(*words: object, **options) -> subprocess.CompletedProcess:
    return run("make", f"PYTHON={sys.executable}", *words, **options)


def of_page(
    folder: Path, command: str, timeout: float = 600, **variables: str
) -> subprocess.CompletedProcess:
    """A command of a page, by a shell in `folder`, from which it imports."""
    word, _, rest = command.partition(" ")
    own = {"PYTHONPATH": str(folder)} | variables
    return run("sh", "-c", f"{WORDS[word]} {rest}", cwd=folder, timeout=timeout, **own)


def under_make(
    line: str, folder: Path, environment: dict[str, str] | None = None
) -> tuple[subprocess.Popen, int]:
    """(make, which runs a line of shell in the clone and leads the session of a new terminal; the terminal's
    other end)."""
    (folder / "run.sh").write_text(line)
    (folder / "Makefile").write_text(f"all:\n\tcd {ROOT} && bash {folder}/run.sh\n")
    master, slave = os.openpty()

    def lead() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored, and rightly so by a stage
        os.setsid()
        os.close(os.open(os.ttyname(slave), os.O_RDWR))

    ends, words = dict.fromkeys(("stdin", "stdout", "stderr"), slave), ["make", "-C", str(folder)]
    try:
        return subprocess.Popen(words, env=environment, preexec_fn=lead, **ends), master
    finally:
        os.close(slave)


def wait_for(is_so: Callable[[], object], seconds: float = 60) -> bool:
    """Whether something comes true within so many seconds."""
    until = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def supervisor(
    launcher: str = "[sys.executable, '-c', *words[1:]]", before: str = "", **constants: float
) -> str:
    """Python code: ups_launch's supervisor with another launcher, a function of `words`, and constants."""
    settings = "".join(f"launch.{name} = {value}; " for name, value in constants.items())
    return (
        f"import os, sys; {before}from ups_launch import supervisor as launch; "
        f"launch.launcher_command = lambda words: {launcher}; {settings}sys.exit(launch.main())"
    )
