"""The sums over groups through real messages: what the groups end up with, and what a node refuses.

Axis letters: G groups, Q questions, K options.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from flwr.app import Context
from in_process import InProcessGrid, flower_task, request, simulated

from appa_flwr import secure_sum, wire
from appa_flwr.config import Config
from client_app import population, state
from client_app.data import all_groups
from client_app.main import app
from pluralllm.data import GroupData, OptionEmbedding
from pluralllm.population import mean_from_sums, population_sums
from server_app.federation.catalogue import build_catalogue
from server_app.federation.grid import OverlapGrid
from server_app.federation.groups import Federation
from server_app.predictor.sums import exchange_sums

SMALL = {"data.num-questions": 40, "data.num-groups": 6, "embedding.dim": 8, "federation.min-groups": 1}


def config(**changes: object) -> Config:
    return Config.load({**SMALL, **{key.replace("__", ".").replace("_", "-"): value for key, value in changes.items()}})


def joined(chosen: Config, *, num_nodes: int = 6) -> tuple[InProcessGrid, Federation, wire.Catalogue]:
    grid = InProcessGrid(simulated(chosen, num_nodes))
    federation = Federation(OverlapGrid(grid), min_groups=1, timeout=5.0)
    catalogue = build_catalogue(chosen)
    federation.gather((), patience=0.0)
    federation.send_catalogue(catalogue)
    return grid, federation, catalogue


def exchanged(chosen: Config, *, num_nodes: int = 6):
    """The contexts of all nodes after the exchange, by group, and its summary."""
    with flower_task():
        grid, federation, catalogue = joined(chosen, num_nodes=num_nodes)
        steps = []
        summary = exchange_sums(federation, chosen, catalogue, progress=lambda *step: steps.append(step[:2]))
    if summary is not None:
        assert [step for step, _ in steps] == list(range(1, steps[-1][1] + 1))
    homes = {name: context for context in grid.contexts.values() for name in state.groups(context.state)}
    return homes, summary, catalogue, grid


def answers(homes: dict[str, Context], group: str, rows_Q: np.ndarray) -> GroupData:
    truth_QK = state.truth(homes[group].state, group)
    rows = np.flatnonzero(rows_Q & ~np.isnan(truth_QK).any(1))
    return GroupData(group, rows, truth_QK[rows].astype(np.float32))


def plain_sums(given: list[GroupData], catalogue: wire.Catalogue):
    """What one place with all these answers would sum up."""
    ids = tuple(question.question_id for question in catalogue.questions)
    return population_sums(given, OptionEmbedding(ids, catalogue.embedding_QKE, catalogue.option_QK))


@pytest.mark.parametrize("num_nodes", [6, 2, 1])
def test_groups_end_with_what_one_place_with_all_answers_would_compute(num_nodes):
    chosen = config(pluralllm__unseen_groups=all_groups(config())[-1])
    (unseen,) = chosen.unseen_group_names
    homes, summary, catalogue, grid = exchanged(chosen, num_nodes=num_nodes)
    seen = [name for name in homes if name != unseen]
    held_out = [answers(homes, name, ~catalogue.train_Q) for name in seen]
    sums = plain_sums(held_out, catalogue)
    means = {name: state.mean_of_others(homes[name].state, name) for name in homes}
    for data in held_out:
        np.testing.assert_allclose(means[data.group], mean_from_sums(*sums, own=data), atol=1e-6)
        assert means[data.group].any()
    np.testing.assert_allclose(means[unseen], mean_from_sums(*sums), atol=1e-6)
    assert summary.min_groups == 3
    assert summary.held_out == mean_from_sums(*sums).any(1).sum() > 0
    steps = [wire.unpack_sums_request(r.message.content).step for r in grid.requests if r.kind == wire.POPULATION]
    assert list(dict.fromkeys(steps)) == [wire.KEYS, wire.COUNTS, wire.ANSWERS, wire.FIT]


def test_the_mean_of_the_others_is_of_held_out_questions_and_without_the_own_share():
    homes, summary, catalogue, _ = exchanged(config())
    held_out = [answers(homes, name, ~catalogue.train_Q) for name in homes]
    _, count_Q = plain_sums(held_out, catalogue)
    for own, name in zip(held_out, homes, strict=True):
        others = [data for data in held_out if data.group != name]
        expected = mean_from_sums(*plain_sums(others, catalogue), min_groups=1)
        expected[count_Q < 3] = 0.0
        found = state.mean_of_others(homes[name].state, name)
        np.testing.assert_allclose(found, expected, atol=1e-6)
        assert found[own.question_N].any()
        assert not found[catalogue.train_Q].any()
    assert summary.held_out == (count_Q >= 3).sum()


def test_no_training_answer_enters_a_sum():
    """A server that asks for more than held-out questions gets nothing more."""
    with flower_task():
        grid, _, catalogue = joined(config(), num_nodes=1)
    (own,) = grid.contexts.values()
    node = population.Node(own.state, config(), catalogue.train_Q, catalogue.option_QK, min_nodes=0)
    known_Q = np.any([~np.isnan(state.truth(own.state, name)).any(1) for name in node.seen], axis=0)
    assert known_Q[catalogue.train_Q].all()
    for sums_QX in (population._counts(node)["count"], population._answers(node, np.ones_like(known_Q))["answers"]):
        assert not sums_QX[catalogue.train_Q].any()
        assert sums_QX[known_Q & ~catalogue.train_Q].any()


def test_keys_are_chance_and_change_no_bit():
    first, again = (exchanged(config())[0] for _ in range(2))
    for name in first:
        one, other = (state.mean_of_others(homes[name].state, name) for homes in (first, again))
        assert one.tobytes() == other.tobytes()
    assert secure_sum.public_key(state.exchange(first[name].state).private) != secure_sum.public_key(
        state.exchange(again[name].state).private
    )


def test_a_question_that_too_few_answered_is_in_no_sum():
    homes, summary, catalogue, grid = exchanged(config(sums__min_groups=5))
    known_GQ = np.stack([~np.isnan(state.truth(homes[name].state, name)).any(1) for name in homes])
    enough_Q = (known_GQ.sum(0) >= 5) & ~catalogue.train_Q
    assert 0 < enough_Q.sum() < (known_GQ.any(0) & ~catalogue.train_Q).sum()
    for asked in grid.requests:
        if asked.kind == wire.POPULATION:
            tables = wire.unpack_sums_request(asked.message.content).tables
            for name, table in tables.items():
                assert table[enough_Q].any(), name
                assert not table[~enough_Q].any(), name
    assert summary.held_out == enough_Q.sum()


def test_nothing_is_asked_of_anyone_where_it_is_off():
    _homes, summary, _, grid = exchanged(config(sums__mean_of_others=False))
    assert summary is None
    assert wire.POPULATION not in {asked.kind for asked in grid.requests}


def test_too_few_groups_have_no_mean_to_compare_with(caplog):
    homes, summary, *_ = exchanged(config(data__num_groups=2), num_nodes=2)
    assert summary is None
    assert [state.mean_of_others(home.state, name) for name, home in homes.items()] == [None] * 2
    assert "need sums.min-groups = 3 groups that train, and there are 2" in caplog.text


@pytest.mark.parametrize("step", [wire.COUNTS, wire.ANSWERS])
def test_a_node_that_stops_answering_is_named(step, monkeypatch, caplog):
    honest = population.respond

    def gone(asked, node):
        if asked.step == step and state.groups(node.memory) == (last,):
            raise RuntimeError("no more")
        return honest(asked, node)

    last = all_groups(config())[-1]
    monkeypatch.setattr(population, "respond", gone)
    assert exchanged(config())[1] is None  # the comparison is not worth a run
    assert "the mean of the other groups will not be among the scores" in caplog.text
    assert f"{last} stopped answering at the step {step}, and without them the sum cannot be read" in caplog.text


NO_SUMS = "the totals are no sums of answers"


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        ("noise", NO_SUMS),
        ("count", NO_SUMS),
        ("answer", NO_SUMS),
        ("shape", "parts of the step counts differ in shape"),
    ],
)
def test_totals_that_can_be_no_sums_are_refused(spoil, said, monkeypatch, caplog):
    honest = secure_sum.mask
    liars = []

    def lie(part, **keys):
        hidden = honest(part, **keys)
        name = {"count": "count", "answer": "answers"}.get(spoil, next(iter(part)))
        if name in hidden and not liars:
            liars.append(name)
            change = np.uint64(2**63 // 3 if spoil == "noise" else int(2.5 * secure_sum.SCALE))
            hidden[name] = hidden[name][:-1] if spoil == "shape" else hidden[name] + change
        return hidden

    monkeypatch.setattr(population.secure_sum, "mask", lie)
    assert exchanged(config())[1] is None
    assert liars
    assert said in caplog.text


def test_a_node_with_a_key_nobody_can_agree_with_is_left_out(monkeypatch):
    chosen = config()
    spoilt = all_groups(chosen)[-1]
    honest = population.respond

    def weak(asked, node):
        reply = honest(asked, node)
        theirs = asked.step == wire.KEYS and state.groups(node.memory) == (spoilt,)
        return wire.SumsReply(bytes(32)) if theirs else reply

    monkeypatch.setattr(population, "respond", weak)
    homes, summary, catalogue, _ = exchanged(chosen)
    assert summary.held_out > 0
    # it is no part of the sums, so it takes nothing out of them
    held_out = [answers(homes, name, ~catalogue.train_Q) for name in homes if name != spoilt]
    expected = mean_from_sums(*plain_sums(held_out, catalogue))
    np.testing.assert_allclose(state.mean_of_others(homes[spoilt].state, spoilt), expected, atol=1e-6)


def ask(context: Context, step: str, *, keys: tuple[bytes, ...] = (), **tables: np.ndarray):
    content = wire.pack_sums_request(wire.SumsRequest(step, keys, tables))
    reply = app(request(wire.POPULATION, content, node=context.node_id), context)
    return None if reply.has_error() else wire.unpack_sums_reply(reply.content)


@pytest.fixture
def node(tmp_path: Path) -> tuple[Context, tuple[bytes, ...], np.ndarray]:
    """A deployed node with one of three groups that has told its key, all keys, and which questions all may answer.

    The server's config asks for no third group.
    """
    chosen = config(data__num_groups=3, sums__min_groups=1)
    with flower_task():
        grid, _, catalogue = joined(chosen, num_nodes=3)
    own, *others = grid.contexts.values()
    (tmp_path / "policy.toml").write_text("sums = true")
    own.node_config["policy"] = str(tmp_path / "policy.toml")
    own.node_config["ledger"] = str(tmp_path / "ledger.sqlite")
    own.node_config["group"] = state.groups(own.state)[0]  # as deployed
    keys = (ask(own, wire.KEYS).public_key, *(secure_sum.public_key(secure_sum.private_key()) for _ in others))
    return own, keys, np.ones(len(catalogue.train_Q), dtype=bool)


def test_a_step_is_answered_once_and_in_its_order(node):
    context, keys, every = node
    for step in ("everything", wire.KEYS, wire.ANSWERS):  # unknown, answered already, and too early
        assert ask(context, step, keys=keys, allowed=every) is None
    assert ask(context, wire.KEYS, number=1) is None
    assert ask(context, wire.COUNTS, keys=keys).masked.keys() == {"count", "parties"}
    assert ask(context, wire.COUNTS, keys=keys) is None
    assert ask(context, wire.ANSWERS, keys=keys, allowed=every).masked.keys() == {"answers"}
    for number in (0, 1):
        assert ask(context, wire.ANSWERS, keys=keys, number=number, allowed=every) is None


def test_the_nodes_stay_the_same(node):
    context, keys, every = node
    assert ask(context, wire.COUNTS, keys=keys).masked
    stranger = secure_sum.public_key(secure_sum.private_key())
    assert ask(context, wire.ANSWERS, keys=(*keys[:-1], stranger), allowed=every) is None
    assert ask(context, wire.ANSWERS, keys=keys[:-1], allowed=every) is None
    assert ask(context, wire.ANSWERS, keys=keys, allowed=every).masked


def test_too_few_other_nodes_are_refused_whatever_the_server_s_config_says(node):
    context, keys, _ = node
    assert ask(context, wire.COUNTS, keys=keys[:2]) is None
    assert ask(context, wire.COUNTS, keys=keys[:1]) is None
    del context.node_config["group"]
    assert ask(context, wire.COUNTS, keys=keys[:1]).masked.keys() == {"count", "parties"}  # a simulation is one party


@pytest.mark.parametrize(("deployed", "parties"), [(True, 1.0), (False, 2.0)])
def test_the_groups_of_one_place_are_one_party(deployed, parties):
    with flower_task():
        grid, _, catalogue = joined(config(data__num_groups=2), num_nodes=1)
    (own,) = grid.contexts.values()
    node = population.Node(
        own.state, config(data__num_groups=2), catalogue.train_Q, catalogue.option_QK, min_nodes=3 * deployed
    )
    counts = population._counts(node)
    assert counts["count"].max() == 2.0
    assert counts["parties"].max() == parties
    assert (counts["parties"] <= counts["count"]).all()
