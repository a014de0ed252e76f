"""Masked sums: the total is exact, a part says nothing, and what would take a part apart is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appa_flwr.core.errors import UserError
from appa_flwr.secure import masks as secure_sum

PRIVATE = [secure_sum.private_key() for _ in range(4)]
PUBLIC = [secure_sum.public_key(key) for key in PRIVATE]


def masked(parts, step="answers 0", keys=PUBLIC):
    return [
        secure_sum.mask(part, private=private, public_keys=keys, step=step)
        for part, private in zip(parts, PRIVATE, strict=False)
    ]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(-(2**60), 2**60), min_size=4, max_size=4), st.integers(0, 2**32))
def test_the_total_is_the_sum(numbers, seed):
    parts = [{"a": np.array([number]), "b": np.random.default_rng(seed + n).integers(-9, 9, size=(2, 3))}
             for n, number in enumerate(numbers)]  # fmt: skip
    found = secure_sum.total(masked(parts))
    assert found["a"].tolist() == [sum(numbers)]
    np.testing.assert_array_equal(found["b"], sum(part["b"] for part in parts))


def test_the_order_of_nodes_and_of_keys_changes_no_bit():
    parts = [{"count": np.array([n, 7, 0])} for n in range(4)]
    hidden = masked(parts)
    assert secure_sum.total(hidden)["count"].tolist() == [6, 28, 0]
    assert secure_sum.total(hidden[::-1])["count"].tolist() == [6, 28, 0]
    shuffled = masked(parts, keys=PUBLIC[::-1])
    assert all((one["count"] == other["count"]).all() for one, other in zip(hidden, shuffled, strict=True))


def test_a_part_looks_random_and_without_one_node_so_does_the_sum():
    parts = [{"a": np.zeros(4096, dtype=np.int64)} for _ in PRIVATE]
    hidden = masked(parts)
    for seen in (*(part["a"] for part in hidden), hidden[0]["a"] + hidden[1]["a"] + hidden[2]["a"]):
        bits = np.unpackbits(seen.view(np.uint8))
        assert abs(bits.mean() - 0.5) < 0.01  # 260 000 fair coins: a standard deviation of .001
        assert len(np.unique(seen)) == seen.size
    assert not secure_sum.total(hidden)["a"].any()


def test_masks_differ_from_step_to_step_array_to_array_and_pair_to_pair():
    nothing = [{"a": np.zeros(8, dtype=np.int64), "b": np.zeros(8, dtype=np.int64)} for _ in PRIVATE]
    first, again, other = masked(nothing), masked(nothing), masked(nothing, step="answers 1")
    assert (first[0]["a"] == again[0]["a"]).all()
    assert not (first[0]["a"] == other[0]["a"]).any()
    assert not (first[0]["a"] == first[0]["b"]).any()
    alone = masked(nothing[:2], keys=PUBLIC[:2])
    assert not (first[0]["a"] == alone[0]["a"]).any()


@pytest.mark.parametrize("keys", [PUBLIC[1:], [PUBLIC[0], *PUBLIC], [*PUBLIC, PUBLIC[1]]])
def test_what_would_spoil_a_sum_is_refused(keys):
    with pytest.raises(UserError, match="secure sum"):
        secure_sum.mask({"a": np.array([0])}, private=PRIVATE[0], public_keys=keys, step="s")


def test_a_key_of_low_order_is_told_from_a_sound_one():
    assert secure_sum.usable(PUBLIC[0])
    assert not secure_sum.usable(bytes(32))
