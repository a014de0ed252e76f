"""Secure sums among groups in this process, with whoever drops out."""

from __future__ import annotations

import hashlib
from functools import cache

import numpy as np

from appa_flwr.secure.fixed_point import encode
from appa_flwr.secure.member import Member, pair_secrets
from appa_flwr.secure.messages import Task
from appa_flwr.secure.primitives import public_key
from appa_flwr.secure.roster import read_roster, roster_file
from appa_flwr.secure.summing import total, unmasking, usable

SESSION = "run 1"


def key_of(name):
    return hashlib.sha256(f"key of {name}".encode()).digest()


@cache
def roster_of(number):
    keys = {f"g{n:04}": public_key(key_of(f"g{n:04}")) for n in range(number)}
    return read_roster(roster_file(keys).encode())


@cache
def pairs_of(number, name):
    return pair_secrets(name, key_of(name), roster_of(number))


def member(number, name, memory=None, least_cohort=3):
    memory = {} if memory is None else memory

    def remember(key, value):
        before = memory.get(key)
        memory.setdefault(key, value)
        return before

    return Member(name, pairs_of(number, name), roster_of(number), least_cohort=least_cohort, remember=remember)


class Round:
    """One round over a whole roster; `x_GN` are the groups' numbers."""

    def __init__(self, x_GN, *, number=1, request="answers", members=None):
        self.x_GN = np.asarray(x_GN, dtype=np.float64)
        self.roster = roster_of(len(self.x_GN))
        names = self.roster.names
        self.members = members or {name: member(len(names), name) for name in names}
        self.task = Task(SESSION, number, names, request, self.x_GN.shape[1])
        self.prepared = {name: self.members[name].prepare(SESSION, [number])[0] for name in names}
        self.masked = {}

    def mask(self, *, without=()):
        for name, x_N in zip(self.roster.names, self.x_GN, strict=True):
            if name not in without:
                self.masked[name] = self.members[name].mask(self.task, encode(x_N))
                assert usable(self.roster, self.task, name, self.masked[name])

    def unmask(self, *, without=()):
        requests = unmasking(self.roster, self.task, self.prepared, self.masked)
        self.shares = {n: self.members[n].unmask(self.task, r) for n, r in requests.items() if n not in without}

    def total(self):
        return total(self.roster, self.task, self.prepared, self.masked, self.shares)
