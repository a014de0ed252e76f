"""Secure sums by the groups' real ClientApp, and a server that tries to learn more than the sums.

Legend: G groups, J answers.
"""

from __future__ import annotations

import numpy as np
import pytest
from client_node import Node, asked_of, config_of, home_files, uniform_request, weights
from in_process import FEW, pinned
from small import AS_OWNERS_ASK

from appa_flwr.analysis.aggregation import configured
from appa_flwr.config import Config
from appa_flwr.core.errors import UserError
from appa_flwr.protocol import asks, messages, refusals
from appa_flwr.protocol.asks import Ask
from appa_flwr.protocol.rewards import js, training_reward
from appa_flwr.secure import masks, rule_sums
from appa_flwr.secure.roster import ROSTER_FILE, own_key, public_key, roster_file
from appa_flwr.survey.generate import generate
from client_app.party import Party
from server_app.federation.catalogue import build_catalogue

SURVEY = generate(num_questions=60, num_groups=5, seed=3)
EVERYBODY = SURVEY.groups


class Circle:
    """Five groups that have pinned their roster, as a server meets them."""

    def __init__(self, folder, *, owner_policy=FEW, **changes) -> None:
        keys = {"data__num_groups": 5, "run__sums": "secure", "appa__fairness_threshold": 1.1, **changes}
        config, self.files = home_files(SURVEY, folder, config_of(**keys))
        self.config = Config.load({**config.flat(), **AS_OWNERS_ASK})
        contexts = pinned(self.config, self.files, owner_policy=owner_policy)
        self.nodes = dict(zip(self.files, map(Node, contexts.values()), strict=True))
        self.catalogue, self.round = build_catalogue(self.config), 0
        for node in self.nodes.values():
            node.prepared(self.catalogue)
        self.world = asks.world_of(
            self.config,
            messages.digest(messages.pack_catalogue(self.catalogue)),
            messages.digest(messages.pack_weights(weights(self.config))),
        )
        self.roster = next(iter(self.nodes.values())).hello().fields["roster"]

    def task(self, asked: Ask, cohort=EVERYBODY, *, run="run", number=0) -> masks.Task:
        self.round += 1
        request = asks.request_digest(asked, self.world)
        return masks.Task(run, number or self.round, tuple(cohort), request, self.roster)

    def mask(self, asked: Ask, task: masks.Task, group: str):
        """A group's words; the code of a refusal."""
        reply = self.nodes[group].ask(asked, round=task.round, cohort=task.cohort) if task.run == "run" else None
        if reply is None:
            content = messages.pack_ask(asked, messages.Head(task.run, self.world, task.round, task.cohort))
            reply = self.nodes[group].send(messages.ASK, content)
        if reply.has_error():
            return reply.error.code
        return messages.unpack_reply(reply.content, numbers=(np.uint64, 1)).numbers

    def open(self, task: masks.Task, group: str):
        """A group's seed; the code of a refusal."""
        reply = self.nodes[group].send(messages.OPEN, messages.pack_open(task))
        return (
            reply.error.code if reply.has_error() else messages.unpack_reply(reply.content, seed=bytes).fields["seed"]
        )

    def sums(self, asked: Ask, cohort=EVERYBODY, *, run="run") -> dict[str, np.ndarray]:
        """The totals by name."""
        task = self.task(asked, cohort, run=run)
        words = {group: self.mask(asked, task, group) for group in cohort}
        seeds = {group: self.open(task, group) for group in cohort}
        shapes = asks.numbers_of(asked, self.catalogue)
        self.last = task
        return asks.split(masks.total(task, words, seeds) * asks.scales(shapes), shapes)

    def terms(self, iteration: int, reference: float, completed=()) -> Ask:
        request = uniform_request(self.catalogue)
        size = len(request.question_J)
        return request.ask(
            asks.TERMS,
            arrays={"format": np.ones(size), "parsed": np.ones(size, dtype=bool)},
            rule="appa",
            iteration=iteration,
            reference=reference,
            completed=list(completed),
        )


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Circle:
    """For tests that only add."""
    return Circle(tmp_path_factory.mktemp("circle"), owner_policy=f"{FEW}\ncohort-changes = 1000")


