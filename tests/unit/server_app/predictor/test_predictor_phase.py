"""PluralLLM's scores on the server from each group's sums, and the faults that sums may have.

Axis letters: L sums, Q questions, N answered questions.
"""

import numpy as np
import pytest
from fakes import catalogue_of
from runs import FakeGroups, federated

from appa_flwr.protocol.queries import SCORES
from pluralllm.scores import SUMS
from server_app.predictor.phase import fault, scores

CATALOGUE = catalogue_of([2] * 25, train=[True] * 20 + [False] * 5)
SIZE = 5
PLACES = {name: place for place, name in enumerate(SUMS)}


def sums(answers=0, js=0.0):
    """A group's sums (L,) from its answers and their mean JS: the other measures and predictors follow from that."""
    score_L = np.zeros(len(PLACES))
    for name, less in (("pluralllm", 0.0), ("uniform", 0.2), ("nearest-question", 0.1)):
        mean_of = {"answers": 1.0, "js": js - less, "js_distance": js - less - 0.1, "wasserstein": js - less}
        for measure, mean in mean_of.items():
            score_L[PLACES[name, measure]] = answers * mean
    return score_L


BY_GROUP = {
    "A": sums(4, 0.9),
    "B": sums(1, 0.4),
    "C": sums(),  # has answered no held-out question
}


def scored(by_group):
    node = FakeGroups([*by_group], lambda query, name: {"scores": by_group[name]})
    found = scores(federated({1: node}, CATALOGUE), CATALOGUE)
    assert [query.kind for query in node.asked] == [SCORES]
    return found


def test_means_are_over_answers():
    found = scored(BY_GROUP)
    assert found["scores"].keys() == {"pluralllm", "uniform", "nearest-question"}
    expected = {"answers": 5, "js": 0.8, "js_distance": 0.7, "wasserstein": 0.8}
    assert found["scores"]["pluralllm"] == pytest.approx(expected)  # (4 x 0.9 + 0.4) / 5, not (0.9 + 0.4) / 2
    assert found["groups"]["B"]["pluralllm"]["js"] == pytest.approx(0.4)
    assert found["groups"]["C"] == {}


def changed(measure, value, name="uniform"):
    score_L = BY_GROUP["A"].copy()
    score_L[PLACES[name, measure]] = value
    return score_L


@pytest.mark.parametrize(
    "score_L",
    [
        changed("answers", 3.0),  # of pluralllm 4
        changed("js", 4.1),
        sums(6, 0.5),
        sums(3.5, 0.5),
    ],
)
def test_a_group_whose_sums_cannot_be_is_left_out_and_named(score_L, caplog):
    assert fault(score_L, SIZE)
    found = scored({**BY_GROUP, "A": score_L})
    assert "A" not in found["groups"]
    assert found["scores"]["pluralllm"]["answers"] == 1
    assert "group A" in caplog.text


def test_sums_that_can_be_are_taken():
    for part in (5, 1.0), (4, 0.9), ():
        assert fault(sums(*part), SIZE) is None
