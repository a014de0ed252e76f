"""Scores without a language model, through a federation that scores with the clients' own code.

Axis letters: G groups, Q questions, K options, J answers.
"""

from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from fakes import catalogue_of
from runs import GROUPS, MAY, NODES, TABLES, TEST_J, TRUTHS, federated, scoring_node
from runs import THREE_CATALOGUE as CATALOGUE
from small import config_in

from appa_flwr.analysis import ceilings
from appa_flwr.analysis.ceilings import NotSolved
from appa_flwr.config import TASK_METRICS
from appa_flwr.protocol import messages, queries, rewards
from appa_flwr.run import pair_scores
from appa_flwr.run.pair_scores import PREDICTIONS
from appa_flwr.run.records import CEILINGS, LOOK_UPS
from appa_flwr.run.schema import EXAMPLES, PROGRESS, SUMMARY
from appa_flwr.survey.types import Question
from server_app import baselines as server_baselines
from server_app import examples
from server_app.baselines import look_ups
from server_app.inputs import RunInputs
from server_app.run_writer import RunWriter


def asked(groups):
    """The kinds of numbers that were asked for since the catalogue, once a message."""
    pushed = [message for message in groups.grid._grid.pushed if message.metadata.message_type == messages.ASK]
    return [messages.unpack_query(message.content)[0].kind for message in pushed if message.metadata.dst_node_id == 0]


def baselines(place):
    """The run's folder, and the rows of groups one of which lets no answers leave, so that there are no look-ups."""
    majority_QK = np.where(CATALOGUE.option_QK, np.arange(5)[None] == 0, 0.0)
    keeping = scoring_node({"B": TABLES["B"]}, {"B": TRUTHS["B"]}, may=[word for word in MAY if word != "answers"])
    config, groups = config_in(place), federated({**NODES, 1: keeping}, CATALOGUE)
    with RunWriter(config) as folder:
        run = RunInputs(config, folder, groups, CATALOGUE)
        server_baselines.score_baselines(run, TEST_J, majority_QK=majority_QK)
    return folder.path, SUMMARY.read(folder.path)


def test_tables_are_rounded_so_that_ties_stay_ties():
    third_K = np.array([0.1 + 0.2, 0.3, 0.4])
    assert third_K[0] != third_K[1]
    assert server_baselines._rounded(third_K[None]).tolist() == [[0.3, 0.3, 0.4]]


def test_trivial_baselines_and_ceilings_frame_what_a_policy_can_reach(tmp_path):
    with patch.object(pair_scores, "replace_hashed", wraps=pair_scores.replace_hashed) as written:
        folder, rows = baselines(tmp_path)
    rows = [row for row in rows if row.against == PREDICTIONS]
    assert written.call_count == 1  # of scores.parquet, for which all of it is read and written
    single = pair_scores.read(folder).query("against == @PREDICTIONS")
    means = single.groupby(["method", "metric", "group"])["reward"].mean()
    assert means.to_dict() == pytest.approx({(r.method, r.metric, g): r.per_group[g] for r in rows for g in GROUPS})
    found = {(row.method, row.metric): row for row in rows}
    metrics = TASK_METRICS["dpa"]
    pairs = [(method, metric) for method in ("uniform", "majority") for metric in metrics]
    solved = ("js", "wasserstein", "cosine")  # js-distance has no ceilings
    pairs += [("mean-prediction", metric) for metric in metrics]
    pairs += [(method, metric) for method in ("ceiling-average", "ceiling-min") for metric in solved]
    assert [(row.method, row.metric) for row in rows] == pairs
    sizes = {1: 3, 2: 4, 4: 5}
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


def test_without_a_ceiling_that_the_solver_does_not_find_the_rest_is_there(tmp_path, monkeypatch, caplog):
    solved = server_baselines.shared_answer

    def shared_answer(*targets, metric, objective):
        if (metric, objective) == ("js", "min"):
            raise NotSolved("stalled")
        return solved(*targets, metric=metric, objective=objective)

    monkeypatch.setattr(server_baselines, "shared_answer", shared_answer)
    found = {(row.method, row.metric) for row in baselines(tmp_path)[1]}
    assert ("ceiling-min", "js") not in found
    assert found > {("ceiling-average", "js"), ("ceiling-min", "cosine"), ("uniform", "js")}
    assert [record.levelname for record in caplog.records if "stalled" in record.message] == ["WARNING"]


@pytest.mark.parametrize(("most", "solved"), [(len(GROUPS) * 9, 2), (0, 0)])
def test_ceilings_of_many_groups_are_of_a_sample_and_every_row_says_so(tmp_path, monkeypatch, most, solved):
    monkeypatch.setattr(ceilings, "MOST_SHARES", most)  # held-out questions have 3, 4 and 5 options
    config, groups = config_in(tmp_path), federated(NODES, CATALOGUE)
    groups.config = config
    with RunWriter(config) as folder:
        run = RunInputs(config, folder, groups, CATALOGUE)
        server_baselines.score_baselines(run, TEST_J, majority_QK=None)
    found = SUMMARY.read(folder.path)
    assert {(row.method in CEILINGS, row.sampled) for row in found} == {
        (False, None),
        *([(True, solved)] if solved else []),
    }
    single = pair_scores.read(folder.path)
    asked_of = single.groupby("method")["question"].nunique().to_dict()
    assert {method: asked_of.get(method, 0) for method in (*CEILINGS, "uniform")} == dict.fromkeys(CEILINGS, solved) | {
        "uniform": 3
    }
    (words,) = [line.message for line in PROGRESS.read(folder.path) if "uniform" in line.message]
    assert (f"{solved} of 3" in words) == bool(solved)


@pytest.mark.parametrize(
    ("may", "wanted", "methods"),
    [
        (("rewards",), True, []),
        (("rewards", "answers"), True, [*LOOK_UPS]),
        (("rewards", "predictions"), True, ["mean-prediction", *CEILINGS]),
        (("rewards", "predictions"), False, []),
    ],
)
def test_there_are_the_rows_that_every_owner_allows(tmp_path, may, wanted, methods):
    config = config_in(tmp_path, **{"eval.ceilings": wanted})
    groups = federated({**NODES, 1: scoring_node({"B": TABLES["B"]}, may=may)}, CATALOGUE)
    groups.config = config
    with RunWriter(config) as folder:
        run = RunInputs(config, folder, groups, CATALOGUE)
        server_baselines.score_baselines(run, TEST_J, majority_QK=TABLES["A"])
        examples.add_groups(run, TEST_J)
    for q, example in zip(TEST_J, EXAMPLES.read(folder.path), strict=True):
        assert example.survey == {}  # nobody but a simulation's server knows them
        predicted = {name: TABLES[name][q, : len(example.options)] for name in GROUPS}
        told = predicted if "mean-prediction" in methods else {}
        assert example.predictions == {name: pytest.approx(own_K, abs=1e-4) for name, own_K in told.items()}
    rows = SUMMARY.read(folder.path)
    assert list(dict.fromkeys(row.method for row in rows)) == ["uniform", "majority", *methods]
    by_method = {row.method: row.per_group["A"] for row in rows if row.against == PREDICTIONS}
    assert by_method["majority"] == pytest.approx(1.0)  # by whatever metric, as its own answers to these questions are
    assert (queries.PREDICTIONS in asked(groups)) == ("mean-prediction" in methods)


# --- look-ups: hand-worked answers, of which those to held-out questions would change all ---

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
