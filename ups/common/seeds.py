"""Random streams by name: every draw is a function of a seed and of keys, of nothing that came before."""

import hashlib

import torch


def generator(seed: int, *keys: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    """A random generator that depends on `seed` and `keys` alone, e.g. generator(seed, "noise", step, rank).

    Keys are hashed (BLAKE2b), so neighbouring steps or ranks give unrelated streams, unlike seed + step.
    """
    digest = hashlib.blake2b(repr((int(seed), *keys)).encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)
