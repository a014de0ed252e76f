"""The roster: who may take part in secure sums, a file of names and public keys that owners agree on outside.

Each owner's policy names it by its hash, so that no server can invent groups or swap keys. Thresholds and graph follow
from it alone: neither a server nor a group can choose whom a group shares its masks with.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from appa_flwr.core.errors import UserError
from appa_flwr.core.files import replace_file
from appa_flwr.secure.fixed_point import MOST_GROUPS
from appa_flwr.secure.primitives import KEY_BYTES, agree, framed, private_key
from appa_flwr.secure.refusals import OTHER_ROSTER, Refused

KEY_SUFFIX, ROSTER_FILE = ".sums.key", "roster.toml"
"""A group's private key has its data file's name with this ending; its owner keeps the roster beside it."""

LEAST_GROUPS = 3
"""The sum over two tells each of them the other's part."""

DEGREES = {256: 32, MOST_GROUPS: 40}
"""Most groups -> with how many others each is masked and shares its secrets (Bell et al. 2020)."""

EVERYBODY = 64
"""Up to so many groups, it is with all others."""


@dataclass(frozen=True)
class Roster:
    """Names and X25519 public keys, in the order of names; `sha256` is the file's."""

    key_of: Mapping[str, bytes]
    sha256: str

    @property
    def names(self) -> tuple[str, ...]:
        """In the order that decides who adds a pair's mask and who takes it away."""
        return tuple(self.key_of)

    @cached_property
    def point_of(self) -> dict[str, int]:
        """Name -> the point of its shares, from 1 on."""
        return {name: point for point, name in enumerate(self.key_of, start=1)}

    @cached_property
    def _circle(self) -> tuple[str, ...]:
        """All names, in an order that nobody chose."""
        return tuple(sorted(self.key_of, key=lambda name: hashlib.sha256(framed(self.sha256, name)).digest()))

    def neighbours(self, name: str) -> tuple[str, ...]:
        """The groups that this one has masks in common with, in the order of names.

        On a circle in random order those next to it on both sides: to cut any group off, most of its neighbours would
        have to be gone at once, and `threshold` does not let them.
        """
        number = len(self.key_of)
        if number <= EVERYBODY:
            return tuple(other for other in self.key_of if other != name)
        reach = next(degree for most, degree in DEGREES.items() if number <= most) // 2
        place = self._circle.index(name)
        found = {self._circle[(place + step) % number] for step in range(-reach, reach + 1)} - {name}
        return tuple(sorted(found))

    def holders(self, name: str) -> tuple[str, ...]:
        """The groups that hold a share of this one's secrets: its neighbours and itself, in the order of names."""
        return tuple(sorted({name, *self.neighbours(name)}))

    def threshold(self, name: str) -> int:
        """How many shares give a secret of this group."""
        return two_thirds(len(self.holders(name)))

    def least(self, least_cohort: int) -> int:
        """The fewest groups that a sum may be over, two thirds of the roster or what an owner's policy asks for."""
        return max(two_thirds(len(self.key_of)), least_cohort, LEAST_GROUPS)


def two_thirds(number: int) -> int:
    """Two thirds, rounded up: with fewer liars than a third nobody gets these many of two kinds of shares."""
    return -(-2 * number // 3)


def read_roster(data: bytes, *, source: str = "roster") -> Roster:
    """The roster in the bytes of a TOML file: one line a group, name = "public key, 64 hexadecimal digits".

    Raises:
        UserError: it is none, a key stands there twice or cannot be used, or there are too few or too many groups.
    """
    try:
        table = tomllib.loads(data.decode())
        keys = {name: bytes.fromhex(table[name]) for name in sorted(table)}
    except (ValueError, TypeError) as error:
        raise UserError(f'{source}: must hold lines name = "public key, 64 hexadecimal digits" ({error})') from None
    for name, key in keys.items():
        _check_key(source, name, key)
    if len(set(keys.values())) < len(keys):  # one party under two names would count twice for the least cohort
        raise UserError(f"{source}: two groups have the same key")
    if not LEAST_GROUPS <= len(keys) <= MOST_GROUPS:
        raise UserError(f"{source}: has {len(keys)} groups; secure sums are over {LEAST_GROUPS} to {MOST_GROUPS}")
    return Roster(keys, hashlib.sha256(data).hexdigest())


def pinned_roster(data: bytes, *, pinned: str) -> Roster:
    """The roster that a server sent, if it is the one that the owner's policy names.

    Raises:
        Refused: it is another one: a server that adds groups of its own, or swaps keys for its own, reads what is
            masked with them.
        UserError: as `read_roster`.
    """
    if hashlib.sha256(data).hexdigest() != pinned:
        raise Refused(OTHER_ROSTER)
    return read_roster(data)


def roster_file(key_of: Mapping[str, bytes]) -> str:
    """The text of a roster file."""
    return "".join(f'{json.dumps(name, ensure_ascii=False)} = "{key_of[name].hex()}"\n' for name in sorted(key_of))


def own_key(path: Path) -> bytes:
    """The private key in a group's own file, which nobody else may read; made where there is none.

    Raises:
        UserError: it cannot be read or written, or holds something else.
    """
    if not path.exists():
        replace_file(path, f"{private_key().hex()}\n".encode(), mode=0o600)
    try:
        found = bytes.fromhex(read_file(path).decode())
    except ValueError:
        found = b""
    if len(found) != KEY_BYTES:
        raise UserError(f"{path}: must hold a private key, {2 * KEY_BYTES} hexadecimal digits")
    return found


def read_file(path: Path) -> bytes:
    """A file's bytes, or a UserError with the reason."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None


def _check_key(source: str, name: str, key: bytes) -> None:
    try:
        if len(key) != KEY_BYTES:
            raise ValueError
        agree(private_key(), key)  # some points of low order agree with every key on the same secret
    except ValueError:
        raise UserError(f"{source}: {name}: no public key that can be used") from None
