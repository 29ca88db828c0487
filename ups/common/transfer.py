"""From main memory to a device without a wait: what a step is given travels while the device computes."""

import torch
from torch import Tensor


def pinned(tensor: Tensor, device: torch.device | str) -> Tensor:
    """`tensor`, from main memory, where a copy to `device` can start without a wait: pinned for a GPU."""
    return tensor.pin_memory() if torch.device(device).type == "cuda" else tensor


def send(tensor: Tensor, device: torch.device | str) -> Tensor:
    """`tensor`, from main memory, on `device`; itself where that is main memory.

    A plain `.to(device)` waits until a GPU has done all that it was given before. From pinned memory the copy
    takes its place in line; torch keeps that memory until it is done.
    """
    assert tensor.device.type == "cpu", tensor.device  # the way back has to wait
    return pinned(tensor, device).to(device, non_blocking=True)
