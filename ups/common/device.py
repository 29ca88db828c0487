"""What a device does well: products of bfloat16 matrices, and copies that overlap with its computations."""

from functools import cache

import torch
from torch import Tensor


@cache
def has_bfloat16(kind: str) -> bool:
    """Whether devices of this type ("cpu", "cuda") multiply bfloat16 matrices in hardware.

    A CPU without AVX-512 takes 20 to 30 times as long for them as for float32 (AMD EPYC with AVX2, 64 x 96 by
    96 x 96); a CPU with AVX-512 takes a third to all of the time.
    """
    if kind == "cpu":
        return torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    return kind != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)


def computed(precision: str, device: torch.device) -> torch.dtype:
    """The type in which matrices are multiplied on a device, for `precision` "no" or "bf16"."""
    return torch.bfloat16 if precision == "bf16" and has_bfloat16(device.type) else torch.float32


def in_words(precision: str, device: torch.device) -> str:
    """`computed` in words, with the reason if bf16 is not available."""
    if computed(precision, device) == torch.bfloat16:
        return "bf16"
    return "float32" + f" (this {device.type} does not multiply bf16)" * (precision == "bf16")


def autocast(precision: str, device: torch.device) -> torch.autocast:
    """A context in which matrices are multiplied in the type of `computed`."""
    is_on = computed(precision, device) == torch.bfloat16
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=is_on)


def pinned(tensor: Tensor, device: torch.device | str) -> Tensor:
    """`tensor`, from main memory, pinned if `device` is a GPU, so that a copy can start at once."""
    return tensor.pin_memory() if torch.device(device).type == "cuda" else tensor


def send(tensor: Tensor, device: torch.device | str) -> Tensor:
    """`tensor`, from main memory, on `device`.

    A plain `.to(device)` waits until a GPU has finished its queue. A copy from pinned memory is queued, and
    torch keeps that memory until it is done.
    """
    assert tensor.device.type == "cpu", tensor.device  # a copy from the device has to wait
    return pinned(tensor, device).to(device, non_blocking=True)
