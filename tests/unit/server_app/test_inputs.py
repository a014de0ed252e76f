"""The result of the groups' votes.

Axis letters: Q questions, K options.
"""

import numpy as np
import pytest
from fake_groups import FakeGroups, federated
from fakes import catalogue_of

from appa_flwr.config import Config
from appa_flwr.protocol import asks
from server_app.inputs import RunInputs, ask_votes

CATALOGUE = catalogue_of([3, 2], train=[True, False])
MODES = {"A": [[1, 0, 0], [1, 0, 0]], "B": [[1, 0, 0], [0, 1, 0]], "C": [[0, 0, 1], [0, 1, 0]]}
SHARES = {"A": [[0.6, 0.2, 0.2], [1, 0, 0]], "B": [[0.5, 0.1, 0.4], [0, 1, 0]], "C": [[0.1, 0, 0.9], [0.2, 0.8, 0]]}
MEAN = [[0.4, 0.1, 0.5], [0.4, 0.6, 0.0]]
MAJORITY = [[1, 0, 0], [0, 1, 0]]


def voted(**keys):
    """The result of the votes, and the kinds of numbers that were asked for."""
    node = FakeGroups([*MODES], lambda ask, name: {"votes": (MODES if ask.kind == asks.VOTES else SHARES)[name]})
    run = RunInputs(Config.load(keys), None, federated({1: node}, CATALOGUE), CATALOGUE)
    return ask_votes(run), [ask.kind for ask in node.asked]


@pytest.mark.parametrize(
    ("target", "sft_QK", "kinds"),
    [
        ("majority", MAJORITY, [asks.VOTES]),
        ("votes", [[2 / 3, 0, 1 / 3], [1 / 3, 2 / 3, 0]], [asks.VOTES]),
        # 2, 0 and 1 votes of 3 become 3, 1 and 2 of 6; 1 and 2 of 3 become 2 and 3 of 5
        ("smoothed-votes", [[3 / 6, 1 / 6, 2 / 6], [2 / 5, 3 / 5, 0]], [asks.VOTES]),
        ("predicted-mean", MEAN, [asks.PREDICTIONS]),
    ],
)
def test_sft_s_targets_and_the_majority(target, sft_QK, kinds):
    votes, asked = voted(**{"sft.target": target})
    np.testing.assert_allclose(votes.sft_QK, sft_QK, atol=1e-12)
    np.testing.assert_allclose(votes.majority_QK, MAJORITY)
    assert asked == kinds


def test_the_mean_of_answers_is_asked_for_as_such():
    votes, asked = voted(**{"sft.target": "mean"})
    np.testing.assert_allclose(votes.sft_QK, MEAN)
    assert asked == [asks.ANSWERS]
