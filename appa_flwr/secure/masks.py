"""Sums over nodes of which the server learns the total and no summand.

Every two nodes agree on a secret by Diffie-Hellman. One adds the numbers that the secret makes to its part and the
other takes them away, so that each part alone looks random and they vanish in the sum (Bonawitz et al., 2017,
"Practical Secure Aggregation for Privacy-Preserving Machine Learning", without its recovery of nodes that drop out: the
sum of all but one is as random as a single part). Numbers are whole and everything is modulo 2^64, so masks cancel to
the last bit and no order matters. Nothing of a run uses it yet.

The server hands the public keys on, and it follows the protocol but is curious: one that lies about whose keys they are
could take every node's part apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from appa_flwr.core.errors import UserError

Whole = npt.NDArray[np.int64]
Masked = npt.NDArray[np.uint64]

KEY_BYTES = 32
_NONCE = bytes(16)  # a key makes one stream only


def private_key() -> bytes:
    """A fresh secret of one node for one exchange, 32 bytes."""
    return X25519PrivateKey.generate().private_bytes_raw()


def public_key(private: bytes) -> bytes:
    """The public key of a private key, 32 bytes."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def usable(public: bytes) -> bool:
    """True if a public key can be agreed with; some points of low order cannot, and would stop every other node."""
    try:
        X25519PrivateKey.generate().exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        return False
    return True


def mask(arrays: Mapping[str, Whole], *, private: bytes, public_keys: Sequence[bytes], step: str) -> dict[str, Masked]:
    """Hide one node's part of a sum: for each array one of the same shape, with masks.

    Args:
        arrays: the part, by name; no total may leave 64 bits.
        private: this node's key.
        public_keys: of all nodes that take part, this one among them; the same at every node.
        step: what is summed; a name is used once with a key, or two parts could be told from their difference.

    Raises:
        UserError: this node's key is not among those given, or one stands there twice.
    """
    own = public_key(private)
    if public_keys.count(own) != 1 or len(set(public_keys)) != len(public_keys):
        raise UserError("secure sum: the keys must hold this node's own and no key twice")
    hidden = {name: array.view(np.uint64) for name, array in arrays.items()}
    for other in public_keys:
        if other != own:
            stream = _stream(private, other, step, size=sum(array.size for array in hidden.values()))
            start = 0
            for name, array in hidden.items():
                part = stream[start : start + array.size].reshape(array.shape)
                hidden[name] = array + part if own > other else array - part
                start += array.size
    return hidden


def total(parts: Sequence[Mapping[str, Masked]]) -> dict[str, Whole]:
    """The sum over all nodes, by name, of what `mask` returned at each; with one missing, noise comes out."""
    first, *others = parts
    sums = {name: array.copy() for name, array in first.items()}
    for part in others:
        for name in sums:
            sums[name] += part[name]
    return {name: array.view(np.int64) for name, array in sums.items()}


def _stream(private: bytes, other: bytes, step: str, *, size: int) -> Masked:
    secret = X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(other))
    key = HKDF(SHA256(), length=KEY_BYTES, salt=None, info=step.encode()).derive(secret)
    noise = Cipher(algorithms.ChaCha20(key, _NONCE), mode=None).encryptor().update(bytes(size * np.uint64().itemsize))
    return np.frombuffer(noise, dtype=np.uint64)
