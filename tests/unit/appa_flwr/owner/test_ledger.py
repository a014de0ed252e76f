"""What a node remembers over all runs, and that two processes of it cannot spend the same allowance twice."""

import sqlite3
import subprocess
import sys
import textwrap
from contextlib import closing

import pytest

from appa_flwr.core.errors import UserError
from appa_flwr.owner.ledger import Ledger, Release, digest, ledger_of


@pytest.fixture
def ledger(tmp_path):
    return Ledger(tmp_path / "a.sqlite")


def release(**changes):
    fields = {"time": 1.5, "run": "7", "kind": "ask rewards", "groups": "Avaria", "numbers": 24}
    return Release(**{**fields, "sha256": "ab", "refused": "", **changes})


def pairs(*names: str) -> list[tuple[str, bytes]]:
    """q1 -> question q, mark 1."""
    return [(name[0], name[1:].encode()) for name in names]


def test_releases_come_back_in_their_order_from_a_file_that_nobody_else_can_read(ledger):
    lines = [release(), release(time=0.5, numbers=0, sha256="", refused="no"), release(run="8", cohort="A; B; C")]
    for line in lines:
        ledger.write(line)
    assert Ledger(ledger.path).releases() == lines
    assert ledger.path.stat().st_mode & 0o777 == 0o600


def test_a_question_has_so_many_marks_and_one_that_comes_again_is_free(ledger):
    assert ledger.spend("truth", pairs("q1", "q2", "r1"), limit=2, whole=False) == [True, True, True]
    assert Ledger(ledger.path).spend("truth", pairs("q1", "q3", "r3"), limit=2, whole=False) == [True, False, True]
    assert ledger.spend("targets", pairs("q3"), limit=2, whole=False) == [True]
    assert ledger.spent("truth") == {"q": 2, "r": 2}
    assert ledger.spend("truth", pairs("q4"), limit=0, whole=False) == [True]
    assert ledger.spent("truth") == {"q": 3, "r": 2}
    # an owner who lowers the limit still gives what has been given
    assert ledger.spend("truth", pairs("q1", "q5"), limit=1, whole=False) == [True, False]
    # many times in one message, counted as it goes
    assert ledger.spend("truth", pairs("s1", "s1", "s2", "s3"), limit=2, whole=False) == [True, True, True, False]
    assert ledger.kinds() == ["targets", "truth"]


def test_as_a_whole_all_is_written_down_or_nothing(ledger):
    assert ledger.spend("update", pairs("q1", "r1"), limit=1, whole=True) == [True, True]
    assert ledger.spend("update", pairs("s2", "q2"), limit=1, whole=True) == [True, False]
    assert ledger.spent("update") == {"q": 1, "r": 1}
    assert ledger.spend("update", pairs("s2"), limit=1, whole=True) == [True]


def test_two_processes_share_one_allowance_and_one_secret(ledger):
    code = f"""
        import sys
        from pathlib import Path
        from appa_flwr.owner.ledger import Ledger
        own = sys.argv[1].encode()
        ledger = Ledger(Path({str(ledger.path)!r}))
        kept = [ledger.spend("truth", [("q", own + bytes([i]))], limit=50, whole=True)[0] for i in range(40)]
        print(sum(kept), ledger.secret().hex())
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    both = [subprocess.Popen([*command, name], stdout=subprocess.PIPE, text=True) for name in ("a", "b")]
    printed = [process.communicate(timeout=60)[0].split() for process in both]
    assert sum(int(number) for number, _ in printed) == 50
    assert len({secret for _, secret in printed}) == 1
    assert ledger.spent("truth") == {"q": 50}


def test_facts_are_kept_together_or_not_at_all(ledger):
    with ledger.facts() as facts:
        facts.update(a=b"1", b=b"2")

    def broken_off():
        with ledger.facts() as facts:
            facts["a"] = b"3"
            del facts["b"]
            raise ValueError("midway")

    with pytest.raises(ValueError, match="midway"):
        broken_off()
    with Ledger(ledger.path).facts() as facts:
        with closing(sqlite3.connect(ledger.path, timeout=0)) as other, pytest.raises(sqlite3.OperationalError):
            other.execute("begin immediate")  # what has been read here nobody changes before it is written
        assert dict(facts) == {"a": b"1", "b": b"2"}
        del facts["a"]
        assert [*facts, facts.get("c")] == ["b", None]


def test_a_run_has_one_catalogue_and_two_differ_by_enough_answers_of_a_part_or_by_none(ledger):
    def enter(run, catalogue, training, held_out, group="A"):
        return ledger.enter(run, catalogue, group, {"training": training, "held-out": held_out}, least=3)

    assert enter("1", "x", "abcdef", "uvw") == ""
    assert enter("1", "x", "abcdef", "uvw") == ""  # the same catalogue again
    assert enter("1", "y", "ghi", "uvw") == "other"
    assert enter("2", "y", "abcd", "uvw") == "near"  # without e and f
    assert enter("3", "y", "abcdef", "uvwxy") == "near"  # with x and y
    assert enter("4", "z", "abc", "uvw") == ""  # without d, e and f
    assert enter("5", "y", "abcd", "uvw", group="B") == ""  # another group's answers
    assert enter("2", "y", "abcdefghi", "uvw") == ""  # three beyond the first, six beyond the second
    assert enter("6", "v", "abcdefgh", "uvw") == "near"  # only i apart from the third
    assert enter("7", "u", "abcdefghijkl", "uvwx") == "near"  # three of one part, and one of the other


def test_a_digest_needs_the_secret_and_tells_its_parts_apart():
    assert digest(b"s", b"ab", b"c") == digest(b"s", b"ab", b"c")
    assert len({digest(b"s", b"ab", b"c"), digest(b"s", b"a", b"bc"), digest(b"t", b"ab", b"c")}) == 3


def test_where_a_node_s_ledger_lies(tmp_path):
    assert ledger_of({"partition-id": 1}) is None
    assert ledger_of({"group": "A", "data": "x/a.jsonl"}).path.as_posix() == "x/a.ledger.sqlite"
    with pytest.raises(UserError, match=r"^node-config lacks `data`"):
        ledger_of({"group": "A"})
