"""Scores without a language model, through a federation that scores with the clients' own code.

Axis letters: G groups, Q questions, K options, J answers.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fake_groups import federated, scoring_node
from fakes import catalogue_of
from three_groups import CATALOGUE, GROUPS, NODES, TABLES, TEST_J, TRUTHS

from appa_flwr.analysis import group_differences
from appa_flwr.analysis.ceilings import NotSolved
from appa_flwr.config import Config
from appa_flwr.config.ranges import TASK_METRICS
from appa_flwr.protocol import asks, messages, rewards
from appa_flwr.run.records import CEILINGS, LOOK_UPS
from appa_flwr.survey.types import Question, Survey
from server_app import baselines as server_baselines
from server_app import inputs
from server_app.baselines import look_ups
from server_app.inputs import RunInputs
from server_app.run_folder import RunFolder

CONFIG = Config.load({})


@pytest.fixture
def groups():
    return federated(NODES, CATALOGUE)


def asked(groups):
    """The kinds of numbers that were asked for since the catalogue, once a message."""
    pushed = [message for message in groups.grid._grid.pushed if message.metadata.message_type == messages.ASK]
    return [messages.unpack_ask(message.content)[0].kind for message in pushed if message.metadata.dst_node_id == 0]


def baselines(groups, config, truths=TRUTHS):
    majority_QK = np.where(CATALOGUE.option_QK, np.arange(5)[None] == 0, 0.0)
    run = RunInputs(config, None, groups, CATALOGUE)
    with pytest.MonkeyPatch.context() as patched:
        answers = {
            name: {
                question.question_id: table_QK[q, : len(question.options)]
                for q, question in enumerate(CATALOGUE.questions)
                if not np.isnan(table_QK[q]).all()
            }
            for name, table_QK in truths.items()
        }
        patched.setattr(inputs, "run_survey", lambda config: Survey(CATALOGUE.questions, answers))
        return server_baselines.baseline_scores(run, question_J=TEST_J, known_JK={"majority": majority_QK[TEST_J]})


def test_tables_are_rounded_so_that_ties_stay_ties():
    third_K = np.array([0.1 + 0.2, 0.3, 0.4])
    assert third_K[0] != third_K[1]
    rounded_JK = server_baselines._rounded(np.stack([third_K, np.full(3, np.nan)]))
    assert rounded_JK[0].tolist() == [0.3, 0.3, 0.4]
    assert np.isnan(rounded_JK[1]).all()


def test_trivial_baselines_and_ceilings_frame_what_a_policy_can_reach(groups):
    rows = baselines(groups, CONFIG).rows
    found = {(row.method, row.metric): row for row in rows}
    metrics = TASK_METRICS["dpa"]
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


def test_without_a_ceiling_that_the_solver_does_not_find_the_rest_is_there(groups, monkeypatch, caplog):
    solved = server_baselines.shared_answer

    def shared_answer(*targets, metric, objective):
        if (metric, objective) == ("js", "min"):
            raise NotSolved("stalled")
        return solved(*targets, metric=metric, objective=objective)

    monkeypatch.setattr(server_baselines, "shared_answer", shared_answer)
    monkeypatch.setattr(group_differences, "shared_answer", shared_answer)
    scored = baselines(groups, CONFIG)
    found = {(row.method, row.metric) for row in scored.rows}
    assert ("ceiling-min", "js") not in found
    assert found > {("ceiling-average", "js"), ("ceiling-min", "cosine"), ("uniform", "js")}
    assert scored.differences is None
    assert [record.levelname for record in caplog.records if "stalled" in record.message] == ["WARNING"] * 2


@pytest.mark.parametrize("why", ["eval.ceilings", "owner"])
def test_without_ceilings_no_single_group_s_prediction_is_asked_for(groups, why):
    config = Config.load({"eval.ceilings": why != "eval.ceilings"})
    if why == "owner":
        own = {"may": ("votes", "training", "rewards")}
        groups = federated({**NODES, 1: scoring_node({"B": TABLES["B"]}, **own)}, CATALOGUE)
    found = baselines(groups, config)
    assert {row.method for row in found.rows} == {"uniform", "majority"}
    assert (found.differences, found.predictions) == (None, None)
    assert asks.PREDICTIONS not in asked(groups)


@pytest.mark.parametrize("silent", [[], [1]])
def test_in_a_simulation_the_groups_differences_are_compared_with_the_surveys(silent):
    groups = federated(NODES, CATALOGUE, silent=silent)
    groups.grid.simulated = True
    scored = baselines(groups, CONFIG)
    found = scored.differences
    rows = {row.method: row for row in scored.rows if row.metric == "js"}
    there = [name for g, name in enumerate(GROUPS) if g not in silent]
    assert found.predicted["min_of_average"] == pytest.approx(rows["ceiling-average"].min_as, abs=1e-6)
    assert found.predicted["min_of_fairest"] == pytest.approx(rows["ceiling-min"].min_as, abs=1e-6)
    # by hand: shares less their mean over the groups that are there, all real options of the three questions
    away = []
    for tables in (TABLES, TRUTHS):
        value_GQK = np.stack([tables[name][TEST_J] for name in there])
        away.append((value_GQK - value_GQK.mean(0))[:, CATALOGUE.option_QK[TEST_J]].ravel())
    assert (found.predicted["size"], found.survey["size"]) == pytest.approx([values.std() for values in away])
    assert found.captured["r"] == pytest.approx(np.corrcoef(*away)[0, 1])
    assert found.captured["size"] == pytest.approx(found.survey["size"])
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


def test_deployed_the_groups_are_compared_by_their_predictions_alone(groups):
    assert not groups.simulated
    scored = baselines(groups, CONFIG)
    found = scored.differences
    assert scored.predictions is None
    assert asked(groups).count(asks.PREDICTIONS) == 1
    assert (found.survey, found.captured) == (None, None)
    assert found.predicted["size"] > 0


def test_a_question_without_a_group_s_survey_answer_has_no_truth_there(groups):
    groups.grid.simulated = True
    truths = {**TRUTHS, "A": TRUTHS["A"].copy()}
    truths["A"][2] = np.nan
    rows = {row.method: row for row in baselines(groups, CONFIG, truths).rows if row.metric == "js"}
    known = [rewards.js(TABLES["A"][q], TRUTHS["A"][q], CATALOGUE.option_QK[q]) for q in (1, 4)]
    assert rows["own-prediction"].survey.per_group["A"] == pytest.approx(np.mean(known), abs=1e-6)


def test_without_survey_answers_to_held_out_questions_only_predictions_are_compared(groups):
    groups.grid.simulated = True
    found = baselines(groups, CONFIG, {name: np.full(CATALOGUE.option_QK.shape, np.nan) for name in GROUPS}).differences
    assert (found.survey, found.captured) == (None, None)


def test_by_a_metric_without_ceilings_nothing_is_compared(groups):
    assert baselines(groups, Config.load({"metric": "js-distance"})).differences is None


@pytest.mark.parametrize(
    ("run_sums", "may", "methods"),
    [
        ("plain", ("rewards",), ["uniform"]),
        ("plain", ("rewards", "answers"), ["uniform", *LOOK_UPS]),
        ("secure", ("rewards", "votes"), ["uniform", "mean-prediction"]),
        ("secure", ("rewards", "answers"), ["uniform", *LOOK_UPS]),
        ("plain", ("rewards", "predictions"), ["uniform", "mean-prediction", *CEILINGS]),
    ],
)
def test_there_are_the_rows_that_owners_allow_and_sums_hold(tmp_path, run_sums, may, methods):
    config = Config.load({"run.output-dir": str(tmp_path), "run-name": "r", "run.sums": run_sums})
    nodes = {g: scoring_node({group: TABLES[group]}, may=may) for g, group in enumerate(GROUPS)}
    groups = federated(nodes, CATALOGUE)
    groups.config, groups.plain, groups.grid.simulated = config, run_sums == "plain", run_sums == "secure"
    with RunFolder(config) as folder:
        run = RunInputs(config, folder, groups, CATALOGUE)
        rows = server_baselines.score_baselines(run, TEST_J, majority_QK=None, earlier=[])
    assert list(dict.fromkeys(row.method for row in rows)) == methods


# --- look-ups: hand-worked answers, and what they may know ---

YES_NO, SCALE, SHORT_SCALE, FREE = ("Yes", "No"), ("Low", "Middle", "High"), ("Bad", "So so", "Good"), ("x",) * 4
OPTIONS = (YES_NO, YES_NO, YES_NO, SCALE, SCALE, SHORT_SCALE, FREE)
TRAIN = (True, True, False, True, False, False, False)
HELD_OUT_J = np.array([2, 4, 5, 6])
ANSWERS = np.array(
    [[0.2, 0.8, 0, 0], [0.4, 0.6, 0, 0], [1, 0, 0, 0], [0.1, 0.2, 0.7, 0], [1, 0, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]]
)


def looked_up(place_Q=(0.0, 1.0, 0.9, 5.0, 4.0, 6.0, 7.0)):
    """One feature an option: the question's place on a line."""
    drawn = catalogue_of([len(options) for options in OPTIONS], train=TRAIN)
    questions = tuple(Question(f"Q{q}", f"text {q}", options) for q, options in enumerate(OPTIONS))
    embedding_QKE = (np.array(place_Q)[:, None, None] * drawn.option_QK[..., None]).astype(np.float32)
    return replace(drawn, questions=questions, embedding_QKE=embedding_QKE)


