"""Files of weights (safetensors), and the one way to load the network of a finished stage: for training,
forecasts and publishing.

A file is written completely or not at all, and read with finite numbers alone. Of a stage digests are checked
first (ups/training/artifact.py). Then the network of config.json is built within a budget of numbers and
operations that follows from the header of the weights, and compared with that header before a weight is read.
So a small file cannot allocate more than it holds. Nothing in it names code to run: tensors are safetensors,
the rest is JSON, read as plain values into classes of this package.
"""

import json
import math
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves

from ups.common.files import MOST_RECORD_BYTES, DamagedError, replacing, require_plain
from ups.common.text import require_plain_text
from ups.training.artifact import DONE, MODEL, read_stage, require_weights

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "BOOL": torch.bool,
}
# Beside its weights a network may hold and compute (transforms, grids): numbers in one tensor, operations per
# tensor of the weights. MOST_COUNT: larger integers in a description need as many weights.
MOST_NUMBERS = 2**25
MOST_OPERATIONS = 200
MOST_COUNT = 2**20
# functions of torch whose result may be larger than their arguments; integers set the size of the first ones
MAKERS = {
    "zeros",
    "ones",
    "empty",
    "full",
    "rand",
    "randn",
    "arange",
    "eye",
    "linspace",
    "fftfreq",
    "repeat",
    "repeat_interleave",
    "new_zeros",
    "new_ones",
    "new_empty",
    "new_full",
}
PRODUCTS = {"outer", "meshgrid", "kron", "cartesian_prod", "einsum"}
MATRIX_PRODUCTS = {"matmul", "__matmul__", "__rmatmul__", "mm", "bmm"}

Sizes = dict[str, tuple[torch.dtype, tuple[int, ...]]]


def load_stage(
    directory: str | Path, build: Callable[[dict[str, Any]], nn.Module], what: str, do: str, stage: str = ""
) -> nn.Module:
    """The network of a finished stage, with done.json as its `record`.

    build: makes the network from config.json; what: the stage in words; do: how to make it; stage: its name,
    if the folder has another. Raises FileNotFoundError, or DamagedError if files were altered or differ.
    """
    directory = Path(directory)
    path = directory / MODEL
    for file in (directory / "config.json", path, directory / DONE):
        if not file.is_file():
            raise FileNotFoundError(f"{file} is missing; expected a finished {what} in {directory}. {do}")
    done, description = read_stage(directory, stage)
    require_plain(path, do)
    stored = read_header(path, do)
    network = _build(build, description, stored, directory / "config.json", do)
    wanted = {name: (value.dtype, tuple(value.shape)) for name, value in network.state_dict().items()}
    for name in sorted(stored.keys() | wanted.keys()):
        there, expected = stored.get(name, "missing"), wanted.get(name, "missing")
        if there != expected:
            raise DamagedError(
                f"{path} has {name:.80} as {there}; expected {expected}, as its config.json describes. {do}"
            )
    require_weights(directory, done)
    network.load_state_dict(read_weights(path, do))
    network.record = done
    return network


