"""The seal of a latent cache (ups/data/cache.py): the first bytes, which verify the others. Without torch."""

import hashlib
import json
import os
import zlib
from pathlib import Path
from typing import Any, BinaryIO

import h5py

from ups.common.place import make_target, script

FORMAT = 1
MAGIC = b"UPS latent cache "
SEAL_BYTES = 4096  # a page, so that the latents can be page-aligned behind it


def read_seal(path: Path) -> dict[str, Any]:
    """The seal of a cache file, whose size and header agree with it. Raises ValueError for anything but a
    complete cache."""
    with path.open("rb") as file:
        size, block = os.fstat(file.fileno()).st_size, file.read(SEAL_BYTES)
        text, checksum = block[:-4], int.from_bytes(block[-4:], "little")
        try:
            is_sealed = len(block) == SEAL_BYTES and zlib.crc32(text) == checksum and text.startswith(MAGIC)
            seal = json.loads(text[len(MAGIC) :].rstrip(b"\0").decode()) if is_sealed else {}
            is_sealed = {"format", "size", "latents", "digest"} == seal.keys() and all(
                isinstance(at, int) and isinstance(num, int) for at, num in seal["latents"]
            )
        except (ValueError, TypeError, AttributeError):  # not a seal of ours
            is_sealed = False
        if not is_sealed:
            raise refusal(
                path,
                "is not a finished UPS cache (no intact seal in its first bytes)",
                "a file written by prepare_cache.py",
            )
        is_inside = all(SEAL_BYTES <= at <= at + num <= size for at, num in seal["latents"])
        for is_right, what, expected in (
            (seal["format"] == FORMAT, f"has format {seal['format']}", f"format {FORMAT}"),
            (
                seal["size"] == size,
                f"holds {size} bytes",
                f"{seal['size']} (it was truncated or appended to)",
            ),
            (
                is_inside and _header_digest(file, size, seal["latents"]) == seal["digest"],
                "has an altered header",
                f"SHA-256 {str(seal['digest'])[:12]}",
            ),
        ):
            if not is_right:
                raise refusal(path, what, expected)
    return seal


def write_seal(path: Path) -> None:
    """Seal the finished HDF5 file at `path`, whose first SEAL_BYTES are free."""
    with h5py.File(path, "r", locking=False) as file:
        arrays = [file[name] for name in ("state/latents", "input/latents") if name in file]
        latents = [[array.id.get_offset(), array.nbytes] for array in arrays]
    with path.open("r+b") as file:
        size = os.fstat(file.fileno()).st_size
        seal = {
            "format": FORMAT,
            "size": size,
            "latents": latents,
            "digest": _header_digest(file, size, latents),
        }
        text = (MAGIC + json.dumps(seal).encode()).ljust(SEAL_BYTES - 4, b"\0")
        file.seek(0)
        file.write(text + zlib.crc32(text).to_bytes(4, "little"))


def _header_digest(file: BinaryIO, size: int, latents: list[list[int]]) -> str:
    """SHA-256 of `file` without the seal and the regions (offset, bytes) of `latents`."""
    digest, position = hashlib.sha256(), SEAL_BYTES
    for offset, num_bytes in [*sorted(latents), [size, 0]]:
        file.seek(position)
        digest.update(file.read(offset - position))
        position = offset + num_bytes
    return digest.hexdigest()


def refusal(path: Path, what: str, expected: str) -> ValueError:
    """The error for a file that is not a cache, or not as it was written."""
    return ValueError(
        f"{path} {what}; expected {expected}. Rebuild it with `{make_target('cache')}` (if that finds "
        f"nothing to do: {script('prepare_cache.py')} --config CONFIG --rebuild)."
    )
