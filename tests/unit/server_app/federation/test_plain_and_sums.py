"""The same numbers by the groups' real ClientApp: each group's own, their sums, and masked sums.

Legend: G groups, J answers.
"""

from __future__ import annotations

import numpy as np
import pytest
from client_node import config_of, home_files, weights
from fake_groups import FakeGroups
from fakes import CATALOGUE, FakeGrid
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from in_process import FEW, InProcessGrid, SimulatedGrid, deployed, flower_task, pinned, simulated
from small import AS_OWNERS_ASK

from appa_flwr.config import Config
from appa_flwr.protocol import asks, messages
from appa_flwr.protocol.asks import TARGET_SIDE, TRUTH_SIDE
from appa_flwr.survey import store
from appa_flwr.survey.generate import generate
from server_app.federation.answers import Answers
from server_app.federation.ask import LostSum, TooFew
from server_app.federation.ask_grid import TRAIN, AskGrid
from server_app.federation.grid import OverlapGrid
from server_app.federation.groups import Groups
from server_app.federation.reward_rule import RewardRule
from server_app.federation.scores import scores
from server_app.questions import build_catalogue

SURVEY = generate(num_questions=60, num_groups=4, seed=3)
WITH_TRUTH = 'may-leave = ["votes", "training", "rewards", "truth"]'
ITERATIONS, J = 4, 12
ROWS, SUMS, MASKED = "rows", "sums", "masked sums"


class Parties:
    """The groups of one survey as a server meets them: deployed or in a simulation, with their targets."""

    def __init__(self, folder, how, **changes):
        sums = "plain" if how == ROWS else "secure"
        keys = {"data__num_groups": 4, "run__sums": sums, "run__min_groups": 3, **changes}
        config, files = home_files(SURVEY, folder, config_of(**keys))
        self.config = Config.load({**config.flat(), **AS_OWNERS_ASK})
        survey = folder / "all.jsonl"
        if how == SUMS:  # in a simulation, whose nodes read one file with all groups
            store.write(SURVEY, survey)
            self.config = Config.load({**self.config.flat(), "survey": str(survey)})
            self.grid = SimulatedGrid(simulated(self.config, 2))
        else:
            owned = pinned if how == MASKED else deployed
            self.grid = InProcessGrid(owned(self.config, files, owner_policy=f"{FEW}\n{WITH_TRUTH}"))
        self.groups = Groups(OverlapGrid(self.grid), self.config, survey=str(survey))
        self.groups.gather(self.config.group_names, patience=0.0)
        self.catalogue = build_catalogue(self.config)
        self.groups.send_catalogue(self.catalogue)
        self.groups.send_targets(weights(self.config))

    def answers(self, seed, question_J):
        """Random answers, the first of which nobody can read."""
        rng = np.random.default_rng(seed)
        option_JK = self.catalogue.option_QK[question_J]
        answer_JK = np.where(option_JK, rng.random(option_JK.shape), 0.0)
        answer_JK /= answer_JK.sum(axis=1, keepdims=True)
        answer_JK[0] = np.nan
        format_J, parsed_J = rng.choice([0.5, 1.0], len(question_J)), np.arange(len(question_J)) > 0
        return Answers(question_J, ("",) * len(question_J), answer_JK, format_J * parsed_J, parsed_J)


@pytest.fixture(autouse=True)
def in_a_task():
    with flower_task():
        yield


@pytest.fixture(scope="module")
def parties(tmp_path_factory):
    """All three by their name."""
    with flower_task():
        yield {how: Parties(tmp_path_factory.mktemp("parties"), how) for how in (ROWS, SUMS, MASKED)}


RULES = {
    "appa": {"appa.fairness-threshold": 1.1, "appa.temperature": 0.1},
    "alpha": {"appa.alpha": 5.0},
    "average": {},
}


