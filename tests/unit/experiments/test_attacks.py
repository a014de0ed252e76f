"""The attacks of `experiments.privacy`, small: what reads answers, what finds no more than a guess, what is refused."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial

import numpy as np
import pandas as pd
import pytest

from experiments import privacy

READ, GUESS, REFUSED = "read", "guess", "refused"
WEAK = partial(privacy.by_training, rounds=1, strategy="fedadam", steps=1)
VALIDATION = partial(privacy.by_errors, number=1, turns=10, kind="validation")
SCORES = partial(privacy.by_errors, number=1, turns=5, kind="scores")
FEW_SCORES = partial(privacy.by_errors, number=10, turns=4, kind="scores")
OWN = partial(privacy.by_own_scores, option_RN=privacy.RANDOM[:10])
# Name -> answered questions, attack; plain with no limits, plain by the owner's defaults, the same under secure sums.
EXPECTED = {
    "one weak step": (1, WEAK, (REFUSED, REFUSED, GUESS, REFUSED)),
    "a training round": (2, partial(privacy.by_training, rounds=1), (GUESS, REFUSED, GUESS, REFUSED)),
    "errors of one answer": (11, VALIDATION, (READ, REFUSED, GUESS, REFUSED)),
    "scores of one answer": (11, SCORES, (READ, REFUSED, GUESS, REFUSED)),
    "few scores of ten answers": (20, FEW_SCORES, (GUESS,) * 4),  # as many as training-replies = 40 allows
    "rewards": (10, privacy.by_rewards, (READ, READ, GUESS, GUESS)),
    "a second sum": (10, partial(privacy.by_rewards, change=0.0), (READ, READ, REFUSED, REFUSED)),
    "another second sum": (10, partial(privacy.by_rewards, change=1e-3), (READ,) * 4),
    "own scores of one question": (
        10,
        partial(privacy.by_own_scores, option_RN=privacy.ALONE),
        (READ, REFUSED, READ, REFUSED),
    ),
    "few own scores": (10, OWN, (GUESS,) * 4),
    "a second reference": (10, partial(privacy.by_terms, iterations=3, lie="reference"), (REFUSED,) * 4),
    "withheld histories": (10, partial(privacy.by_terms, iterations=3, lie="history"), (REFUSED,) * 4),
}


@pytest.fixture(autouse=True)
def _fewer_rounds(monkeypatch) -> Iterator[None]:
    """The study also silences the log of refusals, which other tests read."""
    monkeypatch.setattr(privacy, "MADE_UP", 40)
    level = logging.getLogger("appa").level
    yield
    logging.getLogger("appa").setLevel(level)


def verdict(distance: float, uniform: float) -> str:
    if np.isnan(distance):
        return REFUSED
    return READ if distance < 0.3 * uniform else GUESS if distance > 0.45 * uniform else f"{distance / uniform:.2f}"


@pytest.mark.parametrize("name", EXPECTED)
def test_an_attack_reads_what_it_may_and_nothing_else(monkeypatch, name):
    number, read, expected = EXPECTED[name]
    monkeypatch.setattr(privacy, "ATTACKS", {name: (number, read)})
    distances = privacy.learned((name,), 0)
    verdicts = tuple(verdict(distances[column], distances[privacy.UNIFORM]) for column in privacy.COLUMNS)
    assert verdicts == expected


def test_the_table_says_what_was_refused_and_reads_of_the_worst_off_group(monkeypatch, tmp_path):
    monkeypatch.setattr(privacy, "ATTACKS", {"terms": (10, partial(privacy.by_terms, iterations=12))})
    privacy.main(seeds=1, output=tmp_path)
    distances = pd.read_csv(tmp_path / "privacy.csv").iloc[0]
    row = [cell.strip() for cell in (tmp_path / "privacy.md").read_text().splitlines()[2].strip("|").split("|")]
    sums = [f"{distances[column]:.3f}" for column in (*privacy.COLUMNS[2:], privacy.UNIFORM)]
    assert row == ["terms", REFUSED, REFUSED, *sums]
    assert distances["secure, owner's defaults"] < 0.7 * distances[privacy.UNIFORM]


@pytest.mark.parametrize(
    ("name", "policy"), [("another second sum", {"cohort-changes": 0}), ("few own scores", {"own-score": 0})]
)
def test_an_owner_can_stop_an_attack_that_the_defaults_allow(monkeypatch, name, policy):
    monkeypatch.setattr(privacy, "ATTACKS", {name: EXPECTED[name][:2]})
    assert not np.isnan(privacy.learned((name,), 0)["secure, owner's defaults"])
    monkeypatch.setitem(privacy.POLICIES, "owner's defaults", policy)
    assert np.isnan(privacy.learned((name,), 0)["secure, owner's defaults"])


def test_as_many_scores_as_the_defaults_allow_tell_ten_answers(monkeypatch):
    many = partial(privacy.by_errors, number=10, turns=20, kind="scores")
    monkeypatch.setattr(privacy, "ATTACKS", {"many scores": (20, many)})
    distances = privacy.learned(
        ("many scores",), 1
    )  # with seed 0 the search ends beside them: a test's network is small
    assert distances["plain, owner's defaults"] < 0.03
    assert distances["secure, owner's defaults"] > 0.6 * distances[privacy.UNIFORM]
