"""How long a classic netCDF file must be, by its header: the library reads what a shorter one lacks as zeros.

The formats are CDF-1, CDF-2 and CDF-5 (netCDF-C documentation, "File Format Specifications").
"""

import math
from pathlib import Path
from typing import BinaryIO

# bytes of a number, by its nc_type
SIZES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 4, 6: 8, 7: 1, 8: 2, 9: 4, 10: 8, 11: 8}
MOST = 2**16   # dimensions, variables or attributes; netCDF itself takes 8192
STREAMING = {4: 2**32 - 1, 8: 2**64 - 1}   # in place of a number of records that was not known


def require_length(path: Path) -> None:
    """Raise ValueError for a file that ends before the numbers that its header speaks of."""
    with path.open("rb") as file:
        version = file.read(4)[3]
        wide = 8 if version == 5 else 4
        num_records = _number(file, wide)
        file.seek(4, 1)
        dims = []
        for _ in range(_count(file, wide)):
            _skip_name(file, wide)
            dims.append(_number(file, wide))
        _skip_attributes(file, wide)
        file.seek(4, 1)
        fixed, records = [], []   # (begin, bytes of all or of one record)
        for _ in range(_count(file, wide)):
            _skip_name(file, wide)
            shape = [dims[_number(file, wide)] for _ in range(_count(file, wide))]
            _skip_attributes(file, wide)
            item = SIZES[_number(file, 4)]
            file.seek(wide, 1)
            begin, is_record = _number(file, 4 if version == 1 else 8), 0 in shape[:1]
            (records if is_record else fixed).append((begin, item * math.prod(shape[is_record:])))
        length = file.seek(0, 2)
    # a record is not padded where it holds one variable alone
    record = sum(_padded(size) if len(records) > 1 else size for _, size in records)
    count = 0 if num_records == STREAMING[wide] else num_records
    ends = [begin + size for begin, size in fixed]
    ends += [begin + (count - 1) * record + size for begin, size in records if count]
    if length < max(ends, default=0):
        raise ValueError(f"{path} has {length} bytes, and its header speaks of {max(ends)}; expected a whole "
                         "file. Copy or write it again.")


def _number(file: BinaryIO, size: int) -> int:
    found = file.read(size)
    if len(found) < size:
        raise EOFError("its header ends early")
    return int.from_bytes(found, "big")


def _count(file: BinaryIO, size: int) -> int:
    if (count := _number(file, size)) > MOST:
        raise ValueError(f"a list of {count} entries in its header")
    return count


def _padded(size: int) -> int:
    return -(-size // 4) * 4


def _skip_name(file: BinaryIO, wide: int) -> None:
    file.seek(_padded(_number(file, wide)), 1)


def _skip_attributes(file: BinaryIO, wide: int) -> None:
    file.seek(4, 1)
    for _ in range(_count(file, wide)):
        _skip_name(file, wide)
        item = SIZES[_number(file, 4)]
        file.seek(_padded(item * _number(file, wide)), 1)
