"""Certificates for a server and keys for groups' nodes, as Flower's TLS and SuperNode authentication read them."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from appa_flwr.core.errors import UserError
from appa_flwr.core.files import replace_file

YEARS_VALID = 2
PUBLIC = ".pub"  # what a public key's file is called after its private one
_PEM = serialization.Encoding.PEM
_OPEN = serialization.NoEncryption()
_HASH = hashes.SHA384()
_USAGES = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "crl_sign")
_NO_USAGE = dict.fromkeys((*_USAGES, "encipher_only", "decipher_only"), False)
_AUTHORITY, _SERVER = (
    x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"appa-flwr {who}")]) for who in ("authority", "server")
)


def make_certificates(folder: Path, hosts: Sequence[str]) -> None:
    """Write `ca.crt` and `ca.key`, an authority of its own, and `server.crt` and `server.key`, signed by it.

    A certificate that is good for these hosts for another month stays, and so does the authority's; a new one of it
    has the same key.

    Args:
        folder: where they go.
        hosts: names and IP addresses by which the server will be reached; clients refuse it under another one.

    Raises:
        UserError: something cannot be written, or the authority's key is somebody else's.
    """
    if _lasting(folder / "ca.crt") and _good(folder / "server.crt", hosts):
        return
    signer = _signer(folder / "ca.key")
    if not _lasting(folder / "ca.crt"):
        made = _certificate(_AUTHORITY, signer, signer, x509.BasicConstraints(ca=True, path_length=0))
        _write(folder / "ca", signer, made.sign(signer, _HASH))
    key = ec.generate_private_key(ec.SECP384R1())
    made = _certificate(_SERVER, key, signer, x509.BasicConstraints(ca=False, path_length=None))
    made = made.add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False)
    _write(folder / "server", key, made.sign(signer, _HASH))


def certificate(path: Path) -> x509.Certificate:
    """A certificate that was made here.

    Raises:
        UserError: it does not say what its key may do, as those of earlier versions, which Python 3.13 refuses.
    """
    found = x509.load_pem_x509_certificate(path.read_bytes())
    if not any(isinstance(extension.value, x509.KeyUsage) for extension in found.extensions):
        raise UserError("has no key usage, without which Python 3.13 refuses it; make the folders again")
    return found


def _signer(path: Path) -> ec.EllipticCurvePrivateKey:
    if not path.exists():
        return ec.generate_private_key(ec.SECP384R1())
    key = serialization.load_pem_private_key(path.read_bytes(), None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise UserError(f"{path}: is not the key that was made here; name another folder")
    return key


def _lasting(path: Path) -> bool:
    with suppress(UserError, FileNotFoundError):
        return certificate(path).not_valid_after_utc > datetime.now(UTC) + timedelta(days=30)
    return False


def _good(path: Path, hosts: Sequence[str]) -> bool:
    if not _lasting(path):
        return False
    named = certificate(path).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return all(_host(host) in named for host in hosts)


def make_node_key(path: Path) -> None:
    """Write a SuperNode's private key, and then beside it (`.pub`) the public one to be registered."""
    key = ec.generate_private_key(ec.SECP384R1())
    replace_file(path, key.private_bytes(_PEM, serialization.PrivateFormat.OpenSSH, _OPEN), parents=True, mode=0o600)
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    replace_file(path.with_name(path.name + PUBLIC), public + b"\n")


def _certificate(
    subject: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    signer: ec.EllipticCurvePrivateKey,
    rights: x509.BasicConstraints,
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    usage = x509.KeyUsage(**{**_NO_USAGE, "digital_signature": not rights.ca, "key_cert_sign": rights.ca})
    by = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    return (
        x509.CertificateBuilder(subject_name=subject, issuer_name=_AUTHORITY, public_key=key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))  # clocks differ
        .not_valid_after(now + timedelta(days=365 * YEARS_VALID))
        .add_extension(rights, critical=True)
        .add_extension(usage, critical=True)
        .add_extension(identifier, critical=False)
        .add_extension(by, critical=False)
    )


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
