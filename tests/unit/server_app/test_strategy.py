"""An iteration of federated PPO: what is asked, what is reported, and what a failure leaves behind.

Axis letters: G groups, J rollouts, Q questions.
"""

from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby, islice, repeat
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fakes import catalogue_of, random_tables, silent
from flwr.app import ArrayRecord
from flwr.common.serde import recorddict_to_proto
from nodes import flower_task
from runs import GROUPS, federated, scoring_node
from small import VALUE_MODEL, keys_of

from appa_flwr.analysis.equations import training_reward
from appa_flwr.analysis.rule_choice import make
from appa_flwr.config import Config
from appa_flwr.config.sections import PPOSection
from appa_flwr.protocol import formats, messages, queries
from appa_flwr.protocol.rewards import js
from server_app import evaluation
from server_app.federation import grid
from server_app.federation.replies import TooFew
from server_app.federation.responses import parse_responses
from server_app.inputs import PolicyInputs, RunInputs
from server_app.policy.ppo import ReferencePass
from server_app.policy.sample import Rollout, Sequences
from server_app.questions import question_batches
from server_app.reward_rule import RewardRule
from server_app.strategy import AppaStrategy

CATALOGUE = catalogue_of([2, 3, 4, 3], train=[True, True, False, True])
TABLES = random_tables(CATALOGUE.option_QK, GROUPS, seed=5)
TEXTS = ["0.70,0.30", "0.20,0.30,0.50", "no idea", "0.10, 0.10, 0.80", "0.50,0.50"]
QUESTIONS = [0, 1, 3, 3, 1]  # the last text has too few numbers for its question
SETTINGS = {"ppo.batch-size": 5, "ppo.num-mini-batches": 1, **VALUE_MODEL}
STATS = ("policy_loss", "value_loss", "clip_fraction", "approximate_kl", "kl", "entropy", "response_length")
LEARNED = {name: 0.1 * number for number, name in enumerate(STATS)}


class FakeEngine:
    """Samples what it is told, learns nothing, and remembers what it was given."""

    def __init__(self):
        self.prompts, self.scores = [], []

    def rollout(self, prompts):
        self.prompts.append(list(prompts))
        mask_JT = torch.ones(len(prompts), 1, dtype=torch.bool)
        ids_JT = torch.arange(len(prompts)).unsqueeze(1)
        no_prefix_C = torch.empty(0, dtype=torch.long)
        return Rollout(Sequences(no_prefix_C, ids_JT, mask_JT, ids_JT, mask_JT), torch.zeros(len(prompts), 1))

    def reference_pass(self, sequences):
        return ReferencePass(torch.zeros(1), torch.zeros(1))

    def update(self, rollout, reference, score_J):
        self.scores.append(score_J)
        return dict(LEARNED)


class FakeBase:
    """Decodes a rollout's only token as the number of its text."""

    def texts(self, response_JT, mask_JT):
        return [TEXTS[int(j)] for j in response_JT[:, 0]]


def scoring_nodes():
    return {node: scoring_node({name: TABLES[name]}) for node, name in enumerate(GROUPS)}


def build(*, done=0, **keys):
    groups = federated(scoring_nodes(), CATALOGUE, run__min_groups=2)
    config = Config.load({**SETTINGS, **keys_of(keys)})
    engine, lines = FakeEngine(), []
    engine.done_before = done
    rule = RewardRule(groups.names, config)
    run = RunInputs(config, None, groups, CATALOGUE)
    inputs = PolicyInputs(FakeBase(), [[q] for q in range(4)], np.array([0, 1, 3]), np.array([2]))
    strategy = AppaStrategy(
        run,
        inputs,
        engine,
        rule,
        repeat(np.array(QUESTIONS)),
        num_iterations=3,
        finished=lambda line, state: lines.append(line),
        done=done,
        state=rule.first(),
    )
    return strategy, groups, engine, lines


def run(strategy, groups, rounds):
    """Flower's own `start` runs so many more rounds."""
    with flower_task():
        strategy.done = strategy.engine.done_before + len(strategy.engine.scores)
        strategy.start(groups.grid, ArrayRecord(), num_rounds=rounds, timeout=0.02)


def asked(strategy, groups):
    """The messages of one iteration."""
    before = len(groups.grid._grid.pushed)
    run(strategy, groups, 1)
    return groups.grid._grid.pushed[before:]


def alignment_rewards():
    """The groups' rewards for TEXTS, answer by answer, by the reward and the parser alone."""

    def reward(text, question, table_QK):
        size = len(CATALOGUE.questions[question].options)
        prediction = formats.parse("dpa", text, size).prediction
        return 0.0 if prediction is None else float(js(prediction, table_QK[question, :size], [True] * size))

    return np.array([[reward(t, q, TABLES[n]) for t, q in zip(TEXTS, QUESTIONS, strict=True)] for n in GROUPS])


