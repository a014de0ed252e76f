"""Answers read from replies that are made here of known ones."""

from __future__ import annotations

import numpy as np
import pytest

from appa_flwr.core.errors import UserError
from experiments import likeliest


def test_where_nothing_was_said_nothing_is_read():
    with pytest.raises(UserError, match="no reply"):
        likeliest.by_sums(lambda answer_NK: answer_NK[:, 0][None], np.array([]), (2, 3), noise=1e-6)


def test_the_mean_of_many_noisy_steps_tells_more_than_one():
    rng = np.random.default_rng(0)
    known_SNK, secret_NK = rng.dirichlet(np.ones(3), size=(100, 2)), rng.dirichlet(np.ones(3), size=2)
    slope_MP = rng.normal(size=(6, 500))
    clean_SP, clean_P = known_SNK.reshape(100, 6) @ slope_MP, secret_NK.ravel() @ slope_MP
    np.testing.assert_allclose(likeliest.by_steps(known_SNK, clean_SP, clean_P, rounds=1), secret_NK, atol=1e-3)
    noisy_SP = clean_SP + rng.normal(scale=0.5, size=clean_SP.shape)
    off = {
        rounds: np.mean(
            [
                np.abs(likeliest.by_steps(known_SNK, noisy_SP, clean_P + noise_P, rounds=rounds) - secret_NK).mean()
                for noise_P in rng.normal(scale=0.5 / np.sqrt(rounds), size=(10, 500))
            ]
        )
        for rounds in (1, 100)
    }
    assert off[100] < 0.5 * off[1]
    assert off[1] < np.abs(1 / 3 - secret_NK).mean()
