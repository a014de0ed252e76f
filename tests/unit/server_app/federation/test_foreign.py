"""What groups write, on its way into the run's log: clean, short, and a few lines at most."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from fakes import FakeGrid, catalogue_of, replying
from flwr.app import Array, ArrayRecord, Error, Message
from in_process import flower_task

from appa_flwr.config import Config
from appa_flwr.core.errors import UserError
from appa_flwr.protocol import wire
from server_app.federation.foreign import LENGTH, listed, plain
from server_app.federation.grid import OverlapGrid
from server_app.federation.group_keys import GroupKeys
from server_app.federation.groups import MOST_NAMES, Federation
from server_app.predictor.pooled_scores import ALWAYS, fault
from server_app.predictor.pretraining import pretrain
from server_app.run_folder import RunFolder

HOSTILE = "\x1b[2J\x1b]0;owned\x07ends\r\nA line\x00of\u2028its\u202eown\u2066\ud800\x9b"
HUGE = HOSTILE + "x" * 300_000
MANY = [f"{HOSTILE}{number}" for number in range(20_000)]
MOST_LINES, MOST_CHARACTERS = 6, 4000
GOOD = {("js", wire.TARGET_SIDE): np.array([0.5])}
REQUEST = wire.ScoreRequest(np.array([0]), np.full((1, 2), 0.5), ("js",))
WEIGHTS = ArrayRecord({"weights": Array(np.ones(2, np.float32))})


def test_texts_are_left_as_they_are_or_lose_what_a_terminal_obeys():
    for text in ("", "Österreich, l'été; 日本 🙂", "می‌خواهم", "x" * LENGTH, "a|b [red]<b>"):
        assert plain(text) == text
    assert plain(HOSTILE) == " [2J ]0;owned ends A line of its own "
    assert plain("x" * (LENGTH + 1)) == "x" * (LENGTH - 3) + "..."
    assert len(plain(HUGE)) == LENGTH
    assert listed(["a", "b", "c"]) == "a, b, c"
    assert listed(["a\n", "b", "c", "d", "e"]) == "a , b, c and 2 more"


def error(text):
    return lambda message: Message(Error(wire.FAILED, text), reply_to=message)


def names(*said):
    """A node that says these names, with a reward where it is a single one."""
    rewards = GOOD if len(said) == 1 else {}
    return replying(*(wire.GroupReply(name, rewards) for name in said))


def strange_sums(message):
    sums = {("held-out", name): {"answers": 0.0} for name in (HUGE, *ALWAYS)}
    return replying(wire.GroupReply("B", sums=sums))(message)


BAD = {
    "an error": error(HUGE),
    "too many names": names(*MANY),
    "many names": names(*MANY[:MOST_NAMES]),
    "one name many times": names(*["B"] * MOST_NAMES),
    "the other's name many times": names(*["A"] * MOST_NAMES),
    "sums of its own": strange_sums,
}


@pytest.fixture
def run_log(tmp_path):
    """The lines of run.log."""
    with RunFolder(Config.load({"run.output-dir": str(tmp_path), "run-name": "r"})) as folder:
        yield lambda: (folder.path / "run.log").read_bytes().decode().split("\n")[:-1]


def harmless(lines):
    assert 0 < len(lines) <= MOST_LINES
    assert sum(map(len, lines)) <= MOST_CHARACTERS
    assert all(plain(line) == line or len(line) > LENGTH for line in lines)
    assert not any(mark in line for line in lines for mark in "\x1b\x00\x07\r\u202e\u2066")


def host(first, then):
    return lambda message: (first if message.metadata.message_type == wire.ROLL_CALL else then)(message)


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("question", ["score", "targets", "votes", "catalogue"])
def test_a_reply_makes_a_few_clean_lines_whatever_it_holds(kind, question, run_log):
    grid = FakeGrid({1: names("A"), 2: host(names("B"), BAD[kind])})
    federation = Federation(OverlapGrid(grid), min_groups=1, timeout=5.0)
    federation.gather(("A", "B"), patience=0.0)
    federation.grid.simulated = False
    if question == "score":
        reward_GJ = federation.score(REQUEST)["js", wire.TARGET_SIDE]
        assert reward_GJ[0] == 0.5
        assert np.isnan(reward_GJ[1])
    elif question == "catalogue":
        assert "A" in federation.send_catalogue(catalogue_of([2, 2], train=[True, False]))
    elif question == "targets":
        with pytest.raises(UserError):
            federation.send_targets(WEIGHTS, fault=lambda reply: fault(reply.sums, {"held-out": 1}))
    else:
        federation._vote_shape = (2, 2)
        assert federation.votes(needed=False) is None
    if not (question == "catalogue" and kind == "sums of its own"):  # nobody looks at sums then
        harmless(run_log())


class Keys(GroupKeys):
    """Node 1 has the key of A, the others that of B."""

    def names(self, node):
        return frozenset({"A"} if node.node_id == 1 else {"B"})


@pytest.mark.parametrize("with_keys", [True, False])
@pytest.mark.parametrize("kind", ["an error", "too many names", "many names"])
@pytest.mark.parametrize("expected", [(), ("A", "B")])
def test_a_roll_call_too(kind, with_keys, expected, run_log):
    grid = FakeGrid({1: names("A"), 2: BAD[kind]})
    keys = Keys({}) if with_keys else None
    federation = Federation(OverlapGrid(grid), min_groups=1, timeout=5.0, keys=keys)
    federation.gather(expected, patience=0.0)
    assert federation.present == ("A",)
    harmless(run_log())


def test_names_that_nobody_asked_for_are_few_in_the_error_too():
    grid = FakeGrid({1: names("A"), 2: names(*(f"unrelated {n}" for n in range(MOST_NAMES)))})
    federation = Federation(OverlapGrid(grid), min_groups=2, timeout=5.0)
    with pytest.raises(UserError, match=rf"not in `groups`: .* and {MOST_NAMES - 3} more$") as refused:
        federation.gather(("A", "B"), patience=0.0)
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize(("more", "joined"), [(MOST_NAMES - 1, True), (MOST_NAMES, False)])
def test_a_node_that_says_too_many_names_is_not_read(more, joined, caplog):
    grid = FakeGrid({1: names("A"), 2: names("B", *MANY[:more])})
    federation = Federation(OverlapGrid(grid), min_groups=1, timeout=5.0)
    federation.gather(("A", "B"), patience=0.0)
    assert ("B" in federation.present) == joined
    assert (f"node 2: it says {MOST_NAMES + 1} names, at most {MOST_NAMES} are read" in caplog.messages) != joined


def test_many_groups_that_are_missing_for_one_reason_are_one_line(run_log):
    whole = [f"G{n}" for n in range(500)]
    grid = FakeGrid({1: names("A"), 2: host(names(*whole), error("gone"))})
    federation = Federation(OverlapGrid(grid), min_groups=1, timeout=5.0)
    federation.gather((), patience=0.0)
    federation.score(REQUEST)
    said = [line.partition("warning: ")[2] for line in run_log()]
    assert said == ["node 2: gone", "groups G0, G1, G10 and 497 more count as missing: no answer"]


def test_so_do_the_errors_of_pluralllm_s_rounds(run_log):
    def trained(message):
        metrics = wire.MetricRecord({"num-examples": 5, "loss": 0.5})
        content = {"arrays": message.content["arrays"], "metrics": metrics}
        return Message(wire.RecordDict(content), reply_to=message)

    config = Config.load({"pluralllm.rounds": 1})
    with flower_task():
        grid = OverlapGrid(FakeGrid({1: trained, 2: error(HUGE)}))
        pretrain(grid, config, WEIGHTS, nodes=(1, 2), progress=lambda *_: None)
    harmless(run_log())


def test_a_name_that_is_none_is_no_group_where_everybody_may_join(caplog):
    caplog.set_level(logging.WARNING, "appa.server")
    grid = FakeGrid({1: names("A"), 2: names("B\x1b[31m"), 3: names("x" * (LENGTH + 1)), 4: names("Ö 日本")})
    federation = Federation(OverlapGrid(grid), min_groups=1, timeout=5.0)
    federation.gather((), patience=0.0)
    assert federation.groups == ("A", "Ö 日本")
    assert len(caplog.messages) == 2