def code(name: str) -> int:
    return refusals.SECURE[name]


@pytest.mark.parametrize("kind", [asks.VOTES, asks.PREDICTIONS, asks.SCORES, asks.REWARDS, asks.VALIDATION])
def test_the_sum_is_that_of_the_groups_own_numbers(kind, shared, monkeypatch):
    asked = asked_of(kind, shared.catalogue, shared.config)
    own, flatten = [], asks.flatten

    def noted(values, shapes, *, cut=False):
        own.append({name: np.array(value) for name, value in values.items()})
        return flatten(values, shapes, cut=cut)

    monkeypatch.setattr(asks, "flatten", noted)
    sums = shared.sums(asked)
    assert len(own) == len(EVERYBODY)
    for name, total in sums.items():
        expected = np.sum([values[name] for values in own], axis=0)
        np.testing.assert_allclose(total, expected, atol=1e-12 * len(shared.catalogue.questions))
        assert total.any()


def test_rewards_by_the_rule_are_those_of_the_plain_rule(tmp_path):
    """Three iterations of appa over a standing cohort, from the same tables."""
    circle = Circle(tmp_path)
    settings, request = circle.config.appa, uniform_request(circle.catalogue)
    option_JK = circle.catalogue.option_QK
    reward_GJ = np.stack([js(request.prediction_JK, circle.nodes[g].targets(g), option_JK) for g in EVERYBODY])
    ones = np.ones(len(option_JK))
    training_GJ = training_reward(reward_GJ, ones, ones > 0, alignment_weight=settings.alignment_weight)
    rule = configured("appa", settings)
    plain, state = rule.init(5), rule_sums.first("appa", settings, 5)
    for iteration in (1, 2, 3):
        expected = rule.apply(plain, reward_GJ, training_GJ)
        sums = circle.sums(circle.terms(iteration, state.reference, state.completed))
        task = circle.last.digest.hex()
        outcome = rule_sums.combine("appa", settings, state, sums, groups=5, task=task)
        plain, state = expected.state, outcome.state
        np.testing.assert_allclose(outcome.aggregate_J, expected.aggregate_J, atol=1e-9)
        assert outcome.fairness_index == pytest.approx(expected.fairness_index, abs=1e-9)


def test_a_roster_that_the_server_has_made_is_refused(tmp_path):
    """It could hold keys of the server's own beside one group's."""
    circle = Circle(tmp_path)
    group, *others = EVERYBODY
    forged = {name: public_key(own_key(tmp_path / f"{name}.key")) for name in others[:2]}
    path = circle.files[group].with_name(ROSTER_FILE)
    before = path.read_text()
    path.write_text(roster_file({group: public_key(own_key(circle.files[group].with_suffix(".sums.key"))), **forged}))
    asked = Ask(asks.VOTES)
    assert circle.mask(asked, circle.task(asked, (group, *others[:2])), group) == refusals.FAILED
    path.write_text(before)
    assert circle.mask(asked, circle.task(asked, (group, "Nobody", others[0])), group) == code(masks.STRANGERS)


def test_an_opened_request_is_masked_again_for_the_same_groups_only(tmp_path):
    """Otherwise the sum over all, and then over all but one, is that one's numbers; in another run too."""
    circle = Circle(tmp_path)
    asked = asked_of(asks.REWARDS, circle.catalogue, circle.config)
    circle.sums(asked)
    fewer = EVERYBODY[1:]
    for run in ("run", "another"):
        task = circle.task(asked, fewer, run=run)
        assert {circle.mask(asked, task, group) for group in fewer} == {code(masks.OTHER_COHORT)}
    again = circle.sums(asked)
    assert again["js targets reward"].any()


