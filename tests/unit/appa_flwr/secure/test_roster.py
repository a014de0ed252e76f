"""The roster's file and hash."""

import hashlib

import pytest

from appa_flwr.core.errors import UserError
from appa_flwr.secure.roster import public_key, read_roster, roster_file

KEYS = {name: public_key(hashlib.sha256(name.encode()).digest()) for name in ("Övria", 'Say "B"', "Avaria")}


def test_a_file_is_read_as_written_and_known_by_its_hash():
    data = roster_file(KEYS).encode()
    roster = read_roster(data)
    assert roster.key_of == KEYS
    assert roster.names == ("Avaria", 'Say "B"', "Övria")
    assert roster.sha256 == hashlib.sha256(data).hexdigest()


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
        (roster_file(dict(list(KEYS.items())[:2])), "has 2 groups; secure sums are over 3 to 64"),
        (roster_file({f"g{n}": KEYS["Avaria"] for n in range(65)}), "has 65 groups"),
    ],
)
def test_a_file_that_is_no_roster_is_one_line(text, says):
    with pytest.raises(UserError, match=says):
        read_roster(text.encode("latin-1" if text == "\xff" else "utf-8"))