def test_the_same_options_else_as_many_else_uniform():
    found_JK = look_ups(ANSWERS, looked_up(), HELD_OUT_J)["option-list"]
    expected = [[0.3, 0.7, 0, 0], [0.1, 0.2, 0.7, 0], [0.1, 0.2, 0.7, 0], [0.25, 0.25, 0.25, 0.25]]
    np.testing.assert_allclose(found_JK, expected)


def test_the_nearest_of_as_many_options_are_averaged():
    found_JK = look_ups(ANSWERS, looked_up(), np.array([2, 4, 6]))["nearest-questions"]
    # there are two of two options and one of three: fewer than three are averaged alike
    expected = [[0.3, 0.7, 0, 0], [0.1, 0.2, 0.7, 0], [0.25, 0.25, 0.25, 0.25]]
    np.testing.assert_allclose(found_JK, expected, atol=1e-7)
    many_JK = look_ups(10 * ANSWERS, looked_up(), np.array([2, 4, 6]))["nearest-questions"]  # a group that shouts
    np.testing.assert_allclose(many_JK, expected, atol=1e-7)


def test_answers_to_held_out_questions_are_not_known():
    changed = np.where(np.array(TRAIN)[:, None], ANSWERS, 0.25)
    for name, found_JK in look_ups(ANSWERS, looked_up(), HELD_OUT_J).items():
        np.testing.assert_array_equal(look_ups(changed, looked_up(), HELD_OUT_J)[name], found_JK)
