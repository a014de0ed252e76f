"""What a node writes down of its replies."""

import sqlite3
from contextlib import closing

import pytest

from appa_flwr.core.errors import UserError
from appa_flwr.owner.ledger import Ledger, Release, ledger_of


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


def test_without_a_ledger_there_is_nothing_to_read(ledger):
    with pytest.raises(UserError, match="there is no ledger"):
        ledger.releases()
    ledger.path.write_bytes(b"no database, but long enough to be taken for one" * 30)
    with pytest.raises(UserError, match="the ledger cannot be used"):
        ledger.write(release())


def test_where_a_node_s_ledger_lies(tmp_path):
    assert ledger_of({"partition-id": 1}) is None
    assert ledger_of({"group": "A", "data": "x/a.jsonl"}).path.as_posix() == "x/a.ledger.sqlite"
    with pytest.raises(UserError, match=r"^node-config lacks `data`"):
        ledger_of({"group": "A"})
