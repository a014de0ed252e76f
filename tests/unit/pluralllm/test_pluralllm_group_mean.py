"""The mean answer of the other groups, worked out by hand."""

from __future__ import annotations

import numpy as np

from pluralllm.data import GroupData, OptionEmbedding
from pluralllm.scores import group_sums, mean_from_sums

TABLE = OptionEmbedding(("a", "b", "c"), np.zeros((3, 2, 5), np.float32), np.ones((3, 2), np.bool_))


def group(name: str, **answers: float) -> GroupData:
    rows = [TABLE.question_ids.index(question_id) for question_id in answers]
    shares = [[first, 1.0 - first] for first in answers.values()]
    return GroupData(name, np.array(rows, dtype=np.int64), np.array(shares, dtype=np.float32).reshape(-1, 2))


HERE, THERE, AWAY = group("Here", a=1.0, b=0.25), group("There", a=0.5, b=0.75), group("Away", a=0.0)


def test_sums_by_hand_and_of_nodes() -> None:
    total, count = group_sums([HERE, THERE, AWAY], TABLE)
    np.testing.assert_allclose(total, [[1.5, 1.5], [1.0, 1.0], [0.0, 0.0]])
    assert count.tolist() == [3, 2, 0]
    first, second = group_sums([HERE], TABLE), group_sums([THERE, AWAY], TABLE)
    np.testing.assert_allclose(first[0] + second[0], total)
    assert (first[1] + second[1]).tolist() == count.tolist()


def test_the_own_share_is_removed_and_answers_of_few_groups_have_no_mean() -> None:
    sums = group_sums([HERE, THERE, AWAY], TABLE)
    for few in (1, 2):
        expected = [[0.25, 0.75], [0.75, 0.25], [0, 0]]
        np.testing.assert_allclose(mean_from_sums(*sums, own=HERE, min_groups=few), expected)
        np.testing.assert_allclose(mean_from_sums(*sums, min_groups=few), [[0.5, 0.5], [0.5, 0.5], [0, 0]])
    # question b was answered by two groups only, whoever asks
    np.testing.assert_allclose(mean_from_sums(*sums, own=HERE, min_groups=3), [[0.25, 0.75], [0, 0], [0, 0]])
    np.testing.assert_allclose(mean_from_sums(*sums, own=AWAY, min_groups=3), [[0.75, 0.25], [0, 0], [0, 0]])
    np.testing.assert_allclose(mean_from_sums(*sums, min_groups=3), [[0.5, 0.5], [0, 0], [0, 0]])
    np.testing.assert_allclose(sums[0][0], [1.5, 1.5])  # the sums themselves are left alone


def test_nothing_is_left_of_a_share_that_stood_alone() -> None:
    third = group("Here", a=1 / 3)
    total, count = group_sums([third], TABLE)
    assert not mean_from_sums(total + 1e-9, count, own=third, min_groups=1).any()
