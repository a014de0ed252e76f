"""The roster's file and hash, and a group's own key."""

import hashlib

import pytest

from appa_flwr.core.errors import UserError
from appa_flwr.secure.roster import own_key, public_key, read_file, read_roster, roster_file

KEYS = {name: public_key(hashlib.sha256(name.encode()).digest()) for name in ("Övria", 'Say "B"', "Avaria")}


def test_a_file_is_read_as_written_and_known_by_its_hash():
    data = roster_file(KEYS).encode()
    roster = read_roster(data)
    assert roster.key_of == KEYS
    assert roster.names == ("Avaria", 'Say "B"', "Övria")
    assert roster.sha256 == hashlib.sha256(data).hexdigest()


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
        (roster_file(dict(list(KEYS.items())[:2])), "has 2 groups; secure sums are over 3 to 64"),
        (roster_file({f"g{n}": KEYS["Avaria"] for n in range(65)}), "has 65 groups"),
    ],
)
def test_a_file_that_is_no_roster_is_one_line(text, says):
    with pytest.raises(UserError, match=says):
        read_roster(text.encode("latin-1" if text == "\xff" else "utf-8"))
