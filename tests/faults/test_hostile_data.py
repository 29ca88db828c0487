"""Data and configurations from strangers: sizes are looked at before anything of that size is read or
made, and what a library reads is limited. Reading runs nothing, and opens and changes nothing outside."""

import re
import sys
import zlib
from pathlib import Path

import h5py
import numpy as np
import pytest
import yaml
from cases import cases
from commands import python

ROOT = Path(__file__).resolve().parents[2]
MOST_S, MOST_MB = 5, 500
READ = """
import os, re, resource, sys, time
from pathlib import Path
from ups.config.load import load_config
from ups.userdata.describe import describe_file
started, begun = time.perf_counter(), sum(os.times()[:4])
try:
    load_config(sys.argv[2]) if sys.argv[1] == "config" else print(describe_file(sys.argv[2]))
except (ValueError, OSError) as error:
    print(str(error)[:9000])
seconds = time.perf_counter() - started
# not ru_maxrss, which has the parent's, from before exec
most = re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1]
process = sys.modules.get("ups.userdata.readers.process")
if process and process._running:
    process._running.end()
if sys.argv[1] == "file":  # those of computing, which the load of the machine does not change
    seconds = sum(os.times()[:4]) - begun
most = max(int(most), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
print(f"{seconds:.2f} {most // 1024}")
"""
# In every process of a reading: what it deletes, writes, starts or connects to, what it opens beside the data
# and which code that is no installed file it imports or runs.
WATCH = """
import os, re, sys
LOG = os.open(os.environ["WATCH_LOG"], os.O_WRONLY | os.O_APPEND)
INSTALLED = ("<", *filter(None, sys.path))  # "<": code of an installed file, such as that of a named tuple
CHANGES = re.compile("os[.](remove|rename|rmdir|mkdir|symlink|link|truncate|chmod|system|exec)|"
                     "os[.](posix_spawn|fork)|shutil[.]|socket[.](connect|bind)|webbrowser|subprocess[.]Popen")
def watch(event, arguments):
    text = ""
    if event == "open" and isinstance(arguments[0], str | bytes):
        path, mode = os.path.abspath(os.fsdecode(arguments[0])), arguments[1] or "r"
        if "/outside/" in path or (mode[0] in "wax" or "+" in mode) and path != os.devnull:
            text = f"{path} {mode}"
    elif event == "exec":
        name = arguments[0].co_filename
        text = "" if name.startswith(INSTALLED) else name
    elif event == "pickle.find_class":
        if arguments[0].split(".")[0] not in ("numpy", "ups", "builtins", "pathlib", "h5py", "_codecs"):
            text = str(arguments)
    elif CHANGES.match(event) and "serve_files" not in str(arguments) and "uname" not in str(arguments):
        text = str(arguments)[:200]
    if text:
        os.write(LOG, f"{event} {text}\\n".encode())
sys.addaudithook(watch)
"""


def fields(file: h5py.File) -> None:
    x = np.arange(16) / 16
    file["u"] = np.sin(2 * np.pi * (x + np.arange(4)[:, None, None] + 0.1 * np.arange(5)[:, None])).astype(
        "float32"
    )


def sixteen_gigabytes_of_coordinates(file: h5py.File) -> None:
    fields(file)
    x = file.create_dataset("x", (2**31,), "f8", chunks=(2**24,), compression="gzip", fillvalue=0.0)
    x.id.write_direct_chunk((0,), packed(2**24 * 8))
    for chunk in range(1, 2**7):
        x.id.write_direct_chunk((chunk * 2**24,), PACKED[2**24 * 8])


def coordinates_larger_than_fields(file: h5py.File) -> None:
    fields(file)
    file.create_dataset("x", data=np.arange(2**20) / 2**20)


def a_large_chunk(file: h5py.File) -> None:
    shape = (6, 100, 2**10, 2**10)  # 2.3 GiB of float32 in one chunk
    u = file.create_dataset("u", shape, "f4", chunks=shape, compression="gzip")
    u.id.write_direct_chunk((0, 0, 0, 0), b"\0" * 10**7)