def test_a_late_seed_gives_nobodys_numbers(tmp_path):
    """All have masked and a seed comes late: the same request for the others, which have opened it for all."""
    circle = Circle(tmp_path)
    asked = asked_of(asks.REWARDS, circle.catalogue, circle.config)
    task, (late, *others) = circle.task(asked), EVERYBODY
    for group in EVERYBODY:
        assert not isinstance(circle.mask(asked, task, group), int)
    assert all(isinstance(circle.open(task, group), bytes) for group in others)
    smaller = circle.task(asked, others)
    assert {circle.mask(asked, smaller, group) for group in others} == {code(masks.OTHER_COHORT)}
    assert isinstance(circle.open(task, late), bytes)  # then the sum over five is complete, and no other one is


def test_two_runs_at_once_open_a_request_for_one_cohort(tmp_path):
    circle = Circle(tmp_path)
    asked = asked_of(asks.REWARDS, circle.catalogue, circle.config)
    every, fewer = circle.task(asked, run="run"), circle.task(asked, EVERYBODY[1:], run="another")
    for group in EVERYBODY[1:]:
        assert not isinstance(circle.mask(asked, every, group), int)
        assert not isinstance(circle.mask(asked, fewer, group), int)
        assert isinstance(circle.open(every, group), bytes)
        assert circle.open(fewer, group) == code(masks.OTHER_COHORT)


def test_rounds_rise_and_only_the_last_one_is_opened(tmp_path):
    circle = Circle(tmp_path)
    first, second = Ask(asks.VOTES), asked_of(asks.REWARDS, circle.catalogue, circle.config)
    group = EVERYBODY[0]
    task = circle.task(first)
    assert not isinstance(circle.mask(first, task, group), int)
    assert circle.nodes[group].hello().fields["round"] == 1
    for number in (1, 0):
        replayed = masks.Task(task.run, number, task.cohort, task.request, task.roster)
        assert circle.mask(first, replayed, group) in (code(masks.MASKED_BEFORE), refusals.ONLY_SUMS)
    later = circle.task(second)
    assert not isinstance(circle.mask(second, later, group), int)
    assert circle.open(task, group) == code(masks.NOT_LAST)
    assert circle.open(later, group) == circle.open(later, group)  # asked again, the same


def test_the_groups_of_a_runs_sums_change_as_often_as_the_owner_says(tmp_path):
    circle = Circle(tmp_path, owner_policy=f"{FEW}\ncohort-changes = 1\nleast-cohort = 3")
    asked = [uniform_request(circle.catalogue, draw=0).ask(asks.REWARDS, more=n) for n in range(4)]
    circle.sums(asked[0])
    circle.sums(asked[1], EVERYBODY[1:])
    circle.sums(asked[2])  # one of the two again
    task = circle.task(asked[3], EVERYBODY[:4])
    assert circle.mask(asked[3], task, EVERYBODY[1]) == code(masks.CHANGES)


def test_a_cohort_is_as_large_as_the_owner_says(tmp_path):
    circle = Circle(tmp_path)  # by default the roster but one
    asked = Ask(asks.VOTES)
    assert circle.mask(asked, circle.task(asked, EVERYBODY[:3]), EVERYBODY[0]) == code(masks.FEW)
    assert not isinstance(circle.mask(asked, circle.task(asked, EVERYBODY[:4]), EVERYBODY[0]), int)
    twice = (*EVERYBODY[:2], *EVERYBODY[:2])
    assert circle.mask(asked, circle.task(asked, twice), EVERYBODY[0]) == code(masks.STRANGERS)


