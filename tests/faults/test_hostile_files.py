"""Files that only their library can find out: attributes on which HDF5 crashes, streams that unpack without
end, groups within themselves, links, codecs that run code. Each is described within MOST_S and MOST_MB, or
refused in one line, and does nothing else."""

import bz2
import io
import itertools
import json
import os
import pickle
import re
import struct
import subprocess
import sys
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
import xarray
import zarr
from h5py import h5a, h5s, h5t
from test_hostile_data import ROOT, read

from ups.userdata.readers import open_store, process


def zeros(num_bytes: int, window: int = 15) -> bytes:
    """A stream of zlib that unpacks to zeros, 1 to 1029 (window 31: of gzip, with a wrong checksum)."""
    packer = zlib.compressobj(9, zlib.DEFLATED, window)
    head = packer.compress(b"") + packer.flush(zlib.Z_FULL_FLUSH)
    piece = packer.compress(bytes(2**20)) + packer.flush(zlib.Z_FULL_FLUSH)
    return head + piece * (num_bytes >> 20) + packer.flush()


MANY = 2700 * 2**20  # bytes
WAVES = np.sin(
    2 * np.pi * (np.arange(32) / 32 - 0.05 * np.arange(16)[:, None] + np.arange(20)[:, None, None])
)


def attribute_of_axes(out: Path, name: str, value: object, is_netcdf: bool = False) -> Path:
    with h5py.File(out / "a.h5", "w") as file:
        file["u"], file["x"] = WAVES, np.arange(32) / 32
        file["x"].make_scale("x")
        file["u"].dims[2].attach_scale(file["x"])
        if is_netcdf:
            file.attrs["_NCProperties"] = "version=2"
        at = file["x" if name in ("REFERENCE_LIST", "CLASS", "NAME") else "u"].attrs
        if name in at:
            del at[name]
        if value is None:
            h5a.create(file["u"].id, name.encode(), h5t.C_S1, h5s.create(h5s.NULL))
        else:
            at[name] = value
    return out / "a.h5"


class Canary:
    def __reduce__(self):
        return os.system, ("touch ran",)


def link_of_netcdf(out: Path, link: object) -> Path:
    xarray.Dataset({"u": (("run", "time", "x"), WAVES)}).to_netcdf(out / "a.nc", engine="h5netcdf")
    with h5py.File(out / "a.nc", "r+") as file:
        file["v"] = link
    return out / "a.nc"


def chunk_of_hdf5(out: Path) -> Path:
    with h5py.File(out / "a.h5", "w") as file:
        u = file.create_dataset("u", (20, 16, 32), "f4", chunks=(20, 16, 32), compression="gzip")
        u.id.write_direct_chunk((0, 0, 0), zeros(MANY))
    return out / "a.h5"


def zarr_of(out: Path, **options: object) -> Path:
    folder = out / "a.zarr"
    options = {"shape": (20, 16, 32), "chunks": (20, 16, 32), "dtype": "f4"} | options
    array = zarr.open_group(str(folder), mode="w", zarr_format=2).create_array("u", **options)
    array[...] = WAVES
    return folder


def chunk_of_zarr(out: Path, codec: dict, packed: Callable[[], bytes]) -> Path:
    folder = zarr_of(out)
    about = json.loads((folder / "u/.zarray").read_text())
    (folder / "u/.zarray").write_text(json.dumps(about | codec))
    (folder / "u/0.0.0").write_bytes(packed())
    return folder


def declared(out: Path, **about: object) -> Path:
    folder = zarr_of(out)
    there = json.loads((folder / "u/.zarray").read_text())
    (folder / "u/.zarray").write_text(json.dumps(there | about))
    return folder


def link_in_zarr(out: Path, kind: str) -> Path:
    folder, beside = zarr_of(out), out / "outside"
    beside.mkdir()
    if kind == "file":
        (folder / "u/0.0.0").rename(beside / "0.0.0")
        (folder / "u/0.0.0").symlink_to(beside / "0.0.0")
    elif kind == "folder":
        (folder / "u").rename(beside / "u")
        (folder / "u").symlink_to(beside / "u")
    elif kind == "loop":
        (folder / "again").symlink_to(folder)
    else:
        (folder / "u/1.0.0").symlink_to("0.0.0" if kind == "within" else "/nowhere")
    return folder