def a_diamond(file: h5py.File) -> None:
    fields(file)
    here = file
    for _ in range(40):
        here = here.create_group("a")
        here.parent["b"] = here
    file["a/back"] = file["/"]


def a_chain(file: h5py.File) -> None:
    fields(file)
    here = file
    for _ in range(1200):
        here = here.create_group("a")


PACKED: dict[int, bytes] = {}


def packed(num_bytes: int) -> bytes:
    return PACKED.setdefault(num_bytes, zlib.compress(b"\0" * num_bytes, 9))


DATA = {
    sixteen_gigabytes_of_coordinates: "expected a field, which compresses to no less than 1/500|has no more "
    "than the fields",
    coordinates_larger_than_fields: "holds 1048576 numbers in x; expected a coordinate, which has no more "
    "than the fields, 320",
    a_large_chunk: "holds u in compressed chunks of 2400 MiB; expected at most 256",
    a_diamond: "holds no array 'v'",
    a_chain: "holds no array 'v'",
}
CONFIGURATIONS = {
    "30000 keys": (
        "\n".join(f"key{i}: 1" for i in range(30000)),
        "has 348889 bytes; expected a configuration of at most",
    ),
    "7000 keys": ("\n".join(f"key{i}: 1" for i in range(7000)), "and 6980 more"),
    "a number of 1e5 digits": (
        "run: {seed: " + ":".join(["1"] * 50000) + "}",
        "a number of 99999 characters",
    ),
}


def read(path: Path, kind: str = "config") -> str:
    hooks, log = path.parent / "hooks", path.parent / "hooks/log"
    hooks.mkdir(exist_ok=True)
    (hooks / "sitecustomize.py").write_text(WATCH)
    log.touch()
    done = python(
        "-B",
        "-c",
        READ,
        kind,
        path,
        PYTHONPATH=f"{hooks}:{ROOT}",
        PYTHONDONTWRITEBYTECODE="1",
        WATCH_LOG=str(log),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert not log.read_text(), log.read_text()
    *text, numbers = done.stdout.splitlines()
    seconds, size = map(float, numbers.split())
    assert seconds < MOST_S and size < MOST_MB, done.stdout[-500:]
    return "\n".join(text)


@pytest.mark.parametrize("code", cases("hostile_data.noticed"))
def test_what_must_not_happen_would_be_noticed(tmp_path, monkeypatch, code):
    (tmp_path / "outside").mkdir()
    for name in ("data", "outside/data", "beside.py"):
        (tmp_path / name).touch()
    script = f"import contextlib, os, sys\nos.chdir({str(tmp_path)!r})\nsys.path.insert(0, os.getcwd())\n"
    script += f"with contextlib.suppress(OSError):\n    {code}\nprint('0 0')"
    monkeypatch.setattr(sys.modules[__name__], "READ", script)
    with pytest.raises(AssertionError, match="beside|outside|remove|data|system|connect"):
        read(tmp_path / "data")


@pytest.mark.parametrize("make", DATA, ids=lambda make: make.__name__)
def test_data_that_ask_for_more_than_a_field_needs_are_refused_at_once(tmp_path, make):
    with h5py.File(tmp_path / "my.h5", "w") as file:
        make(file)
    name = "v" if DATA[make].startswith("holds no array") else "u"
    axes = ["trajectory", "time", "x", "y"][: 4 if make is a_large_chunk else 3]
    section = {"files": str(tmp_path / "my.h5"), "layout": {name: axes}, "boundary": "periodic", "dt": 0.1}
    section |= {} if "coordinates" in make.__name__ else {"domain": [0, 1]}
    path = tmp_path / "my.yaml"
    path.write_text(
        yaml.safe_dump({"data": {"tasks": ["mine"], "source": "user"}, "task": {"mine": section}}),
        encoding="utf-8",
    )
    assert re.search(DATA[make], read(path)), read(path)


@pytest.mark.parametrize("kind", CONFIGURATIONS)
def test_a_configuration_without_end_is_refused_at_once(tmp_path, kind):
    text, words = CONFIGURATIONS[kind]
    path = tmp_path / "my.yaml"
    path.write_text(text, encoding="utf-8")
    found = read(path)
    assert words in found and len(found) < 9000
