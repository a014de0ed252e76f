"""The roster: who may take part in secure sums, a file of names and public keys that owners agree on outside.

Each owner pins its hash in the policy, so that no server can invent groups or swap keys.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from appa_flwr.core.errors import UserError
from appa_flwr.core.files import replace_file

KEY_SUFFIX, ROSTER_FILE = ".sums.key", "roster.toml"
"""A group's private key has its data file's name with this ending; its owner keeps the roster beside it."""

LEAST_GROUPS, MOST_GROUPS = 3, 64
"""The sum over two tells each of them the other's part; each group shares a mask with every other."""


@dataclass(frozen=True)
class Roster:
    """Names and X25519 public keys, in the order of names; `sha256` is the file's."""

    key_of: Mapping[str, bytes]
    sha256: str

    @property
    def names(self) -> tuple[str, ...]:
        """The groups, in order."""
        return tuple(self.key_of)


def read_roster(data: bytes, *, source: str = ROSTER_FILE) -> Roster:
    """The roster in the bytes of a TOML file: one line a group, name = "public key, 64 hexadecimal digits".

    Raises:
        UserError: it is none, a key stands there twice or cannot be used, or there are too few or too many groups.
    """
    try:
        table = tomllib.loads(data.decode())
        key_of = {name: bytes.fromhex(table[name]) for name in sorted(table)}
    except (ValueError, TypeError) as error:
        raise UserError(f'{source}: must hold lines name = "public key, 64 hexadecimal digits" ({error})') from None
    if not LEAST_GROUPS <= len(key_of) <= MOST_GROUPS:
        raise UserError(f"{source}: has {len(key_of)} groups; secure sums are over {LEAST_GROUPS} to {MOST_GROUPS}")
    trial = X25519PrivateKey.generate()
    for name, key in key_of.items():
        try:  # some points of low order agree with every key on the same secret
            trial.exchange(X25519PublicKey.from_public_bytes(key))
        except ValueError:
            raise UserError(f"{source}: {name}: no public key that can be used") from None
    if len(set(key_of.values())) < len(key_of):  # one party under two names would count twice for the least cohort
        raise UserError(f"{source}: two groups have the same key")
    return Roster(key_of, hashlib.sha256(data).hexdigest())


def roster_file(key_of: Mapping[str, bytes]) -> str:
    """The text of a roster file, from each group's public key."""
    return "".join(f'{json.dumps(name, ensure_ascii=False)} = "{key_of[name].hex()}"\n' for name in sorted(key_of))


def own_key(path: Path) -> bytes:
    """The private key in a group's own file, which nobody else may read; made where there is none.

    Raises:
        UserError: it cannot be read or written, or holds something else.
    """
    if not path.exists():
        replace_file(path, f"{X25519PrivateKey.generate().private_bytes_raw().hex()}\n".encode(), mode=0o600)
    try:
        private = bytes.fromhex(read_file(path).decode())
        public_key(private)
    except ValueError:
        raise UserError(f"{path}: must hold a private key, 64 hexadecimal digits") from None
    return private


def public_key(private: bytes) -> bytes:
    """The public key of a private key, 32 bytes each."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def read_file(path: Path) -> bytes:
    """A file's bytes, or a UserError with the reason."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
