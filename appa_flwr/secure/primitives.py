"""Keys, streams and sealed boxes: X25519, HKDF-SHA256, ChaCha20 and ChaCha20-Poly1305, as `cryptography` has them."""

from __future__ import annotations

import secrets

import numpy as np
import numpy.typing as npt
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

Words = npt.NDArray[np.uint64]

KEY_BYTES, NONCE_BYTES = 32, 12
_FIRST_BLOCK = bytes(4)  # ChaCha20's counter


def private_key() -> bytes:
    """A fresh X25519 key, 32 bytes."""
    return X25519PrivateKey.generate().private_bytes_raw()


def public_key(private: bytes) -> bytes:
    """The public key of a private key, 32 bytes."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def agree(private: bytes, public: bytes) -> bytes:
    """What the owners of two keys can both compute and nobody else.

    Raises:
        ValueError: a public key of low order, with which everybody could.
    """
    return X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))


def derive(secret: bytes, *context: str, length: int = KEY_BYTES) -> bytes:
    """An independent secret for each context, by HKDF."""
    return HKDF(SHA256(), length=length, salt=None, info=framed(*context)).derive(secret)


def framed(*parts: str) -> bytes:
    """Texts as one byte string that no other texts give: each after its length."""
    encoded = [part.encode() for part in parts]
    return b"".join(len(part).to_bytes(4) + part for part in encoded)


def stream(key: bytes, nonce: bytes, count: int) -> Words:
    """So many random words of 64 bits, by ChaCha20; a nonce of 12 bytes gives each use of a key its own."""
    cipher = Cipher(algorithms.ChaCha20(key, _FIRST_BLOCK + nonce), mode=None)
    return np.frombuffer(cipher.encryptor().update(bytes(8 * count)), dtype="<u8").astype(np.uint64, copy=False)


def seal(key: bytes, plain: bytes, about: bytes) -> bytes:
    """Encrypt and authenticate; `about` is bound to it, so that a box cannot be passed off as another."""
    # Random, not counted: the same box may be made twice, by processes that know nothing of each other.
    nonce = secrets.token_bytes(NONCE_BYTES)
    return nonce + ChaCha20Poly1305(key).encrypt(nonce, plain, about)


def unseal(key: bytes, box: bytes, about: bytes) -> bytes:
    """The inverse of `seal`.

    Raises:
        ValueError: not made with this key, or about something else.
    """
    try:
        return ChaCha20Poly1305(key).decrypt(box[:NONCE_BYTES], box[NONCE_BYTES:], about)
    except (InvalidTag, ValueError):  # the second for a box that is too short
        raise ValueError("a box that was not sealed for this") from None
