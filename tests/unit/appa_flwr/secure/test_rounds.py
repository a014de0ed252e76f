"""Whole rounds in this process: sums under all drop-outs, what a lying server is refused, and what it sees."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appa_flwr.core.errors import UserError
from appa_flwr.secure import member as member_module
from appa_flwr.secure.fixed_point import decode, encode
from appa_flwr.secure.member import pair_secrets
from appa_flwr.secure.messages import Unmasking
from appa_flwr.secure.primitives import public_key
from appa_flwr.secure.refusals import Refused
from appa_flwr.secure.roster import read_roster, roster_file
from appa_flwr.secure.summing import TooFew, unmasking, usable
from tests.secure_rounds import SESSION, Round, key_of, member, pairs_of, roster_of


def numbers(groups, count=5, seed=0):
    return np.random.default_rng(seed).uniform(-1, 1, size=(groups, count))


def names_at(run, places):
    return {run.roster.names[place] for place in places}


@settings(max_examples=40, deadline=None)
@given(st.integers(3, 9), st.data())
def test_the_sum_is_that_of_those_who_answered_whoever_drops_out_when(groups, data):
    run = Round(numbers(groups))
    gone = data.draw(st.sets(st.integers(0, groups - 1)), label="before masking")
    left = [place for place in range(groups) if place not in gone]
    late = data.draw(st.sets(st.sampled_from(left)) if left else st.just(set()), label="before unmasking")
    run.mask(without=names_at(run, gone))
    needed = max(3, -(-2 * groups // 3))
    if len(left) < needed:
        with pytest.raises(TooFew, match="are needed"):
            run.unmask()
        return
    run.unmask(without=names_at(run, late))
    if len(left) - len(late) < -(-2 * groups // 3):
        with pytest.raises(TooFew, match="came back"):
            run.total()
        return
    found = decode(run.total(), groups=len(left), least=-1, most=1)
    assert np.abs(found - run.x_GN[left].sum(axis=0)).max() <= len(left) * 2**-41 + 1e-15


@pytest.mark.parametrize("groups", [65, 256])
def test_the_sum_on_a_graph_with_drop_outs_at_both_steps(groups):
    run = Round(numbers(groups, 3))
    drops = np.random.default_rng(1).permutation(groups)[: groups // 10]
    gone, late = set(drops[::2].tolist()), set(drops[1::2].tolist())
    run.mask(without=names_at(run, gone))
    run.unmask(without=names_at(run, late))
    left = [place for place in range(groups) if place not in gone]
    np.testing.assert_allclose(decode(run.total(), groups=len(left)), run.x_GN[left].sum(axis=0), atol=2e-9)


def test_another_process_of_a_group_can_unmask_what_the_first_has_masked():
    run = Round(numbers(4))
    memories = {name: {} for name in run.roster.names}
    run.members = {name: member(4, name, memories[name]) for name in run.roster.names}
    run.mask()
    run.members = {name: member(4, name, memories[name]) for name in run.roster.names}
    run.unmask()
    np.testing.assert_allclose(decode(run.total(), groups=4), run.x_GN.sum(axis=0), atol=2e-9)


def test_a_group_may_prepare_again_and_the_newest_is_used():
    run = Round(numbers(3 + 1))
    gone = run.roster.names[0]
    run.prepared[gone] = run.members[gone].prepare(SESSION, [1])[0]
    run.mask(without={gone})
    run.unmask()
    np.testing.assert_allclose(decode(run.total(), groups=3), run.x_GN[1:].sum(axis=0), atol=2e-9)


# --- what a group refuses -------------------------------------------------------------------------


def refusal(call):
    with pytest.raises(Refused) as caught:
        call()
    return caught.value.name


def test_a_key_that_is_not_in_the_roster_masks_nothing():
    assert refusal(lambda: pair_secrets("g0000", key_of("somebody"), roster_of(4))) == "not-on-roster"
    assert refusal(lambda: pair_secrets("g0009", key_of("g0009"), roster_of(4))) == "not-on-roster"


def test_a_round_is_masked_once():
    run = Round(numbers(4))
    name, words = run.roster.names[0], encode(run.x_GN[0])
    run.members[name].mask(run.task, words)
    others = [run.task, replace(run.task, request="other answers"), replace(run.task, cohort=run.task.cohort[:3])]
    for task in others:
        assert refusal(lambda task=task: run.members[name].mask(task, words)) == "masked-before"
    run.members[name].mask(replace(run.task, round=2), words)


@pytest.mark.parametrize(
    ("cohort", "why"),
    [
        (("g0001", "g0002", "g0003", "g0004"), "strangers"),
        (("g0000", "g0001", "g0002", "g0003", "invented"), "strangers"),
        (("g0000", "g0001", "g0002"), "few"),
        (("g0000", "g0000", "g0000", "g0001", "g0002"), "few"),
    ],
)
def test_a_cohort_that_would_open_a_part_is_refused(cohort, why):
    run = Round(numbers(5))
    ours = run.members["g0000"]
    assert refusal(lambda: ours.mask(replace(run.task, cohort=cohort), encode(run.x_GN[0]))) == why
    ours.mask(run.task, encode(run.x_GN[0]))
    if why == "few":  # the same who are said to have answered
        assert refusal(lambda: ours.unmask(run.task, Unmasking(cohort, {}))) == why


def test_an_owner_may_ask_for_a_larger_cohort():
    run = Round(numbers(6))
    ours = member(6, "g0000", least_cohort=5)
    four = run.task.cohort[:4]
    for cohort in (four, (*four, "g0000")):
        assert refusal(lambda cohort=cohort: ours.mask(replace(run.task, cohort=cohort), encode(run.x_GN[0]))) == "few"


def test_a_group_keeps_to_one_view_and_to_what_it_has_masked():
    run = Round(numbers(4))
    run.mask()
    requests = unmasking(run.roster, run.task, run.prepared, run.masked)
    name = run.roster.names[0]
    ours = run.members[name]
    other = replace(run.task, request="other answers")
    assert refusal(lambda: ours.unmask(other, requests[name])) == "not-answered"
    first = ours.unmask(run.task, requests[name])
    assert first == ours.unmask(run.task, requests[name])
    fewer = Unmasking(requests[name].answered[:3], {**requests[name].boxes, "g0003": run.prepared["g0003"].boxes[name]})
    assert refusal(lambda: ours.unmask(run.task, fewer)) == "other-view"
    never = member(4, name)
    assert refusal(lambda: never.unmask(run.task, requests[name])) == "not-answered"
    without_it = Unmasking(requests[name].answered[1:], requests[name].boxes)
    assert refusal(lambda: ours.unmask(run.task, without_it)) == "strangers"


def test_no_group_gives_both_secrets_of_another_whatever_boxes_it_is_sent():
    run = Round(numbers(6))
    run.mask()
    name = run.roster.names[1]
    view = run.roster.names[:4]  # the server lies: the last two have answered too
    both = {}
    for kind in (run.masked, run.prepared):
        boxes = {owner: kind[owner].boxes[name] for owner in run.roster.names}
        both[id(kind)] = run.members[name].unmask(run.task, Unmasking(view, boxes))
    by_answer, by_absence = both[id(run.masked)], both[id(run.prepared)]
    assert set(by_answer) == set(view)
    assert set(by_absence) == set(run.roster.names[4:])


def test_a_box_of_another_round_group_or_kind_does_not_open():
    run, earlier = Round(numbers(4), number=2), Round(numbers(4), number=1)
    run.mask()
    earlier.mask()
    name, other = run.roster.names[:2]
    ours = run.members[name]
    boxes = {
        name: run.masked[name].boxes[other],  # somebody else's
        other: earlier.masked[other].boxes[name],  # another round's
        "g0002": run.prepared["g0002"].boxes[name],  # another kind
        "g0003": run.masked["g0003"].boxes[name],
    }
    assert set(ours.unmask(run.task, Unmasking(run.roster.names, boxes))) == {"g0003"}


def test_swapped_keys_give_noise_and_no_part():
    # a server that has a group mask with keys of its own: the roster's hash is another, and no box opens
    keys = {name: public_key(key_of(name)) for name in roster_of(4).names}
    swapped = read_roster(roster_file({**keys, "g0003": public_key(key_of("server"))}).encode())
    assert swapped.sha256 != roster_of(4).sha256
    assert pair_secrets("g0000", key_of("g0000"), swapped)["g0001"] == pairs_of(4, "g0000")["g0001"]
    mine = member_module.Member("g0000", pair_secrets("g0000", key_of("g0000"), swapped), swapped,
                                least_cohort=3, remember={}.get)  # fmt: skip
    assert mine._keys("g0001", SESSION, 1) != member(4, "g0000")._keys("g0001", SESSION, 1)


# --- what the server sees -------------------------------------------------------------------------


def test_a_wrong_share_is_found_out():
    run = Round(numbers(4))
    run.mask()
    run.unmask()
    run.shares["g0000"]["g0001"] = bytes(33)
    with pytest.raises(UserError, match=r"secure sum: (g0001: no shares of one secret|the total is none)"):
        decode(run.total(), groups=4, least=-1, most=1)


def test_replies_that_do_not_fit_the_task_are_told():
    run = Round(numbers(3))
    run.mask()
    name = run.roster.names[0]
    good = run.masked[name]
    assert usable(run.roster, run.task, name, good)
    assert not usable(run.roster, run.task, "g0009", good)
    assert not usable(run.roster, run.task, name, replace(good, words=good.words[1:]))
    assert not usable(run.roster, run.task, name, replace(good, words=good.words.view(np.int64)))
    assert not usable(run.roster, run.task, name, replace(good, boxes={}))
    with pytest.raises(ValueError, match="words for a task"):
        run.members[name].mask(replace(run.task, round=9, count=7), encode(run.x_GN[0]))
