"""Ceilings: hand-worked answers, other answers, sparse groups and bad input."""

from unittest.mock import patch

import numpy as np
import pytest
from small import cases

from appa_flwr.analysis import ceilings
from appa_flwr.analysis.alignment import alignment_scores, shared_rewards
from appa_flwr.analysis.ceilings import OBJECTIVES, SOLVED_METRICS, sample, shared_answer
from appa_flwr.core.errors import UserError

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


def reached(answer_QK, targets_GQK, options_QK, *, metric: str, objective: str) -> float:
    scores = alignment_scores(shared_rewards(answer_QK, np.asarray(targets_GQK), options_QK, metric=metric))
    return scores.avg_as if objective == "average" else scores.min_as


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
        # of two questions alike the minimum is joint: the second makes up for what the first costs a group
        ("wasserstein", "min", [[[1.0, 0.0], [1.0, 0.0]], [[0.0, 1.0], [0.0, 1.0]]], None, 0.5),
    ],
)  # fmt: skip
def test_ceilings_by_hand(metric, objective, targets_GQK, answer_QK, value):
    options_QK, asked = np.ones(np.shape(targets_GQK)[1:], bool), {"metric": metric, "objective": objective}
    best_QK = shared_answer(targets_GQK, options_QK, **asked)
    if answer_QK is not None:
        np.testing.assert_allclose(best_QK, answer_QK, atol=2e-3)
    if value is not None:
        assert reached(best_QK, targets_GQK, options_QK, **asked) == pytest.approx(value, abs=1e-6)


@each_objective
@each_metric
def test_no_step_towards_any_other_answer_gains(metric, objective):
    targets_GQK, options_QK = random_targets(1)
    asked = {"metric": metric, "objective": objective}
    best_QK = shared_answer(targets_GQK, options_QK, **asked)
    assert (best_QK[~options_QK] == 0.0).all()
    np.testing.assert_allclose(best_QK.sum(axis=-1), 1.0, atol=1e-12)
    value = reached(best_QK, targets_GQK, options_QK, **asked)
    rng = np.random.default_rng(2)
    for step in np.repeat((1e-3, 1e-2, 0.1, 1.0), 50):
        other_QK = rng.dirichlet(np.full(4, 0.3), size=len(options_QK)) * options_QK + 1e-9 * options_QK
        other_QK /= other_QK.sum(axis=-1, keepdims=True)
        tried_QK = best_QK + step * (other_QK - best_QK)
        assert reached(tried_QK, targets_GQK, options_QK, **asked) <= value + 1e-6


@each_objective
@each_metric
def test_padding_and_what_has_no_target_change_nothing(metric, objective):
    targets_GQK, options_QK = random_targets(3)
    asked = {"metric": metric, "objective": objective}

    def value(targets_GQK, options_QK):
        answer_QK = shared_answer(targets_GQK, options_QK, **asked)
        return answer_QK, reached(answer_QK, targets_GQK, options_QK, **asked)

    _, plain = value(targets_GQK, options_QK)
    padded_QK, padded = value(np.insert(targets_GQK, 2, 5.0, axis=-1), np.insert(options_QK, 2, False, axis=-1))
    assert padded == pytest.approx(plain, abs=1e-9)
    assert (padded_QK[:, 2] == 0.0).all()
    # one more group and one more question, both without any target
    wider_GQK = np.pad(targets_GQK, ((0, 1), (0, 1), (0, 0)), constant_values=np.nan)
    wider_QK, wider = value(wider_GQK, np.concatenate([options_QK, [[True, True, False, True]]]))
    assert wider == pytest.approx(plain, abs=1e-6)
    np.testing.assert_allclose(wider_QK[-1], [1 / 3, 1 / 3, 0, 1 / 3], atol=1e-12)


@each_objective
@pytest.mark.parametrize("least", [0.0, 1e-100, 1e-9])
def test_targets_of_every_size_are_solved(least, objective):
    rng = np.random.default_rng(5)
    targets_GQK = np.maximum(rng.dirichlet(np.full(4, 0.02), (6, 40)), least)
    targets_GQK[0] = np.eye(4)[rng.integers(4, size=40)]
    options_QK, asked = np.ones((40, 4), bool), {"metric": "js", "objective": objective}
    value = reached(shared_answer(targets_GQK, options_QK, **asked), targets_GQK, options_QK, **asked)
    for other_QK in (targets_GQK.mean(axis=0), options_QK / 4):
        assert reached(other_QK, targets_GQK, options_QK, **asked) <= value + 1e-6


def test_a_solver_that_fails_is_said(monkeypatch):
    monkeypatch.setitem(ceilings._CLARABEL, "max_iter", 1)
    with pytest.raises(ceilings.NotSolved, match="average"):
        shared_answer(*random_targets(1), metric="js", objective="average")


def test_a_solver_that_fails_tries_shorter_steps():
    solve, steps, asked = ceilings.cp.Problem.solve, [], {"metric": "js", "objective": "min"}

    def fails_first(problem, **keys):
        steps.append(keys["max_step_fraction"])
        return solve(problem, **keys, max_iter=1 if len(steps) == 1 else 200)

    with patch.object(ceilings.cp.Problem, "solve", fails_first):
        best_QK = shared_answer(*random_targets(1), **asked)
    assert steps[0] > steps[1]
    np.testing.assert_allclose(best_QK, shared_answer(*random_targets(1), **asked), atol=2e-3)


def test_a_sample_keeps_below_the_most_shares_and_few_questions_are_kept_whole(monkeypatch):
    monkeypatch.setattr(ceilings, "MOST_SHARES", 60)
    options_QK = np.arange(5) < np.array([2, 5, 3, 4, 2, 5, 3])[:, None]  # 24 options
    assert sample(options_QK, groups=2, seed=0).tolist() == [*range(7)]
    drawn = [sample(options_QK, groups=5, seed=seed).tolist() for seed in (0, 0, *range(1, 9))]
    assert drawn[0] == drawn[1]
    assert len({*map(tuple, drawn)}) > 1
    for questions in drawn:
        assert questions == sorted({*questions})
        # the next question, of at most 5 options, does not fit
        assert 60 - 5 * 5 < 5 * options_QK[questions].sum() <= 60
    assert sample(options_QK, groups=61, seed=0).size == 0


@pytest.mark.parametrize(("change", "message"), cases("wrong_numbers")["ceilings"])
def test_bad_input_is_an_error(change, message):
    good = {"targets_GQK": np.full((2, 1, 2), 0.5), "options_QK": np.ones((1, 2), bool), "metric": "js"}
    with pytest.raises(UserError if "unknown" in message else ValueError, match=message):
        shared_answer(**(good | {"objective": "min"} | change))
