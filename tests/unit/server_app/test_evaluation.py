"""Scores of methods, baselines and ceilings through a federation that scores with the clients' own code.

Axis letters: G groups, Q questions, K options, J answers.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fakes import PAD_ID, PROMPTS, catalogue_of, federated, random_tables, scoring_node, tiny_causal_lm

from appa_flwr.analysis import aggregation
from appa_flwr.analysis.fairness import fairness_index
from appa_flwr.config import Config
from appa_flwr.protocol import formats, rewards, wire
from appa_flwr.run.records import ScoreRecord, SummaryRow
from server_app import evaluation
from server_app.federation.answers import parse_answers
from server_app.federation.group_rewards import aggregated_reward

GROUPS = ("A", "B", "C")
CATALOGUE = catalogue_of([2, 3, 4, 3, 5], train=[True, False, False, True, False])
TEST_J = np.array([1, 2, 4])
TABLES = random_tables(CATALOGUE.option_QK, GROUPS, seed=1)
TRUTHS = random_tables(CATALOGUE.option_QK, GROUPS, seed=2)
CONFIG = Config.load({})
JS_ONLY = ["js"]
NODES = {g: scoring_node({name: TABLES[name]}, {name: TRUTHS[name]}) for g, name in enumerate(GROUPS)}


@pytest.fixture
def federation():
    return federated(NODES, CATALOGUE)


TARGETS, TRUTH = wire.TARGET_SIDE, wire.TRUTH_SIDE


@pytest.mark.parametrize("sides", [(TARGETS,), (TARGETS, TRUTH)])
@pytest.mark.parametrize("silent", [[], [1]])
def test_what_groups_score_against_is_rebuilt_from_the_rewards_of_those_that_answer(silent, sides):
    federation = federated(NODES, CATALOGUE, silent=silent)
    found = evaluation.probe_targets(federation, TEST_J, CATALOGUE.option_QK[TEST_J], sides=sides)
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
    found = evaluation.probe_targets(federation, TEST_J, CATALOGUE.option_QK[TEST_J], sides=(TARGETS, TRUTH))
    np.testing.assert_allclose(found[TARGETS][0], TABLES["A"][TEST_J], rtol=0, atol=1e-9)
    np.testing.assert_allclose(found[TRUTH][0, [0, 2]], TRUTHS["A"][[1, 4]], rtol=0, atol=1e-9)
    assert np.isnan(found[TRUTH][0, 1, :4]).all()


def test_targets_with_zeros_and_ties_come_back_as_zeros_and_ties():
    table_QK = np.array([[1, 0, 0, 0, 0], [0.5, 0, 0.5, 0, 0], [0.25] * 4 + [0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 1.0]])
    federation = federated({0: scoring_node({"A": table_QK})}, CATALOGUE)
    found = evaluation.probe_targets(federation, TEST_J, CATALOGUE.option_QK[TEST_J], sides=(TARGETS,))
    (found_JK,) = found[TARGETS]
    np.testing.assert_allclose(found_JK, table_QK[TEST_J], rtol=0, atol=1e-9)
    assert found_JK[0, 0] == found_JK[0, 2]
    assert len(set(found_JK[1, :4])) == 1
    assert not found_JK[~CATALOGUE.option_QK[TEST_J]].any()


def test_a_method_s_rows(federation):
    answers = parse_answers("dpa", ["0.20,0.30,0.50", "what?", "0.10,0.20,0.30,0.20,0.20"], TEST_J, CATALOGUE)
    scored = evaluation.score(federation, "ppo", answers, metrics=["js", "cosine"], config=CONFIG, catalogue=CATALOGUE)
    assert [(row.method, row.metric) for row in scored.rows] == [("ppo", "js"), ("ppo", "cosine")]
    predictions = {1: [0.2, 0.3, 0.5], 4: [0.1, 0.2, 0.3, 0.2, 0.2]}

    def reward(metric, table_QK, q):
        if q not in predictions:
            return 0.0
        size = len(predictions[q])
        return float(rewards.METRICS[metric](predictions[q], table_QK[q, :size], [True] * size))

    for row in scored.rows:
        for tables, scores in ((TABLES, row), (TRUTHS, row.survey)):
            per_group = {n: sum(reward(row.metric, tables[n], q) for q in TEST_J) / 3 for n in GROUPS}
            assert scores.per_group == pytest.approx(per_group)
            assert scores.avg_as == pytest.approx(sum(per_group.values()) / 3)
            assert scores.min_as == pytest.approx(min(per_group.values()))
        assert row.format_score == row.readable == pytest.approx(2 / 3)
        for tables, scores in ((TABLES, row), (TRUTHS, row.survey)):
            read = [[reward(row.metric, tables[name], q) for q in predictions] for name in GROUPS]
            assert scores.fi_readable == pytest.approx(fairness_index(read))
            assert scores.fi == pytest.approx((2 * scores.fi_readable + 1) / 3)  # nobody's answer is fair to all
            assert scores.skill is None  # without the uniform answer
        assert not row.mostly_unreadable
    ids = [CATALOGUE.questions[q].question_id for q in TEST_J]
    for metric, against, tables in (("js", "predictions", TABLES), ("cosine", "survey", TRUTHS)):
        of = scored.pair_scores[(scored.pair_scores["metric"] == metric) & (scored.pair_scores["against"] == against)]
        single = of.set_index(["group", "question"])["reward"].to_dict()
        expected = {(n, i): reward(metric, tables[n], q) for n in GROUPS for i, q in zip(ids, TEST_J, strict=True)}
        assert single == pytest.approx(expected)
    mean_J = [np.mean([reward("js", TABLES[n], q) for n in GROUPS]) for q in TEST_J]
    np.testing.assert_allclose(scored.reward_J, mean_J)


@pytest.mark.parametrize(("readable", "mostly"), [(0, True), (1, True), (2, False), (4, False)])
def test_less_than_half_readable_is_mostly_unreadable(federation, readable, mostly):
    texts = ["0.50,0.50"] * readable + ["?"] * (4 - readable)
    answers = parse_answers("dpa", texts, np.array([0, 0, 0, 0]), CATALOGUE)
    (row,) = evaluation.score(federation, "base", answers, metrics=JS_ONLY, config=CONFIG, catalogue=CATALOGUE).rows
    assert (row.readable, row.mostly_unreadable) == (readable / 4, mostly)
    assert np.isnan(row.fi_readable) == (readable == 0)


def test_skill_is_measured_by_the_uniform_answer_of_the_same_metric_and_side():
    def of(method, metric, avg, truth):
        numbers = {"fi": 1.0, "min_as": 0.0, "per_group": {}}
        survey = None if truth is None else ScoreRecord(avg_as=truth, **numbers)
        return SummaryRow(method=method, metric=metric, avg_as=avg, survey=survey, format_score=None, **numbers)

    rows = evaluation.with_skill(
        [
            of("ppo", "js", 0.9, 0.7),
            of("ppo", "borda", 0.9, 0.7),
            of("uniform", "js", 0.8, 0.6),
            of("sft", "js", 0.7, None),
        ]
    )
    # half of .2 and a quarter of .4 gone; no uniform answer by that metric; itself; half as far again
    assert [row.skill for row in rows] == [pytest.approx(50), None, pytest.approx(0), pytest.approx(-50)]
    assert [row.survey and row.survey.skill for row in rows] == [pytest.approx(25), None, pytest.approx(0), None]


def test_groups_without_survey_answers_leave_the_truth_empty():
    nothing = np.full(CATALOGUE.option_QK.shape, np.nan)
    nodes = {g: scoring_node({name: TABLES[name]}, {name: nothing}) for g, name in enumerate(GROUPS)}
    answers = evaluation.given_answers(TEST_J, TABLES["A"][TEST_J])
    (row,) = evaluation.score(
        federated(nodes, CATALOGUE), "uniform", answers, metrics=JS_ONLY, config=CONFIG, catalogue=CATALOGUE
    ).rows
    assert row.survey is None
    assert row.format_score is None  # no model wrote these
    nodes[1] = scoring_node({"B": TABLES["B"]}, {"B": TRUTHS["B"]})
    (row,) = evaluation.score(
        federated(nodes, CATALOGUE), "uniform", answers, metrics=JS_ONLY, config=CONFIG, catalogue=CATALOGUE
    ).rows
    assert row.survey.avg_as == row.survey.min_as == row.survey.per_group["B"]
    assert np.isnan(row.survey.per_group["A"])


def baselines(federation, config):
    majority_QK = np.where(CATALOGUE.option_QK, np.arange(5)[None] == 0, 0.0)
    return evaluation.baseline_scores(
        federation, config, CATALOGUE, question_J=TEST_J, known_JK={"majority": majority_QK[TEST_J]}
    )


def test_trivial_baselines_and_ceilings_frame_what_a_policy_can_reach(federation):
    rows = baselines(federation, CONFIG).rows
    found = {(row.method, row.metric): row for row in rows}
    metrics = rewards.metrics_of("dpa")
    pairs = [(method, metric) for method in ("uniform", "majority") for metric in metrics]
    solved = ("js", "wasserstein", "cosine")  # js-distance has no ceilings
    pairs += [("mean-prediction", metric) for metric in metrics]
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
    # free answers that follow the mean come near the best for it, and are no better; no rule lifts the worst group more
    average = found.rules["average"]
    assert rows["ceiling-average"].avg_as - 0.02 < average.predicted.avg_as <= rows["ceiling-average"].avg_as + 1e-6
    for rule in found.rules.values():
        assert rule.predicted.min_as <= rows["ceiling-min"].min_as + 1e-6
        value, low, high = rule.survey.over_average
        assert rule.survey.min_as - average.survey.min_as == pytest.approx(value)
        assert low <= high
    assert found.rules["appa-printed"].fell_back is not None


def test_deployed_the_survey_s_answers_are_not_probed(federation):
    assert not federation.simulated
    found = baselines(federation, CONFIG).differences
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


def test_by_a_metric_without_ceilings_nothing_is_compared(federation):
    assert baselines(federation, Config.load({"metric": "js-distance"})).differences is None


def test_greedy_answers_are_in_the_order_of_the_questions():
    model = tiny_causal_lm()
    prompts = [*PROMPTS, [7, 7]]

    def texts(response_JT, mask_JT):
        return [" ".join(map(str, ids[mask].tolist())) for ids, mask in zip(response_JT, mask_JT, strict=True)]

    base = SimpleNamespace(stop_ids=(1,), pad_id=PAD_ID, texts=texts)
    question_J = np.array([4, 0, 2])
    found = {}
    for size in (1, 2, 100):
        config = Config.load({"eval.batch-size": size, "rollout.response-length": 4})
        answers = evaluation.greedy_answers(
            model, base, config, prompts=prompts, question_J=question_J, catalogue=CATALOGUE
        )
        found[size] = answers.texts
        assert answers.question_J.tolist() == [4, 0, 2]
    assert found[1] == found[2] == found[100]
    # one by one, the likeliest token each time
    for text, q in zip(found[100], question_J, strict=True):
        ids = list(prompts[q])
        for token in map(int, text.split()):
            with torch.no_grad():
                assert int(model(torch.tensor([ids])).logits[0, -1].argmax()) == token
            ids.append(token)


def test_answers_are_padded_with_zeros_and_unreadable_ones_are_nan():
    answers = parse_answers("opa", ["B,A,C", "A", "who?"], np.array([1, 2, 2]), CATALOGUE)
    np.testing.assert_array_equal(answers.prediction_JK, [[2, 3, 1, 0, 0], [np.nan] * 5, [np.nan] * 5])
    assert answers.readable_J.tolist() == [True, False, False]
    assert answers.parsed_J.tolist() == [True, True, False]
    np.testing.assert_allclose(answers.format_score_J, [1.0, 0.25, 0.0])


def test_an_incomplete_ranking_is_rewarded_for_its_format_alone(federation):
    rule = aggregation.make("average")
    ideal = formats.answer("opa", TABLES["A"][1, :3])
    answers = parse_answers("opa", [ideal, "C,A", "I cannot say"], np.array([1, 4, 1]), CATALOGUE)
    given = federation.score(answers.request(["borda"]))
    found = aggregated_reward(rule, rule.init(len(GROUPS)), answers, given, metric="borda", alignment_weight=0.85)
    ranked = [rewards.borda(answers.prediction_JK[0], TABLES[name][1], CATALOGUE.option_QK[1]) for name in GROUPS]
    # alignment and 1.00 of .15; two letters of five: .4 of .15; nothing
    np.testing.assert_allclose(found.result.aggregate_J, [0.85 * np.mean(ranked) + 0.15, 0.06, 0.0])
    assert found.reward_GJ[0].tolist() == [1.0, 0.0, 0.0]  # what fairness and history see
