"""The one exit: errors that quote nothing, what owners keep, and nothing without config, policy and ledger."""

import numpy as np
import pytest
from nodes import asked_of, cross, prepared_node, request, uniform_request, weights
from owned import Owned
from small import cases

from appa_flwr.protocol import messages, queries, refusals, votes
from client_app import egress, numbers, predictor
from client_app.main import app
from client_app.node import Node
from pluralllm.prediction import GroupPredictor

SECRET = "secret 0.123456 question text"
FAULTS = [
    (messages.CATALOGUE, Node, "answers"),
    (messages.TARGETS, GroupPredictor, "targets"),
    (queries.UPDATE, predictor, "train"),
    (queries.VOTES, votes, "cast"),
    (queries.REWARDS, numbers, "score"),
    (queries.REWARDS, queries, "flatten"),
    (queries.REWARDS, egress, "_write_down"),
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
        del node.memory["targets"], node.memory["weights"]  # tables are made once
    if kind not in contents:
        asked = asked_of(kind, catalogue, node.config)
        query_digest = queries.query_digest(asked, Node.of(node.context).context_hash)
        contents[kind] = messages.pack_query(asked, query_digest)
    monkeypatch.setattr(module, name, fail)
    action = kind if kind in messages.MESSAGES else messages.ASK
    crossed = cross(app(request(action, contents[kind]), node.context))
    assert crossed.message.error.code == refusals.FAILED
    name_of = action.split(".")[-1]
    assert crossed.message.error.reason == f"{name_of} failed: ValueError (details are in the group's own log)"
    assert crossed.message.metadata.reply_to_message_id == f"{action} to 1"
    for part in SECRET.split():
        assert part.encode() not in crossed.data
    assert SECRET in caplog.text  # the group itself can find out


@pytest.mark.parametrize(("wanted", "owner_policy", "name"), cases("wrong_inputs")["leaving"]["rows"])
def test_deployed_what_the_owner_does_not_allow_is_refused_by_name_and_written_down(
    wanted, owner_policy, name, tmp_path
):
    asked = {"training": 12, "held_out": 10}
    if wanted in queries.QUERY_KINDS:
        node = Owned(tmp_path, owner_policy).ready(**asked)
        reply = node.ask(asked_of(wanted, node.catalogue, node.config))
    else:
        node = Owned(tmp_path, owner_policy, **{"sft.target": wanted})
        reply = node.send(messages.CATALOGUE, messages.pack_catalogue(node.cut(**asked)))
    if not name:
        assert reply.has_content()
        return
    code = refusals.MAY_NOT_LEAVE[name]
    assert (reply.error.code, reply.error.reason) == (code, refusals.REFUSALS[code])
    line = node.ledger.releases()[-1]
    assert (line.numbers, line.sha256, line.refused) == (0, "", refusals.REFUSALS[code])


BROKEN = {
    "run config": ("", {}, {"surprise": 1}),
    "owner's policy": ("this is = not toml [", {}, {}),
    "no group": ("", {"group": ""}, {}),
    "no ledger": ("", {"data": ""}, {}),
    "no place for a ledger": ("", {"data": "no/such/folder/avaria.jsonl"}, {}),
}


@pytest.mark.parametrize("what", BROKEN)
def test_without_config_policy_and_ledger_nothing_leaves(what, tmp_path):
    """Neither a number nor the group's name."""
    owner_policy, own, run = BROKEN[what]
    node = Owned(tmp_path, owner_policy)
    node.context.node_config |= own
    node.context.run_config |= run
    for kind in messages.MESSAGES:
        reply = app(request(kind), node.context)
        assert reply.error.reason.endswith("failed: UserError (details are in the group's own log)")


@pytest.mark.parametrize("change", cases("wrong_inputs")["reward_queries"]["rows"])
def test_a_request_that_makes_no_sense_is_answered_by_an_error_without_private_text(change):
    node, catalogue = prepared_node()
    assert catalogue.option_QK.shape == (24, 4)
    change = {
        name: np.array(value) if name in ("question_J", "prediction_JK") else value for name, value in change.items()
    }
    reply = node.ask(uniform_request(catalogue, **change).query())
    assert reply.error.code in (refusals.FAILED, refusals.FORGOTTEN)
    assert not reply.has_content()


@pytest.mark.parametrize("reward", [[0.5, 1.0 + 1e-9], [-1e-9, 0.5], [0.5, np.inf]])
def test_nothing_but_a_reward_leaves_as_a_reward(reward, monkeypatch):
    node, catalogue = prepared_node()
    monkeypatch.setattr(numbers, "score", lambda *args: {"js": np.array(reward)})
    asked = uniform_request(catalogue, question_J=np.arange(2), prediction_JK=np.full((2, 4), 0.25))
    assert node.ask(asked.query()).error.code == refusals.FAILED
