"""Scores without a language model, through a federation that scores with the clients' own code.

Axis letters: G groups, Q questions, K options, J answers.
"""

from __future__ import annotations

import numpy as np
import pytest
from fakes import federated, scoring_node
from three_groups import CATALOGUE, GROUPS, NODES, TABLES, TEST_J, TRUTHS

from appa_flwr.analysis import group_differences
from appa_flwr.analysis.ceilings import NotSolved
from appa_flwr.config import Config
from appa_flwr.protocol import rewards, wire
from server_app import baselines as server_baselines
from server_app.inputs import RunInputs

CONFIG = Config.load({})


@pytest.fixture
def federation():
    return federated(NODES, CATALOGUE)


TARGETS, TRUTH = wire.TARGET_SIDE, wire.TRUTH_SIDE


@pytest.mark.parametrize("sides", [(TARGETS,), (TARGETS, TRUTH)])
@pytest.mark.parametrize("silent", [[], [1]])
def test_what_groups_score_against_is_rebuilt_from_the_rewards_of_those_that_answer(silent, sides):
    federation = federated(NODES, CATALOGUE, silent=silent)
    found = server_baselines.probe_targets(federation, TEST_J, CATALOGUE.option_QK[TEST_J], sides=sides)
    assert found.keys() == set(sides)
    for side in sides:
        expected_GJK = np.stack([{TARGETS: TABLES, TRUTH: TRUTHS}[side][name][TEST_J] for name in GROUPS])
        assert (expected_GJK.max(2) < 0.99).all()
        expected_GJK[silent] = np.nan
        found_GJK = np.where(CATALOGUE.option_QK[TEST_J], found[side], expected_GJK)
        np.testing.assert_allclose(found_GJK, expected_GJK, rtol=0, atol=1e-9)
    asked = [m for m in federation.grid._grid.pushed if m.metadata.message_type == wire.SCORE]
    assert {wire.unpack_score_request(message.content).sides for message in asked} == {sides}


def test_a_group_that_has_no_survey_answer_to_a_question_has_no_truth_there_and_its_target_all_the_same():
    truth_QK = TRUTHS["A"].copy()
    truth_QK[2] = np.nan
    federation = federated({0: scoring_node({"A": TABLES["A"]}, {"A": truth_QK})}, CATALOGUE)
    found = server_baselines.probe_targets(federation, TEST_J, CATALOGUE.option_QK[TEST_J], sides=(TARGETS, TRUTH))
    np.testing.assert_allclose(found[TARGETS][0], TABLES["A"][TEST_J], rtol=0, atol=1e-9)
    np.testing.assert_allclose(found[TRUTH][0, [0, 2]], TRUTHS["A"][[1, 4]], rtol=0, atol=1e-9)
    assert np.isnan(found[TRUTH][0, 1, :4]).all()


def test_targets_with_zeros_and_ties_come_back_as_zeros_and_ties():
    table_QK = np.array([[1, 0, 0, 0, 0], [0.5, 0, 0.5, 0, 0], [0.25] * 4 + [0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 1.0]])
    federation = federated({0: scoring_node({"A": table_QK})}, CATALOGUE)
    found = server_baselines.probe_targets(federation, TEST_J, CATALOGUE.option_QK[TEST_J], sides=(TARGETS,))
    (found_JK,) = found[TARGETS]
    np.testing.assert_allclose(found_JK, table_QK[TEST_J], rtol=0, atol=1e-9)
    assert found_JK[0, 0] == found_JK[0, 2]
    assert len(set(found_JK[1, :4])) == 1
    assert not found_JK[~CATALOGUE.option_QK[TEST_J]].any()


def baselines(federation, config):
    majority_QK = np.where(CATALOGUE.option_QK, np.arange(5)[None] == 0, 0.0)
    run = RunInputs(config, None, federation, CATALOGUE)
    return server_baselines.baseline_scores(run, question_J=TEST_J, known_JK={"majority": majority_QK[TEST_J]})


def test_trivial_baselines_and_ceilings_frame_what_a_policy_can_reach(federation):
    rows = baselines(federation, CONFIG).rows
    found = {(row.method, row.metric): row for row in rows}
    metrics = rewards.metrics_of("dpa")
    pairs = [(method, metric) for method in ("uniform", "majority") for metric in metrics]
    solved = ("js", "wasserstein", "cosine")  # js-distance has no ceilings
    pairs += [("mean-prediction", metric) for metric in metrics]  # and no row of own predictions but in a simulation
    pairs += [(method, metric) for method in ("ceiling-average", "ceiling-min") for metric in solved]
    assert [(row.method, row.metric) for row in rows] == pairs
    sizes = {1: 3, 2: 4, 4: 5}
    uniform = [
        np.mean([float(rewards.js([1 / n] * n, TABLES[group][q, :n], [True] * n)) for q, n in sizes.items()])
        for group in GROUPS
    ]
    assert list(found["uniform", "js"].per_group.values()) == pytest.approx(uniform)
    mean = {q: np.mean([TABLES[group][q, :n] for group in GROUPS], axis=0) for q, n in sizes.items()}
    by_mean = [
        np.mean([float(rewards.js(mean[q], TABLES[group][q, :n], [True] * n)) for q, n in sizes.items()])
        for group in GROUPS
    ]
    assert list(found["mean-prediction", "js"].per_group.values()) == pytest.approx(by_mean, abs=1e-6)
    for metric in solved:
        best_average, best_minimum = found["ceiling-average", metric], found["ceiling-min", metric]
        for method in ("uniform", "majority", "ceiling-min"):
            assert found[method, metric].avg_as <= best_average.avg_as + 1e-4
        for method in ("uniform", "majority", "ceiling-average"):
            assert found[method, metric].min_as <= best_minimum.min_as + 1e-4
    assert found["uniform", "js"].avg_as < found["ceiling-average", "js"].avg_as - 0.01


