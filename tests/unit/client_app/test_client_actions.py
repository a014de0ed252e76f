"""The groups' actions, called with Flower's own messages and contexts.

Axis letters: Q public questions, J scored answers, K options.
"""

from __future__ import annotations

import io
import sys
from dataclasses import replace

import numpy as np
import pytest
from client_node import ACTIONS, TRAIN, Node, config_of, home_files, one_node, prepared_node, uniform_request
from flwr.app import Context, Message, RecordDict
from in_process import AS_SIMULATED, deployed, flower_task, simulated
from surveys import row, write

from appa_flwr.owner.ledger import Ledger
from appa_flwr.protocol import wire
from appa_flwr.survey import store
from appa_flwr.survey.generate import generate
from appa_flwr.survey.types import Survey
from client_app import main, state
from server_app.federation.catalogue import build_catalogue, run_survey

DISTRIBUTIONS = f"{wire.VOTE} as distributions"


# --- who lives here -------------------------------------------------------------------------------


def deployed_node(**node_config):
    return Node(Context(1, 2, node_config, RecordDict(), dict(config_of().flat())))


def test_letters_that_stdout_lacks_end_no_action(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    monkeypatch.setattr(main, "_unknown", lambda message, context: print("México", flush=True))
    with flower_task():
        main.app(Message(RecordDict(), 1, "query.of_nobody"), deployed_node().context)
    assert rb"M\xe9xico" in sys.stdout.buffer.getvalue()


@pytest.mark.parametrize("num_nodes", [1, 2, 7])
def test_in_simulation_every_group_has_exactly_one_home(num_nodes):
    config = config_of(data__num_groups=5)
    groups_by_node = [list(Node(context).groups(wire.ROLL_CALL)) for context in simulated(config, num_nodes).values()]
    everyone = generate(num_questions=24, num_groups=5, seed=0).groups
    assert sorted(name for names in groups_by_node for name in names) == sorted(everyone)
    if num_nodes == 2:
        assert groups_by_node == [[everyone[0], everyone[2], everyone[4]], [everyone[1], everyone[3]]]


def test_in_simulation_the_run_or_its_survey_names_the_groups(tmp_path):
    contexts = simulated(config_of(groups="Dorvane,Avaria,Castria"), 2).values()
    assert [list(Node(context).groups(wire.ROLL_CALL)) for context in contexts] == [["Dorvane", "Castria"], ["Avaria"]]
    path = write(tmp_path / "survey.jsonl", [row("q1", group) for group in ("South, East", "North")])
    assert list(one_node(config_of(survey=str(path))).groups(wire.ROLL_CALL)) == ["South, East", "North"]


@pytest.mark.parametrize(
    ("named", "expected"),
    [("Kenya", ["Kenya"]), ("Kenya; Bolivia", ["Kenya", "Bolivia"]), ("A, B;C", ["A, B", "C"])],
)
def test_deployed_the_node_config_names_the_groups(named, expected, tmp_path):
    assert list(deployed_node(group=named, data=str(tmp_path / "x.jsonl")).groups(wire.ROLL_CALL)) == expected


def test_a_node_that_nobody_configured_says_so_in_an_error():
    reply = deployed_node().ask(wire.ROLL_CALL)
    assert reply.error.code == wire.FAILED
    assert reply.error.reason.startswith("roll_call failed: UserError")


# --- what a node keeps ----------------------------------------------------------------------------


def two_homes(folder, survey=None, **changes):
    """A survey of two groups, by default the same one, each group's deployed node, and the catalogue."""
    survey = survey or generate(num_questions=24, num_groups=2, seed=3)
    config, files = home_files(survey, folder, config_of(data__num_groups=2, **changes))
    contexts = deployed(config, files, owner_policy=f"truth = true\n{AS_SIMULATED}")
    nodes = dict(zip(files, map(Node, contexts.values()), strict=True))
    return survey, nodes, build_catalogue(config)


def test_held_out_answers_are_kept_apart_from_the_data_that_becomes_context(tmp_path):
    survey, nodes, catalogue = two_homes(tmp_path)
    index = {question.question_id: q for q, question in enumerate(catalogue.questions)}
    for group, node in nodes.items():
        reply = node.groups(wire.CATALOGUE, wire.pack_catalogue(catalogue))[group]
        own = survey.answers[group]
        training = {index[key]: value for key, value in own.items() if catalogue.train_Q[index[key]]}
        assert 0 < len(training) < len(own) < 24  # neither side of the test is empty
        assert reply.counts == {"answered": len(training), "known": len(own), "truth": 1, "probes": 0, "mean": 0}
        kept = state.data(state.memory_of(node.context), group)
        assert kept.question_N.tolist() == sorted(training)
        for q, answer_K in zip(kept.question_N, kept.answer_NK, strict=True):
            np.testing.assert_allclose(answer_K[: len(training[q])], training[q], atol=1e-7)
            assert not answer_K[len(training[q]) :].any()
        truth_QK = state.truth(state.memory_of(node.context), group)
        assert np.flatnonzero(~np.isnan(truth_QK).any(1)).tolist() == sorted(index[key] for key in own)
        assert np.isnan(truth_QK).all(1).sum() == 24 - len(own)
        for key, value in own.items():
            assert truth_QK[index[key]].tolist() == [*value, *[0.0] * (truth_QK.shape[1] - len(value))]


def test_answers_the_public_catalogue_does_not_fit_are_not_used(tmp_path):
    survey, nodes, catalogue = two_homes(tmp_path)
    own, node = next(iter(survey.answers.values())), next(iter(nodes.values()))
    answered = [q for q, question in enumerate(catalogue.questions) if question.question_id in own]
    questions = list(catalogue.questions)
    renamed, shortened, reordered, unasked = answered[:4]
    questions[reordered] = replace(questions[reordered], options=questions[reordered].options[::-1])
    questions[renamed] = replace(questions[renamed], question_id="another question")
    questions[shortened] = replace(questions[shortened], options=(*questions[shortened].options, "one more"))
    option_QK = np.zeros((24, catalogue.option_QK.shape[1] + 1), dtype=bool)
    option_QK[:, :-1] = catalogue.option_QK
    option_QK[shortened, : len(questions[shortened].options)] = True
    features = np.zeros((*option_QK.shape, 8), dtype=np.float32)
    train_Q, unanswered_Q = catalogue.train_Q.copy(), catalogue.unanswered_Q.copy()
    train_Q[unasked], unanswered_Q[unasked] = False, True  # nobody is said to have answered it
    public = wire.Catalogue(tuple(questions), train_Q, features, option_QK, unanswered_Q)
    (reply,) = node.groups(wire.CATALOGUE, wire.pack_catalogue(public)).values()
    assert reply.counts["known"] == len(own) - 4
    assert np.isnan(state.truth(state.memory_of(node.context), reply.group)[answered[:4]]).all()


def absurd_where_held_out(survey: Survey, held_out: set[str]) -> Survey:
    """The same survey, but every held-out answer is all on the option that had the least."""
    return replace(
        survey,
        answers={
            group: {key: np.eye(len(p))[np.argmin(p)] if key in held_out else p for key, p in mine.items()}
            for group, mine in survey.answers.items()
        },
    )


def test_held_out_answers_move_nothing_but_the_truth_column(tmp_path):
    """Two worlds that differ in held-out answers only: training, tables, votes and rewards must be the same bytes."""
    survey, _, catalogue = two_homes(tmp_path / "probe")
    held_out = {q.question_id for q, train in zip(catalogue.questions, catalogue.train_Q, strict=True) if not train}
    worlds = []
    for name, world in (("real", survey), ("absurd", absurd_where_held_out(survey, held_out))):
        _, nodes, _ = two_homes(tmp_path / name, world, pluralllm__architecture="attention")
        said = {}
        for group, node in nodes.items():
            said[group] = {kind: node.ask(kind, node.content(kind, catalogue)).content for kind in ACTIONS}
            for label, asked in {
                "draw": uniform_request(catalogue, draw=4),
                "truth": uniform_request(catalogue, sides=(wire.TRUTH_SIDE,)),
            }.items():
                said[group][label] = node.ask(wire.SCORE, wire.pack_score_request(asked)).content
        worlds.append(said)
    for group in survey.groups:
        real, absurd = worlds[0][group], worlds[1][group]
        for kind in (wire.ROLL_CALL, wire.CATALOGUE, TRAIN, wire.VOTE, wire.SCORE, "draw"):
            assert real[kind] == absurd[kind], kind
        for kind in (wire.TARGETS, "truth"):  # the absurd answers did arrive
            assert real[kind] != absurd[kind], kind
        truth = [wire.unpack_replies(world[group]["truth"])[0].rewards["js", wire.TRUTH_SIDE] for world in worlds]
        for reward_J in truth:  # no answer of D_g is ever compared with: enough rewards would tell it
            assert np.isnan(reward_J[catalogue.train_Q]).all()
            assert np.isfinite(reward_J[~catalogue.train_Q]).any()


def test_a_node_that_lacks_what_an_action_needs_answers_with_an_error():
    restarted, catalogue = prepared_node()
    restarted.context.state = RecordDict()
    untargeted = one_node(config_of())
    assert untargeted.ask(wire.CATALOGUE, wire.pack_catalogue(catalogue)).has_content()
    for kind in (TRAIN, wire.TARGETS, wire.VOTE, wire.SCORE):
        reply = restarted.ask(kind, restarted.content(kind, catalogue))
        assert reply.error.code == wire.FORGOTTEN, kind
    for kind in (wire.VOTE, wire.SCORE):
        reply = untargeted.ask(kind, untargeted.content(kind, catalogue))
        assert reply.error.code == wire.FAILED, kind
        assert reply.error.reason.startswith(f"{kind.split('.')[-1]} failed: UserError")


# --- votes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["dpa", "opa"])
def test_a_group_votes_its_own_training_answers_and_its_predictions_elsewhere(task):
    node, catalogue = prepared_node(task=task)
    votes = {name: reply.votes_QK for name, reply in node.groups(wire.VOTE).items()}
    survey = generate(num_questions=24, num_groups=4, seed=0)
    assert set(votes) == set(survey.groups)
    for group, vote_QK in votes.items():
        table_QK = state.targets(state.memory_of(node.context), group)
        sources = set()
        for q, question in enumerate(catalogue.questions):
            size = len(question.options)
            own = survey.answers[group].get(question.question_id) if catalogue.train_Q[q] else None
            sources.add(own is None)
            opinion = table_QK[q, :size] if own is None else own
            favourites = sorted(range(size), key=lambda k, p=opinion: (-p[k], k))
            expected = [0.0] * vote_QK.shape[1]
            for place, option in enumerate(favourites):
                expected[option] = float(size - place) if task == "opa" else float(place == 0)
            assert vote_QK[q].tolist() == expected
        assert sources == {True, False}


@pytest.mark.parametrize("target", ["mean", "votes", "predicted-mean"])
def test_distributions_that_are_asked_for_hold_no_held_out_answer(target):
    """And predictions that are voted with no answer at all."""
    node, catalogue = prepared_node(sft__target=target)
    asked = wire.pack_distributions_asked() if target == "votes" else RecordDict()
    for group, reply in node.groups(wire.VOTE, asked).items():
        truth_QK = state.truth(state.memory_of(node.context), group)
        known_Q = ~np.isnan(truth_QK).any(1)
        own_Q = known_Q & catalogue.train_Q & (target != "predicted-mean")
        np.testing.assert_array_equal(reply.votes_QK[own_Q], truth_QK[own_Q])
        table_QK = state.targets(state.memory_of(node.context), group)
        np.testing.assert_array_equal(reply.votes_QK[~own_Q], table_QK[~own_Q])
        for part_Q in (known_Q & ~catalogue.train_Q, known_Q & ~own_Q):
            assert part_Q.any()
            assert (np.abs(reply.votes_QK - truth_QK)[part_Q].max(1) > 1e-3).all()


def owned(folder, owner_policy):
    """The node config of a deployed node whose owner wrote this policy; without one where it is None."""
    store.write(run_survey(config_of()), folder / "avaria.jsonl", groups=["Avaria"])
    node_config = {"group": "Avaria", "data": str(folder / "avaria.jsonl"), "ledger": str(folder / "ledger.sqlite")}
    if owner_policy is not None:
        (folder / "policy.toml").write_text(owner_policy)
        node_config["policy"] = str(folder / "policy.toml")
    return node_config


MEANS = [
    ("mean", None, wire.MEAN_REFUSED),
    ("mean", "", wire.MEAN_REFUSED),
    ("mean", "probes = true", wire.MEAN_REFUSED),
    ("mean", "mean = true", None),
    ("predicted-mean", "mean = true", wire.PREDICTIONS_REFUSED),
    ("predicted-mean", "probes = true", None),
]


@pytest.mark.parametrize(
    ("kind", "changes", "owner_policy", "code"),
    [
        *((kind, {"sft__target": to}, text, code) for kind in (wire.CATALOGUE, wire.VOTE) for to, text, code in MEANS),
        (wire.TARGETS, {"sft__target": "mean"}, None, wire.MEAN_REFUSED),
        (TRAIN, {}, "training = false", wire.TRAINING_REFUSED),
        ("evaluate", {}, "training = false", wire.TRAINING_REFUSED),
        (wire.VOTE, {}, "votes = false", wire.VOTES_REFUSED),
        (DISTRIBUTIONS, {}, "mean = false", wire.MEAN_REFUSED),
    ],
)
def test_deployed_what_the_owner_does_not_allow_is_refused_by_name_and_written_down(
    kind, changes, owner_policy, code, tmp_path
):
    node, catalogue = prepared_node()
    node.owned(owned(tmp_path, owner_policy))
    node.context.run_config = dict(config_of(**changes).flat())
    content = node.content(TRAIN if kind == "evaluate" else kind, catalogue)
    if kind == DISTRIBUTIONS:
        kind, content = wire.VOTE, wire.pack_distributions_asked()
    reply = node.ask(kind, content)
    if code is None:
        assert reply.has_content()
        return
    assert (reply.error.code, reply.error.reason) == (code, wire.REFUSALS[code])
    (line,) = Ledger(tmp_path / "ledger.sqlite").releases()
    assert (line.kind, line.numbers, line.sha256, line.refused) == (kind, 0, "", wire.REFUSALS[code])


def test_a_policy_that_cannot_be_read_lets_nothing_out(tmp_path):
    node, catalogue = prepared_node()
    node.owned(owned(tmp_path, "votse = false"))
    for kind in (wire.CATALOGUE, wire.VOTE, wire.SCORE):
        reply = node.ask(kind, node.content(kind, catalogue))
        assert reply.error.reason.endswith("failed: UserError (details are in the group's own log)")


@pytest.mark.parametrize("place", ["", "no/such/folder/ledger.sqlite"])
def test_without_a_ledger_nothing_leaves(place, tmp_path):
    node, catalogue = prepared_node()
    node.context.node_config = {"group": "Avaria", **({"ledger": str(tmp_path / place)} if place else {})}
    for kind in (wire.ROLL_CALL, wire.VOTE, wire.SCORE):
        assert node.ask(kind, node.content(kind, catalogue)).has_error()


# --- scores ---------------------------------------------------------------------------------------


def test_rewards_come_from_each_groups_own_table():
    """Answering with one group's own table earns that group, and no other, all of the reward."""
    node, catalogue = prepared_node()
    for group in state.groups(state.memory_of(node.context)):
        table_QK = state.targets(state.memory_of(node.context), group)
        asked = uniform_request(catalogue, prediction_JK=table_QK)
        for name, reply in node.groups(wire.SCORE, wire.pack_score_request(asked)).items():
            reward_J = reply.rewards["js", wire.TARGET_SIDE]
            assert (reward_J > 1 - 1e-12).all() == (name == group)


def test_a_fresh_draw_takes_another_context_and_the_same_draw_the_same():
    node, catalogue = prepared_node(pluralllm__architecture="attention")

    def rewards(draw: int) -> np.ndarray:
        asked = wire.pack_score_request(uniform_request(catalogue, draw=draw))
        return np.stack([reply.rewards["js", wire.TARGET_SIDE] for reply in node.groups(wire.SCORE, asked).values()])

    drawn = {draw: rewards(draw) for draw in (0, 1, 2)}
    assert not np.allclose(drawn[0], drawn[1])
    assert not np.allclose(drawn[1], drawn[2])
    for draw in (2, 0, 1):
        np.testing.assert_array_equal(rewards(draw), drawn[draw])


@pytest.mark.parametrize(
    "change",
    [
        {"draw": 1},  # the run has one fixed table
        {"metrics": ("js", "kindness")},
        {"sides": ("diary",)},
        {"question_J": np.arange(1, 25)},
        {"question_J": np.arange(-1, 23)},
        {"prediction_JK": np.ones((24, 2))},  # the widest question has four
        {"prediction_JK": np.ones((23, 4))},
        {"prediction_JK": np.full((24, 4), -1.0)},
        {"prediction_JK": np.full((24, 4), np.inf)},
    ],
    ids=["draw", "metric", "side", "past the end", "before the start", "narrow", "short", "negative", "infinite"],
)
def test_a_request_that_makes_no_sense_is_answered_by_an_error_without_private_text(change):
    node, catalogue = prepared_node()
    assert catalogue.option_QK.shape == (24, 4)
    reply = node.ask(wire.SCORE, wire.pack_score_request(uniform_request(catalogue, **change)))
    assert reply.error.code == wire.FAILED
    assert reply.error.reason in {
        f"score failed: {kind} (details are in the group's own log)" for kind in ("UserError", "ValueError", "KeyError")
    }
