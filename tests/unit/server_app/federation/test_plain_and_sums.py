"""The same numbers by the groups' real ClientApp: each group's own, their sums, and masked sums.

Legend: G groups, J answers.
"""

from types import SimpleNamespace

import numpy as np
import pytest
from client_node import config_of, home_files, weights
from in_process import FEW, InProcessGrid, SimulatedGrid, deployed, flower_task, pinned, simulated

from appa_flwr.config import Config
from appa_flwr.protocol import asks
from appa_flwr.protocol.asks import TARGET_SIDE, TRUTH_SIDE
from appa_flwr.survey import store
from appa_flwr.survey.generate import generate
from server_app.federation.answers import Answers
from server_app.federation.ask import TooFew
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
        self.config, files = home_files(SURVEY, folder, config_of(**keys))
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
    """All three by their name; the nodes' own config has the rule, and their ledgers a run's histories."""
    folder, keys = tmp_path_factory.mktemp("parties"), {"appa__fairness_threshold": 1.1, "appa__temperature": 0.1}
    with flower_task():
        yield {how: Parties(folder / how, how, **keys) for how in (ROWS, SUMS, MASKED)}


def run_of(party, config):
    """Each iteration's rewards, and the fields of its record."""
    rule = RewardRule(party.groups.names, config)
    state, results = rule.first(), []
    for iteration in range(ITERATIONS):
        question_J = np.random.default_rng(iteration).choice(len(party.catalogue.questions), J)
        answers = party.answers(iteration, question_J)
        reward_J, state, fields = rule.result(state, answers, party.groups.ask(rule.ask(state, answers, 0)))
        results.append((reward_J, SimpleNamespace(**fields)))
        state = rule.restored(rule.saved(state))  # as a resumed run has it
    return results


def test_rewards_and_fairness_are_the_same(parties):
    plain, *others = (run_of(party, party.config) for party in parties.values())
    for results in others:
        for (expected_J, expected), (reward_J, result) in zip(plain, results, strict=True):
            np.testing.assert_allclose(reward_J, expected_J, atol=1e-6)
            assert result.fairness_index == pytest.approx(expected.fairness_index, abs=1e-9)
            assert result.group_reward == pytest.approx(expected.group_reward, abs=1e-9)
            assert (result.fell_back, result.missing_groups) == (expected.fell_back, ())
            assert (result.weights, result.history, result.rewards) == ({}, {}, {})
    assert np.ptp([list(result.weights.values()) for _, result in plain]) > 0.01


def test_scores_are_the_same(parties):
    held_out = np.flatnonzero(parties[ROWS].catalogue.held_out_Q)
    answers = parties[ROWS].answers(5, np.repeat(held_out, 2))
    request = answers.request(["js", "cosine"], sides=(TARGET_SIDE, TRUTH_SIDE))
    plain, *others = (scores(party.groups, request) for party in parties.values())
    for summed in others:
        assert summed.keys() == plain.keys()
        for key, (expected, _) in plain.items():
            found, reward_GJ = summed[key]
            for name in ("avg_as", "fi", "fi_readable"):
                assert getattr(found, name) == pytest.approx(getattr(expected, name), abs=1e-9)
            assert reward_GJ is None
            own = list(found.per_group.values())
            # a simulation's are exact; an owner's let leave two decimals, of the mean over questions
            np.testing.assert_allclose(own, list(expected.per_group.values()), atol=0.0051)
            assert found.min_as == min(own)


def test_where_owners_keep_their_own_scores_the_sums_stand_alone(parties, monkeypatch):
    groups, ask = parties[SUMS].groups, Groups.ask

    def refused(self, asked, **others):
        if asked.kind == asks.OWN_SCORES:
            raise TooFew("no group gives its own")
        return ask(self, asked, **others)

    monkeypatch.setattr(Groups, "ask", refused)
    question_J = np.flatnonzero(parties[SUMS].catalogue.held_out_Q)
    summed, _ = scores(groups, parties[SUMS].answers(6, question_J).request(["js"]))["js", TARGET_SIDE]
    assert 0 < summed.avg_as < 1
    assert np.isnan([summed.min_as, *summed.per_group.values()]).all()
