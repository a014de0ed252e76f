"""The owner's file: its keys, its defaults, and what is wrong with it in one line; and what a node writes down."""

import re
import sqlite3
from contextlib import closing

import pytest
from small import cases

from appa_flwr.core.errors import UserError
from appa_flwr.owner.ledger import Ledger, Release, ledger_of
from appa_flwr.owner.owner_policy import (
    SIMULATION,
    OwnerPolicy,
    described,
    owner_policy_file,
    owner_policy_of,
    read_owner_policy,
)


def written(tmp_path, text):
    path = tmp_path / "policy.toml"
    path.write_text(text)
    return path


def test_a_file_decides_what_it_names_and_no_more(tmp_path):
    policy = read_owner_policy(written(tmp_path, 'may-leave = ["votes", "truth"]\n'))
    assert policy == OwnerPolicy(may_leave=["votes", "truth"])
    kinds = ("votes", "training", "rewards", "predictions", "answers", "truth")
    assert [policy.may(kind) for kind in kinds] == [True, False, False, False, False, True]
    assert [OwnerPolicy().may(kind) for kind in kinds] == [True, True, True, False, False, False]
    assert [SIMULATION.may(kind) for kind in kinds] == [True] * 6


def test_a_simulation_has_no_owners_and_a_node_its_own_one_s_policy(tmp_path):
    assert owner_policy_of({"partition-id": 0}) is SIMULATION
    assert owner_policy_of({"group": "Avaria"}) == OwnerPolicy()
    path = written(tmp_path, "may-leave = []")
    assert owner_policy_of({"group": "Avaria", "policy": str(path)}) == OwnerPolicy(may_leave=[])
    assert owner_policy_of({"partition-id": 0, "policy": str(path)}) is SIMULATION


@pytest.mark.parametrize(("text", "says"), cases("wrong_inputs")["policies"].items())
def test_a_wrong_file_is_named_with_its_key(tmp_path, text, says):
    path = written(tmp_path, text) if text else tmp_path / "policy.toml"
    with pytest.raises(UserError, match=f"^{re.escape(f'{path}: {says}')}"):
        owner_policy_of({"group": "Avaria", "policy": str(path)})


def test_every_key_says_what_it_decides(tmp_path):
    assert all(described().values())
    text = owner_policy_file(bundle="ab" * 32)
    assert read_owner_policy(written(tmp_path, text)) == OwnerPolicy(bundle="ab" * 32)
    assert all(f"\n{key} = " in text for key in described())


# --- the ledger of a node's replies ---


@pytest.fixture
def ledger(tmp_path):
    return Ledger(tmp_path / "a.sqlite")


def release(**changes):
    fields = {"time": 1.5, "run": "7", "kind": "rewards", "groups": "Avaria", "numbers": 24}
    return Release(**{**fields, "sha256": "ab", "refused": "", **changes})


def test_releases_come_back_in_their_order_from_a_file_that_nobody_else_can_read(ledger):
    lines = [release(), release(time=0.5, numbers=0, sha256="", refused="no"), release(run="8")]
    for line in lines:
        ledger.write(line)
    assert Ledger(ledger.path).releases() == lines
    assert ledger.path.stat().st_mode & 0o777 == 0o600


def test_a_ledger_of_an_earlier_version_can_be_read_and_nothing_leaves_until_it_is_moved_away(ledger):
    with closing(sqlite3.connect(ledger.path)) as file, file:
        columns = "time real, run text, kind text, groups text, numbers integer, sha256 text, refused text"
        file.execute(f"create table release ({columns}, more text not null)")
        file.execute("insert into release values (1.5, '7', 'rewards', 'Avaria', 24, 'ab', '', 'A; B; C')")
    assert ledger.releases() == [release()]
    with pytest.raises(UserError, match=r"a\.sqlite: the ledger cannot be used .*; move the file away"):
        ledger.write(release())


def test_where_a_node_s_ledger_lies(tmp_path):
    assert ledger_of({"partition-id": 1}) is None
    assert ledger_of({"group": "A", "data": "x/a.jsonl"}).path.as_posix() == "x/a.ledger.sqlite"
    with pytest.raises(UserError, match=r"^node-config lacks `data`"):
        ledger_of({"group": "A"})
