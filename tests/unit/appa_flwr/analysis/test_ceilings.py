"""Ceilings: hand-worked answers, certificates, sparse groups and bad input."""

from __future__ import annotations

import numpy as np
import pytest

from appa_flwr.analysis.alignment import alignment_scores
from appa_flwr.analysis.ceilings import (
    GAP_TOLERANCE,
    OBJECTIVES,
    SOLVED_METRICS,
    best_weighted_answer,
    ceiling,
)
from appa_flwr.core.errors import UserError
from appa_flwr.protocol.rewards import METRICS

each_metric = pytest.mark.parametrize("metric", SOLVED_METRICS)
each_objective = pytest.mark.parametrize("objective", OBJECTIVES)


def random_targets(seed: int):
    """Peaked targets of groups that differ, a third of the pairs absent, one option padded in every third question."""
    num_groups, num_questions, num_options = 5, 12, 4
    rng = np.random.default_rng(seed)
    options_QK = np.ones((num_questions, num_options), dtype=bool)
    options_QK[::3, 1] = False
    targets_GQK = np.where(options_QK, rng.dirichlet(np.full(num_options, 0.5), (num_groups, num_questions)), 0.0)
    targets_GQK += np.where(options_QK, 1e-3, 0.0)
    targets_GQK /= targets_GQK.sum(axis=-1, keepdims=True)
    targets_GQK[rng.random((num_groups, num_questions)) < 0.3] = np.nan
    targets_GQK[:, 0] = np.where(options_QK[0], 0.25, 0.0)
    return targets_GQK, options_QK


def scores_of(answer_QK, targets_GQK, options_QK, metric):
    return alignment_scores(METRICS[metric](answer_QK, targets_GQK, options_QK))


def test_js_newton_is_not_kept_from_its_last_step_by_rounding():
    """A question of GlobalOpinionQA: near the end a step changes the loss in its last digit alone, up or down."""
    first_G = [0.54, 0.568, 0.061938, 0.199, 0.114, 0.04]
    targets_GQK = np.array([[[share, 1 - share, 0, 0, 0]] for share in first_G])
    targets_GQK[2, 0] = [0.061938, 0.934066, 0.002997, 0.000999, 0]
    weights_GQ = np.array(
        [0.06574735339, 0.635410663637, 0.060689864668, 0.079962997366, 0.069207740411, 0.088981380528]
    )
    (answer_K,) = best_weighted_answer(targets_GQK, np.ones((1, 5), bool), weights_GQ[:, None], metric="js")
    assert answer_K == pytest.approx([0.41543, 0.58457, 5.0544e-8, 1.6848e-8, 0], rel=1e-4)


@pytest.mark.parametrize(
    ("metric", "objective", "targets_GQK", "answer_QK", "value"),
    [
        # two mirrored groups meet in the middle
        *((metric, objective, [[[0.9, 0.1]], [[0.1, 0.9]]], [[0.5, 0.5]], None)
          for metric in ("js", "cosine") for objective in OBJECTIVES),
        ("wasserstein", "min", [[[0.9, 0.1]], [[0.1, 0.9]]], [[0.5, 0.5]], 0.6),
        # any answer between the two costs .8 in sum; the median picks an end
        ("wasserstein", "average", [[[0.9, 0.1]], [[0.1, 0.9]]], None, 0.6),
        # cumulative first entries .2, .5, .9 have the median .5, second ones .3, .9, 1 the median .9
        ("wasserstein", "average", [[[0.2, 0.1, 0.7]], [[0.5, 0.4, 0.1]], [[0.9, 0.1, 0.0]]], [[0.5, 0.4, 0.1]], None),
        # (3, 4) / 5 and (1, 0) add to (1.6, .8): shares 2/3 and 1/3, however long the targets are
        ("cosine", "average", [[[3.0, 4.0]], [[0.1, 0.0]]], [[2 / 3, 1 / 3]], None),
        # Rankings ABC, ABC, BAC: position 1 to A beats B; C is last for all. Rewards 1, 1 and 1/6 (only C's place).
        ("borda", "average", [[[3, 2, 1]], [[3, 2, 1]], [[2, 3, 1]]], [[3, 2, 1]], (1 + 1 + 1 / 6) / 3),
        # Two questions with opposite rankings: one question for each group serves both half, where the best minimum
        # of a single question is 0. The minimum is joint over questions.
        ("borda", "min", [[[2, 1], [2, 1]], [[1, 2], [1, 2]]], None, 0.5),
    ],
)  # fmt: skip
def test_ceilings_by_hand(metric, objective, targets_GQK, answer_QK, value):
    result = ceiling(targets_GQK, np.ones(np.shape(targets_GQK)[1:], bool), metric=metric, objective=objective)
    if answer_QK is not None:
        np.testing.assert_allclose(result.answer_QK, answer_QK, atol=2e-3 if objective == "min" else 1e-7)
    if value is not None:
        assert result.value == pytest.approx(value, abs=1e-3 if metric == "wasserstein" else 1e-6)
        assert result.upper_bound == pytest.approx(value, abs=1e-3 if metric == "wasserstein" else 1e-6)


