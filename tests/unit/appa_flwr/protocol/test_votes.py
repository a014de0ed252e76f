"""Votes by hand, and votes that are cast again."""

import numpy as np

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
