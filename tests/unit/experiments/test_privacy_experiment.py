"""The attack on a group's targets finds them where nothing keeps it from doing so, and only there."""

from __future__ import annotations

import numpy as np
import pytest

from appa_flwr.owner.policy import Policy
from experiments import privacy
from experiments.stand_in import population

PEOPLE = population(3, num_questions=15, num_groups=4)
TARGET_QK = PEOPLE.target_GQK[0]
KNOWN = privacy.error(PEOPLE.target_GQK[1:].mean(0), TARGET_QK)


def after(scores, **policy):
    return privacy.error(privacy.attack(Policy(**policy), PEOPLE, scores=scores, seed=0), TARGET_QK)


def test_as_many_scores_as_options_tell_all():
    assert after(PEOPLE.option_QK.shape[1]) < 0.005 < after(1) < KNOWN


def test_a_purse_of_one_score_keeps_what_one_score_tells():
    assert after(40, scores_per_question=1) == pytest.approx(after(1), abs=1e-12)


def test_noise_is_averaged_away_and_rounding_leaves_its_step():
    few, many = (after(scores, reward_noise=0.1) for scores in (8, 512))
    assert many < few / 2
    assert 0.01 < after(64, reward_decimals=1) < 0.1


def test_the_error_is_a_share_of_people():
    assert privacy.error(np.array([[1.0, 0.0]]), np.array([[0.75, 0.25]])) == 0.25


def test_the_whole_study_writes_its_tables(tmp_path, capsys):
    privacy.main(seeds=2, iterations=5, questions=6, groups=3, output=tmp_path)
    text = (tmp_path / "privacy.md").read_text()
    assert all(f"| {name} |" in text for name in privacy.POLICIES)
    assert text.strip() in capsys.readouterr().out
