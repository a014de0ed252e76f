"""Sums over real groups against what their single numbers come to, with and without drop-outs.

Axis letters: J answers.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from flwr.app import RecordDict
from in_process import flower_task
from secure_world import Sums

from appa_flwr.analysis import aggregation
from appa_flwr.analysis.alignment import alignment_scores
from appa_flwr.config import Config
from appa_flwr.core.errors import UserError
from appa_flwr.protocol import sum_messages as messages
from appa_flwr.protocol import wire
from appa_flwr.secure.allowed import check_config
from appa_flwr.secure.summing import TooFew
from server_app.checkpoint import Checkpoint, load, save
from server_app.federation import secure_sums
from server_app.federation.answers import Answers
from server_app.federation.group_rewards import aggregated_reward
from server_app.federation.summed_rewards import RuleFromSums
from server_app.federation.summed_scores import scores
from server_app.models.sft import sft_targets, targets_of_mean
from server_app.predictor.pretraining import initial_weights, pretrain
from server_app.predictor.summed_training import SummedTraining

RULES = {
    "average": {"rule": "average"},
    "appa": {"rule": "appa", "appa.fairness-threshold": 2.0},
    "mix": {"rule": "mix"},
}


@pytest.fixture(scope="module")
def groups():
    with flower_task():
        found = Sums()
        found.targets()
        yield found


def asked(groups, rng, number=9):
    question_J, answer_JK = groups.answers(number, rng)
    format_J = np.where(np.isnan(answer_JK).any(1), 0.3, rng.random(number))
    return Answers(question_J, ("",) * number, answer_JK, format_J, np.arange(number) < number - 1)


def wrongs(groups, silences):
    """Largest differences of rewards and index from those of single numbers, an iteration for each set of silences."""
    rng = np.random.default_rng(1)
    rule, config = aggregation.configured(groups.config.rule, groups.config.appa), groups.config
    sums = RuleFromSums(groups.secure, config)
    state, plain, found = sums.first(), rule.init(len(groups.federation.groups)), []
    for masking, unmasking in silences:
        answers = asked(groups, rng)
        request = answers.request([config.reward_metric])
        groups.grid.silent = {wire.SCORE: masking, wire.MASK: masking, wire.UNMASK: unmasking}
        single = aggregated_reward(
            rule, plain, answers, groups.federation.score(request), metric=config.reward_metric,
            alignment_weight=config.appa.alignment_weight,
        )  # fmt: skip
        plain = single.result.state
        done = []
        summed = sums.reward(state, answers, request, meanwhile=lambda done=done: done.append(True))
        assert done == [True]  # the reference pass, once
        state = summed.state
        there = tuple(name for name in groups.federation.groups if groups.node(name) not in masking)
        assert state.groups == there
        assert summed.result.fell_back == single.result.fell_back
        assert summed.reward == pytest.approx(np.nanmean(single.reward_GJ), abs=1e-9)
        found.append((np.abs(summed.result.aggregate_J - single.result.aggregate_J).max(),
                      abs(summed.result.fairness_index - single.result.fairness_index)))  # fmt: skip
    groups.grid.silent = {}
    return np.max(found, axis=0)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("drops", [False, True], ids=["everybody", "drop-outs"])
def test_every_rule_gives_what_it_gives_from_single_rewards(groups, name, drops):
    groups.set(
        **{
            **{key: value for of in RULES.values() for key, value in Config().flat().items() if key in of},
            **RULES[name],
        }
    )
    a, b = groups.node(groups.federation.groups[1]), groups.node(groups.federation.groups[4])
    none = (set(), set())
    silences = [none] * 4 if not drops else [none, ({a}, {a}), none, ({b}, {a, b}), ({a, b}, {a, b}), none]
    aggregate, index = wrongs(groups, silences)
    assert aggregate < 2e-9
    assert index < 1e-9


def test_below_the_threshold_there_is_a_named_error_and_the_next_sum_works(groups, caplog):
    groups.set(**RULES["appa"])
    sums, rng = RuleFromSums(groups.secure, groups.config), np.random.default_rng(2)
    state, answers = sums.first(), asked(groups, rng)
    request = answers.request([groups.config.reward_metric])
    expected = sums.reward(state, answers, request, meanwhile=lambda: None).result.aggregate_J
    three = {groups.node(name) for name in groups.federation.groups[:3]}
    for kind in (wire.MASK, wire.UNMASK):
        groups.grid.silent = {kind: three}
        with pytest.raises(TooFew, match=r"3 of|3 shares"):
            sums.reward(state, answers, request, meanwhile=lambda: None)
    groups.grid.silent = {}
    again = sums.reward(state, answers, request, meanwhile=lambda: None).result.aggregate_J
    np.testing.assert_allclose(again, expected, atol=1e-11)


def test_a_resumed_server_goes_on_with_the_sealed_standings(groups, tmp_path):
    groups.set(**RULES["appa"])
    rng = np.random.default_rng(3)
    first, second = asked(groups, rng), asked(groups, rng)
    sums = RuleFromSums(groups.secure, groups.config)
    ask = lambda of: of.request([groups.config.reward_metric])  # noqa: E731
    state = sums.reward(sums.first(), first, ask(first), meanwhile=lambda: None).state
    expected = sums.reward(state, second, ask(second), meanwhile=lambda: None).result.aggregate_J
    save(tmp_path / "c", Checkpoint.of(1, groups.federation.groups, state, {}))
    anew = secure_sums.SecureSums(groups.federation, groups.config)
    anew.start()
    kept = load(tmp_path / "c").rule_state(groups.federation.groups)
    resumed = RuleFromSums(anew, groups.config)
    given = resumed.reward(kept, second, ask(second), meanwhile=lambda: None).result.aggregate_J
    np.testing.assert_allclose(given, expected, atol=1e-11)
    fresh = replace(kept, standings={})  # histories do matter
    other = resumed.reward(fresh, second, ask(second), meanwhile=lambda: None).result.aggregate_J
    assert np.abs(other - expected).max() > 1e-6
    swapped = replace(kept, standings=dict(zip(kept.standings, reversed(kept.standings.values()), strict=True)))
    alien = resumed.reward(swapped, second, ask(second), meanwhile=lambda: None).result.aggregate_J
    np.testing.assert_allclose(alien, other, atol=1e-9)  # another group's box counts as none


def test_scores_are_those_of_single_rewards_and_an_owner_may_keep_theirs(groups):
    rng = np.random.default_rng(4)
    request = replace(
        asked(groups, rng), question_J=rng.choice(np.flatnonzero(groups.catalogue.held_out_Q), 9)
    ).request(["js", "cosine"], sides=(wire.TARGET_SIDE, wire.TRUTH_SIDE))
    request = replace(request, prediction_JK=_fitting(groups, request.question_J, rng))
    single, summed = groups.federation.score(request), scores(groups.secure, request)
    assert single.keys() == summed.keys()
    for key, reward_GJ in single.items():
        expected, found = alignment_scores(reward_GJ), summed[key]
        assert found.avg_as == pytest.approx(expected.avg_as, abs=1e-9)
        assert found.min_as == pytest.approx(expected.min_as, abs=1e-9)
        assert found.fairness(np.ones(9, dtype=bool)) == pytest.approx(expected.fairness_index, abs=1e-9)
        np.testing.assert_allclose(found.mean_J, np.nanmean(reward_GJ, axis=0), atol=1e-9)
        np.testing.assert_allclose(list(found.per_group.values()), expected.per_group_G, atol=1e-12)
        kept = replace(found, per_group={**found.per_group, groups.federation.groups[0]: np.nan})
        assert np.isnan(kept.min_as)


def _fitting(groups, question_J, rng):
    option_JK = groups.catalogue.option_QK[question_J]
    answer_JK = np.where(option_JK, rng.random(option_JK.shape), 0.0)
    return answer_JK / answer_JK.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("target", ["smoothed-votes", "votes", "predicted-mean", "majority"])
def test_votes_come_to_the_same_targets(groups, target):
    groups.set(**{"sft.target": target})
    option_QK = groups.catalogue.option_QK
    kind = messages.PREDICTIONS if target == "predicted-mean" else messages.VOTES
    summed = groups.secure.total(kind, RecordDict(), {"votes": option_QK.shape})
    mean_QK = option_QK.shape[1] * summed.mean("votes")
    given = targets_of_mean(mean_QK.round(9), option_QK, target=target, num_groups=6)
    expected = sft_targets(groups.federation.votes(), option_QK, target=target)
    if target == "majority":  # equals may fall differently
        clear_Q = (np.sort(mean_QK, axis=1)[:, -1] - np.sort(mean_QK, axis=1)[:, -2]) > 1e-6
        assert clear_Q.sum() > 10
        given, expected = given[clear_Q], expected[clear_Q]
    np.testing.assert_allclose(given, expected, atol=1e-8)
    groups.set(**{"sft.target": "smoothed-votes"})


@pytest.mark.parametrize("strategy", ["fedavg", "fedadam", "fedprox"])
def test_pluralllm_learns_the_same(strategy):
    found = []
    with flower_task():
        for secure in (False, True):
            groups = Sums(
                **{"pluralllm.strategy": strategy, "pluralllm.unseen-groups": "Avaria", "pluralllm.rounds": 1}
            )
            found.append(
                pretrain(
                    groups.federation.grid,
                    groups.config,
                    initial_weights(groups.config),
                    nodes=groups.federation.nodes_of(groups.federation.groups[1:]),
                    summed=SummedTraining(groups.secure, groups.catalogue, groups.config) if secure else None,
                    progress=lambda *_: None,
                )
            )
    plain, summed = found
    assert summed.losses == pytest.approx(plain.losses, rel=1e-5)
    assert summed.validation == pytest.approx(plain.validation, abs=1e-5)
    moved = 0.0
    for name, array in plain.weights.items():
        # FedAdam divides by a gradient's size, which magnifies the last bits of small ones
        np.testing.assert_allclose(summed.weights[name].numpy(), array.numpy(), atol=2e-5)
        moved = max(moved, np.abs(array.numpy() - initial_weights(groups.config)[name].numpy()).max())
    assert moved > 1e-4


BAD = {
    "min": {"rule": "min"},
    "sft.target": {"sft.target": "mean"},
    "serve": {"run.phases": "serve"},
}


@pytest.mark.parametrize("name", BAD)
def test_what_no_sum_holds_is_refused_in_one_line(name):
    config = Config.load({"run.sums": "secure", **BAD[name]})
    with pytest.raises(UserError) as error:
        check_config(config)
    assert "\n" not in str(error.value)
    assert "secure" in str(error.value) or "run.sums = plain" in str(error.value)
    check_config(Config.load({**config.flat(), "run.sums": "plain"}))


def test_two_groups_are_too_few():
    with pytest.raises(UserError, match="2 groups cannot be"):
        check_config(Config.load({"run.sums": "secure"}), groups=2)
