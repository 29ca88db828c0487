"""Where matrices are multiplied in bfloat16: where it was asked for, on a device that has such products."""

from functools import cache

import torch


@cache
def has_bfloat16(kind: str) -> bool:
    """Whether devices of this type ("cpu", "cuda") multiply bfloat16 matrices as such.

    A CPU without AVX-512 takes 20 to 30 times as long for them as for float32 (AMD EPYC with AVX2, 64 x 96 by
    96 x 96), one with it a third to all of the time.
    """
    if kind == "cpu":
        return torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    return kind != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)


def computed(precision: str, device: torch.device) -> torch.dtype:
    """What `precision`, "no" or "bf16", comes to on a device."""
    return torch.bfloat16 if precision == "bf16" and has_bfloat16(device.type) else torch.float32


def in_words(precision: str, device: torch.device) -> str:
    """`computed`, and why it is not what was asked for."""
    if computed(precision, device) == torch.bfloat16:
        return "bf16"
    return "float32" + f" (this {device.type} does not multiply bf16)" * (precision == "bf16")


def autocast(precision: str, device: torch.device) -> torch.autocast:
    """Inside, matrices are multiplied in bfloat16 if that is what `precision` comes to on the device."""
    is_on = computed(precision, device) == torch.bfloat16
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=is_on)
