"""The attacks of `experiments.privacy`, small: what reads answers, what finds no more than a guess, what is refused."""

import logging
from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import get_args

import numpy as np
import pandas as pd
import pytest

from appa_flwr.owner.owner_policy import Leaving
from experiments import likeliest, privacy

READ, GUESS, REFUSED = "read", "guess", "refused"
NO_LIMITS = {"may-leave": get_args(Leaving), "least-answers": 1, "training-replies": 0, "own-score": 10**6}
VALIDATION = partial(privacy.by_errors, number=1, turns=10, kind="validation")
SCORES = partial(privacy.by_errors, number=1, turns=5, kind="scores")
FEW_SCORES = partial(privacy.by_errors, number=10, turns=4, kind="scores")
OWN = partial(privacy.by_own_scores, option_RN=privacy.RANDOM[:10])
# Name -> answered questions, attack; what it finds by the owner's defaults and, if that differs, without limits:
# in plain replies, in secure sums.
EXPECTED = {
    "a training round": (2, partial(privacy.by_training, rounds=1), ((REFUSED, GUESS), (REFUSED, GUESS))),
    "errors of one answer": (11, VALIDATION, ((REFUSED, READ), (REFUSED, GUESS))),
    "scores of one answer": (11, SCORES, ((REFUSED, READ), (REFUSED, GUESS))),
    "few scores of ten answers": (20, FEW_SCORES, ((GUESS,), (GUESS,))),  # as many as training-replies = 40 allows
    "votes of copies": (10, privacy.by_votes, ((READ,), (READ,))),
    "rewards of a question": (10, privacy.by_sums_of_rewards, ((READ,), (READ,))),
    "rewards": (10, privacy.by_rewards, ((READ,), (GUESS,))),
    "a second sum": (10, partial(privacy.by_rewards, change=0.0), ((READ,), (REFUSED,))),
    "another second sum": (10, partial(privacy.by_rewards, change=1e-3), ((READ,), (READ,))),
    "few own scores": (10, OWN, ((GUESS,), (GUESS,))),
}


@pytest.fixture(autouse=True)
def _fewer_rounds(monkeypatch) -> Iterator[None]:
    """The study also silences the log of refusals, which other tests read."""
    monkeypatch.setattr(privacy, "MADE_UP", 40)
    monkeypatch.setattr(likeliest, "STARTS", 6)
    level = logging.getLogger("appa").level
    yield
    logging.getLogger("appa").setLevel(level)


def verdict(distance: float, uniform: float) -> str:
    if np.isnan(distance):
        return REFUSED
    return READ if distance < 0.3 * uniform else GUESS if distance > 0.45 * uniform else f"{distance / uniform:.2f}"


@pytest.mark.parametrize("name", EXPECTED)
def test_an_attack_reads_what_it_may_and_nothing_else(name):
    number, read, expected = EXPECTED[name]
    uniform = privacy.learned(number, privacy.guess, sums="plain", seed=0, policy={})
    for sums, verdicts in zip(privacy.SUMS, expected, strict=True):
        for policy, right in zip(({}, NO_LIMITS), verdicts, strict=False):
            distance = privacy.learned(number, read, sums=sums, seed=0, policy=policy)
            assert verdict(distance, uniform) == right, (sums, policy)


def test_the_table_says_what_was_refused_and_reads_of_the_worst_off_group(monkeypatch, tmp_path):
    monkeypatch.setattr(privacy, "ATTACKS", {"terms": (10, partial(privacy.by_terms, iterations=12))})
    privacy.main(seeds=1, output=tmp_path)
    distances = pd.read_csv(tmp_path / "privacy.csv").iloc[0]
    row = [cell.strip() for cell in (tmp_path / "privacy.md").read_text().splitlines()[2].strip("|").split("|")]
    assert row == ["terms", REFUSED, f"{distances['secure']:.3f}", f"{distances[privacy.UNIFORM]:.3f}"]
    assert distances["secure"] < 0.7 * distances[privacy.UNIFORM]


@pytest.mark.parametrize(
    ("name", "policy"), [("another second sum", {"cohort-changes": 0}), ("few own scores", {"own-score": 0})]
)
def test_an_owner_can_stop_an_attack_that_the_defaults_allow(name, policy):
    number, read, _ = EXPECTED[name]
    assert np.isnan(privacy.learned(number, read, sums="secure", seed=0, policy=policy))


@pytest.mark.long
def test_as_many_scores_as_the_defaults_allow_tell_ten_answers():
    many = partial(privacy.by_errors, number=10, turns=20, kind="scores")
    # A test's network is small: the search ends nearer to the answers than a guess, but not always at them.
    learned = partial(privacy.learned, 20, policy={})
    read, guessed = ([learned(attack, seed=seed, sums="plain") for seed in (0, 3)] for attack in (many, privacy.guess))
    assert np.mean(read) < 0.7 * np.mean(guessed)
    assert learned(many, seed=0, sums="secure") > 0.6 * guessed[0]


def test_the_mean_of_many_noisy_steps_tells_more_than_one():
    rng = np.random.default_rng(0)
    known_SNK, secret_NK = rng.dirichlet(np.ones(3), size=(100, 2)), rng.dirichlet(np.ones(3), size=2)
    slope_MP = rng.normal(size=(6, 500))
    clean_SP, clean_P = known_SNK.reshape(100, 6) @ slope_MP, secret_NK.ravel() @ slope_MP
    np.testing.assert_allclose(likeliest.by_steps(known_SNK, clean_SP, clean_P, rounds=1), secret_NK, atol=1e-3)
    noisy_SP = clean_SP + rng.normal(scale=0.5, size=clean_SP.shape)
    off = {1: 0.0, 100: 0.0}
    for noise_P, rounds in product(rng.normal(scale=0.5, size=(10, 500)), off):
        step_P = clean_P + noise_P / np.sqrt(rounds)
        off[rounds] += np.abs(likeliest.by_steps(known_SNK, noisy_SP, step_P, rounds=rounds) - secret_NK).mean() / 10
    assert off[100] < 0.5 * off[1]
    assert off[1] < np.abs(1 / 3 - secret_NK).mean()
