"""Secure sums as the server asks for them, where groups drop out, come back, lie or are late.

The groups mask with their own code; their numbers are a stub's.
"""

from contextlib import nullcontext

import numpy as np
import pytest
from fake_groups import failing, flat, gathered, new_request
from fakes import CATALOGUE, silent
from flwr.app import Message

from appa_flwr.protocol import asks, messages, refusals
from appa_flwr.secure import masks
from appa_flwr.secure.roster import own_key, public_key, read_roster, roster_file
from server_app.federation import grid as grids
from server_app.federation.ask import LostSum, TooFew
from server_app.federation.members import MOST_AHEAD

NAMES = ("A", "B", "C", "D")
SHARE = {name: np.full((3, 3), share) for name, share in zip(NAMES, (0.1, 0.2, 0.4, 0.8), strict=True)}


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    return {name: own_key(folder / f"{name}.key") for name in NAMES}


class Party:
    """A group that masks as it should, but where `faults` of (kind of message) says what it does instead."""

    def __init__(self, name, keys, *, roster=None):
        self.roster = read_roster(roster_file({other: public_key(key) for other, key in keys.items()}).encode())
        self.pinned = self.roster.sha256 if roster is None else roster
        self.facts, self.faults, self.name, self.names = {}, {}, name, (name,)
        self.member = masks.Member(
            name, keys[name], self.roster, least=3, changes=9, facts=lambda: nullcontext(self.facts)
        )
        self.asked = []

    def __call__(self, message):
        kind = message.metadata.message_type
        self.asked.append(kind)
        if kind in self.faults:
            return self.faults[kind](message)
        try:
            return Message(self.content(kind, message.content), reply_to=message)
        except refusals.Refused as refused:
            return failing(refused.code)(message)

    def content(self, kind, content):
        if kind == messages.HELLO:
            last = masks.last_round(self.facts, messages.unpack_hello(content)[0])
            return messages.pack_reply([self.name], roster=self.pinned, round=last)
        if kind == messages.CATALOGUE:
            return messages.pack_reply([self.name], answered=[3], may=["votes"])
        if kind == messages.OPEN:
            return messages.pack_reply([self.name], seed=self.member.open(messages.unpack_open(content)))
        ask, task = messages.unpack_ask(content)
        shapes = asks.numbers_of(ask, CATALOGUE)
        row_N = flat({"votes": SHARE[self.name]}, shapes)
        if not task.cohort:
            return messages.pack_reply([self.name], row_N[None])
        return messages.pack_reply([self.name], self.member.mask(task, row_N / asks.scales(shapes)))


@pytest.fixture
def parties(keys):
    """A, B, C and D."""
    return [Party(name, keys) for name in NAMES]


def met(parties, *, min_groups=1, answers=None):
    """The groups of a run with secure sums."""
    nodes, sums = dict(enumerate(parties, start=1)), {"run__sums": "secure", "run_name": "run"}
    groups = gathered(nodes, answers=answers, run__min_groups=min_groups, **sums)
    groups.send_catalogue(CATALOGUE)
    return groups


def total(*names):
    return sum(SHARE[name] for name in names)


def test_a_sum_is_over_all_that_are_there_and_no_part_is_known(parties):
    answer = met(parties).ask(new_request(asks.VOTES))
    assert answer.groups == NAMES
    np.testing.assert_allclose(answer.sum("votes"), total(*NAMES), atol=1e-12)
    np.testing.assert_allclose(answer.mean("votes"), total(*NAMES) / 4, atol=1e-12)
    assert [kind for kind in parties[0].asked if kind in (messages.ASK, messages.OPEN)] == [messages.ASK, messages.OPEN]
    with pytest.raises(AssertionError, match="single groups"):
        answer.each("votes")


def test_who_drops_out_before_anything_is_opened_costs_another_try(parties, monkeypatch):
    monkeypatch.setattr(grids, "LATE_TTL", 0.0)
    groups = met(parties)
    parties[1].faults[messages.ASK] = silent
    answer = groups.ask(new_request(asks.VOTES))
    assert answer.groups == ("A", "C", "D")
    np.testing.assert_allclose(answer.sum("votes"), total("A", "C", "D"), atol=1e-12)
    assert parties[0].asked[-3:] == [messages.ASK, messages.ASK, messages.OPEN]
    del parties[1].faults[messages.ASK]
    assert groups.ask(new_request(asks.VOTES)).groups == NAMES


