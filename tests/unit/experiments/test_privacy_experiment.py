"""The attack on a group's targets finds them where nothing keeps it from doing so, and only there."""

from __future__ import annotations

import numpy as np
import pytest

from appa_flwr.owner.owner_policy import OwnerPolicy
from experiments import attacks, privacy
from experiments.study import true_targets

PEOPLE = true_targets(3, num_questions=15, num_groups=4)
TARGET_QK = PEOPLE.target_GQK[0]
KNOWN = attacks.error(PEOPLE.target_GQK[1:].mean(0), TARGET_QK)


def after(scores, **owner_policy):
    return attacks.error(privacy.attack(OwnerPolicy(**owner_policy), PEOPLE, scores=scores, seed=0), TARGET_QK)


def test_as_many_scores_as_options_tell_all():
    assert after(PEOPLE.option_QK.shape[1]) < 0.005 < after(1) < KNOWN


def test_an_allowance_of_one_score_keeps_what_one_score_tells():
    assert after(40, scores_per_question=1) == pytest.approx(after(1), abs=1e-12)


def test_noise_is_averaged_away_and_rounding_leaves_its_step():
    few, many = (after(scores, reward_noise=0.1) for scores in (8, 128))
    assert many < few / 2
    assert 0.01 < after(16, reward_decimals=1) < 0.1


def test_the_error_is_a_share_of_people():
    assert attacks.error(np.array([[1.0, 0.0]]), np.array([[0.75, 0.25]])) == 0.25


@pytest.mark.long
def test_the_whole_study_writes_its_tables(tmp_path, capsys):
    privacy.main(seeds=2, visits=5, questions=6, groups=3, attacks=0, output=tmp_path)
    learned, price = ((tmp_path / f"{name}.md").read_text() for name in ("learned", "price"))
    assert all(f"| {name} |" in learned for name in (*privacy.OWNER_POLICIES, *privacy.GUESSES))
    assert [line.split("|")[1].strip() for line in price.splitlines()[2:]] == [
        *("reward-decimals = 2", "reward-decimals = 1", "reward-noise = 0.05", "reward-noise = 0.2")
    ]
    printed = capsys.readouterr().out
    assert learned in printed
    assert price in printed


def test_the_attacks_table_has_the_spread_over_groups(monkeypatch, tmp_path):
    """Errors of .1 and .3 without limits: mean .2, standard deviation .1, of all groups there are."""

    class Read:
        name = "read"

        def error(self, owner_policy, *, seed):
            return 0.1 + 0.2 * seed if owner_policy == attacks.NOTHING_LIMITED else 0.5

        def guess(self, *, seed):
            return 0.5

    monkeypatch.setattr(privacy, "ATTACKS", [Read()])
    privacy.study_attacks(2, output=tmp_path)
    row = (tmp_path / "attacks.md").read_text().splitlines()[2]
    assert row == "| read | 0.200 ± 0.100 | 0.500 ± 0.000 | 0.500 ± 0.000 |"


@pytest.mark.parametrize(
    "name",
    [
        "train: one question",
        *(pytest.param(f"{phase}: one question", marks=pytest.mark.long) for phase in ("evaluate", "targets")),
    ],
)
def test_a_catalogue_of_one_question_told_its_answer_and_now_tells_nothing(name):
    """The attack that found the hole, by each kind of message."""
    (attack,) = [attack for attack in attacks.ATTACKS if attack.name.startswith(name)]
    guess = attack.guess(seed=1)
    assert attack.error(attacks.NOTHING_LIMITED, seed=1) < 1e-4 < 0.1 < guess
    assert attack.error(OwnerPolicy(), seed=1) == guess


def test_an_attack_that_hears_what_it_does_not_want_finds_nothing():
    """The search for answers is one: replies of other answers lead to these."""
    answer_NK = np.array([[0.2, 0.5, 0.3]])
    linear = np.array([[1.0, 2.0, 0.5], [0.3, 1.0, 4.0]])
    got_R = (answer_NK @ linear.T).ravel()
    found_NK = attacks.found(lambda a_NK: (a_NK @ linear.T).ravel(), got_R, number=1, blur=0.0, starts=1)
    np.testing.assert_allclose(found_NK, answer_NK, atol=1e-4)
