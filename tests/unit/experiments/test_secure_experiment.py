"""What the attacks on secure sums find where the page says that they find something, and nowhere else."""

from __future__ import annotations

import pytest

from experiments import secure
from experiments.attacks import ATTACKS


@pytest.fixture(scope="module")
def uniform():
    return next(one for one in ATTACKS if one.name == secure.SCORED).guess(seed=0)


def test_a_second_sum_without_a_group_tells_its_answers_unless_its_owner_asks_for_all(uniform):
    assert secure.in_sums(secure.SCORED, 0, difference=True) < 0.05 < uniform
    assert secure.in_sums(secure.SCORED, 0, difference=True, least=secure.GROUPS) == pytest.approx(uniform)


def test_swapped_keys_and_a_late_reply_tell_nothing(uniform):
    assert secure.in_sums(secure.SCORED, 0, lie=secure.swapped) == pytest.approx(uniform)
    assert secure.late(0) > 0.2


def test_three_groups_rewards_are_known_without_names_and_six_groups_are_not():
    assert secure.as_a_set(3, 0, answers=3)[secure.SECURE] < 1e-6
    assert secure.as_a_set(6, 0, answers=3)[secure.SECURE] > 0.01
