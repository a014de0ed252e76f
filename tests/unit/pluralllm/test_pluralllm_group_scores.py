"""PluralLLM's scores in a federation: what a group computes at home, and what the server makes of the sums.

Axis letters: Q questions, K options, N answered questions.
"""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats
from scipy.spatial.distance import jensenshannon

from pluralllm.data import GroupData, OptionEmbedding
from pluralllm.prediction import Targets
from pluralllm.scores import AT_SCALES, coverage_at, interval_scale, local_sums
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
    spread_Q = np.random.default_rng(2).uniform(size=13)
    found = local_sums(Targets(table_QK, spread_Q), truth=asked, known=known, embedding=embedding)
    assert found.keys() == {"pluralllm", "uniform", "nearest-question", "calibration"}
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

    spread = {"spread": spread_Q[8:12].sum()}
    assert found["pluralllm"] == pytest.approx({**expected(lambda q: table_QK[q]), **spread}, abs=1e-6)
    assert found["uniform"] == pytest.approx(expected(lambda q: np.full(3, 1 / 3)), abs=1e-6)
    assert found["nearest-question"] == pytest.approx(expected(nearest), abs=1e-6)
    error = [jensenshannon(table_QK[q], asked.answer_NK[q - 8].astype(float), np.e) for q in rows]
    ranked = stats.spearmanr(spread_Q[8:12], error).statistic
    assert found["calibration"] == pytest.approx({"answers": 4, "rank_correlation": 4 * ranked})
    assert abs(ranked) > 0.1


def test_a_known_answer_is_never_its_own_nearest_question_and_no_spread_is_no_calibration():
    embedding, known, _, table_QK = world()
    found = local_sums(Targets(table_QK, np.zeros(13)), truth=known, known=known, embedding=embedding)
    assert found["nearest-question"]["js"] < 8 - 0.1  # itself would score 8
    assert "calibration" not in found
    assert found["pluralllm"]["spread"] == 0.0


def test_the_share_of_answers_within_their_intervals_by_hand():
    """Roots of .5 and .25 with deviations that reach so far to both sides, at 1 and at twice as much."""
    embedding, known, asked, table_QK = world()
    embedding.option_QK[8, 2] = False
    table_QK[8] = [0.5, 0.5, 0.0]
    table_QK[9:12] = [0.25, 0.25, 0.5]
    asked.answer_NK[:4] = [[0.5, 0.5, 0.0], [0.36, 0.16, 0.48], [0.49, 0.01, 0.5], [1.0, 0.0, 0.0]]
    # each root's interval is .15 wide to both sides at 1, .3 at 2, and .105, .21, .42 at the others
    deviation_QK = np.full((13, 3), 0.15 / 1.6448536)
    given = {"truth": asked, "known": known, "embedding": embedding}
    found = local_sums(Targets(table_QK, np.zeros(13), deviation_QK), **given)["coverage"]
    # Distances of the roots: 0 and 0; .1, .1, .014; .2, .4, 0; .5, .5, .707. The question of one option says nothing.
    assert found == pytest.approx(
        {
            "answers": 4.0,
            "coverage-0.7": 1 + 1 + 1 / 3,
            "coverage-1": 1 + 1 + 1 / 3,
            "coverage-1.4": 1 + 1 + 2 / 3,
            "coverage-2": 1 + 1 + 2 / 3,
            "coverage-2.8": 1 + 1 + 1,
        }
    )
    assert "coverage" not in local_sums(Targets(table_QK, np.zeros(13)), **given)


def test_the_factor_of_the_deviations_is_where_nine_in_ten_shares_are_covered():
    assert interval_scale([0.5, 0.9, 0.95, 1.0, 1.0]) == pytest.approx(1.0)
    # half-way between 1.0 and 1.4 in their logarithms
    assert interval_scale([0.5, 0.85, 0.95, 1.0, 1.0]) == pytest.approx(1.4**0.5)
    assert interval_scale([0.1, 0.2, 0.3, 0.4, 0.5]) == pytest.approx(2.8)  # never beyond what was measured
    assert interval_scale([0.95, 1.0, 1.0, 1.0, 1.0]) == pytest.approx(0.7)
    assert interval_scale([0.95, 0.1, 0.2, 0.3, 0.4]) == pytest.approx(0.7)  # a liar's
    assert coverage_at(1.4**0.5, [0.5, 0.85, 0.95, 1.0, 1.0]) == pytest.approx(0.9)


