"""What a server may try once it keeps to the masks: to know the others' numbers, or to have a group send its own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from audit import make_world
from flwr.app import RecordDict
from in_process import flower_task
from secure_world import Sums, pinned

from appa_flwr.config import Config
from appa_flwr.owner.ledger import Ledger
from appa_flwr.protocol import sum_messages as messages
from appa_flwr.protocol import wire
from appa_flwr.secure import terms
from appa_flwr.secure.summing import TooFew
from appa_flwr.secure.terms import Public
from client_app import state
from pluralllm.scores import summed as score_names
from server_app.federation.catalogue import build_catalogue
from server_app.federation.grid import OverlapGrid
from server_app.federation.groups import Federation
from server_app.federation.secure_sums import SecureSums
from server_app.federation.summed_scores import scores
from server_app.predictor.pretraining import initial_weights
from server_app.predictor.summed_training import SummedTraining


@pytest.fixture
def groups():
    with flower_task():
        found = Sums()
        found.targets()
        yield found


def votes(groups):
    shape = {"votes": groups.catalogue.option_QK.shape}
    return groups.secure.total(messages.VOTES, RecordDict(), shape)


@pytest.mark.parametrize("what", ["config", "catalogue", "targets"])
def test_a_group_that_was_given_something_else_than_the_others_is_in_no_sum(groups, what, caplog):
    assert votes(groups).groups == groups.federation.groups
    name = groups.federation.groups[2]
    node = groups.node(name)
    if what == "config":  # the others would add nothing, and the victim its step
        context = groups.grid.contexts[node]
        context.run_config = {**context.run_config, "pluralllm.unseen-groups": name}
    else:  # its numbers would be known beforehand
        kind = wire.CATALOGUE if what == "catalogue" else wire.TARGETS
        sent, context = groups.federation._setup[kind], groups.grid.contexts[node]
        path = state.survey_file(state.memory_of(context))
        context.state.clear()
        state.remember_survey(state.memory_of(context), path)
        other = wire.pack_catalogue(build_catalogue(Config.load({**groups.config.flat(), "seed": 1})))
        weights = {key: array.numpy() * 0 for key, array in initial_weights(groups.config).items()}
        for given, mine in ((wire.CATALOGUE, other), (wire.TARGETS, wire.pack_weights(wire.arrays_record(weights)))):
            content = mine if given == kind else groups.federation._setup[given]
            groups.federation.ask_each(given, {node: content})
        assert groups.federation._setup[kind] is sent
    assert votes(groups).groups == tuple(other for other in groups.federation.groups if other != name)
    assert "another catalogue, other target tables or another config" in caplog.text


def test_the_step_of_one_or_two_groups_is_no_sum(groups, caplog):
    # of six groups two may drop out: with two unseen ones there may be two whose step it is
    unseen = groups.federation.groups[:2]
    groups.set(**{"pluralllm.unseen-groups": ", ".join(unseen)})
    training = SummedTraining(groups.secure, groups.catalogue, groups.config)
    content = RecordDict({"arrays": wire.join_weights(initial_weights(groups.config))})
    for step in (training.trained, training.validated):
        with pytest.raises(TooFew, match="might have numbers of their own"):
            step(content)


def test_predictor_scores_of_two_unseen_groups_are_no_sum():
    for number in (0, 2):
        with flower_task():
            few = Sums(**{"pluralllm.unseen-groups": ", ".join(Sums().federation.groups[:number])})
            few.targets()
            shape = {"scores": (2, len(score_names()))}
            seen_L, unseen_L = few.secure.total(messages.PREDICTOR_SCORES, RecordDict(), shape).sums["scores"]
        assert not unseen_L.any()
        assert seen_L.any() == (number == 0)


def test_no_rule_asks_for_more_than_one_number_an_answer_beside_r_and_its_square():
    # three sums of powers of three groups' rewards are as good as the rewards (Newton's identities)
    for rule in ("average", "alpha", "appa", "mix"):
        config = Config.load({"rule": rule, "appa.alpha": 5.0})
        found, _ = terms.terms(rule, config.appa, Public(), terms.Standing(), np.full(7, 0.2), np.full(7, 0.3))
        per_answer = {name: array.size for name, array in found.items() if name not in ("weight", "next")}
        assert sum(size for name, size in per_answer.items() if name not in ("history", "lead")) <= 4 * 7


def test_a_rule_that_no_sum_should_hold_is_refused_by_the_group_too(groups):
    groups.set(rule="alpha", **{"appa.alpha": -100.0})
    content = messages.pack_rule_terms(messages.RuleTerms("r", "alpha", Public()))
    shapes = {name: a.shape for name, a in terms.weight_terms(groups.config.appa, Public(), terms.Standing()).items()}
    with pytest.raises(TooFew):
        groups.secure.total(messages.WEIGHTS, content, shapes)
    groups.set(**{"appa.alpha": -14.0})
    assert groups.secure.total(messages.WEIGHTS, content, shapes).groups == groups.federation.groups


# --- a group's own score --------------------------------------------------------------------------


@pytest.fixture
def owners(tmp_path):
    """Three deployed groups with tables, and the server's sums over them."""
    world = make_world(tmp_path, run__sums="secure")
    with flower_task():
        grid = pinned(world.config, world.files)
        federation = Federation(OverlapGrid(grid), min_groups=3, timeout=5.0)
        federation.gather((), patience=0.0)
        catalogue = build_catalogue(world.config)
        federation.send_catalogue(catalogue)
        secure = federation.secure = SecureSums(federation, world.config)
        secure.start()
        federation.send_targets(initial_weights(world.config), fault=lambda reply: None)
        yield world, catalogue, secure


def request_over(catalogue, question_J):
    option_JK = catalogue.option_QK[question_J]
    return wire.ScoreRequest(question_J, option_JK / option_JK.sum(1, keepdims=True), ("js",))


def test_an_own_score_is_over_many_questions_and_to_two_decimals(owners):
    _, catalogue, secure = owners
    for few in ([0], [1, 1, 1, 1], [0, 1]):  # the owners ask for three questions
        found = scores(secure, request_over(catalogue, np.array(few)))["js", wire.TARGET_SIDE]
        assert np.isnan(list(found.per_group.values())).all()
        assert 0 < found.avg_as < 1
    found = scores(secure, request_over(catalogue, np.arange(12)))["js", wire.TARGET_SIDE]
    given = np.array(list(found.per_group.values()))
    np.testing.assert_array_equal(given, given.round(2))
    assert found.avg_as == pytest.approx(given.mean(), abs=0.005)


def test_own_scores_end_and_the_sums_go_on(owners):
    world, catalogue, secure = owners
    request = replace(request_over(catalogue, np.arange(12)), metrics=("js", "cosine"))
    for path in world.files.values():
        with path.with_suffix(".policy.toml").open("a") as policy:
            policy.write("own-scores = 5\n")
    given = []
    for _ in range(4):
        found = scores(secure, request)
        given.append([not np.isnan(of.min_as) for of in found.values()])
    assert given == [[True, True], [True, True], [True, False], [False, False]]
    assert 0 < found["js", wire.TARGET_SIDE].avg_as < 1
    for path in world.files.values():
        assert Ledger(path.with_suffix(".ledger.sqlite")).replies()["own score"] == 5
