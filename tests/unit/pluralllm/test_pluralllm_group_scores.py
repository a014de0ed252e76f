"""PluralLLM's scores in a federation: what a group computes at home, and what the server makes of the sums.

Axis letters: Q questions, K options, N answered questions.
"""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats
from scipy.spatial.distance import jensenshannon

from pluralllm.data import GroupData, OptionEmbedding
from pluralllm.scores import local_sums
from server_app.predictor.pooled_scores import fault, scores

SIZES = {"training": 20, "held-out": 5}


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


def sums(answers: float, js: float) -> dict[str, float]:
    return {
        "answers": answers,
        "js": js * answers,
        "js_distance": (js - 0.1) * answers,
        "wasserstein": js * answers,
    }


def sent_sums(answers: float = 4.0, js: float = 0.9, part: str = "held-out") -> dict[tuple[str, str], dict[str, float]]:
    return {
        (part, "pluralllm"): sums(answers, js),
        (part, "uniform"): sums(answers, 0.7),
        (part, "nearest-question"): sums(answers, 0.8),
    }


def test_means_are_over_answers_and_unseen_groups_stand_apart():
    by_group = {
        "A": sent_sums(4, 0.9),
        "B": {**sent_sums(1, 0.4), **sent_sums(20, 0.95, "training")},
        "C": sent_sums(3, 0.5),
        "D": sent_sums(0),  # has answered no held-out question
    }
    found = scores(by_group, {"C"})
    assert found["scores"].keys() == {"seen/held-out", "seen/training", "unseen/held-out"}
    seen = found["scores"]["seen/held-out"]["pluralllm"]
    # (4 x 0.9 + 0.4) / 5, not (0.9 + 0.4) / 2
    assert seen == pytest.approx({"answers": 5, "js": 0.8, "js_distance": 0.7, "wasserstein": 0.8})
    assert found["scores"]["unseen/held-out"]["pluralllm"]["js"] == pytest.approx(0.5)
    assert found["groups"]["B"]["seen/training"]["pluralllm"]["js"] == pytest.approx(0.95)
    assert found["groups"]["C"].keys() == {"unseen/held-out"}
    assert found["groups"]["D"] == {}


def changed(name: str, part: str = "held-out", **measures: float) -> dict[tuple[str, str], dict[str, float]]:
    good = sent_sums()
    return {**good, (part, name): {**good.get((part, name), {}), **measures}}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "no score of pluralllm on held-out"),
        ({key: value for key, value in sent_sums().items() if key[1] != "uniform"}, "no score of uniform"),
        (changed("diary", answers=1.0), "'diary' on 'held-out', which nobody asked for"),
        (changed("uniform", "diary", answers=1.0), "'uniform' on 'diary', which nobody asked for"),
        (changed("uniform", diary=1.0), "other measures of uniform than answers, js, js_distance, wasserstein"),
        (changed("context-4", **sums(4, 0.5)), "'context-4' on 'held-out', which nobody asked for"),
        (changed("x" * 9000, **sums(4, 0.5)), f"'{'x' * 40}' on 'held-out', which nobody asked for"),
        (changed("uniform", **sums(3, 0.5)), "3 answers scored of uniform, others of pluralllm"),
        (changed("uniform", js=4.1), "scores of uniform out of range"),
        (changed("uniform", js=-0.1), "scores of uniform out of range"),
        (changed("uniform", js=float("nan")), "scores of uniform out of range"),
        (changed("pluralllm", answers=6.0), "6.0 answers scored of 5"),
        (changed("pluralllm", answers=3.5), "3.5 answers scored of 5"),
    ],
)
def test_sums_that_cannot_be_are_named(given, says):
    assert says in str(fault(given, SIZES))


def test_sums_that_can_be_are_taken():
    for good in (sent_sums(), sent_sums(0), {**sent_sums(), **sent_sums(20, 1.0, "training")}):
        assert fault(good, SIZES) is None
