"""Autocast to bfloat16, if the configuration sets it and the device multiplies bfloat16 matrices."""

from functools import cache

import torch


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
