"""Certificates for a server and keys for groups' nodes, as Flower's TLS and SuperNode authentication read them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from appa_flwr.core.errors import UserError
from appa_flwr.core.files import replace_file

PUBLIC = ".pub"  # what a public key's file is called after its private one


def make_certificates(folder: Path, hosts: Sequence[str]) -> None:
    """Write `ca.crt` and `ca.key`, an authority of its own, and `server.crt` and `server.key`, signed by it.

    An authority that is there signs again, so that whoever has its certificate trusts the server's new one.

    Args:
        folder: where they go.
        hosts: names and IP addresses by which the server will be reached; clients refuse it under another one.

    Raises:
        UserError: something cannot be written, or the authority that is there cannot be used.
    """
    from trustme import CA  # a group's machine lacks it

    certificate, key = folder / "ca.crt", folder / "ca.key"
    if certificate.exists():
        try:
            authority = CA.from_pem(certificate.read_bytes(), key.read_bytes())
        except (OSError, ValueError) as error:
            raise UserError(f"{key}, {certificate}: cannot be used ({error}); name another folder") from None
    else:
        authority = CA(organization_name="appa-flwr")
        replace_file(key, authority.private_key_pem.bytes(), parents=True, mode=0o600)
        replace_file(certificate, authority.cert_pem.bytes())
    server = authority.issue_cert(*hosts, organization_name="appa-flwr")
    replace_file(folder / "server.key", server.private_key_pem.bytes(), mode=0o600)
    replace_file(folder / "server.crt", server.cert_chain_pems[0].bytes())


def make_node_key(path: Path) -> None:
    """Write a SuperNode's private key, and then beside it (`.pub`) the public one to be registered."""
    key, no_password = ec.generate_private_key(ec.SECP384R1()), serialization.NoEncryption()
    private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, no_password)
    replace_file(path, private, parents=True, mode=0o600)
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    replace_file(path.with_name(path.name + PUBLIC), public + b"\n")
