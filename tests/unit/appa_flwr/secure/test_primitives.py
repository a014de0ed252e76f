"""Keys, streams, boxes, shares and words: published vectors, identities, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appa_flwr.core.errors import UserError
from appa_flwr.secure import fixed_point, shamir
from appa_flwr.secure.primitives import seal, unseal

secret = st.binary(min_size=32, max_size=32)
bytes_of = bytes.fromhex


def test_boxes_by_rfc_8439_and_what_does_not_open():
    # section 2.8.2
    key, nonce, about = bytes(range(0x80, 0xA0)), "070000004041424344454647", bytes_of("50515253c0c1c2c3c4c5c6c7")
    box = nonce + (
        "d31a8d34648e60db7b86afbc53ef7ec2a4aded51296e08fea9e2b5a736ee62d63dbea45e8ca9671282fafb69da92728b1a71de0a9e06"
        "0b2905d6a5b67ecd3b3692ddbd7f2d778b8c9803aee328091b58fab324e4fad675945585808b4831d7bc3ff4def08e4b7a9de576d265"
        "86cec64b61161ae10b594f09e26a7e902ecbd0600691"
    )
    assert unseal(key, bytes_of(box), about).startswith(b"Ladies and Gentlemen of the class of '99")
    assert unseal(key, seal(key, b"a share", about), about) == b"a share"
    assert seal(key, b"a share", about) != seal(key, b"a share", about)
    for wrong in (bytes_of(box)[:-1], b"", bytes(40)):
        with pytest.raises(ValueError, match="not sealed"):
            unseal(key, wrong, about)
    with pytest.raises(ValueError, match="not sealed"):
        unseal(key, bytes_of(box), b"another round")


# --- Shamir ---------------------------------------------------------------------------------------


def test_the_field_s_size_is_prime():
    # Fermat's test to thirty bases
    assert all(pow(base, shamir.PRIME - 1, shamir.PRIME) == 1 for base in range(2, 32))


def solved(shares, threshold):
    """The secret by Gaussian elimination of the polynomial's equations: slow, and nothing like Lagrange's formula."""
    prime = shamir.PRIME
    rows = [[point**power % prime for power in range(threshold)] + [int.from_bytes(share)]
            for point, share in list(shares.items())[:threshold]]  # fmt: skip
    for column in range(threshold):
        pivot = next(row for row in rows[column:] if row[column])
        rows.remove(pivot)
        rows.insert(column, [value * pow(pivot[column], -1, prime) % prime for value in pivot])
        for at, row in enumerate(rows):
            if at != column:
                rows[at] = [(mine - row[column] * its) % prime for mine, its in zip(row, rows[column], strict=True)]
    return rows[0][-1].to_bytes(32)


@settings(max_examples=40, deadline=None)
@given(secret, st.integers(1, 9), st.data())
def test_any_threshold_of_shares_gives_the_secret(value, threshold, data):
    points = data.draw(st.lists(st.integers(1, 1024), min_size=threshold, max_size=12, unique=True))
    shares = shamir.split(value, points, threshold=threshold)
    some = data.draw(st.permutations(points))[:threshold]
    chosen = {point: shares[point] for point in some}
    assert shamir.join(chosen) == solved(chosen, threshold) == value
    assert shamir.join(shares) == value


def test_shares_under_the_threshold_fit_every_secret():
    # two shares of a threshold of three, and a third made up for a secret of one's choice: a polynomial goes through
    shares = shamir.split(bytes(32), [1, 2, 3], threshold=3)
    # f(0) = 3 f(1) - 3 f(2) + f(3), so f(3) = f(0) - 3 f(1) + 3 f(2)
    wanted = int.from_bytes(b"x" * 32)
    third = (wanted - 3 * int.from_bytes(shares[1]) + 3 * int.from_bytes(shares[2])) % shamir.PRIME
    assert shamir.join({1: shares[1], 2: shares[2], 3: third.to_bytes(33)}) == b"x" * 32


def test_shares_are_fresh_and_wrong_points_are_refused():
    assert shamir.split(bytes(32), [1, 2], threshold=2) != shamir.split(bytes(32), [1, 2], threshold=2)
    for points, threshold in (([0, 1], 2), ([1, 1], 2), ([1], 2), ([1], 0)):
        with pytest.raises(ValueError, match="different points"):
            shamir.split(bytes(32), points, threshold=threshold)
    with pytest.raises(ValueError, match="no shares"):
        shamir.join({1: (shamir.PRIME - 1).to_bytes(33)})


# --- words ----------------------------------------------------------------------------------------


@given(st.lists(st.floats(-4096, 4096), min_size=1, max_size=50))
def test_the_sum_of_words_is_that_of_numbers(numbers):
    words = sum((fixed_point.encode([number]) for number in numbers), np.zeros(1, np.uint64))
    assert fixed_point.decode(words, groups=len(numbers)) == pytest.approx(sum(numbers), abs=len(numbers) * 2**-40)


def test_a_sum_over_all_groups_is_right_to_2e_9():
    numbers_GN = np.random.default_rng(0).uniform(-1, 1, size=(1024, 200))
    words = np.zeros(200, np.uint64)
    for numbers_N in numbers_GN:
        words = words + fixed_point.encode(numbers_N)
    found_N = fixed_point.decode(words, groups=1024, least=-1, most=1)
    assert np.abs(found_N - numbers_GN.sum(axis=0)).max() < 2e-9
    most = np.full(1, fixed_point.LARGEST)
    largest = fixed_point.encode(most) * np.uint64(1024)
    assert fixed_point.decode(largest, groups=1024) == 2.0**22


@pytest.mark.parametrize("value", [1.0001, -0.0001, np.nan, np.inf, -np.inf])
def test_numbers_out_of_range_are_refused(value):
    with pytest.raises(UserError, match=r"outside \[0, 1\]"):
        fixed_point.encode([0.5, value], least=0, most=1)


def test_a_sum_that_cannot_be_is_told():
    with pytest.raises(UserError, match="none of numbers in their range"):
        fixed_point.decode(np.array([2**60 + 5], np.uint64), groups=3, least=0, most=1)
