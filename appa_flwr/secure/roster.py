"""The roster: a file with the names and public keys of the groups in secure sums, which the owners agree on directly.

Each owner pins the roster's hash in the policy, so that no server can invent groups or swap keys.
"""

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
"""Suffix of a group's private key, which is named after the data file; name of the roster, in the same folder."""

LEAST_GROUPS, MOST_GROUPS = 3, 64
"""From a sum over two groups each could compute the other's summand; the number of pairwise masks limits the groups."""


@dataclass(frozen=True)
class Roster:
    """Names and X25519 public keys, in the order of names; `sha256` is the hash of the file."""

    key_of: Mapping[str, bytes]
    sha256: str

    @property
    def names(self) -> tuple[str, ...]:
        """The groups, in order."""
        return tuple(self.key_of)


def read_roster(data: bytes, *, source: str = ROSTER_FILE) -> Roster:
    """Parse the bytes of a TOML file with one line per group: name = "public key, 64 hexadecimal digits".

    Raises:
        UserError: the file is malformed, a key is used twice or invalid, or there are too few or too many groups.
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
        try:  # with some points of low order, every key gives the same shared secret
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
    """Read a group's private key from its file (mode 0600), which is created if it does not exist.

    Raises:
        UserError: the file cannot be read or written, or holds something else.
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
    """Read a file's bytes; raises UserError with the reason if that fails."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
