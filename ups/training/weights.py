"""Files of weights (safetensors): written completely or not at all, read with finite numbers alone."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path

from ups.common.files import DamagedError, replacing


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
