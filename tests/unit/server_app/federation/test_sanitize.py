"""What groups write, on its way into the run's log: clean, short, and a few lines at most."""

import numpy as np
import pytest
from fakes import CATALOGUE, GOOD, REQUEST, WEIGHTS, failing, only
from runs import federated, gathered, replying
from small import config_in

from appa_flwr.core.errors import UserError
from appa_flwr.protocol import messages, refusals
from server_app.federation import members
from server_app.federation.sanitize import LENGTH, listed, plain
from server_app.run_writer import RunWriter

HOSTILE = "\x1b[2J\x1b]0;owned\x07ends\r\nA line\x00of\u2028its\u202eown\u2066\ud800\x9b"
HUGE = HOSTILE + "x" * 300_000
# Flower's own records hold no halves of characters
MANY = [f"{HOSTILE}{number}".replace("\ud800", "") for number in range(20_000)]
MOST_LINES, MOST_CHARACTERS, MOST_NAMES = 8, 4000, 1000


def test_texts_are_left_as_they_are_or_lose_what_a_terminal_obeys():
    for text in ("", "Österreich, l'été; 日本 🙂", "می‌خواهم", "x" * LENGTH, "a|b [red]<b>"):
        assert plain(text) == text
    assert plain(HOSTILE) == " [2J ]0;owned ends A line of its own "
    assert plain("x" * (LENGTH + 1)) == "x" * (LENGTH - 3) + "..."
    assert len(plain(HUGE)) == LENGTH
    assert listed(["a\n", "b", "c"]) == "a , b, c"
    assert listed(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"


BAD = {
    "an error": failing(refusals.FAILED, HUGE),
    "too many names": replying(*MANY),
    "many names": replying(*MANY[:MOST_NAMES]),
    "one name many times": replying(*["B"] * MOST_NAMES),
    "the other's name many times": replying(*["A"] * MOST_NAMES),
}


@pytest.fixture
def run_log(tmp_path):
    """The lines of run.log."""
    with RunWriter(config_in(tmp_path)) as folder:
        yield lambda: (folder.path / "run.log").read_bytes().decode().split("\n")[:-1]


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("question", [messages.HELLO, messages.CATALOGUE, messages.TARGETS, messages.ASK])
def test_a_reply_makes_a_few_clean_lines_whatever_it_holds(kind, question, run_log, monkeypatch):
    keys_of = {1: frozenset({"A"}), 2: frozenset({"B"})}
    monkeypatch.setattr(members, "names_of", lambda node, keys: keys_of[node.node_id])

    second = only(question, BAD[kind], replying("B"))
    groups = gathered({1: replying("A"), 2: second}, ("A", "B"), keys={})
    assert "A" in groups.send_catalogue(CATALOGUE)
    groups.send_targets(WEIGHTS)
    answer = groups.ask(REQUEST.query())
    assert answer.groups[0] == "A"
    np.testing.assert_array_equal(answer.each("js targets reward")[0], GOOD)
    lines = run_log()
    assert 0 < len(lines) <= MOST_LINES
    assert sum(map(len, lines)) <= MOST_CHARACTERS
    assert all(plain(line) == line or len(line) > LENGTH for line in lines)
    assert not any(mark in line for line in lines for mark in "\x1b\x00\x07\r\u202e\u2066")


def test_names_that_nobody_asked_for_are_few_in_the_error_too():
    nodes = {1: replying("A"), 2: replying(*(f"unrelated {n}" for n in range(MOST_NAMES)))}
    with pytest.raises(UserError, match=rf"not in `groups`: .* and {MOST_NAMES - 3} more$") as refused:
        gathered(nodes, ("A", "B"), run__min_groups=2)
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize(("more", "joined"), [(MOST_NAMES, True), (2 * MOST_NAMES, False)])
def test_a_node_that_says_too_many_names_is_not_read(more, joined):
    groups = gathered({1: replying("A"), 2: replying("B", *MANY[:more])}, ("A", "B"))
    assert ("B" in groups.members.present) == joined


def test_many_groups_that_are_missing_for_one_reason_are_one_line(run_log):
    many = replying(*(f"G{n}" for n in range(500)))
    groups = federated({1: replying("A"), 2: many})
    groups.grid._grid.nodes[2] = failing(refusals.FAILED, "gone")
    groups.ask(REQUEST.query())
    assert len(run_log()) == 2
