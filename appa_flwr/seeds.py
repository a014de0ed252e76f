"""Named child seeds: one run seed, an independent stream for every purpose, equal on every machine."""

from __future__ import annotations

import hashlib

_SEED_BITS = 63


def child_seed(seed: int, *names: str | int) -> int:
    """A seed for one purpose.

    Args:
        seed: the run's seed.
        names: what the stream is for, such as ("pluralllm", group, round).

    Returns:
        An integer in [0, 2**63), the same for the same arguments everywhere; `hash` would differ between processes.
    """
    text = "\x1f".join([str(seed), *map(str, names)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> (64 - _SEED_BITS)
