"""Votes by hand, and votes that are cast again."""

from __future__ import annotations

import numpy as np
import pytest

from appa_flwr.protocol.votes import BALLOTS, cast


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


@pytest.mark.parametrize("kind", [*BALLOTS.values(), "distribution"])
def test_a_vote_that_is_cast_again_stays_and_groups_vote_apart(kind):
    option_QK = np.array([[True, True, True], [True, True, False]])
    opinion_GQK = np.random.default_rng(0).dirichlet(np.ones(3), size=(4, 2))
    once_GQK = cast(opinion_GQK, option_QK, kind=kind)
    np.testing.assert_array_equal(cast(once_GQK, option_QK, kind=kind), once_GQK)
    for opinion_QK, once_QK in zip(opinion_GQK, once_GQK, strict=True):
        np.testing.assert_array_equal(cast(opinion_QK, option_QK, kind=kind), once_QK)
