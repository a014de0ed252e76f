"""PluralLLM's scores: what a group computes at home, and the nearest question.

Axis letters: Q questions, K options, N answered questions.
"""

import numpy as np
import pytest
from fakes import catalogue_of
from scipy import stats
from scipy.spatial.distance import jensenshannon

from pluralllm.data import GroupData
from pluralllm.scores import MEASURES, PREDICTORS, local_sums, nearest_question


def test_a_groups_sums_are_those_of_scipy():
    """Twelve questions of 3 options and one of 1; the group knows eight of them and is asked about the rest."""
    rng = np.random.default_rng(0)
    public = catalogue_of([3] * 12 + [1], embedding_QKE=rng.normal(size=(13, 3, 4)))
    answer_QK = rng.dirichlet(np.ones(3), size=13).astype(np.float32)
    table_QK = rng.dirichlet(np.ones(3), size=13)
    answer_QK[12] = table_QK[12] = [1.0, 0.0, 0.0]
    known, asked = (GroupData("A", rows, answer_QK[rows]) for rows in (np.arange(8), np.arange(8, 13)))
    sum_PM = local_sums(table_QK, truth=asked, known=known, public=public)
    found = {name: dict(zip(MEASURES, sum_M, strict=True)) for name, sum_M in zip(PREDICTORS, sum_PM, strict=True)}
    rows = range(8, 12)  # the question of one option says nothing

    def expected(answer):
        pairs = [(answer(q), asked.answer_NK[q - 8].astype(float)) for q in rows]
        places = np.arange(3) / 2
        return {
            "answers": 4,
            "js": sum(1 - jensenshannon(p, t, 2) ** 2 for p, t in pairs),
            "js_distance": sum(1 - jensenshannon(p, t, np.e) for p, t in pairs),
            "wasserstein": sum(1 - stats.wasserstein_distance(places, places, p, t) for p, t in pairs),
        }

    def nearest(q):
        distance = ((public.embedding_QKE[:8].astype(float) - public.embedding_QKE[q]) ** 2).sum((1, 2))
        return known.answer_NK[distance.argmin()].astype(float)

    assert found["pluralllm"] == pytest.approx(expected(lambda q: table_QK[q]), abs=1e-6)
    assert found["uniform"] == pytest.approx(expected(lambda q: np.full(3, 1 / 3)), abs=1e-6)
    assert found["nearest-question"] == pytest.approx(expected(nearest), abs=1e-6)


def test_the_nearest_question_by_hand():
    """Questions a, b, c of two options; b is nearer to a than to c, d has three options and so is like none."""
    value_QKE = np.zeros((4, 3, 1), np.float32)
    value_QKE[:, :2, 0] = np.array([[0.0], [1.0], [3.0], [0.0]])
    table = catalogue_of([2, 2, 2, 3], embedding_QKE=value_QKE)
    known = GroupData("New", np.array([0, 2]), np.array([[0.9, 0.1, 0.0], [0.2, 0.8, 0.0]], dtype=np.float32))
    third = 1 / 3
    expected = [[0.2, 0.8, 0.0], [0.9, 0.1, 0.0], [0.9, 0.1, 0.0], [third, third, third]]
    np.testing.assert_allclose(nearest_question(known, table), expected, atol=1e-7)
    # of two, never itself: b has both, a and c only the other
    both = [[0.2, 0.8, 0.0], [0.55, 0.45, 0.0], [0.9, 0.1, 0.0], [third, third, third]]
    np.testing.assert_allclose(nearest_question(known, table, count=2), both, atol=1e-7)
