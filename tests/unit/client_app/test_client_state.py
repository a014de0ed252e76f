"""What a deployed node remembers lies in files of its own, and nowhere else."""

from __future__ import annotations

import os
import stat

import numpy as np
import pytest
from audit import holds, make_world, talked
from flwr.app import Context
from in_process import InProcessGrid, request

from appa_flwr.protocol import wire
from client_app import state
from client_app.main import app


@pytest.fixture(scope="module")
def remembered(tmp_path_factory):
    """A world and its talk under the most careless umask, beside what runs of a month and of a day ago left."""
    world = make_world(tmp_path_factory.mktemp("world"), pluralllm__rounds=1)
    folder = next(iter(world.files.values())).with_suffix(".ledger.memory")
    for name, days in (("7", 30), ("8", 1)):
        (folder / name).mkdir(parents=True)
        (folder / name / "file").write_bytes(b"x")
        then = (folder / name).stat().st_mtime - days * 86400
        os.utime(folder / name, (then, then))
    folder.chmod(0o700)
    umask = os.umask(0o000)
    try:
        return world, talked(world)
    finally:
        os.umask(umask)


def test_nothing_private_is_in_flower_s_context_and_nobody_else_can_read_the_files(remembered):
    """Flower's SuperNode shows a context to whoever takes one of the node's tasks."""
    world, grid = remembered
    for context, path in zip(grid.contexts.values(), world.files.values(), strict=True):
        assert dict(context.state) == {}
        memory = state.memory_of(context)
        truth_QK = state.truth(memory, str(context.node_config["group"]))
        assert any(holds(truth_QK, row) for row in world.rows)  # it does remember
        assert memory.folder.parent == path.with_suffix(".ledger.memory")
        for made in (memory.folder.parent, memory.folder):
            assert stat.S_IMODE(made.stat().st_mode) == 0o700
        files = list(memory.folder.iterdir())
        assert files
        assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}


def test_what_runs_of_last_month_left_is_removed(remembered):
    folder = next(iter(remembered[0].files.values())).with_suffix(".ledger.memory")
    assert sorted(path.name for path in folder.iterdir()) == ["1", "8"]


def test_a_node_that_has_restarted_goes_on_and_another_run_knows_nothing(remembered):
    _, grid = remembered
    node, context = next(iter(grid.contexts.items()))
    asked = next(message for message in grid.requests if message.kind == wire.SCORE)
    before = next(reply for reply in grid.replies if reply.kind == wire.SCORE)
    again = InProcessGrid({node: context})  # Flower keeps nothing of a context over a restart, and there is nothing
    again.push_messages([asked.message])
    rewards = [reply.message.content.array_records["rewards"] for reply in (before, again.replies[0])]
    assert rewards[0] == rewards[1]
    another = Context(context.run_id + 1, node, context.node_config, context.state, context.run_config)
    assert app(request(wire.VOTE, node=node), another).error.code == wire.FORGOTTEN


def test_a_name_of_any_kind_is_a_file_s(tmp_path):
    memory = state.Memory(folder=tmp_path / "m" / "1", state=None)
    memory.folder.parent.mkdir()
    for group in ("../../x", "a/b", "é" * 300, "CON"):
        state.remember_targets(memory, group, np.array([[0.25, 0.75]]))
        assert state.targets(memory, group).tolist() == [[0.25, 0.75]]
    assert len(list(memory.folder.iterdir())) == 4