def test_groups_that_are_asked_different_things_add_up_to_nothing(tmp_path):
    """Other requests, cohorts or rounds to one group, or numbers that it has made up."""
    circle = Circle(tmp_path)
    asked, other = Ask(asks.VOTES), Ask(asks.PREDICTIONS)
    task = circle.task(asked)
    words = {group: circle.mask(asked, task, group) for group in EVERYBODY[1:]}
    aside = circle.task(other)
    words[EVERYBODY[0]] = circle.mask(other, aside, EVERYBODY[0])
    seeds = {group: circle.open(task, group) for group in EVERYBODY[1:]}
    seeds[EVERYBODY[0]] = circle.open(aside, EVERYBODY[0])
    with pytest.raises(UserError, match="wrong part"):
        masks.total(task, words, seeds)


def test_an_iteration_has_one_reference_and_no_history_comes_back(tmp_path):
    """Bends of the clipped weight, by several references, would give all histories."""
    circle = Circle(tmp_path)
    state = rule_sums.first("appa", circle.config.appa, 5)
    sums = circle.sums(circle.terms(1, state.reference))
    first = circle.last.digest.hex()
    state = rule_sums.combine("appa", circle.config.appa, state, sums, groups=5, task=first).state
    circle.sums(circle.terms(2, state.reference, state.completed))
    second, group = circle.last.digest.hex(), EVERYBODY[0]

    def refused(asked: Ask) -> int | None:
        answer = circle.mask(asked, circle.task(asked), group)
        return answer if isinstance(answer, int) else None

    assert refused(circle.terms(2, state.reference + 1e-9, [first])) == code(masks.OTHER_REFERENCE)
    assert refused(circle.terms(2, state.reference, ["ff" * 32])) == code(masks.OTHER_REFERENCE)
    assert refused(circle.terms(2, state.reference, [])) == code(masks.OTHER_REFERENCE)
    assert refused(circle.terms(1, state.reference)) == code(masks.PAST)
    assert refused(circle.terms(2, float("inf"), [first])) in (refusals.FAILED, code(masks.OTHER_REFERENCE))
    # a server that leaves a completed sum out would choose the history that a group continues
    assert refused(circle.terms(3, state.reference, [first, second])) is None
    assert refused(circle.terms(4, state.reference, [first, "ff" * 32, "ff" * 32])) == code(masks.PAST)


def test_a_group_whose_part_was_not_completed_keeps_its_history(tmp_path):
    circle = Circle(tmp_path, owner_policy=f"{FEW}\ncohort-changes = 9")
    group, *others = EVERYBODY
    circle.sums(circle.terms(1, 1.0))
    first = circle.last.digest.hex()
    circle.sums(circle.terms(2, 1.0, [first]), others)
    second = circle.last.digest.hex()
    asked = circle.terms(3, 1.0, [first, second])
    circle.sums(asked)
    with Party.of(circle.nodes[group].context).facts() as facts:
        known = {name for name in facts if name.startswith("history")}
    assert len(known) == 2  # of the first and the third iteration


def test_a_temperature_under_the_owners_is_refused(tmp_path):
    """At a low one the term is nearly the worst-off group's reward."""
    circle = Circle(tmp_path, appa__temperature=0.05, owner_policy=f"{FEW}\nleast-temperature = 0.06")
    asked = circle.terms(1, 0.0)
    assert circle.mask(asked, circle.task(asked), EVERYBODY[0]) == refusals.LOW_TEMPERATURE


def test_another_rule_metric_or_side_is_no_term(tmp_path):
    circle = Circle(tmp_path)
    for change in ({"rule": "alpha"}, {"metrics": ["cosine"]}, {"sides": ["truth"]}):
        asked = circle.terms(1, 0.0)
        asked.settings.update(change)
        assert circle.mask(asked, circle.task(asked), EVERYBODY[0]) == refusals.BAD_REQUEST


def test_where_too_few_train_there_is_no_step(tmp_path):
    circle = Circle(tmp_path, pluralllm__unseen_groups=", ".join(EVERYBODY[:3]))
    asked = asked_of(asks.UPDATE, circle.catalogue, circle.config)
    assert circle.mask(asked, circle.task(asked), EVERYBODY[4]) == refusals.FEW_OWN
