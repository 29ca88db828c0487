"""Readers: the arrays of a file of any kind, by name, and parts of them.

HDF5 (MATLAB's version 7.3 is HDF5), netCDF, zarr, NumPy's .npy and .npz, MATLAB's version 5 and torch's
files. The first bytes of a file tell its kind, never its suffix. Nothing is unpickled but tensors.
"""

import os
import zipfile
from pathlib import Path

from ups.common.text import require_plain_name
from ups.userdata.readers import budget
from ups.userdata.readers.process import Foreign, serve
from ups.userdata.readers.store import MARKS, Store, Stored, checked, natural, require_unpackable

__all__ = ["Store", "Stored", "natural", "open_here", "open_store", "serve_files"]

KINDS = "HDF5, netCDF, zarr, .npy, .npz, a MATLAB file or one of torch"
# how the files of a compressor begin -> its command
UNPACK = {
    b"\x1f\x8b": "gunzip -k",
    b"BZh": "bunzip2 -k",
    b"\xfd7zXZ": "unxz -k",
    b"\x28\xb5\x2f\xfd": "unzstd",
}
PACKED = f"expected {KINDS}. Unpack it (%s), and describe what comes out."


def open_store(path: str | Path) -> Store:
    """The open file (a folder for zarr), for use in `with`; it is read in a process of its own.
    Raises FileNotFoundError or ValueError, which name the kinds that can be read, and the library to install
    if one is missing."""
    return Foreign(Path(require_plain_name(str(path), "the path of a file")))


def serve_files() -> None:
    """The reading process."""
    serve(open_here)


def open_here(path: Path) -> Store:
    """The open file, read in this process."""
    import h5py  # what asks another process for a file needs none of the libraries that read it

    is_folder = path.is_dir()
    if not is_folder and not path.is_file():  # a pipe would be waited at
        raise FileNotFoundError(f"there is no file {path}; expected {KINDS}. Correct the path.")
    first = b"" if is_folder else _begin(path)
    if is_folder:
        if path.suffix != ".zarr" and not any((path / name).is_file() for name in MARKS):
            raise ValueError(
                f"{path} is a folder; expected {KINDS}. Name the files in it, such as {path}/*.h5."
            )
        from ups.userdata.readers.xarray_files import Zarr as kind
    elif first == b"\x89HDF\r\n\x1a\n" or h5py.is_hdf5(path):  # which looks behind other bytes, too
        from ups.userdata.readers.hdf5 import Hdf5 as kind
    elif first.startswith(b"CDF"):
        from ups.userdata.readers.xarray_files import NetCdf3 as kind
    elif first.startswith(b"\x93NUMPY"):
        from ups.userdata.readers.numpy_files import Npy as kind
    elif zipfile.is_zipfile(path):
        from ups.userdata.readers.numpy_files import Npz, Torch

        names = checked(path, lambda: zipfile.ZipFile(path).namelist(), ".npz file")
        kind = Torch if any(name.endswith("/data.pkl") for name in names) else Npz
        if any(name.rpartition("/")[2] in MARKS for name in names):
            from ups.userdata.readers.xarray_files import Zarr as kind
        elif kind is Npz and not any(name.endswith(".npy") for name in names):
            raise ValueError(f"{path} is an archive of {', '.join(names)[:100]}; {PACKED % 'unzip'}")
    elif first.startswith(b"MATLAB 5"):
        from ups.userdata.readers.numpy_files import Matlab as kind
    elif first.startswith(b"\x80\x02"):  # what torch wrote before version 1.6
        from ups.userdata.readers.numpy_files import Torch as kind
    elif command := next((word for mark, word in UNPACK.items() if first.startswith(mark)), ""):
        raise ValueError(f"{path} is compressed as a whole; {PACKED % command}")
    else:
        raise ValueError(
            f"{path} begins with {first!r}; expected {KINDS}. Write the arrays into one of "
            f"these, such as np.save."
        )
    return kind(path)


def _begin(path: Path) -> bytes:
    """The first bytes of a file, which may take longer to open if it is longer. Raises DamagedError if almost
    nothing of it is stored (a sparse file), as it reads as zeros."""
    with path.open("rb") as file:
        found = os.fstat(file.fileno())
        stored = 512 * found.st_blocks or found.st_size  # some file systems do not count blocks
        require_unpackable(path, "all arrays", 0, found.st_size, stored)
        budget.allow(work=stored)
        return file.read(8)
