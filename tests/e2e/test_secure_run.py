"""A whole run under secure sums, every message recorded: no group's number leaves outside what its owner releases."""

from __future__ import annotations

import json

import numpy as np
import pytest
from audit import audit, make_world
from flwr.app import Context, RecordDict
from in_process import FEW, flower_task
from secure_world import pinned

from appa_flwr.owner.ledger import Ledger
from appa_flwr.protocol import wire
from appa_flwr.secure import terms
from client_app import summands
from server_app import main as server


def run(grid, config):
    with flower_task():
        server.app(grid, Context(17, 1, {}, RecordDict(), dict(config.flat())))


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """The run where owners pin a roster and let out nothing of their own; and what each group has put into the sums."""
    world = make_world(tmp_path_factory.mktemp("secure"), run__sums="secure")
    grid = pinned(world.config, world.files, policy=f"{FEW}\nown-score = false")
    summed, made = [], summands.summand

    def recorded(asked, group):
        found = made(asked, group)
        summed.append((group.name, found))
        return found

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(summands, "summand", recorded)
        run(grid, world.config)
    return world, grid, summed


def test_nothing_but_sums_and_names_leaves(whole_run):
    world, grid, _ = whole_run
    assert {reply.kind for reply in grid.replies} == {wire.ROLL_CALL, wire.CATALOGUE, wire.TARGETS, *wire.IN_SUMS}
    assert not any(reply.message.has_error() for reply in grid.replies)
    assert audit(grid, world) == []


def test_what_a_group_sends_is_uniform_and_none_of_its_numbers(whole_run):
    _, grid, summed = whole_run
    masks = [reply for reply in grid.replies if reply.kind == wire.MASK]
    assert len(masks) == len(summed) >= 3 * 15
    words = []
    for reply, (name, found) in zip(masks, summed, strict=True):
        own = terms.pack(found.terms)
        (sent,) = (array.numpy() for array in reply.message.content.array_records["words"].values())
        assert sent.shape == own.shape
        assert not (sent == own).any()
        # no share of a group's own number stands anywhere else in the reply either
        telling = [of.tobytes() for of in found.terms.values() if of.size and 0 < abs(float(of.ravel()[0])) < 1]
        assert not any(raw[:8] in reply.data for raw in telling), name
        words.append(sent)
    top = np.bincount((np.concatenate(words) >> np.uint64(56)).astype(int), minlength=256)
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
    said = (folder / "run.log").read_text()
    assert "secure sums over 3 groups" in said
    assert "NO CEILINGS AND NO OWN PREDICTIONS" in said
    page = (folder / "report.html").read_text()
    assert "only sums over the groups" in page
    assert "not released" in page


def test_every_ledger_accounts_for_every_word(whole_run):
    world, grid, _ = whole_run
    for node, path in zip(grid.contexts, world.files.values(), strict=True):
        left = [reply for reply in grid.replies if reply.message.metadata.src_node_id == node]
        written = Ledger(path.with_suffix(".ledger.sqlite")).releases()
        assert [line.kind for line in written] == [reply.kind for reply in left]
        masks = [reply for reply in left if reply.kind == wire.MASK]
        sizes = [sum(a.numpy().size for a in reply.message.content.array_records["words"].values()) for reply in masks]
        assert [line.numbers for line in written if line.kind == wire.MASK] == sizes
