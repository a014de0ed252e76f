"""The vectorised metrics against scipy's distances; Borda, which it lacks, is worked by hand in its unit tests."""

import numpy as np
import pytest
from scipy.spatial.distance import cosine as scipy_cosine_distance
from scipy.spatial.distance import jensenshannon
from scipy.stats import wasserstein_distance

from appa_flwr.protocol.rewards import METRICS

K_MAX = 6


REFERENCES = {
    "js": lambda p, q: 1 - jensenshannon(p, q, base=2) ** 2,
    "js-distance": lambda p, q: 1 - jensenshannon(p, q, base=2),
    "wasserstein": lambda p, q: 1 - wasserstein_distance(range(len(p)), range(len(q)), p, q) / (len(p) - 1),
    "cosine": lambda p, q: 1 - scipy_cosine_distance(p, q) / 2,
}


def _cases(seed: int):
    rng = np.random.default_rng(seed)
    for _ in range(60):
        num_options = int(rng.integers(2, K_MAX + 1))
        # Tenths make ties and zeros common.
        vectors = rng.multinomial(10, rng.dirichlet(np.ones(num_options)), size=2) / 10
        yield num_options, vectors if rng.random() < 0.5 else rng.dirichlet(np.ones(num_options), size=2)


@pytest.mark.parametrize("metric", REFERENCES)
def test_padded_batch_equals_reference_row_by_row(metric):
    prediction, target, options, expected = [], [], [], []
    for num_options, (p, q) in _cases(seed=3):
        pad = (0, K_MAX - num_options)
        prediction.append(np.pad(p, pad, constant_values=7.0))
        target.append(np.pad(q, pad, constant_values=7.0))
        options.append(np.arange(K_MAX) < num_options)
        expected.append(REFERENCES[metric](p, q))
    reward = METRICS[metric](np.array(prediction), np.array(target), np.array(options))
    np.testing.assert_allclose(reward, expected, atol=5e-8 if metric == "js-distance" else 1e-12)
