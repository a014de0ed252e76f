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

from appa_flwr.core.errors import UserError
from appa_flwr.core.files import replace_file

YEARS_VALID = 2
RENEWED = timedelta(days=30)  # before its end a certificate is made anew, and the doctor says so
PUBLIC = ".pub"  # what a public key's file is called after its private one
_PEM = serialization.Encoding.PEM
_OPEN = serialization.NoEncryption()
_USAGES = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "crl_sign")
_NO_USAGE = dict.fromkeys((*_USAGES, "encipher_only", "decipher_only"), False)


def make_certificates(folder: Path, hosts: Sequence[str]) -> None:
    """Write `ca.crt` and `ca.key`, an authority of its own, and `server.crt` and `server.key`, signed by it.

    Certificates that are good for these hosts for another month stay. New ones are signed by the authority's old key,
    so that whoever has its old certificate trusts them until that ends.

    Args:
        folder: where they go.
        hosts: names and IP addresses by which the server will be reached; clients refuse it under another one.

    Raises:
        UserError: something cannot be written, or the authority's key is somebody else's.
    """
    authority, server = folder / "ca", folder / "server"
    if all(lasts(path.with_suffix(".crt")) for path in (authority, server)) and _names(server, hosts):
        return
    signer = _signer(authority.with_suffix(".key"))
    _write(authority, signer, _certificate("authority", signer, signer))
    key = ec.generate_private_key(ec.SECP384R1())
    _write(server, key, _certificate("server", key, signer, hosts))


def ends(path: Path) -> datetime:
    """The time from which on a certificate is no longer valid; a UserError where the file holds none."""
    try:
        return x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc
    except ValueError:
        raise UserError(f"{path}: is no certificate; take the one that appa deploy made") from None


def lasts(path: Path) -> bool:
    """True if a certificate is there and valid for another month."""
    return path.exists() and ends(path) > datetime.now(UTC) + RENEWED


def make_node_key(path: Path) -> None:
    """Write a SuperNode's private key, and then beside it (`.pub`) the public one to be registered."""
    key = ec.generate_private_key(ec.SECP384R1())
    replace_file(path, key.private_bytes(_PEM, serialization.PrivateFormat.OpenSSH, _OPEN), parents=True, mode=0o600)
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    replace_file(path.with_name(path.name + PUBLIC), public + b"\n")


def _names(server: Path, hosts: Sequence[str]) -> bool:
    own = x509.load_pem_x509_certificate(server.with_suffix(".crt").read_bytes())
    named = own.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return all(_host(host) in named for host in hosts)


def _signer(path: Path) -> ec.EllipticCurvePrivateKey:
    if not path.exists():
        return ec.generate_private_key(ec.SECP384R1())
    key = serialization.load_pem_private_key(path.read_bytes(), None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise UserError(f"{path}: is not the key that was made here; name another folder")
    return key


def _certificate(
    who: str, key: ec.EllipticCurvePrivateKey, signer: ec.EllipticCurvePrivateKey, hosts: Sequence[str] = ()
) -> x509.Certificate:
    """A certificate of a server with these names, or without any of the authority; as Python 3.13 wants it."""
    now, ca = datetime.now(UTC), not hosts
    subject, issuer = (
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"appa-flwr {name}")]) for name in (who, "authority")
    )
    made = (
        x509.CertificateBuilder(subject_name=subject, issuer_name=issuer, public_key=key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))  # clocks differ
        .not_valid_after(now + timedelta(days=365 * YEARS_VALID))
        .add_extension(x509.BasicConstraints(ca=ca, path_length=0 if ca else None), critical=True)
        .add_extension(x509.KeyUsage(digital_signature=not ca, key_cert_sign=ca, **_NO_USAGE), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    if hosts:
        made = made.add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False)
    return made.sign(signer, hashes.SHA384())


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _write(path: Path, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
    """The key before the certificate: where the second is, so is the first."""
    private = key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, _OPEN)
    replace_file(path.with_suffix(".key"), private, parents=True, mode=0o600)
    replace_file(path.with_suffix(".crt"), certificate.public_bytes(_PEM))