def test_without_a_ceiling_that_the_solver_does_not_find_the_rest_is_there(federation, monkeypatch, caplog):
    solved = server_baselines.shared_answer

    def shared_answer(*targets, metric, objective):
        if (metric, objective) == ("js", "min"):
            raise NotSolved("stalled")
        return solved(*targets, metric=metric, objective=objective)

    monkeypatch.setattr(server_baselines, "shared_answer", shared_answer)
    monkeypatch.setattr(group_differences, "shared_answer", shared_answer)
    scored = baselines(federation, CONFIG)
    found = {(row.method, row.metric) for row in scored.rows}
    assert ("ceiling-min", "js") not in found
    assert found > {("ceiling-average", "js"), ("ceiling-min", "cosine"), ("uniform", "js")}
    assert scored.differences is None
    assert [record.levelname for record in caplog.records if "stalled" in record.message] == ["WARNING"] * 2


def test_without_ceilings_no_target_is_asked_for(federation):
    grid = federation.grid._grid
    grid.pushed.clear()
    found = baselines(federation, Config.load({"eval.ceilings": False}))
    assert {row.method for row in found.rows} == {"uniform", "majority"}
    assert found.differences is None
    assert len(grid.pushed) == 2 * len(GROUPS)


def truth_probed(federation) -> list[bool]:
    """Of each probe by one-hot answers that was asked for, whether it was against the groups' own answers too."""
    requests = [
        wire.unpack_score_request(message.content)
        for message in federation.grid._grid.pushed
        if message.metadata.message_type == wire.SCORE
    ]
    return [TRUTH in request.sides for request in requests if len(request.question_J) == 3 + 4 + 5]


@pytest.mark.parametrize("silent", [[], [1]])
def test_in_a_simulation_the_groups_differences_are_compared_with_the_surveys(silent):
    federation = federated(NODES, CATALOGUE, silent=silent)
    federation.grid.simulated = True
    scored = baselines(federation, CONFIG)
    assert truth_probed(federation) == [True] * 3
    found = scored.differences
    rows = {row.method: row for row in scored.rows if row.metric == "js"}
    there = [name for g, name in enumerate(GROUPS) if g not in silent]
    assert found.predicted.min_of_average == pytest.approx(rows["ceiling-average"].min_as, abs=1e-6)
    assert found.predicted.min_of_fairest == pytest.approx(rows["ceiling-min"].min_as, abs=1e-6)
    # by hand: shares less their mean over the groups that are there, all real options of the three questions
    away = []
    for tables in (TABLES, TRUTHS):
        value_GQK = np.stack([tables[name][TEST_J] for name in there])
        away.append((value_GQK - value_GQK.mean(0))[:, CATALOGUE.option_QK[TEST_J]].ravel())
    assert (found.predicted.size, found.survey.size) == pytest.approx([values.std() for values in away])
    assert found.captured.r == pytest.approx(np.corrcoef(*away)[0, 1])
    assert found.captured.size == pytest.approx(found.survey.size)
    kept = scored.predictions
    assert kept["group"].unique().tolist() == there
    for name in there:
        mine = kept[kept["group"] == name]
        assert mine["question"].tolist() == [
            CATALOGUE.questions[q].question_id for q in (1, 1, 1, 2, 2, 2, 2, *[4] * 5)
        ]
        target = TABLES[name][TEST_J][CATALOGUE.option_QK[TEST_J]]
        np.testing.assert_allclose(mine["share"], target, rtol=0, atol=1e-8)
    own = rows["own-prediction"]
    assert own.min_as == pytest.approx(1.0)
    assert list(own.survey.per_group.values()) == pytest.approx(
        [
            np.mean([rewards.js(TABLES[name][q], TRUTHS[name][q], CATALOGUE.option_QK[q]) for q in TEST_J])
            if name in there
            else np.nan
            for name in GROUPS
        ],
        nan_ok=True,
        abs=1e-6,
    )
    # free answers that follow the mean come near the best for it, and are no better; no rule lifts the worst group more
    average = found.rules["average"]
    assert rows["ceiling-average"].avg_as - 0.02 < average.predicted.avg_as <= rows["ceiling-average"].avg_as + 1e-6
    for rule in found.rules.values():
        assert rule.predicted.min_as <= rows["ceiling-min"].min_as + 1e-6
        value, low, high = rule.survey.over_average
        assert rule.survey.min_as - average.survey.min_as == pytest.approx(value)
        assert low <= value <= high
    assert found.rules["appa-printed"].fell_back is not None


def test_deployed_the_survey_s_answers_are_not_probed(federation):
    assert not federation.simulated
    scored = baselines(federation, CONFIG)
    found = scored.differences
    assert scored.predictions is None
    assert truth_probed(federation) == [False] * 3
    assert (found.survey, found.captured) == (None, None)
    assert found.predicted.size > 0
    assert {rule.survey for rule in found.rules.values()} == {None}


def test_without_survey_answers_to_held_out_questions_only_predictions_are_compared():
    nothing = np.full(CATALOGUE.option_QK.shape, np.nan)
    federation = federated({g: scoring_node({n: TABLES[n]}, {n: nothing}) for g, n in enumerate(GROUPS)}, CATALOGUE)
    federation.grid.simulated = True
    found = baselines(federation, CONFIG).differences
    assert (found.survey, found.captured) == (None, None)
    assert {rule.survey for rule in found.rules.values()} == {None}


def test_by_a_metric_without_ceilings_nothing_is_compared(federation):
    assert baselines(federation, Config.load({"metric": "js-distance"})).differences is None
