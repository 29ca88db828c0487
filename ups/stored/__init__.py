"""Arrays in files of any kind, by name: what is there, and parts of it as they lie.

HDF5 (netCDF-4 is HDF5), NumPy's .npy and .npz and zarr; classic netCDF where netCDF4 is installed. What a
file is, its first bytes say, never its suffix. Nothing here knows a task; nothing is unpickled.
"""

import zipfile
from pathlib import Path

from ups.stored.hdf5 import Hdf5
from ups.stored.store import Store, Stored, natural

__all__ = ["Store", "Stored", "natural", "open_store"]

KINDS = "HDF5, netCDF, .npy, .npz or zarr"
ZARR = ("zarr.json", ".zgroup", ".zarray")   # one of these lies in every folder of that kind


def open_store(path: str | Path) -> Store:
    """The open file (a folder for zarr), to be closed by `with`. Raises FileNotFoundError or ValueError,
    naming what it is not, and what to install for a kind that needs more.
    """
    path = Path(path)
    if not path.is_file() and not path.is_dir():   # a pipe would be waited at
        raise FileNotFoundError(f"there is no file {path}; expected {KINDS}. Correct the path.")
    first = b"" if path.is_dir() else path.open("rb").read(8)
    if path.is_dir():
        if path.suffix != ".zarr" and not any((path / name).is_file() for name in ZARR):
            raise ValueError(f"{path} is a folder; expected {KINDS}. Name the files in it, such as "
                             f"{path}/*.h5.")
        from ups.stored.others import Zarr as kind
    elif first == b"\x89HDF\r\n\x1a\n":
        kind = Hdf5
    elif first.startswith(b"\x93NUMPY"):
        from ups.stored.numpy_files import Npy as kind
    elif zipfile.is_zipfile(path):
        from ups.stored.numpy_files import Npz as kind
    elif first.startswith(b"CDF"):
        from ups.stored.others import NetCdf as kind
    else:
        raise ValueError(f"{path} begins with {first!r}; expected {KINDS}. Write the arrays into one of "
                         f"these, such as np.save.")
    return kind(path)