@each_objective
@each_metric
def test_value_is_what_the_answer_scores_and_lies_under_the_bound(metric, objective):
    targets_GQK, options_QK = random_targets(1)
    result = ceiling(targets_GQK, options_QK, metric=metric, objective=objective)
    scores = scores_of(result.answer_QK, targets_GQK, options_QK, metric)
    assert result.value == pytest.approx(scores.avg_as if objective == "average" else scores.min_as)
    assert (result.answer_QK[~options_QK] == 0.0).all()
    if metric != "borda":
        np.testing.assert_allclose(result.answer_QK.sum(axis=-1), 1.0, atol=1e-12)
    # Rankings cannot be mixed: with 12 questions a gap remains, of under one position's worth.
    gap = 0.05 if (metric, objective) == ("borda", "min") else GAP_TOLERANCE
    assert result.value <= result.upper_bound <= result.value + gap


@each_objective
@each_metric
def test_padding_and_what_has_no_target_change_nothing(metric, objective):
    targets_GQK, options_QK = random_targets(3)
    asked = {"metric": metric, "objective": objective}
    plain = ceiling(targets_GQK, options_QK, **asked)
    padded = ceiling(np.insert(targets_GQK, 2, 5.0, axis=-1), np.insert(options_QK, 2, False, axis=-1), **asked)
    assert padded.value == pytest.approx(plain.value, abs=1e-9)
    assert (padded.answer_QK[:, 2] == 0.0).all()
    # one more group and one more question, both without any target
    wider_GQK = np.pad(targets_GQK, ((0, 1), (0, 1), (0, 0)), constant_values=np.nan)
    wider_QK = np.concatenate([options_QK, [[True, True, False, True]]])
    wider = ceiling(wider_GQK, wider_QK, **asked)
    assert wider.value == pytest.approx(plain.value, abs=1e-9)
    assert np.isfinite(wider.answer_QK).all()
    if metric != "borda":
        np.testing.assert_allclose(wider.answer_QK[-1], [1 / 3, 1 / 3, 0, 1 / 3], atol=1e-12)


def test_js_newton_survives_weights_and_targets_of_every_size():
    rng = np.random.default_rng(5)
    for num_options in (2, 4, 7):
        targets_GQK = rng.dirichlet(np.full(num_options, 0.02), (6, 60))
        targets_GQK[0] = np.eye(num_options)[rng.integers(num_options, size=60)]
        weights_GQ = 10.0 ** -rng.integers(0, 14, size=(6, 60))
        options_QK = np.ones((60, num_options), bool)
        answer_QK = best_weighted_answer(targets_GQK, options_QK, weights_GQ, metric="js")
        share_GQ = weights_GQ / weights_GQ.sum(axis=0)

        def weighted_Q(tried_QK, targets_GQK=targets_GQK, options_QK=options_QK, share_GQ=share_GQ):
            return (share_GQ * METRICS["js"](tried_QK, targets_GQK, options_QK)).sum(axis=0)

        reached_Q = weighted_Q(answer_QK)
        for vertex_K in np.eye(num_options):
            # Concavity: no gain towards any vertex, near or far, means no gain anywhere.
            for step in (1e-8, 1e-5, 1e-2, 1.0):
                assert (weighted_Q(answer_QK + step * (vertex_K - answer_QK)) <= reached_Q + 1e-10).all()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"metric": "jss"}, UserError, r"unknown metric 'jss': did you mean 'js'\?"),
        ({"metric": "js-distance"}, UserError, "'js-distance'.*valid are js, wasserstein, cosine, borda"),
        ({"objective": "mean"}, UserError, "unknown objective 'mean'"),
        ({"targets_GQK": np.ones((2, 3, 4))}, ValueError, r"\(G, Q, K\)"),
        ({"targets_GQK": np.full((2, 1, 2), np.nan)}, ValueError, "no target"),
        ({"targets_GQK": np.zeros((2, 1, 2))}, ValueError, "positive sum"),
        ({"options_QK": np.zeros((1, 2), bool)}, ValueError, "an option in every row"),
    ],
)
def test_bad_input_is_an_error(change, error, message):
    good = {"targets_GQK": np.full((2, 1, 2), 0.5), "options_QK": np.ones((1, 2), bool), "metric": "js"}
    with pytest.raises(error, match=message):
        ceiling(**(good | {"objective": "min"} | change))
