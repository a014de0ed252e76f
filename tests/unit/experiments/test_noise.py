"""Noise that adds up over groups: as much in the sum as the promise takes, and shared evenly."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import norm

from experiments import noise

DELTA = 1e-5


def test_the_noise_gives_its_epsilon_by_the_integral_of_the_privacy_loss():
    """A slow reference: delta is the expected part of the loss above epsilon, between Gaussians 2 / noise apart."""
    for loss, iterations in ((8.0, 1), (8.0, 50), (30.0, 188)):
        apart = 2 * math.sqrt(iterations) / noise.multiplier(loss, iterations)
        x = np.linspace(-40, 40 + apart, 400_001)
        excess = np.maximum(norm.pdf(x, apart) - np.exp(loss) * norm.pdf(x), 0.0)
        assert np.trapezoid(excess, x) == pytest.approx(DELTA, rel=1e-3)


def test_the_shares_of_the_groups_add_up_to_the_noise_of_one_sum():
    groups, answers, iterations = 16, 20_000, 4
    reward_GJ = np.full((groups, answers), 0.5)
    sent_GJ = noise.noisy(8.0, iterations=iterations, seed=0)(reward_GJ)
    share_GJ = sent_GJ - reward_GJ
    of_sum = noise.multiplier(8.0, iterations) * math.sqrt(answers) / 2
    assert share_GJ.sum(axis=0).std() == pytest.approx(of_sum, rel=0.02)
    np.testing.assert_allclose(share_GJ.std(axis=1), of_sum / 4, rtol=0.03)
    assert noise.noisy(noise.NONE, iterations=iterations, seed=0) is None


def test_noise_takes_most_of_what_a_rule_wins_for_few_groups():
    def min_as(rule, loss):
        return noise.scores((8, rule, loss), 0, visits=600, num_questions=12)["min_as"]

    start = min_as(noise.START, noise.NONE)
    without, with_noise = min_as("mix", noise.NONE) - start, min_as("mix", 8.0) - start
    assert without > 0.01
    assert with_noise < without / 2


def test_the_table_has_every_rule_of_every_size_and_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr(noise, "GROUPS", (3,))
    monkeypatch.setattr(noise, "EPSILONS", (noise.NONE, 8.0))
    noise.main(seeds=1, visits=20, questions=4, output=tmp_path)
    rows = [line.split(" | ")[1] for line in (tmp_path / "noise.md").read_text().splitlines()[2:]]
    assert rows == [noise.START, *noise.RULES]
