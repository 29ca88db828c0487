"""Copies from main memory to a device that overlap with its computations."""

import torch
from torch import Tensor


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
