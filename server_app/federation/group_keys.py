"""Group keys: a node may speak for a group if Flower knows the node by the group's key."""

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from flwr.proto.node_pb2 import NodeInfo

from appa_flwr.core.errors import UserError

GroupKeys = Mapping[str, bytes]
"""Group -> its public key, as DER bytes."""


def names_of(node: NodeInfo, keys: GroupKeys) -> frozenset[str]:
    """The groups that a node may speak for."""
    own = _der(node.public_key)
    return frozenset(name for name, key in keys.items() if key == own)


def read_group_keys(path: str, *, expected: Iterable[str]) -> GroupKeys | None:
    """Read the keys in a TOML file, group = "public key in OpenSSH's format"; None if `run.group-keys` is empty.

    Raises a UserError if the file cannot be read, has other content, or lacks one of the expected groups.
    """
    if not path:
        return None
    try:
        table = tomllib.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"run.group-keys = {path}: cannot be read as TOML: {error}") from None
    key_of = {}
    for name, text in table.items():
        key = _der(text.encode()) if isinstance(text, str) else None
        if key is None:
            raise UserError(f'{path}: {name}: must be a public key in OpenSSH\'s format, "ecdsa-sha2-nistp384 AAAA..."')
        key_of[name] = key
    if lacking := [name for name in expected if name not in key_of]:
        raise UserError(f"{path}: has no key of {', '.join(lacking)}; every group of the run needs one")
    return key_of


def _der(key_file: bytes) -> bytes | None:
    """Convert a public key in OpenSSH's format (files) or PEM (Flower) to DER; None if it is not a key."""
    read = serialization.load_pem_public_key if key_file.startswith(b"-----") else serialization.load_ssh_public_key
    try:
        key = read(key_file)
    except Exception:  # another party's bytes can raise errors of a dozen classes
        return None
    return key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
