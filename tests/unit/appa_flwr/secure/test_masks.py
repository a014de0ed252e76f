"""Masked sums: exact totals, and a server that lies to read one group's numbers. Each rule that stops it has a test."""

import hashlib
import hmac
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

from appa_flwr.core.errors import UserError
from appa_flwr.protocol import refusals
from appa_flwr.protocol.asks import Task
from appa_flwr.protocol.refusals import REFUSALS, Refused
from appa_flwr.secure.masks import Member, last_round, total
from appa_flwr.secure.roster import public_key, read_roster, roster_file

UNIT = 2.0**-40  # sums of four are exact as floats


def key_of(name):
    return hashlib.sha256(name.encode()).digest()


def roster_of(*names, **swapped):
    """`swapped`: name -> whose key stands there instead."""
    keys = {name: public_key(key_of(swapped.get(name, name))) for name in names}
    return read_roster(roster_file(keys).encode())


class World:
    """Groups A to D with numbers and facts of their own, and a server that does with them what it likes."""

    def __init__(self, numbers=40, *, least=3, changes=9):
        self.roster = roster_of(*"ABCD")
        self.facts = {name: {} for name in "ABCD"}
        self.members = {name: self.member(name, self.roster, least=least, changes=changes) for name in "ABCD"}
        values = np.random.default_rng(5).uniform(-1, 1, (4, numbers))
        self.values = dict(zip("ABCD", np.rint(values / UNIT) * UNIT, strict=True))

    def member(self, name, roster, *, least=3, changes=9):
        return Member(
            name, key_of(name), roster, least=least, changes=changes, facts=lambda: transaction(self.facts[name])
        )

    def task(self, cohort="ABCD", number=1, *, request="answers", run="run"):
        return Task(run, number, tuple(cohort), request, self.roster.sha256)

    def mask(self, task, names=None):
        return {name: self.members[name].mask(task, self.values[name]) for name in names or task.cohort}

    def open(self, task, names=None):
        return {name: self.members[name].open(task) for name in names or task.cohort}

    def sum(self, cohort="ABCD", number=1, **more):
        task = self.task(cohort, number, **more)
        return total(task, self.mask(task), self.open(task))


@contextmanager
def transaction(facts):
    before = dict(facts)
    try:
        yield facts
    except Exception:
        facts.clear()
        facts.update(before)
        raise


@contextmanager
def refused(code):
    with pytest.raises(Refused) as caught:
        yield
    assert (caught.value.code, str(caught.value)) == (code, REFUSALS[code])


@pytest.mark.parametrize("cohort", ["ABCD", "DCA"])
def test_totals_are_the_sums_to_the_last_digit(cohort):
    world = World()
    assert np.array_equal(world.sum(cohort), sum(world.values[name] for name in cohort))


def test_words_by_hand():
    # A of A, B and C adds both pairs' masks, B takes that with A away; .5 is 2^51 and -1 is 2^64 - 2^52
    world, task = World(), World().task("ABC")
    info = task.digest

    def stream(secret, kind):
        # HKDF (RFC 5869) without salt: one block of 32 bytes
        key = hmac.digest(hmac.digest(bytes(32), secret, "sha256"), kind + info + b"\1", "sha256")
        return np.frombuffer(Cipher(algorithms.ChaCha20(key, bytes(16)), None).encryptor().update(bytes(16)), "<u8")

    def pair(one, other):
        public = X25519PublicKey.from_public_bytes(public_key(key_of(other)))
        return stream(X25519PrivateKey.from_private_bytes(key_of(one)).exchange(public), b"pair")

    numbers = np.array([2**51, 2**64 - 2**52], dtype=np.uint64)
    word_A = world.members["A"].mask(task, [0.5, -1.0])
    word_B = world.members["B"].mask(task, [0.5, -1.0])
    np.testing.assert_array_equal(word_A, numbers + stream(key_of("A"), b"own") + pair("A", "B") + pair("C", "A"))
    np.testing.assert_array_equal(word_B, numbers + stream(key_of("B"), b"own") - pair("A", "B") + pair("C", "B"))


def test_no_number_of_a_group_makes_its_part_an_error():
    # it would tell whose number it is: what is outside is cut, and no number is 0
    world = World()
    world.values = {name: np.array([0.5, np.nan, np.inf, -np.inf, 1.5]) for name in "ABC"}
    np.testing.assert_array_equal(world.sum("ABC"), [1.5, 0, 3, -3, 3])


def test_a_late_seed_after_a_sum_without_its_group_opens_nothing():
    # Attack: A, B and D open; C stays silent, so the rest sum again; then C's seed for the first sum, minus the second.
    world, first = World(), World().task()
    words, seeds = world.mask(first), world.open(first, "ABD")
    with refused(refusals.OTHER_COHORT):
        world.mask(world.task("ABD", 2))
    seeds |= world.open(first, "C")  # what was opened goes on over the same cohort, under new masks too
    one, two = total(first, words, seeds), world.sum("ABCD", 2)
    assert np.array_equal(one, two)
    assert not np.array_equal(words["C"], world.mask(world.task("ABCD", 3))["C"])


def test_a_drop_out_before_anything_is_opened_costs_a_round():
    world, first = World(), World().task()
    words = world.mask(first, "ABD")
    np.testing.assert_array_equal(world.sum("ABD", 2), sum(world.values[name] for name in "ABD"))
    words |= world.mask(first, "C")  # late
    with refused(refusals.NOT_LAST):
        world.open(first, "A")
    with pytest.raises(UserError, match="wrong part"):
        total(first, words, {name: bytes(32) for name in "ABD"} | world.open(first, "C"))


