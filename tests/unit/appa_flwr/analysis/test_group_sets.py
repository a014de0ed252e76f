"""The search for one group against a bloc finds a planted one, and believes only questions that it has not seen."""

from __future__ import annotations

import numpy as np
import pytest

from appa_flwr.analysis import group_sets
from appa_flwr.analysis.group_sets import search
from appa_flwr.core.errors import UserError
from appa_flwr.survey.types import Question, Survey

QUESTIONS = 100


def survey(**shares_Q: np.ndarray) -> Survey:
    """Questions of two options; each group's share of the first, NaN where it was not asked."""
    questions = tuple(Question(f"q{n}", f"What of {n}?", ("Yes", "No")) for n in range(QUESTIONS))
    answers = {
        group: {f"q{n}": np.array([share, 1 - share]) for n, share in enumerate(given) if not np.isnan(share)}
        for group, given in shares_Q.items()
    }
    return Survey(questions, answers)


def planted() -> Survey:
    """Four of one mind, one that wants the opposite, and three of minds of their own."""
    rng = np.random.default_rng(0)
    mind_Q = rng.uniform(0.1, 0.9, QUESTIONS)
    bloc = {f"bloc {n}": np.clip(mind_Q + rng.normal(0, 0.02, QUESTIONS), 0.01, 0.99) for n in range(4)}
    return survey(alone=1 - mind_Q, **bloc, **{f"own {n}": rng.uniform(0.3, 0.7, QUESTIONS) for n in range(3)})


def test_a_planted_outlier_is_found_with_its_bloc():
    first, *_ = search(planted(), metric="js", size=5, most=3)
    assert (first.outlier, set(first.others)) == ("alone", {f"bloc {n}" for n in range(4)})
    assert first.gap > 0.05
    assert first.searched_gap > 0.05
    assert first.questions == QUESTIONS // 2


def test_each_set_has_another_outlier():
    found = search(planted(), metric="wasserstein", size=3, most=4)
    assert len({one.outlier for one in found}) == 4


def test_what_was_chosen_by_luck_shows_on_the_other_half():
    """Groups that differ by chance alone: the best of many sets has a gap where it was searched, and less elsewhere."""
    rng = np.random.default_rng(1)
    chance = survey(**{f"group {n}": rng.uniform(0, 1, QUESTIONS) for n in range(12)})
    found = [one for seed in range(3) for one in search(chance, metric="js", size=4, most=2, seed=seed)]
    assert np.mean([one.searched_gap - one.gap for one in found]) > 0


def test_groups_with_too_little_in_common_make_no_set(monkeypatch):
    whole = planted()
    with pytest.raises(UserError, match="js-distance"):
        search(whole, metric="js-distance", size=3, most=1)
    with pytest.raises(UserError, match="at least 3"):
        search(whole, metric="js", size=2, most=1)
    with pytest.raises(UserError, match="no 9 groups"):
        search(whole, metric="js", size=9, most=1)
    monkeypatch.setattr(group_sets, "LEAST_COMMON", QUESTIONS)
    with pytest.raises(UserError, match="in common"):
        search(whole, metric="js", size=3, most=1)
