"""The mean of the other groups through real messages: what it is in a simulation, and that a deployment has none.

Axis letters: Q questions, H held-out ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import pytest
from flwr.app import Context, Message
from in_process import FEW, InProcessGrid, SimulatedGrid, deployed, flower_task, request, simulated
from small import SMALL_PREDICTOR, VOTES

from appa_flwr.config import Config
from appa_flwr.protocol import wire
from appa_flwr.survey.generate import generate
from appa_flwr.survey.store import write_split
from client_app import predictor, state
from client_app.main import app
from pluralllm.data import GroupData, option_embedding
from pluralllm.group_mean import group_sums, mean_from_sums
from pluralllm.scores import measure_sums
from server_app.federation.catalogue import build_catalogue, run_survey
from server_app.federation.grid import OverlapGrid
from server_app.federation.groups import Federation
from server_app.predictor.pretraining import initial_weights

SMALL = {"data.num-questions": 40, "data.num-groups": 6, "run.min-groups": 1, **SMALL_PREDICTOR, **VOTES}
ROW = (wire.HELD_OUT_PART, "mean-of-others")


def config(**changes: object) -> Config:
    return Config.load({**SMALL, **{key.replace("__", ".").replace("_", "-"): value for key, value in changes.items()}})


def replies_to_targets(chosen: Config, contexts: Mapping[int, Context]):
    """Join, catalogue and targets: the groups' replies to the last, the catalogue, and all messages."""
    in_simulation = any("partition-id" in context.node_config for context in contexts.values())
    grid = (SimulatedGrid if in_simulation else InProcessGrid)(contexts)
    with flower_task():
        federation = Federation(OverlapGrid(grid), min_groups=1, timeout=5.0)
        catalogue = build_catalogue(chosen)
        federation.gather((), patience=0.0)
        federation.send_catalogue(catalogue)
        replies = federation.send_targets(initial_weights(chosen), fault=lambda reply: None)
    return replies, catalogue, grid


def held_out(grid: InProcessGrid, catalogue: wire.Catalogue) -> list[GroupData]:
    """Every group's answers to held-out questions, from its node's memory."""
    memories = map(state.memory_of, grid.contexts.values())
    groups = ((name, state.truth(memory, name)) for memory in memories for name in state.groups(memory))
    return [predictor.held_out_answers(name, truth_QK, catalogue.train_Q) for name, truth_QK in groups]


def scores(data: GroupData, others: Iterable[GroupData], catalogue: wire.Catalogue) -> dict[str, float]:
    """What a group must tell of the others' mean, from a place that has all answers."""
    mean_QK = mean_from_sums(*group_sums(others, option_embedding(catalogue)), min_groups=1)
    known = mean_QK[data.question_N].any(axis=1)
    rows = data.question_N[known]
    return measure_sums(mean_QK[rows], data.answer_NK[known].astype(np.float64), catalogue.option_QK[rows])


def totals_sent(grid: InProcessGrid) -> list[wire.Totals | None]:
    return [wire.unpack_totals(asked.message.content) for asked in grid.requests if asked.kind == wire.TARGETS]


def test_in_a_simulation_each_group_is_scored_by_the_mean_of_the_others_that_train():
    unseen = run_survey(config()).groups[-1]
    chosen = config(pluralllm__unseen_groups=unseen)
    replies, catalogue, grid = replies_to_targets(chosen, simulated(chosen, 6))
    everyone = held_out(grid, catalogue)
    seen = [data for data in everyone if data.group != unseen]
    count_Q = np.bincount(np.concatenate([data.question_N for data in seen]), minlength=len(catalogue.questions))
    for data in everyone:
        enough = count_Q[data.question_N] >= 3  # of a question's groups, its own among them
        assert enough.sum() > 0
        mine = GroupData(data.group, data.question_N[enough], data.answer_NK[enough])
        expected = scores(mine, [other for other in seen if other.group != data.group], catalogue)
        assert replies[data.group].sums[ROW] == pytest.approx(expected, abs=1e-9)
        assert expected["js"] > 0
    for totals in totals_sent(grid):
        assert set(totals.groups) == {data.group for data in seen}
        assert not totals.count_Q[catalogue.train_Q].any()
        assert not totals.answer_QK[catalogue.train_Q].any()
    shared, _, _ = replies_to_targets(chosen, simulated(chosen, 2))  # how groups share nodes changes no digit
    assert {name: reply.sums for name, reply in shared.items()} == {name: reply.sums for name, reply in replies.items()}


def test_where_too_few_groups_train_there_is_no_row():
    chosen = config(data__num_groups=2)
    replies, _, _ = replies_to_targets(chosen, simulated(chosen, 2))
    assert len(replies) == 2
    assert not any(ROW in reply.sums for reply in replies.values())


def two_deployed(tmp_path) -> tuple[Config, dict[int, Context]]:
    survey = generate(num_questions=40, num_groups=3, seed=0)
    written = write_split(survey, tmp_path)
    chosen = config(survey=str(written.questions))
    return chosen, deployed(chosen, written.groups, owner_policy=FEW)


def test_a_deployed_group_sends_no_answer_and_has_no_such_row(tmp_path):
    chosen, contexts = two_deployed(tmp_path)
    replies, catalogue, grid = replies_to_targets(chosen, contexts)
    assert len(replies) == 3
    assert all((data.question_N >= 0).any() for data in held_out(grid, catalogue))
    for reply in grid.replies:
        if reply.kind == wire.CATALOGUE:
            assert set(reply.message.content) == {"groups", "counts"}
    assert totals_sent(grid) == [None] * 3
    assert not any(ROW in reply.sums for reply in replies.values())


def test_a_deployed_group_scores_no_totals_that_a_server_made_up(tmp_path):
    """A table that fits one question alone, scored against the own answers, would tell that answer."""
    chosen, contexts = two_deployed(tmp_path)
    with flower_task():
        catalogue = build_catalogue(chosen)
        content = wire.pack_weights(initial_weights(chosen))
    made_up = wire.Totals(catalogue.option_QK * 1.0, np.full(len(catalogue.questions), 9), ())
    content.update(wire.pack_totals(made_up))
    node, context = next(iter(contexts.items()))
    asked = [(wire.CATALOGUE, wire.pack_catalogue(catalogue)), (wire.TARGETS, content)]
    replies: list[Message] = [app(request(kind, of, node=node), context) for kind, of in asked]
    (reply,) = wire.unpack_replies(replies[-1].content)
    assert ("held-out", "uniform") in reply.sums
    assert ROW not in reply.sums


def test_the_server_uses_no_answers_that_a_deployed_node_sends(tmp_path, monkeypatch):
    chosen, contexts = two_deployed(tmp_path)
    honest, liars = wire.pack_replies, []

    def generous(replies):
        first = replies[0]
        if first.counts and not liars:
            liars.append(first.group)
            replies = [wire.GroupReply(first.group, counts=first.counts, held_out_HK=np.eye(2))]
        return honest(replies)

    monkeypatch.setattr(wire, "pack_replies", generous)
    replies, _, grid = replies_to_targets(chosen, contexts)
    assert len(replies) == 3
    assert liars
    assert totals_sent(grid) == [None] * 3
