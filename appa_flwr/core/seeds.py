"""Named child seeds: one run seed, an independent stream for every purpose, equal on every machine."""

import hashlib


def child_seed(seed: int, *names: str | int) -> int:
    """Seed in [0, 2**63) for one purpose, such as ("pluralllm", group, round); `hash` would differ per process."""
    text = "\x1f".join([str(seed), *map(str, names)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 1
