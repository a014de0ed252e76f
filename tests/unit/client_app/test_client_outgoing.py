"""The one exit: whatever goes wrong inside a group, its text stays there, and only rewards leave as rewards."""

from __future__ import annotations

import numpy as np
import pytest
from client_node import TRAIN, config_of, one_node, prepared_node, uniform_request
from in_process import cross, request

from appa_flwr.protocol import votes, wire
from client_app import outgoing, predictor, scoring, state, survey_answers
from client_app.main import app

SECRET = "secret 0.123456 question text"

FAULTS = [
    (wire.ROLL_CALL, survey_answers, "my_groups"),
    (wire.CATALOGUE, survey_answers, "answers"),
    (wire.CATALOGUE, state, "remember_data"),
    (TRAIN, predictor, "train_round"),
    (TRAIN, outgoing, "send_weights"),
    (wire.TARGETS, predictor.Predictor, "table"),
    (wire.TARGETS, predictor.Predictor, "scores"),
    (wire.VOTE, votes, "cast"),
    (wire.SCORE, scoring, "score"),
    (wire.SCORE, wire, "pack_replies"),
]


@pytest.mark.parametrize(("kind", "module", "name"), FAULTS, ids=[f"{k}-{n}" for k, _, n in FAULTS])
def test_whatever_an_action_raises_its_text_stays_at_home(kind, module, name, monkeypatch, caplog):
    node, catalogue = prepared_node()

    def fail(*args: object, **kwargs: object) -> None:
        try:
            raise KeyError(SECRET)
        except KeyError as cause:
            raise ValueError(SECRET) from cause

    content = node.content(kind, catalogue)
    for key in [key for key in node.context.state if key.startswith("targets ") and kind == wire.TARGETS]:
        del node.context.state[key]  # sums are made for the first table alone
    monkeypatch.setattr(module, name, fail)
    crossed = cross(app(request(kind, content), node.context))
    reply = crossed.message
    assert not reply.has_content()
    assert reply.error.code == wire.FAILED
    action = kind.split(".")[-1]
    assert reply.error.reason == f"{action} failed: ValueError (details are in the group's own log)"
    assert reply.metadata.reply_to_message_id == f"{kind} to 1"
    for part in SECRET.split():
        assert part.encode() not in crossed.data
    assert SECRET in caplog.text  # the group itself can find out


def test_a_file_in_another_format_is_named_in_the_groups_own_log(caplog, tmp_path):
    node, catalogue = prepared_node()
    (path := tmp_path / "avaria.sav").touch()
    node.owned({"group": "Avaria", "data": str(path)})
    assert node.ask(wire.CATALOGUE, wire.pack_catalogue(catalogue)).error.code == wire.FAILED
    assert f"appa survey {path} --write" in caplog.text


@pytest.mark.parametrize("kind", [wire.ROLL_CALL, wire.CATALOGUE, TRAIN, wire.TARGETS, wire.VOTE])
def test_an_unknown_run_config_is_an_error_of_every_action(kind):
    node = one_node(config_of())
    node.context.run_config = {**node.context.run_config, "surprise": 1}
    assert app(request(kind), node.context).error.reason.startswith(kind.split(".")[-1])


@pytest.mark.parametrize(
    ("side", "reward", "leaves"),
    [
        (wire.TARGET_SIDE, [0.0, 1.0], True),
        (wire.TARGET_SIDE, [0.5, 1.0 + 1e-9], False),
        (wire.TARGET_SIDE, [-1e-9, 0.5], False),
        (wire.TARGET_SIDE, [0.5, np.nan], False),
        (wire.TRUTH_SIDE, [0.5, np.nan], True),
        (wire.TRUTH_SIDE, [np.nan, -np.inf], False),
    ],
)
def test_nothing_but_a_reward_leaves_as_a_reward(side, reward, leaves, monkeypatch):
    node, catalogue = prepared_node()
    monkeypatch.setattr(scoring, "score", lambda *args: {"js": np.array(reward)})
    asked = uniform_request(catalogue, sides=(side,))
    reply = node.ask(wire.SCORE, wire.pack_score_request(asked))
    assert reply.has_content() == leaves
    if leaves:
        got = wire.unpack_replies(reply.content)[0].rewards["js", side]
        np.testing.assert_array_equal(got, reward)
