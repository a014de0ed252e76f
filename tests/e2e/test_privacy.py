"""Nothing but the protocol's fields leaves a group: every message of a run is recorded and searched for private values.

The groups' real ClientApp answers the real server, each group from a private file of its own, and every message crosses
as bytes. That the audit can find something is tested at the end.

Axis letters: Q public questions, K options.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from audit import DIARY, HIDDEN_QUESTION, World, asked_for, audit, make_world, structure
from flwr.app import Array, ConfigRecord, Error, Message, RecordDict
from nodes import Crossed, InProcessGrid, cross, cross_records, deployed
from runs import run_server

from appa_flwr import report
from appa_flwr.config import Config
from appa_flwr.protocol import messages, queries, refusals
from server_app.questions import build_catalogue


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory) -> tuple[World, InProcessGrid]:
    """The embedded run, all phases, by the real server."""
    world = make_world(tmp_path_factory.mktemp("whole"))
    all_but_answers = "may-leave = ['votes', 'training', 'rewards', 'predictions', 'truth']"
    return world, run(world, all_but_answers)


def run(world: World, owner_policy: str) -> InProcessGrid:
    grid = InProcessGrid(deployed(world.config, world.files, owner_policy=owner_policy))
    run_server(grid, world.config)
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


SETUP = {messages.HELLO, messages.CATALOGUE, messages.TARGETS}


@pytest.mark.parametrize(
    ("owner_policy", "more"),
    [("", {queries.SCORES}), ('may-leave = ["votes", "rewards"]', set())],
    ids=["that nobody wrote", "strictest"],
)
def test_by_a_policy_no_more_leaves_than_it_says_and_no_answer_is_compared(owner_policy, more, whole_run, tmp_path):
    world, grid = run_again(whole_run[0], tmp_path, owner_policy)
    assert audit(grid, world) == []
    pairs = [
        (asked_for(asked), reply.message.has_error()) for asked, reply in zip(grid.requests, grid.replies, strict=True)
    ]
    assert {kind for kind, refused in pairs if not refused} == {*SETUP, queries.VOTES, queries.REWARDS, *more}
    assert any(refused for _, refused in pairs) == (not more)  # by the first the server asks for nothing in vain
    for asked, reply in zip(grid.requests, grid.replies, strict=True):
        if asked_for(asked) == queries.REWARDS:
            shapes = queries.layouts_of(messages.unpack_query(asked.message.content)[0], build_catalogue(world.config))
            own = queries.split(messages.unpack_reply(reply.message.content, numbers=True).numbers[0], shapes)
            assert not any(array.any() for name, array in own.items() if "truth" in name)
    rows = json.loads((world.config.run_folder / "summary.json").read_text())
    assert list(dict.fromkeys(row["method"] for row in rows)) == ["base", "sft", "uniform", "majority", "ppo"]
    assert {row["against"] for row in rows} == {"predictions"}


def test_a_whole_run_lets_only_the_protocol_out(whole_run):
    world, grid = whole_run
    assert {asked_for(asked) for asked in grid.requests} == {*SETUP, *queries.QUERY_KINDS} - {queries.ANSWERS}
    assert not any(reply.message.has_error() for reply in grid.replies)
    assert audit(grid, world) == []
    written = {path.name: path.read_bytes() for path in world.config.run_folder.rglob("*") if path.is_file()}
    assert {"summary.json", "metrics.jsonl", "report.html", "run.log"} <= written.keys()
    for data in written.values():
        assert DIARY.encode() not in data
        assert HIDDEN_QUESTION.encode() not in data


# --- the audit itself: clients that leak on purpose are caught --------------------------------------------------------

Change = Callable[[RecordDict, np.ndarray], None]


def put(record: str, key: str, value: object) -> Change:
    """Set an entry of a record, or a whole record where none is named."""

    def change(content: RecordDict, row: np.ndarray) -> None:
        (content[record] if record else content)[key] = value

    return change


def at(start: int, value: Callable[[np.ndarray], np.ndarray] | float) -> Change:
    """Replace the group's numbers from a place on; functions are given a private answer."""

    def change(content: RecordDict, row: np.ndarray) -> None:
        arrays = content.array_records["arrays"]
        changed, numbers = arrays["numbers"].numpy().copy(), np.ravel(value(row) if callable(value) else value)
        changed[0, start : start + len(numbers)] = numbers
        arrays["numbers"] = Array(changed)

    return change


LEAKS = [
    (queries.REWARDS, put("", "notes", ConfigRecord({"x": 1})), "more than was asked for"),
    (messages.HELLO, put("head", "groups", ["Avaria", f"{DIARY}-1"]), "more than was asked for"),
    (messages.CATALOGUE, put("head", "may", ["a yes"]), "words that are none"),
    (queries.SCORES, at(1, lambda row: row[:1]), "a private share"),
    (queries.REWARDS, at(3, np.copy), "a private answer"),
    (queries.REWARDS, at(3, 1.5), "js targets reward is outside"),
    (queries.VOTES, at(0, 0.5), "a vote that is none"),
]


@pytest.mark.parametrize(("kind", "change", "finding"), LEAKS, ids=[f"{kind}: {finding}" for kind, _, finding in LEAKS])
def test_a_client_that_leaks_is_caught(kind, change, finding, whole_run):
    """What the groups really sent, with every reply of one kind changed as by a client that leaks."""
    world, recorded = whole_run

    def leaking(asked: Crossed, reply: Crossed) -> Crossed:
        if asked_for(asked) != kind:
            return reply
        content = cross_records(reply.message.content)
        change(content, world.rows[0])
        return cross(Message(content, reply_to=asked.message))

    grid = InProcessGrid(recorded.contexts)
    grid.requests = recorded.requests
    grid.replies = [leaking(*pair) for pair in zip(recorded.requests, recorded.replies, strict=True)]
    lines = audit(grid, world)
    assert any(f"{kind}: {finding}" in line for line in lines), lines
    assert [line.split(":")[0] for line in lines if "ledger" in line] == [*world.files]


def test_an_error_in_its_own_words_is_caught(whole_run):
    world, grid = whole_run
    asked = grid.requests[0]
    reason = f"no {DIARY}-1 in {world.rows[0][0]}"
    reply = cross(Message(Error(code=refusals.FAILED, reason=reason), reply_to=asked.message))
    group, public = next(iter(world.files)), build_catalogue(world.config)
    assert "an error in its own words" in next(structure(asked, reply, group=group, public=public))
