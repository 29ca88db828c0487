"""How torch computes: what a device does well (products of bfloat16 matrices, and copies that overlap with
its computations), and the state of torch in public calls, whatever the caller has set.

Under the caller's autocast a forecast was off by 3e-3 to 8e-3, and with float64 as the default type sound
weights did not load.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual
from torch.utils._pytree import tree_leaves

AUTOCAST = ("cpu", "cuda", "mps", "xpu")
PRODUCTS = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul, torch.backends.mkldnn.conv)
# of the process: (read, set, value in public calls). Everything else belongs to a thread.
SETTINGS = (
    (torch.get_default_dtype, torch.set_default_dtype, torch.float32),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, 0),
    *(
        (partial(getattr, one, "fp32_precision"), partial(setattr, one, "fp32_precision"), "ieee")
        for one in PRODUCTS
    ),
)


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


def precision_in_words(precision: str, device: torch.device) -> str:
    """`computed` in words, with the reason if bf16 is not available."""
    if computed(precision, device) == torch.bfloat16:
        return "bf16"
    return "float32" + f" (this {device.type} does not multiply bf16)" * (precision == "bf16")


def autocast(precision: str, device: torch.device) -> torch.autocast:
    """A context in which matrices are multiplied in the type of `computed`."""
    is_on = computed(precision, device) == torch.bfloat16
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=is_on)


def send(tensor: Tensor, device: torch.device | str) -> Tensor:
    """`tensor`, from main memory, on `device`.

    A plain `.to(device)` waits until a GPU has finished its queue. A copy from pinned memory is queued, and
    torch keeps that memory until it is done.
    """
    assert tensor.device.type == "cpu", tensor.device  # a copy from the device has to wait
    tensor = tensor.pin_memory() if torch.device(device).type == "cuda" else tensor
    return tensor.to(device, non_blocking=True)


# ---------------------------------------------------------------- public calls


class _Process:
    """The settings of the process. Of the threads that are in a public call, the first one changes them and
    the last one restores them.
    """

    def __init__(self) -> None:
        self.lock, self.num_calls, self.has_computed = threading.Lock(), 0, False
        if hasattr(os, "register_at_fork"):  # not on Windows
            os.register_at_fork(after_in_child=self.after_fork)

    def after_fork(self) -> None:
        """A child computes with one thread: OpenMP hangs if parent and child both start threads."""
        self.lock = threading.Lock()
        if self.has_computed:
            torch.set_num_threads(1)

    def enter(self) -> None:
        with self.lock:
            if not self.num_calls:
                self.callers = [(change, read()) for read, change, value in SETTINGS if read() != value]
                for read, change, value in SETTINGS:
                    if read() != value:
                        change(value)
            self.num_calls, self.has_computed = self.num_calls + 1, True

    def leave(self) -> None:
        with self.lock:
            self.num_calls -= 1
            if not self.num_calls:
                for change, value in self.callers:
                    change(value)


PROCESS = _Process()


@contextmanager
def plain_torch(keeps_gradient: bool = False) -> Iterator[None]:
    """Compute in float32 on the CPU by default, without autocast, inference mode and gradients, and restore
    the caller's state. Public calls have it as a decorator.

    keeps_gradient: leave it to the caller whether gradients are recorded.
    """
    has_gradient = keeps_gradient and torch.is_grad_enabled()
    PROCESS.enter()
    try:
        with ExitStack() as stack:
            if torch._C._len_torch_function_stack():  # default devices are such functions, and slow
                stack.enter_context(torch.device("cpu"))
            if kinds := [kind for kind in AUTOCAST if torch.is_autocast_enabled(kind)]:
                # weights that were cast are cached until the caller's autocast ends: of another type, or
                # without gradient
                torch.clear_autocast_cache()
                stack.callback(torch.clear_autocast_cache)
            for kind in kinds:
                stack.enter_context(torch.autocast(kind, enabled=False))
            if torch.is_inference_mode_enabled():
                stack.enter_context(torch.inference_mode(False))
            if torch.is_grad_enabled() != has_gradient:
                stack.enter_context(torch.set_grad_enabled(has_gradient))
            yield
    finally:
        PROCESS.leave()


def has_gradient(*given: Any) -> bool:
    """Whether a tensor in nested containers has a gradient to keep, in reverse or forward mode."""
    is_recorded = torch.is_grad_enabled()
    return any(
        isinstance(u, Tensor) and ((is_recorded and u.requires_grad) or unpack_dual(u).tangent is not None)
        for u in tree_leaves(given)
    )


def refuse_gradient(what: str, why: str, *given: Any) -> None:
    """Raise ValueError if a tensor has a gradient, which the call would lose."""
    if has_gradient(*given):
        raise ValueError(
            f"{what} was given a tensor that requires a gradient; expected one without, as {why}. Pass its "
            "detach()."
        )
