"""A group's masked words against a second implementation, slow and of Python's own numbers: RFC 7748, 5869 and 8439."""

from __future__ import annotations

import hashlib
import hmac

from appa_flwr.secure.shamir import PRIME
from tests.secure_rounds import SESSION, Round, key_of

FIELD = 2**255 - 19


def x25519(private, public):
    """RFC 7748, section 5: the Montgomery ladder."""
    scalar = int.from_bytes(private, "little") & ~7 & (2**255 - 1) | 2**254
    u = int.from_bytes(public, "little") & (2**255 - 1)
    x2, z2, x3, z3 = 1, 0, u, 1
    for bit in reversed(range(255)):
        if scalar >> bit & 1:
            x2, x3, z2, z3 = x3, x2, z3, z2
        a, b, c, d = x2 + z2, x2 - z2, x3 + z3, x3 - z3
        e = a * a - b * b
        x3, z3 = (d * a + c * b) ** 2 % FIELD, u * (d * a - c * b) ** 2 % FIELD
        x2, z2 = a * a * b * b % FIELD, e * (a * a + 121665 * e) % FIELD
        if scalar >> bit & 1:
            x2, x3, z2, z3 = x3, x2, z3, z2
    return (x2 * pow(z2, -1, FIELD) % FIELD).to_bytes(32, "little")


def hkdf(secret, info, length):
    """RFC 5869, section 2, without salt."""
    extracted = hmac.digest(bytes(32), secret, "sha256")
    made, block = b"", b""
    while len(made) < length:
        block = hmac.digest(extracted, block + info + bytes([len(made) // 32 + 1]), "sha256")
        made += block
    return made[:length]


def chacha20(key, nonce, count):
    """RFC 8439, section 2.4, as words of 64 bits."""
    out = b""
    for counter in range(-(-count // 8)):
        text = b"expand 32-byte k" + key + counter.to_bytes(4, "little") + nonce
        start = [int.from_bytes(text[at : at + 4], "little") for at in range(0, 64, 4)]
        now = list(start)
        for _ in range(10):
            for column in range(4):
                quarter(now, column, column + 4, column + 8, column + 12)
            for column in range(4):
                quarter(now, column, (column + 1) % 4 + 4, (column + 2) % 4 + 8, (column + 3) % 4 + 12)
        out += b"".join(((one + two) % 2**32).to_bytes(4, "little") for one, two in zip(now, start, strict=True))
    return [int.from_bytes(out[at : at + 8], "little") for at in range(0, 8 * count, 8)]


def quarter(now, a, b, c, d):
    for one, other, third, turn in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
        now[one] = (now[one] + now[other]) % 2**32
        mixed = now[third] ^ now[one]
        now[third] = (mixed << turn | mixed >> 32 - turn) % 2**32


def frame(*texts):
    return b"".join(len(text.encode()).to_bytes(4, "big") + text.encode() for text in texts)


def test_masked_words_by_hand():
    run = Round([[0.5, -1.25, 3.0], [0.0, 0.0, 0.0], [1.0, 2.0, -3.5]], number=7, request="abc")
    run.mask()
    run.unmask()
    names, me = ("g0000", "g0001", "g0002"), "g0001"
    roster = "".join(f'"{name}" = "{x25519(key_of(name), (9).to_bytes(32, "little")).hex()}"\n' for name in names)
    pinned = hashlib.sha256(roster.encode()).hexdigest()
    nonce = hashlib.sha256(frame(pinned, SESSION, "7", "abc", "3", *names)).digest()[:12]

    # the self mask's seed from shares 1 and 3, a line through which is at 0: f(0) = (3 f(1) - f(3)) / 2
    first, third = (int.from_bytes(run.shares[holder][me]) for holder in ("g0000", "g0002"))
    own = ((3 * first - third) * pow(2, -1, PRIME) % PRIME).to_bytes(32, "big")
    expected = chacha20(own, nonce, 3)
    public = {name: x25519(key_of(name), (9).to_bytes(32, "little")) for name in names}
    for other, sign in (("g0000", -1), ("g0002", 1)):
        seed = hkdf(x25519(key_of(me), public[other]), frame(pinned, SESSION, "7"), 64)[:32]
        expected = [(word + sign * part) % 2**64 for word, part in zip(expected, chacha20(seed, nonce, 3), strict=True)]
    assert run.masked[me].words.tolist() == expected

    # g0000's own numbers, 0.5, -1.25 and 3 in 2^40ths, under its masks, which cancel in the sum
    whole = [sum(int(run.masked[name].words[at]) for name in names) for at in range(3)]
    assert run.total().tolist() == [3 * 2**39, 3 * 2**38, 2**64 - 2**39]
    assert whole != run.total().tolist()