def test_a_seed_that_stays_away_is_asked_for_again_over_the_same_groups(parties):
    groups, asked = met(parties), []

    def once(message):
        asked.append(message)
        del parties[2].faults[messages.OPEN]

    parties[2].faults[messages.OPEN] = once
    answer = groups.ask(new_request(asks.VOTES))
    assert (answer.groups, len(asked)) == (NAMES, 1)
    np.testing.assert_allclose(answer.sum("votes"), total(*NAMES), atol=1e-12)


def test_what_was_half_opened_is_lost_and_no_smaller_sum_is_asked_for(parties, monkeypatch):
    monkeypatch.setattr(grids, "LATE_TTL", 0.0)
    groups, ask = met(parties), new_request(asks.VOTES)
    parties[2].faults = {messages.OPEN: silent}
    with pytest.raises(LostSum, match="all but C"):
        groups.ask(ask)
    parties[2].faults = {messages.ASK: silent}
    with pytest.raises(LostSum, match="it has opened this request for other groups"):
        groups.ask(ask)
    parties[2].faults.clear()
    np.testing.assert_allclose(groups.ask(ask).sum("votes"), total(*NAMES), atol=1e-12)  # it is back


@pytest.mark.parametrize(
    "words", [np.zeros(9, np.uint64), np.zeros(8, np.uint64), np.zeros(9)], ids=["garbage", "short", "plain"]
)
def test_a_group_that_masks_garbage_spoils_the_sum_and_one_that_sends_none_is_missing(words, parties):
    groups = met(parties)
    parties[3].faults[messages.ASK] = lambda message: Message(messages.pack_reply(["D"], words), reply_to=message)
    seed = messages.pack_reply(["D"], seed=bytes(32))
    parties[3].faults[messages.OPEN] = lambda message: Message(seed, reply_to=message)
    if words.dtype == np.uint64 and len(words) == 9:
        with pytest.raises(LostSum, match="wrong part"):
            groups.ask(new_request(asks.VOTES))
    else:
        assert groups.ask(new_request(asks.VOTES)).groups == ("A", "B", "C")


def test_a_sum_that_no_groups_can_have_is_none(parties, monkeypatch):
    """Votes are 0 or more, and D adds -1 of the largest."""
    groups, ask = met(parties), new_request(asks.VOTES)
    monkeypatch.setitem(SHARE, "D", np.full((3, 3), -3.0))
    with pytest.raises(LostSum, match="a wrong part of votes"):
        groups.ask(ask)


def test_a_group_that_leaves_no_room_for_rounds_takes_no_part(parties):
    for last, names in ((2**62, NAMES[1:]), (MOST_AHEAD, NAMES)):
        parties[0].facts[masks.fact("round", "run")] = str(last).encode()
        groups = met(parties)
        assert groups.present == names
    assert groups.ask(new_request(asks.VOTES)).groups == NAMES


def test_below_three_groups_or_min_groups_there_is_no_sum(keys):
    for min_groups, gone in ((1, (0, 1)), (4, (0,))):
        parties = [Party(name, keys) for name in NAMES]
        groups = met(parties, min_groups=min_groups)
        for place in gone:
            parties[place].faults[messages.ASK] = silent
        with pytest.raises(TooFew, match=f"{max(3, min_groups)} must"):
            groups.ask(new_request(asks.VOTES))
        assert not any(messages.OPEN in party.asked for party in parties)


def test_a_group_with_another_roster_or_none_is_in_no_sum(keys, warnings):
    parties = [Party(name, keys, roster={"B": "", "C": None}.get(name)) for name in NAMES]
    groups = met(parties)
    assert groups.ask(new_request(asks.VOTES)).groups == ("A", "C", "D")
    assert any("appa group pin" in text for text in warnings())


def test_a_restarted_server_goes_on_with_rounds_that_nobody_has_masked(parties, tmp_path):
    ask = new_request(asks.VOTES)
    first = met(parties, answers=tmp_path)
    kept = first.ask(ask)
    parties[0].faults[messages.OPEN] = silent
    with pytest.raises(LostSum):
        first.ask(lost := new_request(asks.VOTES))
    parties[0].faults.clear()
    second = met(parties, answers=tmp_path)
    masked = len(parties[0].asked)
    again = second.ask(ask)  # of the run's folder
    np.testing.assert_array_equal(again.data, kept.data)
    assert (again.task, len(parties[0].asked)) == (kept.task, masked)
    np.testing.assert_allclose(second.ask(lost).sum("votes"), total(*NAMES), atol=1e-12)  # for the same groups
