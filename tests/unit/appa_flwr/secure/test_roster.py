"""The roster's file and hash, its thresholds, and the graph that follows from it."""

from __future__ import annotations

import pytest

from appa_flwr.core.errors import UserError
from appa_flwr.secure.primitives import private_key, public_key
from appa_flwr.secure.refusals import Refused
from appa_flwr.secure.roster import own_key, pinned_roster, read_file, read_roster, roster_file, two_thirds
from tests.secure_rounds import roster_of

KEYS = {name: public_key(private_key()) for name in ("Övria", 'Say "B"', "Avaria")}


def test_a_file_is_read_as_written_and_known_by_its_hash():
    data = roster_file(KEYS).encode()
    roster = read_roster(data)
    assert roster.key_of == KEYS
    assert roster.names == ("Avaria", 'Say "B"', "Övria")
    assert roster.point_of == {"Avaria": 1, 'Say "B"': 2, "Övria": 3}
    assert pinned_roster(data, pinned=roster.sha256) == roster


def test_another_roster_than_the_pinned_one_is_refused():
    pinned = read_roster(roster_file(KEYS).encode()).sha256
    swapped = {**KEYS, "Avaria": public_key(private_key())}
    invented = {**KEYS, "Zed": public_key(private_key())}
    for keys in (swapped, invented):
        with pytest.raises(Refused, match="policy") as caught:
            pinned_roster(roster_file(keys).encode(), pinned=pinned)
        assert caught.value.name == "other-roster"


def test_a_group_s_key_is_made_once_for_its_own_account_alone(tmp_path):
    path = tmp_path / "avaria.key"
    key = own_key(path)
    assert own_key(path) == key
    assert len(key) == 32
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_text("a1")
    with pytest.raises(UserError, match=r"avaria\.key: .* 64 "):
        own_key(path)
    with pytest.raises(UserError, match=r"none\.toml: cannot be read"):
        read_file(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a = 1", "must hold lines"),
        ("a = ", "must hold lines"),
        ('a = "zz"', "must hold lines"),
        ("\xff", "must hold lines"),
        (roster_file({"a": b"short", **KEYS}), "a: no public key that can be used"),
        (roster_file({"low order": bytes(32), **KEYS}), "low order: no public key that can be used"),
        (roster_file({"twin": KEYS["Avaria"], **KEYS}), "two groups have the same key"),
        (roster_file(dict(list(KEYS.items())[:2])), "has 2 groups; secure sums are over 3 to 1024"),
    ],
)
def test_a_file_that_is_no_roster_is_one_line(text, says):
    with pytest.raises(UserError, match=says):
        read_roster(text.encode("latin-1" if text == "\xff" else "utf-8"))


def test_two_thirds_are_rounded_up_and_an_owner_may_ask_for_more():
    assert [two_thirds(number) for number in (3, 4, 5, 6, 8, 64)] == [2, 3, 4, 4, 6, 43]
    assert roster_of(3).least(0) == 3
    assert roster_of(9).least(3) == 6
    assert roster_of(9).least(8) == 8


@pytest.mark.parametrize(("number", "degree"), [(3, 2), (64, 63), (65, 32), (256, 32), (300, 40)])
def test_the_graph_is_the_same_from_both_ends_and_of_its_degree(number, degree):
    roster = roster_of(number)
    near = {name: roster.neighbours(name) for name in roster.names}
    for name, others in near.items():
        assert len(set(others) - {name}) == len(others) == degree
        assert all(name in near[other] for other in others)
        assert roster.holders(name) == tuple(sorted((name, *others)))
    assert roster.threshold(roster.names[0]) == two_thirds(degree + 1)


def test_nobody_is_cut_off_while_each_has_two_thirds_of_its_neighbourhood():
    # the fewest neighbours of a run of groups on the circle are 16 on each side, half of what those at its end have
    roster = roster_of(256)
    for start, length in ((0, 1), (10, 5), (100, 40)):
        run = {roster._circle[(start + n) % 256] for n in range(length)}
        around = {other for name in run for other in roster.neighbours(name)} - run
        least_left = min(len(set(roster.holders(name)) - around) for name in run)
        assert least_left < roster.threshold(roster.names[0])