def test_two_runs_at_once_open_a_request_over_one_cohort():
    world = World()
    one, two = world.task(), world.task("ABD", run="other run")
    world.mask(one)
    world.mask(two)
    world.open(one)
    with refused(refusals.OTHER_COHORT):
        world.open(two, "A")


def test_another_key_under_a_group_s_name_makes_another_cohort():
    # Attack: the owner of C gives way to the server, under C's name; the two sums differ by C's numbers.
    world = World()
    world.sum("ABC")
    swapped = roster_of(*"ABCD", C="the server")
    with refused(refusals.OTHER_COHORT):
        world.member("A", swapped).mask(replace(world.task("ABC", 2), roster=swapped.sha256), world.values["A"])
    larger = roster_of(*"ABCDE")
    world.member("A", larger).mask(replace(world.task("ABC", 2), roster=larger.sha256), world.values["A"])


def test_rounds_of_a_run_rise():
    # Attack: other numbers under the same masks would give their difference away.
    world = World()
    world.mask(world.task(number=3))
    for number in (3, 2, 0, -1):
        with refused(refusals.MASKED_BEFORE):
            world.mask(world.task(number=number, request="others"), "A")
    world.mask(world.task(number=1, run="other run"), "A")
    assert last_round(world.facts["A"], "run") == 3
    assert last_round(world.facts["A"], "third run") == 0


def test_only_the_last_task_is_opened_and_that_as_often_as_asked():
    world, first, second = World(), World().task(), World().task(number=2, request="others")
    world.mask(first)
    assert world.open(first) == world.open(first)
    with refused(refusals.NOT_LAST):
        world.open(second, "A")
    world.mask(second, "A")
    with refused(refusals.NOT_LAST):
        world.open(first, "A")
    assert world.open(second, "A")["A"] != world.open(first, "B")["B"]


def test_a_run_opens_as_many_cohorts_as_the_owner_lets_it():
    world = World(changes=1)
    world.sum("ABCD", 1)
    world.sum("BCA", 2, request="second")
    with refused(refusals.CHANGES):
        world.mask(world.task("ABD", 3, request="third"))
    world.sum("ABC", 4, request="fourth")
    world.sum("ABCD", 5, request="fifth")
    world.sum("ABD", 1, request="third", run="other run")


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"cohort": ("B", "C", "D")}, refusals.STRANGERS),  # without itself
        ({"cohort": ("A", "B", "C", "E")}, refusals.STRANGERS),  # invented
        ({"cohort": ("A", "B", "C", "C")}, refusals.STRANGERS),  # twice
        ({"cohort": ("A", "B", "C")}, refusals.FEW),
        ({"roster": "0" * 64}, refusals.OTHER_ROSTER),
    ],
)
def test_a_sum_among_others_than_the_owner_agreed_to_is_refused(changed, reason):
    world = World(least=4)
    task = replace(world.task(), **changed)
    for action in (lambda member: member.mask(task, np.zeros(3)), lambda member: member.open(task)):
        with refused(reason):
            action(world.members["A"])
    assert not world.facts["A"]


def test_sums_are_over_three_groups_whatever_a_policy_says():
    with refused(refusals.FEW):
        World(least=0).sum("AB")


def test_a_group_whose_key_does_not_stand_in_the_roster_takes_no_part():
    with refused(refusals.NOT_ON_ROSTER):
        World().member("A", roster_of(*"ABCD", A="the server"))
    with refused(refusals.NOT_ON_ROSTER):
        World().member("E", roster_of(*"ABCD"))


CHANGED = {"run": {"run": "other"}, "round": {"round": 2}, "request": {"request": "others"},
           "cohort": {"cohort": ("A", "C", "D")}, "order": {"cohort": ("D", "C", "B", "A")}}  # fmt: skip


@pytest.mark.parametrize("what", [*CHANGED, "roster"])
def test_groups_that_are_asked_for_different_sums_give_noise(what):
    world, task = World(), World().task()
    other, changed = world.members["C"], replace(task, **CHANGED.get(what, {}))
    if what == "roster":
        roster = roster_of(*"ABCDE")
        other, changed = world.member("C", roster), replace(task, roster=roster.sha256)
    words = world.mask(task, "ABD") | {"C": other.mask(changed, world.values["C"])}
    seeds = world.open(task, "ABD") | {"C": other.open(changed)}
    with pytest.raises(UserError, match="asked for something else"):
        total(task, words, seeds)


def test_a_total_without_a_part_or_with_a_wrong_one_is_one_line():
    world, task = World(), World().task()
    words, seeds = world.mask(task), world.open(task)
    garbage = np.random.default_rng(0).integers(0, 2**64, 40, dtype=np.uint64)
    wrong = [
        (words | {"B": garbage}, seeds, "wrong part"),
        (words, seeds | {"B": bytes(32)}, "wrong part"),
        (words | {"B": words["B"][:-1]}, seeds, "several sizes"),
        ({name: words[name] for name in "ABC"}, seeds, "missing"),
        (words, {name: seeds[name] for name in "ABC"}, "missing"),
    ]
    for parts, opened, says in wrong:
        with pytest.raises(UserError, match=f"round 1 of run run over A, B, C, D: .*{says}"):
            total(task, parts, opened)


def test_a_log_of_a_member_holds_no_key():
    assert repr(key_of("A")) not in repr(World().members["A"])


def test_nothing_leaves_that_could_not_be_written_down():
    world, task = World(), World().task()
    world.mask(task)

    @contextmanager
    def full_disk():
        yield dict(world.facts["A"])
        raise UserError("ledger: cannot be written")

    member = Member("A", key_of("A"), world.roster, least=3, changes=2, facts=full_disk)
    for action in (lambda: member.open(task), lambda: member.mask(replace(task, round=2), np.zeros(3))):
        with pytest.raises(UserError, match="cannot be written"):
            action()
