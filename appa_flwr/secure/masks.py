"""Secure sums by masks: pairwise masks that cancel over a cohort, and each group's own mask.

A group sends fix(x) + PRG(own seed) + the sum over the other groups of +-PRG(pair seed), modulo 2^64. It reveals its
own seed only for the last task that it masked. If a group of the cohort does not reply, the server asks for no seeds
and the other groups mask a new task; the words already sent remain noise. Axis letter: N numbers.
"""

import json
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass, field

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from appa_flwr.core.arrays import FloatArray
from appa_flwr.core.errors import UserError
from appa_flwr.protocol import refusals
from appa_flwr.protocol.asks import Task, hashed
from appa_flwr.protocol.refusals import Refused
from appa_flwr.secure.roster import LEAST_GROUPS, Roster, public_key

Words = npt.NDArray[np.uint64]
Facts = MutableMapping[str, bytes]  # state of a group that persists over all processes and runs

FRACTION_BITS = 52  # of a number in [-1, 1]; a random word passes as a sum over 64 groups 1 time in 32
SEED_BYTES = 32


@dataclass(frozen=True)
class Member:
    """A group as a member of the roster that its owner has pinned; raises Refused if the roster lacks its key."""

    name: str
    private: bytes = field(repr=False)  # the group's X25519 key, 32 bytes
    roster: Roster
    _: KW_ONLY
    least: int  # fewest groups of a sum, this group included; values under 3 count as 3
    changes: int  # most cohorts, besides the first, that the group opens in a run
    facts: Callable[[], AbstractContextManager[Facts]]  # opens them for a transaction, which an exception rolls back

    def __post_init__(self) -> None:
        if self.roster.key_of.get(self.name) != public_key(self.private):
            raise Refused(refusals.NOT_ON_ROSTER)  # the other groups would derive masks from another key

    def mask(self, task: Task, value_N: npt.ArrayLike) -> Words:
        """Mask this group's numbers in [-1, 1] (N,), once per task; raises Refused.

        Numbers outside are clipped and NaN becomes 0, since an error would reveal whose number it is.
        """
        with self._checked(task) as facts:
            self._opened(facts, task)
            if task.round <= last_round(facts, task.run):
                raise Refused(refusals.MASKED_BEFORE)
            facts[fact("round", task.run)] = str(task.round).encode()
            facts[fact("last", task.run)] = task.digest
        cut_N = np.clip(np.nan_to_num(np.asarray(value_N, dtype=np.float64)), -1, 1)
        word_N = np.rint(np.ldexp(cut_N, FRACTION_BITS)).astype(np.int64).view(np.uint64)
        word_N += _stream(_derive(self.private, "own", task), len(word_N))
        private = X25519PrivateKey.from_private_bytes(self.private)
        for other in set(task.cohort) - {self.name}:
            shared = private.exchange(X25519PublicKey.from_public_bytes(self.roster.key_of[other]))
            mask_N = _stream(_derive(shared, "pair", task), len(word_N))
            word_N += mask_N if self.name < other else -mask_N
        return word_N

    def open(self, task: Task) -> bytes:
        """Seed of the group's own mask, 32 bytes, only for the last task masked in the run; raises Refused."""
        with self._checked(task) as facts:
            if facts.get(fact("last", task.run)) != task.digest:
                raise Refused(refusals.NOT_LAST)
            cohorts = self._opened(facts, task)  # another run may have opened the request since it was masked
            facts[fact("opened", task.request)] = cohorts[-1].encode()
            facts[fact("cohorts", task.run)] = json.dumps(cohorts).encode()
        return _derive(self.private, "own", task)

    def _checked(self, task: Task) -> AbstractContextManager[Facts]:
        """Check a task's roster and cohort, then open the facts; raises Refused."""
        cohort = set(task.cohort)
        if task.roster != self.roster.sha256:
            raise Refused(refusals.OTHER_ROSTER)
        if len(cohort) < len(task.cohort) or not {self.name} <= cohort <= set(self.roster.names):
            raise Refused(refusals.STRANGERS)
        if len(cohort) < max(self.least, LEAST_GROUPS):
            raise Refused(refusals.FEW)
        return self.facts()

    def _opened(self, facts: Facts, task: Task) -> list[str]:
        """Hashes of the cohorts opened in the run, with this task's cohort as the last; raises Refused."""
        cohort = hashed(sorted((name, self.roster.key_of[name].hex()) for name in task.cohort)).hex()
        if facts.get(fact("opened", task.request), cohort.encode()) != cohort.encode():
            raise Refused(refusals.OTHER_COHORT)
        opened = json.loads(facts.get(fact("cohorts", task.run), b"[]"))
        others = [other for other in opened if other != cohort]
        if len(others) > self.changes:
            raise Refused(refusals.CHANGES)
        return [*others, cohort]


def last_round(facts: Mapping[str, bytes], run: str) -> int:
    """Last round that the group has masked in a run, 0 before the first; a restarted server continues after it."""
    return int(facts.get(fact("round", run), b"0"))


def total(task: Task, words: Mapping[str, Words], seeds: Mapping[str, bytes]) -> FloatArray:
    """Sum over a task's cohort (N,), from the words of `Member.mask` and the seeds of `Member.open`.

    Raises:
        UserError: words or a seed are missing, sizes differ, or a total is impossible for numbers in [-1, 1].
    """
    what = f"secure sum: round {task.round} of run {task.run} over {', '.join(task.cohort)}"
    if not set(task.cohort) <= words.keys() & seeds.keys() or len({words[name].shape for name in task.cohort}) > 1:
        raise UserError(f"{what}: a part or seed is missing, or parts are of several sizes")
    parts = [words[name] - _stream(seeds[name], len(words[name])) for name in task.cohort]
    sum_N = np.ldexp(np.sum(parts, axis=0, dtype=np.uint64).view(np.int64).astype(np.float64), -FRACTION_BITS)
    if (np.abs(sum_N) > len(task.cohort)).any():
        raise UserError(f"{what}: a group sent a wrong part or seed, or was asked for something else than the others")
    return sum_N


def fact(kind: str, *parts: str) -> str:
    """Name of a fact, unique for its kind and parts."""
    return f"{kind} {json.dumps(parts)}"


def _derive(secret: bytes, kind: str, task: Task) -> bytes:
    return HKDF(SHA256(), length=SEED_BYTES, salt=None, info=kind.encode() + task.digest).derive(secret)


def _stream(seed: bytes, count: int) -> Words:
    """Pseudorandom words (count,) by ChaCha20; the nonce may be 0, since a seed is used for one task only."""
    encryptor = Cipher(algorithms.ChaCha20(seed, bytes(16)), mode=None).encryptor()
    return np.frombuffer(encryptor.update(bytes(8 * count)), dtype="<u8").astype(np.uint64, copy=False)