def read_header(path: Path, do: str) -> Sizes:
    """Name -> (dtype, shape) from the header of a safetensors file. Raises DamagedError for another size."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(size - 8, MOST_RECORD_BYTES):
                raise ValueError(f"a header of {length} bytes")
            # decoded here: json would guess the encoding, and import its codec
            header = json.loads(file.read(length).decode())
        sizes, spans = {}, []
        for name, entry in header.items():
            if name != "__metadata__":
                shape, (first, last) = tuple(entry["shape"]), entry["data_offsets"]
                if not all(isinstance(n, int) and n >= 0 for n in (*shape, first, last)):
                    raise ValueError(f"sizes {shape} of {name}")
                sizes[name] = dtype, _ = DTYPES[entry["dtype"]], shape
                spans.append((first, last))
                if last - first != math.prod(shape) * dtype.itemsize:
                    raise ValueError(f"{last - first} bytes of {name}")
        ends = [0, *(last for _, last in sorted(spans))]
        if [first for first, _ in sorted(spans)] != ends[:-1] or ends[-1] != size - 8 - length:
            raise ValueError(f"{size} bytes that are not those of its header")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedError(
            f"{path} is not readable ({type(error).__name__}: {error!s:.200}); expected a "
            f"safetensors file. {do}"
        ) from error
    return sizes


def _build(
    build: Callable[[dict[str, Any]], nn.Module],
    description: dict[str, Any],
    stored: Sizes,
    path: Path,
    do: str,
) -> nn.Module:
    """The network of a description. Raises DamagedError, before allocating much, if it is invalid or larger
    than the `stored` weights.
    """
    num = sum(math.prod(shape) for _, shape in stored.values())
    try:
        counts = [value for value in tree_leaves(description) if isinstance(value, int)]
        if counts and max(map(abs, counts)) > max(num, MOST_COUNT):
            raise ValueError(f"it counts to {max(map(abs, counts)):.3g} and its weights hold {num} numbers")
        if description["model"]["depth"] * len(description["tasks"]) > len(stored):
            raise ValueError(
                f"its depth is {description['model']['depth']} and its weights hold {len(stored)} tensors"
            )
        require_plain_text(description, str(path), MOST_RECORD_BYTES)
        with _Budget(num + MOST_NUMBERS, MOST_OPERATIONS * (10 + len(stored))):
            return build(description)
    except Exception as error:  # a foreign description can raise anything
        raise DamagedError(
            f"{path} describes no network ({type(error).__name__}: {error!s:.300}); expected "
            f"what this version writes. {do}"
        ) from error


class _Budget(TorchFunctionMode):
    """Limits torch: a tensor has at most `numbers` numbers, all new ones together twice as many, in at most
    `operations` calls. Raises ValueError before it would exceed one.

    (The device "meta" would compute sizes for free, but imports torch's compiler, which takes 3 s.)
    """

    def __init__(self, numbers: int, operations: int):
        super().__init__()
        self.numbers, self.made, self.operations = numbers, 0, operations

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(function, "__name__", "")
        size = _most_numbers(name, args, kwargs)
        self.made += size if name in MAKERS else 0
        self.operations -= 1
        if size > self.numbers or self.made > 2 * self.numbers or self.operations < 0:
            raise ValueError(
                f"it asks for a tensor of {size} numbers, {self.made} altogether; expected no more than its "
                f"weights hold"
            )
        return function(*args, **kwargs)


def _most_numbers(name: str, args: tuple, kwargs: dict[str, Any]) -> int:
    """An upper bound of the size of what a function of torch returns."""
    given = tree_leaves((args, kwargs))
    tensors = [value for value in given if isinstance(value, Tensor)]
    sizes = [tensor.numel() for tensor in tensors]
    if name in MAKERS:
        counts = [value for value in given if isinstance(value, int) and not isinstance(value, bool)]
        return math.prod([max(1, abs(count)) for count in counts] + sizes)
    if name in PRODUCTS:
        return math.prod(sizes)
    if name in MATRIX_PRODUCTS:
        return math.prod(
            size // max(1, tensor.shape[-1]) for size, tensor in zip(sizes, tensors, strict=True)
        ) * max(1, tensors[-1].shape[-1])
    lengths = zip_longest(*(reversed(tensor.shape) for tensor in tensors), fillvalue=1)
    return max(sum(sizes), math.prod(map(max, lengths)) if tensors else 0)


def write_weights(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a safetensors file, completely or not at all."""
    with replacing(path) as temporary:
        save_file(tensors, temporary)


def read_weights(path: Path, do: str) -> dict[str, Tensor]:
    """The tensors of a safetensors file. do: advice. Raises DamagedError if unreadable or not finite."""
    try:
        tensors = load_file(path)  # on the CPU: safetensors does not accept "cpu:0"
    except Exception as error:  # safetensors has an error class of its own, and torch's and Python's besides
        raise DamagedError(f"{path} is not readable ({error}); expected a safetensors file. {do}") from error
    require_finite(tensors, path, do)
    return tensors


def require_finite(value: Any, path: Path, do: str) -> None:
    """Raise DamagedError for a tensor in a tree of mappings and lists that holds NaN or Inf."""
    for keys, tensor in tree_flatten_with_path(value)[0]:
        if isinstance(tensor, Tensor) and not bool(torch.isfinite(tensor).all()):
            raise DamagedError(
                f"{path} holds numbers in {keystr(keys)} that are not finite; expected finite ones. {do}"
            )
