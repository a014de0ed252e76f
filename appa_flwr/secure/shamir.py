"""Shamir's secret sharing: any `threshold` shares give a secret of 32 bytes, and fewer say nothing about it.

The secret is the value at 0 of a random polynomial of degree threshold - 1 over a prime field, a share its value at a
point.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from math import prod

PRIME = 2**256 + 297
"""The least prime above all secrets of 32 bytes."""

SHARE_BYTES, SECRET_BYTES = 33, 32


def split(secret: bytes, points: Sequence[int], *, threshold: int) -> dict[int, bytes]:
    """A share of 33 bytes for each point, all different and none 0, where the secret itself stands."""
    if not 1 <= threshold <= len(points) or len(set(points)) != len(points) or 0 in points:
        raise ValueError("shares need different points other than 0, and no more of them than there are")
    coefficients = [int.from_bytes(secret), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    return {point: _value(coefficients, point).to_bytes(SHARE_BYTES) for point in points}


def _value(coefficients: Sequence[int], point: int) -> int:
    total = 0
    for coefficient in reversed(coefficients):
        total = (total * point + coefficient) % PRIME
    return total


def join(shares: Mapping[int, bytes]) -> bytes:
    """The secret of which these are the shares by point, at least `threshold` of them: Lagrange's formula at 0.

    Raises:
        ValueError: no shares of one secret.
    """
    numerator, denominator = 0, 1
    for point, share in shares.items():
        above = prod(other for other in shares if other != point)
        below = prod(other - point for other in shares if other != point)
        numerator = (numerator * below + int.from_bytes(share) * above * denominator) % PRIME
        denominator = denominator * below % PRIME
    secret = numerator * pow(denominator, -1, PRIME) % PRIME
    if secret >= 2 ** (8 * SECRET_BYTES):
        raise ValueError("no shares of one secret")
    return secret.to_bytes(SECRET_BYTES)