def run_of(party, config):
    """Each iteration's outcome."""
    rule = RewardRule(party.groups.names, config)
    state, results = rule.first(), []
    for iteration in range(ITERATIONS):
        question_J = np.random.default_rng(iteration).choice(len(party.catalogue.questions), J)
        answers = party.answers(iteration, question_J)
        results.append(rule.result(state, answers, party.groups.ask(rule.ask(state, answers, 0))))
        state = rule.restored(rule.saved(results[-1].state))  # as a resumed run has it
    return results


@pytest.mark.parametrize("name", RULES)
def test_rewards_and_fairness_are_the_same(name, tmp_path):
    """The nodes' own config names the rule, and their ledgers a run's histories: so these are parties of its own."""
    changes = {"rule": name, **{key.replace(".", "__").replace("-", "_"): v for key, v in RULES[name].items()}}
    plain, *others = (
        run_of(party := Parties(tmp_path / how, how, **changes), party.config) for how in (ROWS, SUMS, MASKED)
    )
    for results in others:
        for expected, result in zip(plain, results, strict=True):
            np.testing.assert_allclose(result.aggregate_J, expected.aggregate_J, atol=1e-6)
            assert result.fairness_index == pytest.approx(expected.fairness_index, abs=1e-9)
            assert result.group_reward == pytest.approx(expected.group_reward, abs=1e-9)
            assert (result.fell_back, result.missing) == (expected.fell_back, ())
            assert (result.weights, result.history, result.rewards) == ({}, {}, {})
    assert np.ptp([list(result.weights.values()) for result in plain]) > 0.01 or name == "average"


def test_scores_are_the_same(parties):
    held_out = np.flatnonzero(parties[ROWS].catalogue.held_out_Q)
    answers = parties[ROWS].answers(5, np.repeat(held_out, 2))
    request = answers.request(["js", "cosine"], sides=(TARGET_SIDE, TRUTH_SIDE))
    plain, *others = (scores(party.groups, request) for party in parties.values())
    for summed in others:
        assert summed.keys() == plain.keys()
        for key, expected in plain.items():
            assert expected.known
            assert summed[key].avg_as == pytest.approx(expected.avg_as, abs=1e-9)
            for used_J in (answers.readable_J, np.ones_like(answers.readable_J)):
                assert summed[key].fairness(used_J) == pytest.approx(expected.fairness(used_J), abs=1e-9)
            np.testing.assert_allclose(summed[key].mean_J, expected.mean_J, atol=1e-9)
            assert summed[key].reward_GJ is None
            own = list(summed[key].per_group.values())
            # a simulation's are exact; an owner's let leave two decimals, of the mean over questions
            np.testing.assert_allclose(own, list(expected.per_group.values()), atol=0.0051)
            assert summed[key].min_as == min(own)


def test_where_owners_keep_their_own_scores_the_sums_stand_alone(parties, monkeypatch):
    groups, ask = parties[SUMS].groups, Groups.ask

    def refused(self, asked, **others):
        if asked.kind == asks.OWN_SCORES:
            raise TooFew("no group gives its own")
        return ask(self, asked, **others)

    monkeypatch.setattr(Groups, "ask", refused)
    question_J = np.flatnonzero(parties[SUMS].catalogue.held_out_Q)
    summed = scores(groups, parties[SUMS].answers(6, question_J).request(["js"]))["js", TARGET_SIDE]
    assert 0 < summed.avg_as < 1
    assert np.isnan([summed.min_as, *summed.per_group.values()]).all()


def test_votes_and_updates_add_up_to_the_same(parties):
    joined = {"weights": messages.join_weights(weights(parties[ROWS].config))}
    for ask in (
        asks.Ask(asks.VOTES),
        asks.Ask(asks.UPDATE, joined, {"round": 1}),
    ):
        rows, *sums = (party.groups.ask(ask) for party in parties.values())
        for summed in sums:
            assert summed.groups == rows.groups == SURVEY.groups
            for name in rows.numbers:
                if ask.kind == asks.UPDATE and name != "answers":
                    continue  # deployed nodes draw their own episodes
                np.testing.assert_allclose(summed.sum(name), rows.sum(name), atol=1e-9)
                np.testing.assert_allclose(summed.mean(name), rows.each(name).mean(axis=0), atol=1e-9)


