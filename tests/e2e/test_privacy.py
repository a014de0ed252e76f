"""Nothing but the protocol's fields leaves a group: every message of a run is recorded and searched for private values.

The groups' real ClientApp answers the real server, each group from a private file of its own, and every message crosses
as bytes. That the audit can find something is tested too, in `test_privacy_audit.py`.

Axis letters: Q public questions, K options.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from audit import DIARY, HIDDEN_QUESTION, World, asked_for, audit, holds, make_world, talked, texts_in
from flwr.app import Context, RecordDict
from in_process import FEW, InProcessGrid, deployed, flower_task
from talk import KINDS

from appa_flwr import report
from appa_flwr.config import Config
from appa_flwr.protocol import asks, messages
from client_app.party import Group, Party
from server_app import main as server
from server_app.questions import build_catalogue


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory) -> tuple[World, InProcessGrid]:
    """The embedded run, all phases, by the real server."""
    world = make_world(tmp_path_factory.mktemp("whole"))
    all_but_answers = "may-leave = ['votes', 'training', 'rewards', 'predictions', 'truth']"
    return world, run(world, f"{all_but_answers}\n{FEW}")


def run(world: World, owner_policy: str) -> InProcessGrid:
    grid = InProcessGrid(deployed(world.config, world.files, owner_policy=owner_policy))
    with flower_task():
        server.app(grid, Context(17, 1, {}, RecordDict(), dict(world.config.flat())))
    return grid


def run_again(world: World, folder: Path, owner_policy: str) -> tuple[World, InProcessGrid]:
    """With what the run has trained, by nodes with new ledgers; without its pictures, which take seconds."""
    trained = {
        "pluralllm.checkpoint": str(world.config.run_folder / "pluralllm.safetensors"),
        "sft.target": "votes",
        "run-name": "again",
        "run.output-dir": str(folder),
    }
    files = {name: folder / path.name for name, path in world.files.items()}
    for name, path in files.items():
        path.write_bytes(world.files[name].read_bytes())
    world = replace(world, files=files, config=Config.load({**world.config.flat(), **trained}))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(report, "build", lambda path: path / "report.html")
        return world, run(world, owner_policy)


def rewards_of(grid: InProcessGrid, world: World) -> Iterator[dict[str, np.ndarray]]:
    public = build_catalogue(world.config)
    for asked, reply in zip(grid.requests, grid.replies, strict=True):
        if asked_for(asked) == asks.REWARDS:
            ask, _ = messages.unpack_ask(asked.message.content)
            own = messages.unpack_reply(reply.message.content, numbers=(np.float64, 2)).numbers
            yield asks.split(own[0], asks.numbers_of(ask, public))


def test_with_the_policy_that_nobody_wrote_no_answer_is_compared_and_no_prediction_leaves(whole_run, tmp_path):
    world, grid = run_again(whole_run[0], tmp_path, "")
    assert audit(grid, world) == []
    # the server asks for nothing in vain
    assert not any(reply.message.has_error() for reply in grid.replies)
    truth = [array for own in rewards_of(grid, world) for name, array in own.items() if "truth" in name]
    assert truth
    assert not any(array.any() for array in truth)
    rows = json.loads((world.config.run_folder / "summary.json").read_text())
    assert {row["method"] for row in rows} >= {"sft", "ppo", "uniform", "majority"}
    assert not any(row["method"].startswith("ceiling") or row["survey"] for row in rows)
    log = (world.config.run_folder / "run.log").read_text()
    assert "NO SURVEY SCORES FROM Avaria, Belmora, Castria" in log
    assert "NO CEILINGS" in log


STRICTEST = """
may-leave = ["votes", "rewards"]
scores-per-question = 40
"""


def test_under_the_strictest_policy_votes_and_rewards_are_all_that_leaves(whole_run, tmp_path):
    world, grid = run_again(whole_run[0], tmp_path, STRICTEST)
    assert audit(grid, world) == []
    rows = json.loads((world.config.run_folder / "summary.json").read_text())
    assert list(dict.fromkeys(row["method"] for row in rows)) == ["base", "sft", "uniform", "majority", "ppo"]
    pairs = zip(grid.requests, grid.replies, strict=True)
    assert {asked_for(asked) for asked, reply in pairs if not reply.message.has_error()} == {
        *(messages.HELLO, messages.CATALOGUE, messages.TARGETS, asks.VOTES, asks.REWARDS),
    }


def test_a_whole_run_lets_only_the_protocol_out(whole_run):
    world, grid = whole_run
    setup = {messages.HELLO, messages.CATALOGUE, messages.TARGETS}
    assert {asked_for(asked) for asked in grid.requests} == {*setup, *KINDS, asks.PREDICTIONS}
    assert not any(reply.message.has_error() for reply in grid.replies)
    # hello, catalogue, 2 rounds, validation of the last, targets, scores, votes, 2 iterations, a point of the learning
    # curve, base, SFT, PPO, uniform, majority, predictions for the ceilings, the mean of predictions and 2 ceilings in
    # 3 metrics: 24 messages to each of 3 groups, less those that repeat a request
    assert 3 * 19 < len(grid.replies) <= 3 * 24
    assert audit(grid, world) == []


def test_the_groups_did_have_what_was_searched_for(whole_run):
    world, grid = whole_run
    assert len(world.rows) > 60
    assert len(np.unique(np.concatenate(world.rows))) == sum(len(row) for row in world.rows)
    for context, (group, mine) in zip(grid.contexts.values(), world.answers.items(), strict=True):
        kept = Group(Party.of(context), group)
        truth_QK, context_NK = kept.truth_QK, kept.data.answer_NK
        assert all(holds(truth_QK, row) for row in mine.values())
        assert 0 < sum(holds(context_NK, row) for row in mine.values()) < len(mine)
        assert DIARY in world.files[group].read_text()


def test_what_the_server_sends_and_writes_holds_nothing_private(whole_run):
    world, grid = whole_run
    for asked in grid.requests:
        assert list(texts_in(asked.data, world)) == [], asked.kind
        for name, record in asked.message.content.array_records.items():
            for key, array in record.items():
                assert not any(holds(array.numpy(), row) for row in world.rows), (asked.kind, name, key)
    written = [path for path in world.config.run_folder.rglob("*") if path.is_file()]
    assert {"summary.json", "metrics.jsonl", "report.html"} <= {path.name for path in written}
    for path in written:
        data = path.read_bytes()
        assert DIARY.encode() not in data
        assert HIDDEN_QUESTION.encode() not in data


@pytest.mark.parametrize(
    "changes",
    [
        {"task": "opa"},
        {"pluralllm__architecture": "attention"},
    ],
)
def test_other_tasks_and_settings_let_no_more_out(changes, tmp_path):
    world = make_world(tmp_path, **changes)
    grid = talked(world)
    assert {asked_for(asked) for asked in grid.requests} >= set(KINDS)
    assert audit(grid, world) == []