def curve(answers: float, *shares: float) -> dict[str, float]:
    return {"answers": answers} | {name: answers * share for name, share in zip(AT_SCALES, shares, strict=True)}


def test_a_group_s_coverage_is_by_the_scale_of_the_others():
    narrow, wide = (0.5, 0.6, 0.7, 0.9, 1.0), (0.7, 0.9, 0.95, 1.0, 1.0)
    by_group = {
        "A": {**sent_sums(10), ("held-out", "coverage"): curve(10, *narrow)},
        "B": {**sent_sums(30), ("held-out", "coverage"): curve(30, *wide)},
        "C": {**sent_sums(10), ("held-out", "coverage"): curve(10, *narrow)},
    }
    found = scores(by_group, {"C"})
    # A by B's factor 1: .6; B by A's factor 2: 1
    assert found["calibration"]["seen/held-out"]["coverage"] == pytest.approx((10 * 0.6 + 30 * 1.0) / 40)
    # of both together .65, .825, .8875, .975, 1: a seventh of the way from 1.4 to 2
    assert found["interval_scale"] == pytest.approx(1.4 * (2 / 1.4) ** (0.0125 / 0.0875))
    assert found["calibration"]["unseen/held-out"]["coverage"] == pytest.approx(0.7 + 0.2 / 7)
    assert scores({"A": sent_sums()}, ())["interval_scale"] is None
    alone = scores({"A": by_group["A"]}, ())
    assert alone["interval_scale"] == pytest.approx(2.0)
    assert "coverage" not in alone["calibration"]["seen/held-out"]  # by its own factor it would be right by making


def sums(answers: float, js: float, **more: float) -> dict[str, float]:
    return {
        "answers": answers,
        "js": js * answers,
        "js_distance": (js - 0.1) * answers,
        "wasserstein": js * answers,
        **more,
    }


def sent_sums(answers: float = 4.0, js: float = 0.9, part: str = "held-out") -> dict[tuple[str, str], dict[str, float]]:
    return {
        (part, "pluralllm"): sums(answers, js, spread=0.02 * answers),
        (part, "uniform"): sums(answers, 0.7),
        (part, "nearest-question"): sums(answers, 0.8),
    }


def test_means_are_over_answers_and_unseen_groups_stand_apart():
    by_group = {
        "A": {
            **sent_sums(4, 0.9),
            ("held-out", "calibration"): {"answers": 4.0, "rank_correlation": 2.0},
        },
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
    assert found["calibration"]["seen/held-out"] == pytest.approx({"spread": 0.02, "rank_correlation": 0.5})
    assert "rank_correlation" not in found["calibration"]["unseen/held-out"]
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
        (changed("context-0", **sums(4, 0.5)), "'context-0' on 'held-out', which nobody asked for"),
        (changed("x" * 9000, **sums(4, 0.5)), f"'{'x' * 40}' on 'held-out', which nobody asked for"),
        (changed("context-4", **sums(3, 0.5)), "3 answers scored of context-4, others of pluralllm"),
        (changed("uniform", **sums(3, 0.5)), "3 answers scored of uniform, others of pluralllm"),
        (changed("uniform", js=4.1), "scores of uniform out of range"),
        (changed("uniform", js=-0.1), "scores of uniform out of range"),
        (changed("uniform", js=float("nan")), "scores of uniform out of range"),
        (changed("pluralllm", answers=6.0), "6.0 answers scored of 5"),
        (changed("pluralllm", answers=3.5), "3.5 answers scored of 5"),
        (changed("calibration", answers=4.0, rank_correlation=-4.5), "scores of calibration out of range"),
        (changed("coverage", **curve(4, 1, 1, 1, 1, 1.1)), "scores of coverage out of range"),
        (changed("coverage", answers=4.0, coverage=4.0), "other measures of coverage than answers, coverage-0.7"),
    ],
)
def test_sums_that_cannot_be_are_named(given, says):
    assert says in str(fault(given, SIZES))


def test_sums_that_can_be_are_taken():
    calibrated = changed("calibration", answers=4.0, rank_correlation=-4.0)
    covered = changed("coverage", **curve(4, 1, 1, 1, 1, 1))
    for good in (sent_sums(), sent_sums(0), calibrated, covered, {**sent_sums(), **sent_sums(20, 1.0, "training")}):
        assert fault(good, SIZES) is None
