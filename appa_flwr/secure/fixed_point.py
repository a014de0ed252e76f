"""Numbers as words of the ring Z_2^64, with 40 fractional bits: sums are exact there, and masks cancel to the last bit.

A word is rounded by at most 2^-41, so the sum over 1,024 groups is right to 5e-10.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from appa_flwr.core.errors import UserError
from appa_flwr.secure.primitives import Words

FRACTION_BITS = 40
MOST_GROUPS = 1024
LARGEST = 2.0**12
"""No number of a group is beyond it: the sum over 1,024 groups is below 2^22, which leaves a bit beside the sign."""


def encode(values: npt.ArrayLike, *, least: float = -LARGEST, most: float = LARGEST) -> Words:
    """Numbers as words.

    Raises:
        UserError: a number that is not finite, or outside its range: it would wrap around and spoil the sum.
    """
    array = np.asarray(values, dtype=np.float64)
    if not (-LARGEST <= least <= most <= LARGEST) or not ((array >= least) & (array <= most)).all():
        raise UserError(f"secure sum: a number outside [{least:g}, {most:g}]")
    return np.rint(np.ldexp(array, FRACTION_BITS)).astype(np.int64).view(np.uint64)


def decode(words: Words, *, groups: int, least: float = -LARGEST, most: float = LARGEST) -> npt.NDArray[np.float64]:
    """The sums that words over so many groups hold.

    Raises:
        UserError: a sum that such numbers cannot have: a share or a mask was wrong, and what came out is random.
    """
    sums = np.ldexp(words.view(np.int64).astype(np.float64), -FRACTION_BITS)
    slack = groups * 2.0 ** -(FRACTION_BITS + 1)
    if not ((sums >= groups * least - slack) & (sums <= groups * most + slack)).all():
        raise UserError("secure sum: the total is none of numbers in their range; a group sent a wrong share or part")
    return sums