# --- Flower's strategies ----------------------------------------------------------------------------------------------

START = ArrayRecord({"b": Array(np.array([1.0], np.float32)), "a": Array(np.array([[2.0, 3.0]], np.float32))})
# by a's two weights and b: 10 answers moved by 1, 2 and 3 in the mean, and 30 by 3, 2 and 1; nobody's C
NUMBERS = {
    "A": {"step": np.array([10.0, 20.0, 30.0]), "answers": 2.0, "loss": 4.0},
    "B": {"step": np.array([3.0, 2.0, 1.0]), "answers": 1.0, "loss": 0.5},
    "C": {"step": np.array([9.0, 9.0, 9.0]), "answers": 1.0, "loss": 9.0},
}
ERRORS = {"A": {"answers": 1.0, "error": 0.5}, "B": {"answers": 1.0, "error": 0.25}, "C": {"answers": 0.0}}


def asked(sums, *, kind=TRAIN, names=("A", "B", "C"), **config):
    """The replies that a strategy gets, with the requests that the groups got."""
    node = FakeGroups(names, lambda ask, name: (NUMBERS if kind == TRAIN else ERRORS)[name])
    flat = {"run.min-groups": 1, "run.sums": sums, "pluralllm.unseen-groups": "C" if sums == "plain" else ""}
    groups = Groups(OverlapGrid(FakeGrid({1: node})), Config.load(flat))
    groups.grid.simulated = True
    groups.gather((), patience=0.0)
    groups.send_catalogue(CATALOGUE)
    grid = AskGrid(groups)
    content = RecordDict({"arrays": START, "config": ConfigRecord({"server-round": 3, **config})})
    sent = [Message(content, place, kind) for place in reversed(list(grid.get_node_ids()))]
    return grid.send_and_receive(sent), node.asked


def arrays_of(reply):
    return {name: array.numpy().tolist() for name, array in reply.content["arrays"].items()}


def test_a_strategy_gets_a_reply_of_each_group_that_trains():
    replies, (ask,) = asked("plain")
    assert (ask.kind, ask.settings) == (asks.UPDATE, {"round": 3})
    assert ask.arrays["weights"].tolist() == [2, 3, 1]  # by name
    assert [reply.content["metrics"] for reply in replies] == [
        {"num-examples": 2, "loss": 2.0},
        {"num-examples": 1, "loss": 0.5},
    ]
    assert [arrays_of(reply) for reply in replies] == [
        {"b": [1 + 15], "a": [[2 + 5, 3 + 10]]},
        {"b": [1 + 1], "a": [[2 + 3, 3 + 2]]},
    ]
    assert all(array.numpy().dtype == np.float32 for reply in replies for array in reply.content["arrays"].values())


def test_under_sums_it_gets_one_that_is_their_mean():
    (reply,), _ = asked("secure")
    assert reply.content["metrics"] == {"num-examples": 4, "loss": (4 + 0.5 + 9) / 4}
    assert arrays_of(reply) == {"b": [1 + 40 / 4], "a": [[2 + 22 / 4, 3 + 31 / 4]]}


@pytest.mark.parametrize(("sums", "errors"), [("plain", [0.5, 0.25]), ("secure", [0.75 / 2])])
def test_validation_errors_are_means_over_answers(sums, errors):
    replies, (ask,) = asked(sums, kind="evaluate")
    assert ask.kind == asks.VALIDATION
    assert [reply.content["metrics"]["errors"][0] for reply in replies] == pytest.approx(errors)


def test_a_round_whose_sum_is_lost_is_asked_anew(monkeypatch):
    tries, ask = [], Groups.ask

    def lost(self, asked, **others):
        tries.append(asked)
        if len(tries) < 3:
            raise LostSum("C stays away")
        return ask(self, asked, **others)

    monkeypatch.setattr(Groups, "ask", lost)
    (reply,), _ = asked("secure")
    assert reply.content["metrics"]["num-examples"] == 4
    assert len({asked.digest for asked in tries}) == 3
