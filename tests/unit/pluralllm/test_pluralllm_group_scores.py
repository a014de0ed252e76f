"""PluralLLM's scores in a federation: what a group computes at home.

Axis letters: Q questions, K options, N answered questions.
"""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats
from scipy.spatial.distance import jensenshannon

from pluralllm.data import GroupData, OptionEmbedding
from pluralllm.scores import local_sums


def world(seed: int = 0) -> tuple[OptionEmbedding, GroupData, GroupData, np.ndarray]:
    """Twelve questions of 3 options and one of 1; the group knows eight of them and is asked about the rest."""
    rng = np.random.default_rng(seed)
    option_QK = np.ones((13, 3), dtype=bool)
    option_QK[12, 1:] = False
    embedding = OptionEmbedding(
        tuple(f"q{q}" for q in range(13)), rng.normal(size=(13, 3, 4)).astype(np.float32), option_QK
    )
    answer_QK = rng.dirichlet(np.ones(3), size=13).astype(np.float32)
    answer_QK[12] = [1.0, 0.0, 0.0]
    known, asked = np.arange(8), np.arange(8, 13)
    table_QK = rng.dirichlet(np.ones(3), size=13)
    table_QK[12] = [1.0, 0.0, 0.0]
    return embedding, GroupData("A", known, answer_QK[known]), GroupData("A", asked, answer_QK[asked]), table_QK


def test_a_groups_sums_are_those_of_scipy():
    embedding, known, asked, table_QK = world()
    found = local_sums(table_QK, truth=asked, known=known, embedding=embedding)
    assert found.keys() == {"pluralllm", "uniform", "nearest-question"}
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
        distance = ((embedding.value_QKE[:8].astype(float) - embedding.value_QKE[q]) ** 2).sum((1, 2))
        return known.answer_NK[distance.argmin()].astype(float)

    assert found["pluralllm"] == pytest.approx(expected(lambda q: table_QK[q]), abs=1e-6)
    assert found["uniform"] == pytest.approx(expected(lambda q: np.full(3, 1 / 3)), abs=1e-6)
    assert found["nearest-question"] == pytest.approx(expected(nearest), abs=1e-6)


def test_a_known_answer_is_never_its_own_nearest_question():
    embedding, known, _, table_QK = world()
    found = local_sums(table_QK, truth=known, known=known, embedding=embedding)
    assert found["nearest-question"]["js"] < 8 - 0.1  # itself would score 8
