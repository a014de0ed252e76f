"""A group's name belongs to its key: whoever else says it is left out, when groups join and later.

Keys are made as `appa deploy` makes them, and reach the server as Flower hands them over.
"""

import json
import re
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from fakes import CATALOGUE, REQUEST
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from nodes import FakeGrid
from runs import gathered, replying
from small import cases

from appa_flwr.core.errors import UserError
from appa_flwr.launch.sites import make_node_key
from server_app.federation.group_keys import read_group_keys

NAMES = ("A", "B of the north")


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


def meeting(folder, nodes, registered):
    """The groups at nodes which have the keys in their order."""
    grid = FakeGrid(dict(enumerate(nodes, start=1)))
    grid.keys = dict(zip(grid.nodes, registered.values(), strict=False))
    return gathered(grid, NAMES, keys=read_group_keys(str(folder / "group-keys.toml"), expected=NAMES)), grid


def answered(groups):
    return groups.ask(REQUEST.query()).groups


def test_a_node_without_the_group_s_key_does_not_speak_for_it_even_where_the_group_s_own_is_gone(tmp_path, registered):
    groups, grid = meeting(tmp_path, [replying(NAMES[0]), replying(NAMES[1]), replying(NAMES[0])], registered)
    assert groups.members.present == NAMES
    assert [message.metadata.dst_node_id for message in grid.pushed] == [1, 2]  # and is not asked: it may hang
    groups.send_catalogue(CATALOGUE)
    grid.nodes[1] = lambda message: None
    groups.grid.get_node_ids = lambda: frozenset({2, 3})
    assert answered(groups) == NAMES[1:]
    grid.nodes[4], grid.keys[4] = replying(NAMES[0]), grid.keys[1]
    groups.grid.get_node_ids = lambda: frozenset({2, 3, 4})
    assert answered(groups) == NAMES


def test_a_group_does_not_speak_for_another_one(tmp_path, registered):
    groups, _ = meeting(tmp_path, [replying(NAMES[1]), replying(NAMES[1])], registered)
    assert groups.members.present == (NAMES[1],)


@pytest.mark.parametrize(("text", "message"), cases("wrong_inputs")["group_keys"].items())
def test_a_file_that_cannot_be_used_says_what_would_be_right(tmp_path, text, message):
    path = tmp_path / "keys.toml"
    if text != "no file":
        path.write_text(text)
    with pytest.raises(UserError, match=message.replace("{path}", re.escape(str(path)))):
        read_group_keys(str(path), expected=NAMES)