@pytest.mark.parametrize(("architecture", "context_seed"), [("attention", 7), ("residual", 0)])
def test_the_groups_are_asked_what_the_policy_wrote(architecture, context_seed):
    strategy, groups, engine, _ = build(pluralllm__architecture=architecture, done=6)
    sent = asked(strategy, groups)
    assert engine.prompts == [[[q] for q in QUESTIONS]]
    assert [m.metadata.dst_node_id for m in sent] == [0, 1, 2]
    query, _ = messages.unpack_query(sent[0].content)
    request = queries.RewardQuery.of(query)
    assert query.kind == queries.REWARDS
    assert request.question_J.tolist() == QUESTIONS
    np.testing.assert_allclose(request.prediction_JK[1], [0.2, 0.3, 0.5, 0.0])
    assert np.isnan(request.prediction_JK[[2, 4]]).all()
    assert (request.metrics, request.references) == (("js",), (queries.TARGET_REFERENCE,))
    assert request.context_seed == context_seed  # fresh contexts draw by the iteration


def test_values_are_computed_while_the_groups_score():
    strategy, groups, engine, lines = build()
    events = groups.grid._grid.events
    reference_pass = engine.reference_pass
    engine.reference_pass = lambda sequences: events.append("reference") or reference_pass(sequences)
    events.clear()
    run(strategy, groups, 2)
    assert [event for event, _ in groupby(events)] == ["push", "reference", "pull"] * 2  # a pull a node
    assert set(lines[0].seconds) == {"rollout", "reference", "federation_wait", "update"}
    assert all(seconds >= 0 for seconds in lines[0].seconds.values())


def test_line_and_scores_are_the_rule_s():
    parameters = {"temperature": 0.1, "fairness_threshold": 1.1, "ema_decay": 0.7}
    strategy, groups, engine, lines = build(**{f"appa__{name}": value for name, value in parameters.items()})
    run(strategy, groups, 2)
    assert [(line.iteration, line.num_iterations, line.missing_groups) for line in lines] == [(1, 3, ()), (2, 3, ())]
    reward_GJ = alignment_rewards()
    # three whole answers, nothing, and for "0.50,0.50" to three options: in range and summing to one, but incomplete
    format_J = np.array([1.0, 1.0, 0.0, 1.0, 2 / 3])
    training_GJ = training_reward(reward_GJ, format_J, np.array([True, True, False, True, False]))
    rule = make("appa", **parameters)
    state = rule.init(len(GROUPS))
    for line, score_J in zip(lines, engine.scores, strict=True):
        expected = rule.apply(state, reward_GJ, training_GJ)
        state = expected.state
        assert tuple(line.weights) == tuple(line.history) == tuple(line.rewards) == GROUPS
        for found, value_G in ((line.weights, expected.weight_G), (line.history, state.history_G)):
            assert found == pytest.approx(dict(zip(GROUPS, value_G, strict=True)))
        assert line.rewards == pytest.approx(dict(zip(GROUPS, reward_GJ.mean(1), strict=True)))
        assert line.fairness_index == pytest.approx(expected.fairness_index)
        assert (line.reward, line.fell_back) == (pytest.approx(expected.aggregate_J.mean()), False)
        assert line.format_score == pytest.approx(format_J.mean())
        np.testing.assert_allclose(score_J, expected.aggregate_J, rtol=1e-5, atol=1e-6)
        assert {name: getattr(line, name) for name in LEARNED} == LEARNED


def test_a_rule_s_state_keeps_its_names_in_files():
    rule = RewardRule(GROUPS, Config.load({"rule": "mix"}))
    last, *others = GROUPS[::-1]
    saved = {  # as the first version wrote it, before the last group joined
        "history": dict.fromkeys(others, 0.3),
        "answered": dict.fromkeys(others, True),
        "log_weight": dict(zip(others, (0.6, -0.6), strict=True)),
    }
    state, new = rule.restored(saved), {"history": 0.0, "answered": False, "log_weight": 0.0}
    assert rule.saved(state) == {name: {**values, last: new[name]} for name, values in saved.items()}
    # all alike: log-weights stay, and the one who joins begins at the others' mean
    assert rule._rule.apply(state, np.full((3, 1), 0.5), np.full((3, 1), 0.5)).state.memory_G.tolist() == [-0.6, 0.6, 0]


def test_a_failed_quorum_updates_and_reports_nothing(monkeypatch):
    monkeypatch.setattr(grid, "LATE_TTL", 0.0)
    strategy, groups, engine, lines = build()
    run(strategy, groups, 1)
    there = dict(groups.grid._grid.nodes)
    groups.grid._grid.nodes.update({1: silent, 2: silent})
    with pytest.raises(TooFew):
        run(strategy, groups, 2)
    assert len(engine.scores) == len(lines) == 1  # the first iteration's
    # the groups come back: it goes on from the state after the first iteration
    groups.grid._grid.nodes.update(there)
    run(strategy, groups, 1)
    mean_G = alignment_rewards().mean(1)
    # .8 (.2 m) + .2 m = .36 m: two updates, not three
    assert list(lines[-1].history.values()) == pytest.approx((0.36 * mean_G).tolist())


