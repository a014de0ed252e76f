"""What a node remembers over all runs, and that two processes of it cannot spend the same score twice."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from appa_flwr.core.errors import UserError
from appa_flwr.owner.ledger import Ledger, Release, digest, ledger_of


def release(**changes):
    given = {"time": 1.5, "run": "7", "message": "m", "kind": "query.score", "groups": "Avaria", "numbers": 24}
    return Release(**{**given, "sha256": "ab", "refused": "", **changes})


def test_releases_come_back_in_their_order(tmp_path):
    ledger = Ledger(tmp_path / "a.sqlite")
    lines = [release(), release(time=0.5, numbers=0, sha256="", refused="no"), release(run="8")]
    for line in lines:
        ledger.write(line)
    assert Ledger(ledger.path).releases() == lines


def test_a_question_has_so_many_scores_and_one_asked_again_is_free(tmp_path):
    ledger = Ledger(tmp_path / "a.sqlite")
    assert ledger.spend(["q", "q", "r"], "truth", [b"1", b"2", b"1"], limit=2) == [True, True, True]
    assert Ledger(ledger.path).spend(["q", "q", "r"], "truth", [b"1", b"3", b"3"], limit=2) == [True, False, True]
    assert ledger.spend(["q"], "targets", [b"3"], limit=2) == [True]
    assert ledger.spent("truth") == {"q": 2, "r": 2}
    assert ledger.spend(["q"], "truth", [b"4"], limit=0) == [True]
    assert ledger.spent("truth") == {"q": 3, "r": 2}
    # many times in one message, counted as it goes
    assert ledger.spend(["s"] * 4, "truth", [b"1", b"1", b"2", b"3"], limit=2) == [True, True, True, False]


def test_two_processes_share_one_allowance(tmp_path):
    path = tmp_path / "a.sqlite"
    code = f"""
        import sys
        from pathlib import Path
        from appa_flwr.owner.ledger import Ledger
        own = sys.argv[1].encode()
        ledger = Ledger(Path({str(path)!r}))
        given = sum(ledger.spend(["q"], "truth", [own + bytes([i])], limit=50)[0] for i in range(40))
        print(given, ledger.secret().hex())
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    both = [subprocess.Popen([*command, name], stdout=subprocess.PIPE, text=True) for name in ("a", "b")]
    printed = [process.communicate(timeout=60)[0].split() for process in both]
    assert sum(int(given) for given, _ in printed) == 50
    assert len({secret for _, secret in printed}) == 1
    assert Ledger(path).spent("truth") == {"q": 50}


def test_a_digest_needs_the_secret_and_tells_its_parts_apart():
    assert digest(b"s", b"ab", b"c") == digest(b"s", b"ab", b"c")
    assert len({digest(b"s", b"ab", b"c"), digest(b"s", b"a", b"bc"), digest(b"t", b"ab", b"c")}) == 3


def test_where_a_node_s_ledger_lies(tmp_path):
    assert ledger_of({"partition-id": 1}) is None
    assert ledger_of({"group": "A", "data": "x/a.jsonl"}).path.as_posix() == "x/a.ledger.sqlite"
    assert ledger_of({"group": "A", "data": "x/a.jsonl", "ledger": "b.db"}).path.as_posix() == "b.db"
    with pytest.raises(UserError, match=r"^node-config lacks `ledger`"):
        ledger_of({"group": "A"})


def test_what_is_no_ledger_is_named(tmp_path):
    path = tmp_path / "a.sqlite"
    with pytest.raises(UserError, match=r"a\.sqlite: there is no ledger"):
        Ledger(path).releases()
    path.write_bytes(b"something else, and long enough to be read as a header" * 9)
    with pytest.raises(UserError, match=r"a\.sqlite: .*not a database"):
        Ledger(path).write(release())


def test_a_step_of_a_secure_sum_is_written_down_once_for_all_processes(tmp_path):
    path = tmp_path / "a.sqlite"
    assert Ledger(path).remember("mask 1", b"one") is None
    assert Ledger(path).remember("mask 1", b"two") == b"one"
    assert Ledger(path).remember("mask 1", b"one") == b"one"
    assert Ledger(path).remember("mask 2", b"two") is None


def test_sums_are_kept_with_whom_they_were_over(tmp_path):
    ledger = Ledger(tmp_path / "a.sqlite")
    ledger.write_masked("s", 4, "rewards")
    ledger.write_masked("s", 5, "scores")
    ledger.write_answered("s", 4, ("Cadiz; Sur", "Avaria"))
    ledger.write_answered("t", 4, ("nobody",))  # a sum that the node has not added to
    first, second = Ledger(ledger.path).sums()
    assert (first.session, first.round, first.what, first.answered) == ("s", 4, "rewards", ("Avaria", "Cadiz; Sur"))
    assert (second.round, second.answered) == (5, ())
