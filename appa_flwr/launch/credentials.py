"""Certificates for a server and keys for groups' nodes, as Flower's TLS and SuperNode authentication read them."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from appa_flwr.files import replace_file

YEARS_VALID = 2
_PEM = serialization.Encoding.PEM
_OPEN = serialization.NoEncryption()


def make_certificates(folder: Path, hosts: Sequence[str]) -> None:
    """Write `ca.crt` and `ca.key`, an authority of its own, and `server.crt` and `server.key`, signed by it.

    Args:
        folder: where they go.
        hosts: names and IP addresses by which the server will be reached; clients refuse it under another one.
    """
    authority, key = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    issuer = _name("appa-flwr authority")
    common = x509.BasicConstraints(ca=True, path_length=0), x509.BasicConstraints(ca=False, path_length=None)
    by_itself = _certificate(issuer, authority, issuer, authority).add_extension(common[0], critical=True)
    server = _certificate(_name(hosts[0]), key, issuer, authority).add_extension(common[1], critical=True)
    server = server.add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False)
    for name, certificate, private in (("ca", by_itself, authority), ("server", server, key)):
        signed = certificate.sign(authority, hashes.SHA384())
        replace_file(folder / f"{name}.crt", signed.public_bytes(_PEM), parents=True)
        _write_private(folder / f"{name}.key", private.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, _OPEN))


def make_node_key(path: Path) -> None:
    """Write a SuperNode's private key, and beside it (`.pub`) the public one to be registered."""
    key = ec.generate_private_key(ec.SECP384R1())
    _write_private(path, key.private_bytes(_PEM, serialization.PrivateFormat.OpenSSH, _OPEN))
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    replace_file(path.with_name(f"{path.name}.pub"), public + b"\n")


def _certificate(
    subject: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    issuer: x509.Name,
    authority: ec.EllipticCurvePrivateKey,
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    by = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
    return (
        x509.CertificateBuilder(subject_name=subject, issuer_name=issuer, public_key=key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))  # clocks differ
        .not_valid_after(now + timedelta(days=365 * YEARS_VALID))
        .add_extension(identifier, critical=False)
        .add_extension(by, critical=False)
    )


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _write_private(path: Path, data: bytes) -> None:
    replace_file(path, data, parents=True)
    path.chmod(0o600)
