"""A whole run under secure sums, every message recorded: no group's number leaves outside what its owner releases."""

from __future__ import annotations

import json

import numpy as np
import pytest
from audit import asked_for, audit, make_world
from flwr.app import Context, RecordDict
from in_process import FEW, InProcessGrid, flower_task, pinned

from appa_flwr.protocol import asks, messages
from appa_flwr.secure.masks import Member
from server_app import main as server


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """The run where owners pin a roster and let out nothing of their own; and what each group has put into the sums."""
    world = make_world(tmp_path_factory.mktemp("secure"), run__sums="secure")
    grid = InProcessGrid(pinned(world.config, world.files, owner_policy=f"{FEW}\nown-score = 0"))
    masked, mask = [], Member.mask

    def recorded(member, task, values):
        words = mask(member, task, values)
        masked.append((values, words))
        return words

    with pytest.MonkeyPatch.context() as patched, flower_task():
        patched.setattr(Member, "mask", recorded)
        server.app(grid, Context(17, 1, {}, RecordDict(), dict(world.config.flat())))
    return world, grid, masked


def test_nothing_but_sums_and_names_leaves(whole_run):
    world, grid, _ = whole_run
    assert {reply.kind for reply in grid.replies} == set(messages.MESSAGES)
    assert not any(reply.message.has_error() for reply in grid.replies)
    plain = [
        asked_for(asked)
        for asked in grid.requests
        if asked.kind == messages.ASK and not messages.unpack_ask(asked.message.content)[1].cohort
    ]
    assert set(plain) <= {asks.OWN_SCORES}
    assert audit(grid, world) == []


def test_what_a_group_sends_is_uniform_and_none_of_its_numbers(whole_run):
    _, _, masked = whole_run
    assert len(masked) >= 3 * 12
    for values, words in masked:
        assert words.shape == values.shape
        assert not (words == np.rint(values * 2.0**52).astype(np.int64).view(np.uint64)).any()
    top = np.bincount((np.concatenate([words for _, words in masked]) >> np.uint64(56)).astype(int), minlength=256)
    expected = top.sum() / 256
    assert ((top - expected) ** 2 / expected).sum() < 255 + 6 * np.sqrt(2 * 255)


def test_the_run_has_its_results_and_says_what_is_not_known(whole_run):
    world, _, _ = whole_run
    folder = world.config.run_folder
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [(line["weights"], line["history"], line["rewards"]) for line in lines] == [({}, {}, {})] * 2
    assert all(line["group_reward"] is not None for line in lines)
    rows = json.loads((folder / "summary.json").read_text())
    assert {row["method"] for row in rows} >= {"base", "sft", "ppo", "uniform", "majority", "mean-prediction"}
    assert not any(row["method"].startswith("ceiling") for row in rows)
    for row in rows:
        assert 0 <= row["avg_as"] <= 1
        assert np.isnan(row["min_as"])
        assert np.isnan(list(row["per_group"].values())).all()
    assert not (folder / "scores.parquet").exists()
    page = (folder / "report.html").read_text()
    assert "only sums over the groups" in page