def shards_in_shards(out: Path) -> Path:
    folder = out / "a.zarr"
    zarr.open_group(str(folder), mode="w").create_array("u", data=WAVES.astype("f4"), chunks=(20, 16, 32))
    about = json.loads((folder / "u/zarr.json").read_text())
    within = '{"name": "sharding_indexed", "configuration": {"chunk_shape": [20, 16, 32], "codecs": ['
    after = '], "index_codecs": [{"name": "bytes"}]}}'
    codecs = f'[{within * 2000}{{"name": "bytes"}}{after * 2000}]'
    (folder / "u/zarr.json").write_text(json.dumps(about | {"codecs": 0}).replace('": 0', f'": {codecs}'))
    return folder


def listed_arrays(out: Path, num: int = 100_000) -> Path:
    folder = zarr_of(out)
    about = json.loads((folder / "u/.zarray").read_text())
    names = {f"v{number}/.zarray": about for number in range(num)}
    (folder / ".zmetadata").write_text(json.dumps({"metadata": names, "zarr_consolidated_format": 1}))
    return folder


def npz_of(out: Path, members: list[tuple[str, bytes]], compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(out / "a.npz", "w", compression) as archive:
        for name, content in members:
            archive.writestr(zipfile.ZipInfo(name), content, compression, 1)
    return out / "a.npz"


def npy(values: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, values)
    return file.getvalue()


def packed_member(out: Path) -> Path:
    """A member of 144 MB: below the limit of one array, and two make a file that is not a field."""
    content = npy(np.zeros((3, 10**6, 6)))
    return npz_of(out, [("u.npy", content), ("v.npy", content)], compression=zipfile.ZIP_DEFLATED)


def packed_matrix(out: Path) -> Path:
    """A matrix of MATLAB that unpacks to 1.4 GB."""
    shape = (3, 10**6, 60)
    num = 8 * 3 * 60 * 10**6
    head = struct.pack("<IIII", 6, 8, 6, 0) + struct.pack("<II3iI", 5, 12, *shape, 0)
    head += struct.pack("<HHI", 1, 1, ord("u")) + struct.pack("<II", 9, num)
    packer = zlib.compressobj(9)
    content = packer.compress(struct.pack("<II", 14, len(head) + num) + head)
    content += packer.flush(zlib.Z_FULL_FLUSH)
    piece = packer.compress(bytes(10**6)) + packer.flush(zlib.Z_FULL_FLUSH)
    content += piece * (num // 10**6) + packer.flush()
    text = b"MATLAB 5.0 MAT-file".ljust(124) + struct.pack("<HH", 0x0100, 0x4D49)
    (out / "a.mat").write_bytes(text + struct.pack("<II", 15, len(content)) + content)
    return out / "a.mat"


def packed_tensor(out: Path) -> Path:
    torch.save(torch.zeros(7, 10**7), out / "plain.pt")
    with (
        zipfile.ZipFile(out / "plain.pt") as plain,
        zipfile.ZipFile(out / "a.pt", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
    ):
        for name in plain.namelist():
            archive.writestr(name, plain.read(name))
    (out / "plain.pt").unlink()
    return out / "a.pt"


def sparse(out: Path) -> Path:
    with (out / "a.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(
            file, {"descr": "<f8", "fortran_order": False, "shape": (4, 2**20, 2**15)}
        )
        file.truncate(file.tell() + 8 * 4 * 2**35)
    return out / "a.npy"


def many_arrays(out: Path, num: int, shape: tuple[int, ...] = (3,), name: str = "a.h5") -> Path:
    with h5py.File(out / name, "w") as file:
        file["u"] = WAVES
        for word in itertools.islice(itertools.product("abcdefghijklmnopqrst", repeat=4), num):
            file["".join(word)] = np.random.default_rng(0).random(shape, np.float32)
    return out / name


PLAIN = r"data: \{tasks: \[a\]"
OF_AXES = {
    "whole numbers": ("DIMENSION_LIST", np.arange(5)),
    "numbers": ("DIMENSION_LIST", np.ones(3)),
    "text": ("DIMENSION_LIST", np.array([b"a", b"b", b"c"])),
    "one": ("DIMENSION_LIST", 7),
    "nothing": ("DIMENSION_LIST", None),
    "labels that are numbers": ("DIMENSION_LABELS", np.arange(3)),
    "few labels": ("DIMENSION_LABELS", np.array([b"a"])),
    "a label": ("DIMENSION_LABELS", "time"),
    "references that are numbers": ("REFERENCE_LIST", np.arange(3)),
    "class": ("CLASS", np.arange(3)),
    "name": ("NAME", np.ones(3)),
    "dimension": ("_Netcdf4Dimid", "x"),
    "coordinates": ("_Netcdf4Coordinates", np.arange(9)),
}
TOO_MUCH = "needs more than 256 MiB|damaged, or no readable|ended the process|cannot be read|out of memory"
PICKLED = {"compressor": {"id": "pickle", "protocol": 5}}
FILTERED = {"compressor": None, "filters": [{"id": "pickle", "protocol": 5}]}
HOSTILE = {  # kind -> what makes it, its options, what is said
    **{
        f"{kind}, {'netCDF' if is_netcdf else 'HDF5'}": (
            attribute_of_axes,
            dict(name=name, value=value, is_netcdf=is_netcdf),
            PLAIN,
        )
        for (kind, (name, value)), is_netcdf in itertools.product(OF_AXES.items(), (False, True))
    },
    "soft link": (link_of_netcdf, dict(link=h5py.SoftLink("/u")), PLAIN),
    "external link": (link_of_netcdf, dict(link=h5py.ExternalLink("/etc/passwd", "/")), PLAIN),
    "chunk of HDF5": (chunk_of_hdf5, {}, TOO_MUCH),
    "chunk of zarr, zlib": (
        chunk_of_zarr,
        dict(codec={"compressor": {"id": "zlib", "level": 1}}, packed=lambda: zeros(MANY)),
        TOO_MUCH,
    ),
    "chunk of zarr, gzip": (
        chunk_of_zarr,
        dict(codec={"compressor": {"id": "gzip", "level": 1}}, packed=lambda: zeros(MANY, 31)),
        TOO_MUCH,
    ),
    "chunk of zarr, bz2": (
        chunk_of_zarr,
        dict(
            codec={"compressor": {"id": "bz2", "level": 1}}, packed=lambda: bz2.compress(bytes(2**24)) * 160
        ),
        f"{TOO_MUCH}|needs too long",
    ),
    "chunks without end": (
        declared,
        dict(shape=[2**40, 16, 32], chunks=[1, 16, 32]),
        "expected a field, which compresses to no less",
    ),
    "bytes without end": (
        declared,
        dict(shape=[2**60], chunks=[1], dtype="|S0"),
        "length must be >= 1, got 0",
    ),
    "a large chunk": (declared, dict(chunks=[2**20, 16, 32]), "in compressed chunks of 2048 MiB"),
    **{
        f"link to {kind}": (link_in_zarr, dict(kind=kind), "a link; expected files and folders")
        for kind in ("file", "folder", "loop", "within", "nothing")
    },
    "pickle as compressor": (
        chunk_of_zarr,
        dict(codec=PICKLED, packed=lambda: pickle.dumps(Canary())),
        "matches .*'pickle'|is encoded by 'pickle'; expected one of",
    ),
    "pickle as filter": (
        chunk_of_zarr,
        dict(codec=FILTERED, packed=lambda: pickle.dumps(Canary())),
        "matches .*'pickle'|is encoded by 'pickle'; expected one of",
    ),
    "json2": (
        declared,
        dict(compressor=None, filters=[{"id": "json2"}]),
        "matches .*'json2'|is encoded by 'json2'; expected one of",
    ),
    "unknown codec": (
        declared,
        dict(compressor={"id": "os.system", "command": "touch ran"}),
        "codec not available",
    ),
    "objects": (declared, dict(dtype="|O", filters=[{"id": "pickle"}]), "No Zarr data type found|encoded by"),
    "shards in shards": (shards_in_shards, {}, "nests without end|damaged, or no readable"),
    "listed arrays": (listed_arrays, {}, "of .* bytes; expected at most 16777216 that describe arrays"),
    "many listed arrays": (listed_arrays, dict(num=5_000), "lists 5000 arrays in 6 files"),
    **{
        f"npz of {names}": (
            npz_of,
            dict(members=[(name, npy(WAVES)) for name in names]),
            "expected plain names that differ",
        )
        for names in (
            ("u.npy", "u.npy"),
            ("u.npy", "u"),
            ("/u.npy",),
            ("../u.npy",),
            ("a/../u.npy",),
            ("..\\u.npy",),
        )
    },
    "packed members": (packed_member, {}, "unpacks to 275 MiB from .*; expected at most 50 times its size"),
    "packed matrix": (packed_matrix, {}, f"unpacks to 1373 MiB from .*; expected at most 50|{TOO_MUCH}"),
    "packed tensor": (packed_tensor, {}, "unpacks to 267 MiB from .*; expected at most 50 times its size"),
    "many arrays": (
        many_arrays,
        dict(num=25_000),
        r"holds more than 1000 arrays of different names \(aaaa, .*at most 1000 .* Name the fields in a",
    ),
    "many fields": (
        many_arrays,
        dict(num=100, shape=WAVES.shape),
        r"holds 101 fields \(aaaa, .*expected at most 100 in a file that is described. Name the fields",
    ),
    "sparse file": (sparse, {}, "holds all arrays of 1048576 MiB in"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_file_is_described_or_refused_in_one_line_and_does_nothing_else(tmp_path, kind):
    make, options, words = HOSTILE[kind]
    out = tmp_path / "theirs"
    out.mkdir()
    found = read(make(out, **options), "file")
    assert re.search(words, found), found
    assert words == PLAIN or len(found.splitlines()) == 1 and "a." in found
    assert not (out / "ran").exists() and not Path("ran").exists()


# ------------------------------------------------------------------------------------- the process that reads


def waves_in(path: Path) -> Path:
    np.save(path, WAVES)
    return path


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("os.kill(os.getpid(), 11)", r"ended the process that reads it \(SIGSEGV\); expected a file that"),
        ("os.abort()", r"ended the process that reads it \(SIGABRT\)"),
        ("os._exit(3)", r"ended the process that reads it \(exit code 3\)"),
        ("exec('while True: pass')", "needs too long; expected that it is open within 3 s"),
        ("bytearray(2**29)", r"needs more than 256 MiB beside its numbers.*\(MemoryError\)"),
        ("(f := lambda: f())()", r".*nests without end \(RecursionError\)"),
        ("{}['u']", r"cannot be read \(KeyError"),
        # any object that is neither a plain value nor an array
        ("setattr(store, 'is_single', os.system)", r"took over the process that reads it \(posix.system"),
    ],
)
def test_a_file_that_ends_its_reader_is_named_and_others_are_read_on(tmp_path, monkeypatch, fault, words):
    command = f"""
import os
from ups.userdata.readers import open_here, process
def opened(path):
    store = open_here(path)
    {fault} if path.stem == "bad" else None
    return store
process.serve(opened)
"""
    monkeypatch.setattr(process, "COMMAND", command)
    monkeypatch.setattr(process, "_running", None)
    with open_store(waves_in(tmp_path / "sound.npy")) as before:
        with pytest.raises(ValueError, match=f"bad.npy {words}") as error:
            open_store(waves_in(tmp_path / "bad.npy"))
        assert len(str(error.value).splitlines()) == 1
        assert np.array_equal(before.read("sound"), WAVES) and before.array("sound").shape == WAVES.shape
    with open_store(tmp_path / "sound.npy") as last:
        assert np.array_equal(last.read("sound"), WAVES)
    process.running().end()


def test_a_signal_during_a_reading_ends_the_process_and_no_answer_is_mixed_up(tmp_path, monkeypatch):
    with open_store(waves_in(tmp_path / "a.npy")) as store:

        def interrupted(_):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(process.Messages, "load", interrupted)
            with pytest.raises(KeyboardInterrupt):
                store.read("a", (0,))
        assert np.array_equal(store.read("a", (1,)), WAVES[1])


def test_a_fork_has_a_reading_process_of_its_own(tmp_path):
    with open_store(waves_in(tmp_path / "a.npy")) as store:
        first = process.running().process.pid
        if not (pid := os.fork()):
            is_right = np.array_equal(store.read("a"), WAVES) and process.running().process.pid != first
            process.running().end()
            os._exit(0 if is_right else 1)
        assert os.waitpid(pid, 0)[1] == 0
        assert process.running().process.pid == first and np.array_equal(store.read("a"), WAVES)


def test_the_reading_process_ends_with_the_one_that_started_it(tmp_path):
    path = waves_in(tmp_path / "a.npy")
    code = (
        "import os, sys; from ups.userdata.readers import open_store, process; open_store(sys.argv[1]); "
        "print(process.running().process.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code, path], cwd=ROOT, capture_output=True, text=True)
    deadline = time.monotonic() + 10
    while Path(f"/proc/{int(done.stdout)}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{int(done.stdout)}").exists()
