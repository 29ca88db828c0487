"""Named random streams: random numbers depend on a seed and keys, not on what was drawn before."""

import hashlib

import torch


def generator(seed: int, *keys: int | str) -> torch.Generator:
    """A random generator that depends on `seed` and `keys` alone, e.g. generator(seed, "noise", step, rank).

    Keys are hashed (BLAKE2b), so the streams of neighbouring steps and ranks are unrelated.
    """
    digest = hashlib.blake2b(repr((int(seed), *keys)).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