def test_flower_s_own_verbs_carry_every_message_of_a_round_and_of_the_curve(monkeypatch):
    """Three nodes: a round asks each for rewards, every second round for scores of the held-out question too."""
    strategy, groups, _, lines = build(eval__every=2)

    @contextmanager
    def computing():  # meanwhile another rule asks the groups
        groups.grid.traffic.clear()
        groups.grid.seconds_waited = 1e6
        yield

    strategy.run = replace(strategy.run, computing=computing)
    curve = ["0.10,0.20,0.30,0.40"]
    answered = parse_responses("dpa", curve, np.array([2]), CATALOGUE)
    monkeypatch.setattr(evaluation, "greedy_answers", lambda run, model, inputs: answered)
    strategy.engine.models = SimpleNamespace(policy=None)
    counts, first = [], len(groups.grid._grid.pushed)
    for _ in range(4):
        before = len(groups.grid._grid.pushed)
        run(strategy, groups, 1)
        counts.append(len(groups.grid._grid.pushed) - before)
    assert counts == [3, 6, 3, 6]
    size = sum(
        recorddict_to_proto(message.content).ByteSize() for message in groups.grid._grid.pushed[first : first + 3]
    )
    for line in lines:  # without those of the curve
        assert (line.traffic["messages_sent"], line.traffic["messages_received"]) == (3, 3)
        assert line.traffic["bytes_sent"] == pytest.approx(size, rel=0.1)  # other texts have other lengths
        assert line.traffic["bytes_received"] > 0
        assert line.seconds["federation_wait"] < 1e6
    assert [[*line.held_out] for line in lines] == [[], ["survey", "predictions"]] * 2
    # the nodes' truth is their table, so both references have the same scores
    expected = [float(js(np.array([0.1, 0.2, 0.3, 0.4]), TABLES[name][2, :4], [True] * 4)) for name in GROUPS]
    for point in lines[1].held_out.values():
        assert (point.avg_as, point.min_as) == pytest.approx((np.mean(expected), min(expected)))
        assert 0 < point.fi < 1


def test_a_round_that_too_few_groups_score_keeps_its_step(monkeypatch, caplog):
    strategy, groups, engine, lines = build(eval__every=1)
    monkeypatch.setattr(evaluation, "greedy_answers", lambda *_: parse_responses("dpa", [""], np.array([2]), CATALOGUE))
    engine.models, update = SimpleNamespace(policy=None), engine.update

    def then_gone(*given):
        groups.grid._grid.nodes.update({1: silent, 2: silent})
        return update(*given)

    engine.update = then_gone
    run(strategy, groups, 1)
    assert [(line.iteration, line.held_out) for line in lines] == [(1, {})]
    assert "iteration 1 is not scored" in caplog.text
    assert "2 nodes have not answered in time" in caplog.text


def test_a_resumed_run_s_rounds_go_on_from_its_last_and_are_scored_by_that_number(monkeypatch):
    strategy, groups, _, lines = build(done=1, eval__every=2)
    monkeypatch.setattr(evaluation, "greedy_answers", lambda *_: parse_responses("dpa", [""], np.array([2]), CATALOGUE))
    strategy.engine.models = SimpleNamespace(policy=None)
    run(strategy, groups, 2)
    assert [(line.iteration, bool(line.held_out)) for line in lines] == [(2, True), (3, False)]


def test_every_pass_over_the_questions_is_complete_and_in_another_order():
    def taken(size, number, *, seed=2):
        batches = question_batches(np.array([3, 5, 8, 13]), PPOSection(batch_size=size, answers_per_question=1), seed)
        return np.concatenate([*islice(batches, number)])

    found = taken(3, 8)  # six passes of four, in bites of three
    passes = [tuple(found[i : i + 4].tolist()) for i in range(0, 24, 4)]
    assert all(sorted(one) == [3, 5, 8, 13] for one in passes)
    assert len(set(passes)) > 1
    assert np.array_equal(taken(8, 3), found)
    assert not np.array_equal(taken(24, 1, seed=3), found)


def test_a_question_s_answers_stand_side_by_side():
    one_each, three_each = (
        question_batches(np.arange(10), PPOSection(batch_size=2 * each, answers_per_question=each), seed=4)
        for each in (1, 3)
    )
    for _ in range(7):  # past the end of a pass over the questions
        first, second = next(one_each)
        assert next(three_each).tolist() == [first] * 3 + [second] * 3
