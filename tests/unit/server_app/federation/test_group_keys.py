"""A group's name belongs to its key: whoever else says it is left out, when groups join and later.

Keys are made as `appa deploy` makes them, and reach the server as Flower hands them over.
"""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from fake_groups import scoring_node
from fakes import CATALOGUE, REQUEST, FakeGrid
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

from appa_flwr.config import Config
from appa_flwr.core.errors import UserError
from appa_flwr.launch.sites import make_node_key
from appa_flwr.protocol import asks
from server_app.federation.grid import OverlapGrid
from server_app.federation.group_keys import read_group_keys
from server_app.federation.groups import Groups

NAMES = ("A", "B of the north")


def node(name: str):
    return scoring_node({name: np.where(CATALOGUE.option_QK, 0.5, 0.0)})


@pytest.fixture
def registered(tmp_path: Path) -> dict[str, bytes]:
    """Everybody's public key as Flower keeps it, a thief's too; the groups' are in group-keys.toml."""
    lines, keys = [], {}
    for number, name in enumerate([*NAMES, "thief"]):
        make_node_key(tmp_path / str(number))
        written = (tmp_path / f"{number}.pub").read_text().strip()
        keys[name] = public_key_to_bytes(load_ssh_public_key(written.encode()))
        if name in NAMES:
            lines.append(f"{json.dumps(name)} = {json.dumps(written + ' a comment')}")
    (tmp_path / "group-keys.toml").write_text("\n".join(lines))
    return keys


@pytest.fixture
def at_work(tmp_path, registered, caplog):
    """Both groups on nodes of their own, and a thief on node 3 that says to be the first."""
    caplog.set_level(logging.WARNING, "appa.server")
    grid = FakeGrid({1: node(NAMES[0]), 2: node(NAMES[1]), 3: node(NAMES[0])})
    grid.keys = dict(zip((1, 2, 3), registered.values(), strict=True))
    keys = read_group_keys(str(tmp_path / "group-keys.toml"), expected=NAMES)
    config = Config.load({"run.min-groups": 1, "run.reply-timeout": 0.02})
    return Groups(OverlapGrid(grid), config, keys=keys), grid


def test_a_node_without_the_group_s_key_does_not_speak_for_it(at_work, caplog):
    groups, grid = at_work
    groups.gather(NAMES, patience=0.0)
    assert groups.names == NAMES
    assert caplog.messages == ["node 3 has the key of no group; it is left out"]
    assert [message.metadata.dst_node_id for message in grid.pushed] == [1, 2]  # and is not asked: it may hang


def test_a_group_does_not_speak_for_another_one(at_work, caplog):
    groups, grid = at_work
    grid.nodes = {1: node(NAMES[1]), 2: node(NAMES[1])}
    groups.gather(NAMES, patience=0.0)
    assert groups.present == (NAMES[1],)
    assert "node 1 speaks for B of the north without its key; it is left out" in caplog.messages


def answered(groups):
    return groups.ask(REQUEST.ask(asks.REWARDS)).groups


def test_nor_does_it_when_the_group_s_own_node_goes_on_the_way(at_work):
    groups, grid = at_work
    groups.gather(NAMES, patience=0.0)
    groups.send_catalogue(CATALOGUE)
    grid.nodes[1] = lambda message: None
    groups.grid.online = lambda: frozenset({2, 3})
    assert answered(groups) == NAMES[1:]
    grid.nodes[4], grid.keys[4] = node(NAMES[0]), grid.keys[1]
    groups.grid.online = lambda: frozenset({2, 3, 4})
    assert answered(groups) == NAMES


def test_nodes_without_keys_speak_for_nobody_then(at_work):
    groups, grid = at_work
    grid.keys.clear()
    with pytest.raises(UserError, match=r"^0 groups joined"):
        groups.gather(NAMES, patience=0.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "^run.group-keys = .*keys.toml: cannot be read as TOML: .*No such file"),
        ("A = ", "^run.group-keys = .*keys.toml: cannot be read as TOML: Invalid value"),
        ('A = "ssh-dss no"', '^{path}: A: must be a public key in OpenSSH\'s format, "ecdsa-sha2-nistp384 AAAA..."$'),
        ("A = 3", "^{path}: A: must be a public key"),
        ("", "^{path}: has no key of A, B of the north; every group of the run needs one$"),
    ],
)
def test_a_file_that_cannot_be_used_says_what_would_be_right(tmp_path, text, message):
    path = tmp_path / "keys.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=message.replace("{path}", re.escape(str(path)))):
        read_group_keys(str(path), expected=NAMES)
