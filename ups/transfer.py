"""From main memory to a device without a wait: what a step is given travels while the device computes."""

import torch
from torch import Tensor


def send(tensor: Tensor, device: torch.device | str) -> Tensor:
    """`tensor`, from main memory, on `device`; itself where that is main memory.

    A plain `.to(device)` waits until a GPU has done all that it was given before. From pinned memory the copy
    takes its place in line; torch keeps that memory until it is done.
    """
    assert tensor.device.type == "cpu", tensor.device   # the way back has to wait
    is_gpu = torch.device(device).type == "cuda"
    return (tensor.pin_memory() if is_gpu else tensor).to(device, non_blocking=True)
