"""The groups' actions, called with Flower's own messages and contexts.

Axis letters: Q public questions, J scored answers, K options.
"""

from __future__ import annotations

import io
import os
import stat
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from client_node import (
    PLAIN_KINDS,
    Node,
    asked_of,
    config_of,
    home_files,
    one_node,
    prepared_node,
    uniform_request,
    weights,
)
from flwr.app import Context, Message, RecordDict
from in_process import FEW, cross, deployed, flower_task, request, simulated
from surveys import row, write

from appa_flwr.owner.ledger import Ledger
from appa_flwr.protocol import asks, messages, refusals, votes
from appa_flwr.protocol.asks import Ask, Catalogue
from appa_flwr.survey import store
from appa_flwr.survey.generate import generate
from appa_flwr.survey.types import Survey
from client_app import leave, main, numbers, predictor
from client_app.main import app
from client_app.memory import KEPT_SECONDS, read_arrays
from client_app.party import Party
from server_app.federation.catalogue import build_catalogue, run_survey


def deployed_node(**node_config):
    return Node(Context(1, 2, node_config, RecordDict(), dict(config_of().flat())))


# --- who lives here ---------------------------------------------------------------------------------------------------


def test_letters_that_stdout_lacks_end_no_action(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    monkeypatch.setattr(main, "_unknown", lambda message, context: print("México", flush=True))
    with flower_task():
        app(Message(RecordDict(), 1, "query.of_nobody"), deployed_node().context)
    assert rb"M\xe9xico" in sys.stdout.buffer.getvalue()


def groups_of(node, survey=""):
    return list(node.hello(survey or node.memory["survey"].decode()).groups)


@pytest.mark.parametrize("num_nodes", [1, 2, 7])
def test_in_simulation_every_group_has_exactly_one_home(num_nodes):
    config = config_of(data__num_groups=5)
    groups_by_node = [groups_of(Node(context)) for context in simulated(config, num_nodes).values()]
    everyone = generate(num_questions=24, num_groups=5, seed=0).groups
    assert sorted(name for names in groups_by_node for name in names) == sorted(everyone)
    if num_nodes == 2:
        assert groups_by_node == [[everyone[0], everyone[2], everyone[4]], [everyone[1], everyone[3]]]


def test_in_simulation_the_runs_survey_names_the_groups(tmp_path):
    path = write(tmp_path / "survey.jsonl", [row("q1", group) for group in ("South, East", "North")])
    assert groups_of(one_node(config_of(survey=str(path)))) == ["South, East", "North"]


@pytest.mark.parametrize(
    ("named", "expected"),
    [("Kenya", ["Kenya"]), ("Kenya; Bolivia", ["Kenya", "Bolivia"]), ("A, B;C", ["A, B", "C"])],
)
def test_deployed_the_node_config_names_the_groups(named, expected, tmp_path):
    assert groups_of(deployed_node(group=named, data=str(tmp_path / "x.jsonl")), "none") == expected


def test_a_node_that_nobody_configured_says_so_in_an_error():
    reply = deployed_node().send(messages.HELLO, messages.pack_hello("run", ""))
    assert (reply.error.code, reply.error.reason.split(" (")[0]) == (refusals.FAILED, "hello failed: UserError")


# --- what a node keeps ------------------------------------------------------------------------------------------------


def two_homes(folder, survey=None, **changes):
    """A survey of two groups, by default the same one, each group's deployed node, and the catalogue."""
    survey = survey or generate(num_questions=24, num_groups=2, seed=3)
    keys = {"pluralllm__local_steps": 16, "pluralllm__strategy": "fedavg", **changes}
    config, files = home_files(survey, folder, config_of(data__num_groups=2, **keys))
    everything = f"{FEW}\nmay-leave = ['votes', 'training', 'rewards', 'predictions', 'answers', 'truth']"
    contexts = deployed(config, files, owner_policy=everything)
    nodes = dict(zip(files, map(Node, contexts.values()), strict=True))
    return survey, nodes, build_catalogue(config)


def test_held_out_answers_are_kept_apart_from_the_data_that_becomes_context(tmp_path):
    survey, nodes, catalogue = two_homes(tmp_path)
    index = {question.question_id: q for q, question in enumerate(catalogue.questions)}
    for group, node in nodes.items():
        reply = node.send(messages.CATALOGUE, messages.pack_catalogue(catalogue))
        joined = messages.unpack_reply(reply.content, answered=(int,), may=(str,))
        own = survey.answers[group]
        training = {index[key]: value for key, value in own.items() if catalogue.train_Q[index[key]]}
        assert 0 < len(training) < len(own) < 24  # neither side of the test is empty
        assert joined.groups == (group,)
        assert joined.fields["answered"] == [len(training)]
        assert "truth" in joined.fields["may"]
        kept = read_arrays(node.memory, f"data {group}")
        assert kept["question"].tolist() == sorted(training)
        for q, answer_K in zip(kept["question"], kept["answer"], strict=True):
            np.testing.assert_allclose(answer_K[: len(training[q])], training[q], atol=1e-7)
            assert not answer_K[len(training[q]) :].any()
        truth_QK = kept["truth"]
        assert np.flatnonzero(~np.isnan(truth_QK).any(1)).tolist() == sorted(index[key] for key in own)
        for key, value in own.items():
            assert truth_QK[index[key]].tolist() == [*value, *[0.0] * (truth_QK.shape[1] - len(value))]


def test_answers_the_public_catalogue_does_not_fit_are_not_used(tmp_path):
    survey, nodes, catalogue = two_homes(tmp_path)
    (group, own), node = next(iter(survey.answers.items())), next(iter(nodes.values()))
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
    public = Catalogue(tuple(questions), train_Q, features, option_QK, unanswered_Q)
    assert node.send(messages.CATALOGUE, messages.pack_catalogue(public)).has_content()
    truth_QK = node.truth(group)
    assert (~np.isnan(truth_QK).any(1)).sum() == len(own) - 4
    assert np.isnan(truth_QK[answered[:4]]).all()


def absurd_where_held_out(survey: Survey, held_out: set[str]) -> Survey:
    """The same survey, but every held-out answer is all on the option that had the least."""
    return replace(
        survey,
        answers={
            group: {key: np.eye(len(p))[np.argmin(p)] if key in held_out else p for key, p in mine.items()}
            for group, mine in survey.answers.items()
        },
    )


def test_held_out_answers_move_nothing_but_the_truth_column(tmp_path, monkeypatch):
    """Two worlds that differ in held-out answers only: training, tables, votes and rewards must be the same bytes."""
    monkeypatch.setattr(Ledger, "secret", lambda ledger: b"7" * 32)
    survey, _, catalogue = two_homes(tmp_path / "probe")
    held_out = {q.question_id for q, train in zip(catalogue.questions, catalogue.train_Q, strict=True) if not train}
    worlds = []
    for name, world in (("real", survey), ("absurd", absurd_where_held_out(survey, held_out))):
        _, nodes, _ = two_homes(tmp_path / name, world, pluralllm__architecture="attention")
        given = {}
        for group, node in nodes.items():
            node.prepared(catalogue)
            requests = {kind: asked_of(kind, catalogue, node.config) for kind in PLAIN_KINDS}
            requests["draw"] = uniform_request(catalogue, draw=4).ask(asks.REWARDS)
            requests["truth"] = uniform_request(catalogue, sides=(asks.TRUTH_SIDE,)).ask(asks.REWARDS)
            given[group] = {label: node.numbers(asked)[group] for label, asked in requests.items()}
        worlds.append(given)
    moved = {asks.VALIDATION, asks.SCORES, "truth"}
    for group in survey.groups:
        real, absurd = worlds[0][group], worlds[1][group]
        for label in real:
            same = all(np.array_equal(real[label][name], absurd[label][name]) for name in real[label])
            assert same == (label not in moved), label  # the absurd answers did arrive
        for world in (real, absurd):  # no answer of D_g is ever compared with: enough rewards would tell it
            assert not world["truth"]["js truth known"][catalogue.train_Q].any()
            assert world["truth"]["js truth known"].any()


def test_a_node_that_lacks_what_an_action_needs_says_that_it_has_restarted():
    restarted, catalogue = prepared_node()
    config = restarted.config
    del restarted.context.state["memory"]
    untargeted = one_node(config_of())
    assert untargeted.send(messages.CATALOGUE, messages.pack_catalogue(catalogue)).has_content()
    for kind in PLAIN_KINDS:
        assert restarted.ask(asked_of(kind, catalogue, config)).error.code == refusals.FORGOTTEN, kind
    assert restarted.send(messages.TARGETS, messages.pack_weights(weights(config))).error.code == refusals.FORGOTTEN
    for kind in (asks.VOTES, asks.REWARDS):
        assert untargeted.ask(asked_of(kind, catalogue, config)).error.code == refusals.FORGOTTEN, kind


def test_nothing_private_is_in_flowers_context_and_nobody_else_can_read_the_file(tmp_path):
    """Flower's SuperNode shows a context to whoever takes one of the node's tasks; old runs' files go."""
    umask = os.umask(0o000)
    try:
        _, nodes, catalogue = two_homes(tmp_path)
        node = next(iter(nodes.values()))
        folder = Path(node.context.node_config["data"]).with_suffix(".ledger.memory")
        folder.mkdir(mode=0o700)
        for name, seconds in (("7", KEPT_SECONDS + 60), ("8", KEPT_SECONDS - 60)):
            (folder / f"{name}.sqlite").write_bytes(b"x")
            then = (folder / f"{name}.sqlite").stat().st_mtime - seconds
            os.utime(folder / f"{name}.sqlite", (then, then))
        node.prepared(catalogue)
    finally:
        os.umask(umask)
    assert dict(node.context.state) == {}
    assert sorted(path.name for path in folder.iterdir()) == ["1.sqlite", "8.sqlite"]
    assert stat.S_IMODE((folder / "1.sqlite").stat().st_mode) == 0o600
    # a run that is only asked for rewards is remembered as long as it is asked
    then = (folder / "1.sqlite").stat().st_mtime - KEPT_SECONDS - 60
    os.utime(folder / "1.sqlite", (then, then))
    again = Node(Context(1, 2, node.context.node_config, RecordDict(), node.context.run_config))
    assert again.ask(asked_of(asks.REWARDS, catalogue, node.config)).has_content()
    another = Node(Context(2, 2, node.context.node_config, RecordDict(), node.context.run_config))
    assert another.ask(Ask(asks.VOTES)).error.code == refusals.FORGOTTEN
    assert (folder / "1.sqlite").exists()


# --- the exit ---------------------------------------------------------------------------------------------------------

SECRET = "secret 0.123456 question text"
FAULTS = [
    (messages.CATALOGUE, Party, "answers"),
    (messages.TARGETS, predictor.Predictor, "table"),
    (asks.UPDATE, predictor, "train"),
    (asks.VOTES, votes, "cast"),
    (asks.REWARDS, numbers, "score"),
    (asks.REWARDS, asks, "flatten"),
    (asks.REWARDS, leave, "_write_down"),
]


@pytest.mark.parametrize(("kind", "module", "name"), FAULTS, ids=[f"{k}-{n}" for k, _, n in FAULTS])
def test_whatever_an_action_raises_its_text_stays_at_home(kind, module, name, monkeypatch, caplog):
    node, catalogue = prepared_node()
    calls = []

    def fail(*args: object, **kwargs: object) -> None:
        calls.append(name)
        if len(calls) > 1:  # the refusal itself can be written down
            return
        try:
            raise KeyError(SECRET)
        except KeyError as cause:
            raise ValueError(SECRET) from cause

    contents = {
        messages.CATALOGUE: messages.pack_catalogue(catalogue),
        messages.TARGETS: messages.pack_weights(weights(node.config)),
    }
    if kind == messages.TARGETS:
        record = node.context.state.config_records["memory"]
        del record["targets"]  # tables are made once
    world = asks.world_of(
        node.config, messages.digest(contents[messages.CATALOGUE]), node.memory.get("targets", b"").decode()
    )
    content = contents.get(kind)
    if content is None:
        content = messages.pack_ask(asked_of(kind, catalogue, node.config), messages.Head("run", world))
    monkeypatch.setattr(module, name, fail)
    action = kind if kind in messages.MESSAGES else messages.ASK
    crossed = cross(app(request(action, content), node.context))
    assert crossed.message.error.code == refusals.FAILED
    name_of = action.split(".")[-1]
    assert crossed.message.error.reason == f"{name_of} failed: ValueError (details are in the group's own log)"
    assert crossed.message.metadata.reply_to_message_id == f"{action} to 1"
    for part in SECRET.split():
        assert part.encode() not in crossed.data
    assert SECRET in caplog.text  # the group itself can find out


def test_a_file_in_another_format_is_named_in_the_groups_own_log(caplog, tmp_path):
    node, catalogue = prepared_node()
    (path := tmp_path / "avaria.sav").touch()
    node.owned({"group": "Avaria", "data": str(path)})
    assert node.send(messages.CATALOGUE, messages.pack_catalogue(catalogue)).error.code == refusals.FAILED
    assert f"appa survey {path} --write" in caplog.text


@pytest.mark.parametrize("kind", messages.MESSAGES)
def test_an_unknown_run_config_is_an_error_of_every_action(kind):
    node = one_node(config_of())
    node.context.run_config = {**node.context.run_config, "surprise": 1}
    assert app(request(kind), node.context).error.code == refusals.FAILED


def owned(folder, owner_policy):
    """The node config of a deployed node whose owner wrote this policy; without one where it is None."""
    store.write(run_survey(config_of()), folder / "avaria.jsonl", groups=["Avaria"])
    node_config = {"group": "Avaria", "data": str(folder / "avaria.jsonl"), "ledger": str(folder / "ledger.sqlite")}
    if owner_policy is not None:
        (folder / "policy.toml").write_text(owner_policy)
        node_config["policy"] = str(folder / "policy.toml")
    return node_config


@pytest.mark.parametrize(
    ("kind", "owner_policy", "name"),
    [
        (asks.VOTES, "may-leave = ['training', 'rewards']", "votes"),
        (asks.UPDATE, "may-leave = ['votes', 'rewards']", "training"),
        (asks.VALIDATION, "may-leave = ['votes', 'rewards']", "training"),
        (asks.SCORES, "may-leave = ['votes', 'rewards']", "training"),
        (asks.REWARDS, "may-leave = ['votes', 'training']", "rewards"),
        (asks.PREDICTIONS, None, "predictions"),
        (asks.ANSWERS, None, "answers"),
        (asks.ANSWERS, "may-leave = ['answers']", None),
        (asks.VOTES, None, None),
        (asks.REWARDS, None, None),
    ],
)
def test_deployed_what_the_owner_does_not_allow_is_refused_by_name_and_written_down(kind, owner_policy, name, tmp_path):
    node, catalogue = prepared_node()
    node.owned(owned(tmp_path, owner_policy))
    reply = node.ask(asked_of(kind, catalogue, node.config))
    if name is None:
        assert reply.has_content()
        return
    code = refusals.MAY_NOT_LEAVE[name]
    assert (reply.error.code, reply.error.reason) == (code, refusals.REFUSALS[code])
    (line,) = Ledger(tmp_path / "ledger.sqlite").releases()
    assert (line.numbers, line.sha256, line.refused) == (0, "", refusals.REFUSALS[code])


@pytest.mark.parametrize(
    ("target", "owner_policy", "name"),
    [
        ("mean", None, "answers"),
        ("mean", "may-leave = ['answers']", None),
        ("predicted-mean", "may-leave = ['answers']", "predictions"),
        ("predicted-mean", "may-leave = ['predictions']", None),
    ],
)
def test_a_run_that_the_owner_does_not_allow_does_not_start(target, owner_policy, name, tmp_path):
    node, catalogue = prepared_node()
    node.owned(owned(tmp_path, "least-answers = 3\n" + (owner_policy or "")))
    node.context.run_config = dict(config_of(sft__target=target).flat())
    reply = node.send(messages.CATALOGUE, messages.pack_catalogue(catalogue))
    assert (reply.error.code if reply.has_error() else None) == (name and refusals.MAY_NOT_LEAVE[name])


def test_a_policy_that_cannot_be_read_lets_nothing_out(tmp_path):
    """Neither a number nor the group's name."""
    node, _ = prepared_node()
    node.owned(owned(tmp_path, "this is = not toml ["))
    for kind in messages.MESSAGES:
        reply = app(request(kind), node.context)
        assert reply.error.reason.endswith("failed: UserError (details are in the group's own log)")


@pytest.mark.parametrize("place", ["", "no/such/folder/ledger.sqlite"])
def test_without_a_ledger_nothing_leaves(place, tmp_path):
    node, _ = prepared_node()
    node.context.node_config = {"group": "Avaria", **({"ledger": str(tmp_path / place)} if place else {})}
    for kind in messages.MESSAGES:
        assert app(request(kind), node.context).has_error()


@pytest.mark.parametrize(
    "change",
    [
        {"draw": 1},  # the run has one fixed table
        {"metrics": ("js", "kindness")},
        {"sides": ("diary",)},
        {"sides": ("targets", "targets")},
        {"question_J": np.arange(1, 25)},
        {"question_J": np.arange(-1, 23)},
        {"prediction_JK": np.ones((24, 2))},  # the widest question has four
        {"prediction_JK": np.ones((23, 4))},
        {"prediction_JK": np.full((24, 4), -1.0)},
        {"prediction_JK": np.full((24, 4), np.inf)},
    ],
    ids=["draw", "metric", "side", "twice", "past the end", "before", "narrow", "short", "negative", "infinite"],
)
def test_a_request_that_makes_no_sense_is_answered_by_an_error_without_private_text(change):
    node, catalogue = prepared_node()
    assert catalogue.option_QK.shape == (24, 4)
    reply = node.ask(uniform_request(catalogue, **change).ask(asks.REWARDS))
    assert reply.error.code in (refusals.FAILED, refusals.FORGOTTEN)
    assert not reply.has_content()


@pytest.mark.parametrize("reward", [[0.5, 1.0 + 1e-9], [-1e-9, 0.5], [0.5, np.inf]])
def test_nothing_but_a_reward_leaves_as_a_reward(reward, monkeypatch):
    node, catalogue = prepared_node()
    monkeypatch.setattr(numbers, "score", lambda *args: {"js": np.array(reward)})
    asked = uniform_request(catalogue, question_J=np.arange(2), prediction_JK=np.full((2, 4), 0.25))
    assert node.ask(asked.ask(asks.REWARDS)).error.code == refusals.FAILED
