"""Votes by hand, and votes that are cast again."""

from itertools import permutations

import numpy as np

from appa_flwr.protocol.rewards import borda
from appa_flwr.protocol.votes import cast


def test_votes_by_hand():
    opinion_QK = np.array([[0.3, 0.7, 99.0], [0.2, 0.4, 0.4], [0.0, 0.0, 1.0]])
    option_QK = np.array([[True, True, False], [True, True, True], [True, True, True]])
    # two options, and padding never wins: 0.7 first; three: the tie at 0.4 goes to the first; last: a tie at 0
    assert cast(opinion_QK, option_QK, kind="mode").tolist() == [[0, 1, 0], [0, 1, 0], [0, 0, 1]]
    # K for the first place down to 1 for the last: of two options 2 and 1, of three 3, 2, 1
    assert cast(opinion_QK, option_QK, kind="ranking").tolist() == [[1, 2, 0], [1, 3, 2], [2, 1, 3]]
    assert cast(opinion_QK, option_QK, kind="distribution").tolist() == [
        [0.3, 0.7, 0.0],
        *opinion_QK.tolist()[1:],
    ]


def test_a_tie_is_a_tie_in_any_order_of_the_rows():
    rows, option_QK = [(0, 0.6), (1, 0.1), (1, 0.2), (1, 0.3)], np.ones((1, 2), bool)  # shares of 1/2 and 1/2
    opinions, half = set(), np.array([[0.5, 0.5]])
    for option, weight in (zip(*order, strict=True) for order in permutations(rows)):
        sum_K = np.zeros(2)
        np.add.at(sum_K, list(option), weight)
        opinions.add((*sum_K / sum_K.sum(),))
    assert len(opinions) > 1  # different numbers
    for opinion in opinions:
        for kind in ("mode", "ranking"):
            assert cast(np.array([opinion]), option_QK, kind=kind).tolist() == cast(half, option_QK, kind=kind).tolist()
        assert borda(np.array([2.0, 1.0]), np.array(opinion), option_QK[0]) == 1.0
