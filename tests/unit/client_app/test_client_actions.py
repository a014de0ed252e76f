"""The groups' actions, called with Flower's own messages and contexts.

Axis letters: Q public questions, J scored answers, K options.
"""

import io
import os
import stat
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Context, RecordDict
from nodes import ClientNode, asked_of, flower_task, one_node, prepared_node, simulated, uniform_request, weights
from owned import GROUP, SURVEY, Owned
from small import config_of

from appa_flwr.protocol import messages, queries, refusals
from appa_flwr.protocol.queries import Catalogue, Query
from appa_flwr.survey.types import Survey
from client_app.memory import KEPT_SECONDS, survey_path
from client_app.node import Node
from server_app.questions import run_survey


def deployed_node(**node_config):
    return ClientNode(Context(1, 2, node_config, RecordDict(), dict(config_of().flat())))


# --- who lives here ---------------------------------------------------------------------------------------------------


def test_letters_that_stdout_lacks_end_no_action(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    monkeypatch.setattr(Node, "of", lambda context: print("México", flush=True))
    with flower_task():
        deployed_node().send(messages.HELLO)
    assert rb"M\xe9xico" in sys.stdout.buffer.getvalue()


def groups_of(node, survey=""):
    reply = node.send(messages.HELLO, messages.pack_hello(survey or survey_path(node.context)))
    return list(messages.unpack_reply(reply.content).groups)


@pytest.mark.parametrize("num_nodes", [1, 2, 7])
def test_in_simulation_every_group_has_exactly_one_home(num_nodes):
    config = config_of(data__num_groups=5)
    groups_by_node = [groups_of(ClientNode(context)) for context in simulated(config, num_nodes).values()]
    everyone = run_survey(config).groups
    assert sorted(name for names in groups_by_node for name in names) == sorted(everyone)
    if num_nodes == 2:
        assert groups_by_node == [[everyone[0], everyone[2], everyone[4]], [everyone[1], everyone[3]]]


def test_deployed_the_node_config_names_the_group(tmp_path):
    assert groups_of(deployed_node(group="A, B", data=str(tmp_path / "x.jsonl")), "none") == ["A, B"]


# --- what a node keeps ------------------------------------------------------------------------------------------------


EVERYTHING = "may-leave = ['votes', 'training', 'rewards', 'predictions', 'answers', 'truth']"


def test_answers_the_public_catalogue_does_not_fit_are_not_used(tmp_path, caplog):
    node, own = Owned(tmp_path, EVERYTHING), SURVEY.answers[GROUP]
    catalogue, answered = node.public, np.flatnonzero(node.answered)
    questions = list(catalogue.questions)
    renamed, shortened, reordered, unasked, reworded, rescaled = answered[:6]
    scale = tuple(float(place) for place in range(len(questions[rescaled].options)))
    questions[rescaled] = replace(questions[rescaled], ordinal=scale[::-1])  # its answers are used, and it is said
    questions[reworded] = replace(questions[reworded], text="Something else under the same id")
    questions[reordered] = replace(questions[reordered], options=questions[reordered].options[::-1])
    questions[renamed] = replace(questions[renamed], question_id="another question")
    questions[shortened] = replace(questions[shortened], options=(*questions[shortened].options, "one more"))
    option_QK = np.zeros((len(questions), catalogue.option_QK.shape[1] + 1), dtype=bool)
    option_QK[:, :-1] = catalogue.option_QK
    option_QK[shortened, : len(questions[shortened].options)] = True
    features = np.zeros((*option_QK.shape, 8), dtype=np.float32)
    train_Q, unanswered_Q = catalogue.train_Q.copy(), catalogue.unanswered_Q.copy()
    train_Q[unasked], unanswered_Q[unasked] = False, True  # nobody is said to have answered it
    public = Catalogue(train_Q, option_QK, tuple(questions), features, unanswered_Q)
    reply = node.send(messages.CATALOGUE, messages.pack_catalogue(public))
    joined = messages.unpack_reply(reply.content, answered=(int,), may=(str,), noise=(float,))
    assert joined.fields["noise"] == []
    assert "1 questions have another `ordinal`" in caplog.text
    truth_QK = node.truth(GROUP)
    known_Q = ~np.isnan(truth_QK).any(1)
    context_N = node.context_of(GROUP).question_N  # no held-out answer is among it
    assert context_N.tolist() == np.flatnonzero(known_Q & train_Q).tolist()
    assert (joined.groups, joined.fields["answered"]) == ((GROUP,), [len(context_N)])
    assert "truth" in joined.fields["may"]
    for q in np.flatnonzero(known_Q):
        answer_K = own[questions[q].question_id]
        assert truth_QK[q].tolist() == [*answer_K, *[0.0] * (truth_QK.shape[1] - len(answer_K))]
    assert (~np.isnan(truth_QK).any(1)).sum() == len(own) - 5
    assert np.isnan(truth_QK[answered[:5]]).all()


def absurd_where_held_out(survey: Survey, held_out: set[str]) -> Survey:
    """The same survey, but every held-out answer is all on the option that had the least."""
    return replace(
        survey,
        answers={
            group: {key: np.eye(len(p))[np.argmin(p)] if key in held_out else p for key, p in mine.items()}
            for group, mine in survey.answers.items()
        },
    )


@pytest.mark.parametrize("architecture", ["residual", "attention"])
def test_held_out_answers_move_nothing_but_the_truth_column(tmp_path, architecture):
    """Two worlds that differ in held-out answers only: training, tables, votes and rewards must be the same bytes."""
    catalogue = Owned(tmp_path / "probe").public
    held_out = {q.question_id for q, train in zip(catalogue.questions, catalogue.train_Q, strict=True) if not train}
    worlds, keys = [], {"pluralllm.architecture": architecture, "pluralllm.num-context-questions": 8}
    for name, survey in (("real", SURVEY), ("absurd", absurd_where_held_out(SURVEY, held_out))):
        node = Owned(tmp_path / name, EVERYTHING, survey=survey, **keys).prepared(catalogue)
        requests = {kind: asked_of(kind, catalogue, node.config) for kind in queries.QUERY_KINDS}
        requests["context seed"] = uniform_request(catalogue, context_seed=4 * (architecture == "attention")).query()
        requests["truth"] = uniform_request(catalogue, references=(queries.TRUTH_REFERENCE,)).query()
        worlds.append({label: node.numbers(asked)[GROUP] for label, asked in requests.items()})
    real, absurd = worlds
    for label in real:
        same = all(np.array_equal(real[label][name], absurd[label][name]) for name in real[label])
        assert same == (label not in {queries.SCORES, "truth"}), label  # the absurd answers did arrive
    for own in worlds:  # no answer of D_g is ever compared with: enough rewards would tell it
        assert not own["truth"]["js truth known"][catalogue.train_Q].any()
        assert own["truth"]["js truth known"].any()


def test_a_node_that_lacks_what_an_action_needs_says_that_it_has_restarted():
    restarted, catalogue = prepared_node()
    config = restarted.config
    del restarted.context.state["memory"]
    untargeted = one_node(config_of())
    assert untargeted.send(messages.CATALOGUE, messages.pack_catalogue(catalogue)).has_content()
    for kind in queries.QUERY_KINDS:
        assert restarted.ask(asked_of(kind, catalogue, config)).error.code == refusals.FORGOTTEN, kind
    assert restarted.send(messages.TARGETS, messages.pack_weights(weights(config))).error.code == refusals.FORGOTTEN
    for kind in (queries.VOTES, queries.REWARDS):
        assert untargeted.ask(asked_of(kind, catalogue, config)).error.code == refusals.FORGOTTEN, kind


def test_a_simulated_node_s_memory_is_of_one_run_and_lies_beside_the_survey():
    node, catalogue = prepared_node()
    survey = Path(survey_path(node.context))
    assert dict(node.context.state["memory"]) == {"survey": str(survey)}
    assert [path.name for path in survey.with_suffix(".memory").iterdir()] == [f"1-{node.context.node_id}.sqlite"]
    asked = asked_of(queries.VOTES, catalogue, node.config)
    for run_id, other in ((2, 0), (1, 1)):
        own = node.context
        stranger = Context(run_id, own.node_id + other, own.node_config, own.state, own.run_config)
        assert ClientNode(stranger).ask(asked).error.code == refusals.FORGOTTEN
    assert node.ask(asked).has_content()


def test_nothing_private_is_in_flowers_context_and_nobody_else_can_read_the_file(tmp_path):
    """Flower's SuperNode shows a context to whoever takes one of the node's tasks; old runs' files go."""
    umask = os.umask(0o000)
    try:
        node = Owned(tmp_path, EVERYTHING)
        folder = Path(node.context.node_config["data"]).with_suffix(".ledger.memory")
        folder.mkdir(mode=0o700)
        for name, seconds in (("7", KEPT_SECONDS + 60), ("8", KEPT_SECONDS - 60)):
            (folder / f"{name}.sqlite").write_bytes(b"x")
            then = (folder / f"{name}.sqlite").stat().st_mtime - seconds
            os.utime(folder / f"{name}.sqlite", (then, then))
        node.prepared(node.public)
    finally:
        os.umask(umask)
    assert dict(node.context.state) == {}
    assert sorted(path.name for path in folder.iterdir()) == ["1.sqlite", "8.sqlite"]
    assert stat.S_IMODE((folder / "1.sqlite").stat().st_mode) == 0o600
    # a run that is only asked for rewards is remembered as long as it is asked
    then = (folder / "1.sqlite").stat().st_mtime - KEPT_SECONDS - 60
    os.utime(folder / "1.sqlite", (then, then))
    again = ClientNode(Context(1, 2, node.context.node_config, RecordDict(), node.context.run_config))
    assert again.ask(asked_of(queries.REWARDS, node.public, node.config)).has_content()
    another = ClientNode(Context(2, 2, node.context.node_config, RecordDict(), node.context.run_config))
    assert another.ask(Query(queries.VOTES)).error.code == refusals.FORGOTTEN
    assert (folder / "1.sqlite").exists()
