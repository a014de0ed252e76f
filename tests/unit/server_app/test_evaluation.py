"""Votes and scores of methods through a federation; it scores with the clients' own code.

Axis letters: G groups, Q questions, K options, J answers.
"""

from types import SimpleNamespace

import numpy as np
import pytest
from fakes import catalogue_of
from report_runs import iteration
from runs import GROUPS, NODES, TABLES, TEST_J, TRUTHS, FakeGroups, federated, scoring_node
from runs import THREE_CATALOGUE as CATALOGUE

from appa_flwr.analysis.equations import fairness_index
from appa_flwr.config import TASK_METRICS, Config
from appa_flwr.protocol import queries, rewards
from server_app import evaluation
from server_app.federation.responses import parse_responses
from server_app.inputs import RunInputs, ask_votes

JS_ONLY = ["js"]


def run_of(folder, nodes=NODES):
    return RunInputs(Config.load({}), SimpleNamespace(path=folder), federated(nodes, CATALOGUE), CATALOGUE)


def test_a_method_s_rows(tmp_path):
    answers = parse_responses("dpa", ["0.20,0.30,0.50", "what?", "0.10,0.20,0.30,0.20,0.20"], TEST_J, CATALOGUE)
    rows = evaluation.score(run_of(tmp_path), [("ppo", answers, ["js", "cosine"])])
    in_order = [(metric, against) for metric in ("js", "cosine") for against in ("survey", "predictions")]
    assert [(row.method, row.metric, row.against) for row in rows] == [("ppo", *both) for both in in_order]
    words = evaluation.in_words(rows)
    assert words.index("survey: Avg AS") < words.index("; predictions: Avg AS")
    predictions = {1: [0.2, 0.3, 0.5], 4: [0.1, 0.2, 0.3, 0.2, 0.2]}

    def reward(metric, table_QK, q):
        if q not in predictions:
            return 0.0
        size = len(predictions[q])
        return float(rewards.METRICS[metric](predictions[q], table_QK[q, :size], [True] * size))

    for row in rows:
        tables = {"survey": TRUTHS, "predictions": TABLES}[row.against]
        per_group = {n: sum(reward(row.metric, tables[n], q) for q in TEST_J) / 3 for n in GROUPS}
        assert row.per_group == pytest.approx(per_group)
        assert row.avg_as == pytest.approx(sum(per_group.values()) / 3)
        assert row.min_as == pytest.approx(min(per_group.values()))
        assert row.format_score == row.readable == pytest.approx(2 / 3)
        read = [[reward(row.metric, tables[name], q) for q in predictions] for name in GROUPS]
        assert row.fi_readable == pytest.approx(fairness_index(read))
        assert row.fi == pytest.approx((2 * row.fi_readable + 1) / 3)  # nobody's answer is fair to all


def test_answers_that_nobody_can_read_have_no_fairness(tmp_path):
    answers = parse_responses("dpa", ["?", "?"], np.array([0, 0]), CATALOGUE)
    row, _ = evaluation.score(run_of(tmp_path), [("base", answers, JS_ONLY)])
    assert (row.readable, row.fi, np.isnan(row.fi_readable)) == (0.0, 1.0, True)


def test_groups_without_survey_answers_leave_the_truth_empty(tmp_path):
    nothing = np.full(CATALOGUE.option_QK.shape, np.nan)
    nodes = {g: scoring_node({name: TABLES[name]}, {name: nothing}) for g, name in enumerate(GROUPS)}
    answers = evaluation.given_answers(TEST_J, TABLES["A"][TEST_J])
    (row,) = evaluation.score(run_of(tmp_path, nodes), [("uniform", answers, JS_ONLY)])
    assert row.against == "predictions"
    assert row.format_score is None  # no model wrote these
    nodes[1] = scoring_node({"B": TABLES["B"]}, {"B": TRUTHS["B"]})
    row, _ = evaluation.score(run_of(tmp_path, nodes), [("uniform", answers, JS_ONLY)])
    assert row.avg_as == row.min_as == row.per_group["B"]
    assert np.isnan(row.per_group["A"])
    assert "survey: Avg AS" in (words := evaluation.in_words([row]))
    assert "WITHOUT A" in words


def test_the_log_has_the_reward_of_the_worst_group_that_answered():
    rewards = {"a": None, "b": 0.5, "c": 0.25}
    said = evaluation.round_in_words(iteration(1, rewards=rewards, missing_groups=("a",)))
    assert "groups' reward 0.700, worst group 0.250, " in said
    assert said.endswith("MISSING: a")


# --- the groups' votes ------------------------------------------------------------------------------------------------

VOTED = catalogue_of([3, 2], train=[True, False])
MODES = {"A": [[1, 0, 0], [1, 0, 0]], "B": [[1, 0, 0], [0, 1, 0]], "C": [[0, 0, 1], [0, 1, 0]]}
SHARES = {"A": [[0.6, 0.2, 0.2], [1, 0, 0]], "B": [[0.5, 0.1, 0.4], [0, 1, 0]], "C": [[0.1, 0, 0.9], [0.2, 0.8, 0]]}
MEAN = [[0.4, 0.1, 0.5], [0.4, 0.6, 0.0]]
MAJORITY = [[1, 0, 0], [0, 1, 0]]


@pytest.mark.parametrize(
    ("target", "sft_QK", "kind"),
    [
        ("majority", MAJORITY, queries.VOTES),
        ("votes", [[2 / 3, 0, 1 / 3], [1 / 3, 2 / 3, 0]], queries.VOTES),
        # 2, 0 and 1 votes of 3 become 3, 1 and 2 of 6; 1 and 2 of 3 become 2 and 3 of 5
        ("smoothed-votes", [[3 / 6, 1 / 6, 2 / 6], [2 / 5, 3 / 5, 0]], queries.VOTES),
        ("predicted-mean", MEAN, queries.PREDICTIONS),
        ("mean", MEAN, queries.ANSWERS),
    ],
)
def test_sft_s_targets_and_the_majority(target, sft_QK, kind):
    node = FakeGroups([*MODES], lambda query, name: {"votes": (MODES if query.kind == queries.VOTES else SHARES)[name]})
    votes = ask_votes(RunInputs(Config.load({"sft.target": target}), None, federated({1: node}, VOTED), VOTED))
    np.testing.assert_allclose(votes.sft_QK, sft_QK, atol=1e-12)
    np.testing.assert_allclose(votes.majority_QK, MAJORITY)
    assert [query.kind for query in node.asked] == [kind]


@pytest.mark.parametrize(("task", "metric"), [("dpa", "wasserstein"), ("dpa", "js"), ("opa", "borda")])
def test_the_training_metric_comes_first(task, metric):
    names = evaluation.metric_names(Config.load({"task": task, "metric": metric}))
    assert names[0] == metric
    assert sorted(names) == sorted(TASK_METRICS[task])
