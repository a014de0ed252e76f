"""The reward metrics: hand-worked numbers, bounds and invariances."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from small import cases

from appa_flwr.core.errors import UserError
from appa_flwr.protocol.rewards import METRICS, find, js_distance

TWO = np.ones(2, dtype=bool)
FOUR = np.ones(4, dtype=bool)
DISTRIBUTION_METRICS = ("js", "js-distance", "wasserstein", "cosine")


@st.composite
def pairs(draw, *, num_pairs: int = 3):
    """Two stacks of vectors with mass, some entries zero or tiny, and how many options they have."""
    num_options = draw(st.integers(2, 7))
    entries = st.one_of(st.just(0.0), st.floats(1e-300, 1.0), st.floats(0.01, 1.0))
    values = draw(hnp.arrays(np.float64, (2, num_pairs, num_options), elements=entries))
    values[..., 0] += np.where(values.sum(axis=-1) == 0.0, 1.0, 0.0)
    return values[0], values[1], np.ones(num_options, dtype=bool)


@pytest.mark.parametrize(
    ("metric", "prediction", "target", "reward"),
    [
        # (1 + cos) / 2, where no direction counts as a right angle; `reference/` has what scipy can compute
        ("cosine", [0, 0], [0.3, 0.7], 0.5),
        ("cosine", [1, 0], [-1, 0], 0.0),
        # rankings B C A D and B A C D agree in positions 1 and 4, worth 4 and 1 of 4 + 3 + 2 + 1
        ("borda", [2, 4, 3, 1], [3, 4, 2, 1], 0.5),
        # A B and B A agree nowhere
        ("borda", [2, 1], [1, 2], 0.0),
        # ties go by option order, so the target ranks C A B; B before A leaves position 1 (worth 3 of 6) alone
        ("borda", [2, 1, 3], [0.25, 0.25, 0.5], 1.0),
        ("borda", [1, 2, 3], [0.25, 0.25, 0.5], 0.5),
    ],
)
def test_rewards_by_hand(metric, prediction, target, reward):
    options = np.ones(len(target), dtype=bool)
    assert METRICS[metric](prediction, target, options) == pytest.approx(reward, abs=1e-15)


def test_js_distance_of_nearly_equal_answers_is_not_lost_in_rounding():
    # For p = (1+d)/2, q = (1-d)/2 the divergence is d^2 / (2 ln 2) to leading order; at d = 1e-9 that is
    # 7.2e-19, under the rounding of any entropy near 1, and its root is 1e-9 * 0.8493218.
    d = 1e-9
    distance = 1 - js_distance([(1 + d) / 2, (1 - d) / 2], [(1 - d) / 2, (1 + d) / 2], TWO)
    assert distance == pytest.approx(0.8493218 * d, rel=1e-6)
    # in natural logarithms it stops at sqrt(ln 2) = .8325546, as scipy's jensenshannon does
    assert js_distance([1.0, 0.0], [0.0, 1.0], TWO, base=np.e) == pytest.approx(1 - 0.8325546111576977)


@pytest.mark.parametrize("metric", METRICS)
def test_rollouts_broadcast_against_groups_and_a_missing_group_has_no_reward(metric):
    rng = np.random.default_rng(0)
    prediction_JK, target_GK = rng.dirichlet(np.ones(4), size=3), rng.dirichlet(np.ones(4), size=2)
    together = METRICS[metric](prediction_JK, np.vstack([target_GK, [np.nan] * 4])[:, None], FOUR)
    assert together.shape == (3, 3)
    assert together.dtype == np.float64
    assert np.isnan(together[2]).all()
    for group, rollout in np.ndindex(2, 3):
        alone = METRICS[metric](prediction_JK[rollout], target_GK[group], FOUR)
        assert together[group, rollout] == pytest.approx(float(alone), abs=1e-15)


@pytest.mark.parametrize("metric", METRICS)
@given(pairs(), st.floats(1e-3, 1e3))
def test_range_symmetry_perfection_and_scale(metric, pair, scale):
    first, second, options = pair
    reward = METRICS[metric](first, second, options)
    assert ((reward >= 0.0) & (reward <= 1.0)).all()
    np.testing.assert_allclose(METRICS[metric](second, first, options), reward, atol=1e-15)
    np.testing.assert_allclose(METRICS[metric](first, first, options), 1.0, atol=1e-15)
    if metric in DISTRIBUTION_METRICS:  # of which only the shape counts
        np.testing.assert_allclose(METRICS[metric](first * scale, second, options), reward, atol=1e-7)


@pytest.mark.parametrize("metric", METRICS)
@given(pairs(), st.data())
def test_padding_anywhere_changes_nothing(metric, pair, data):
    first, second, options = pair
    places = data.draw(st.lists(st.integers(0, options.size), min_size=1, max_size=4))
    junk = data.draw(st.sampled_from([0.0, 1e9, -3.0, np.nan, np.inf]))
    padded = METRICS[metric](
        np.insert(first, places, junk, axis=-1),
        np.insert(second, places, junk, axis=-1),
        np.insert(options, places, False),
    )
    np.testing.assert_allclose(padded, METRICS[metric](first, second, options), atol=1e-14)


@pytest.mark.parametrize(("metrics", "prediction", "options", "message"), cases("wrong_numbers")["rewards"])
def test_bad_vectors_are_errors(metrics, prediction, options, message):
    for metric in metrics or METRICS:
        with pytest.raises(ValueError, match=message):
            METRICS[metric](prediction, [0.5, 0.5], options)
    with pytest.raises(UserError, match="did you mean 'js'"):
        find("jss")
