"""A reward metric of the user's own: the guide's example, what it is given, and wrong ones in one line each.

Axis letters: G groups, N and J answers, K options.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from surveys import refused

from appa_flwr.config import Config
from appa_flwr.core.errors import UserError
from appa_flwr.protocol import rewards

GUIDE = Path(__file__).parents[4] / "docs" / "scores.md"
OTHERS = """
def too_much(prediction, target, options):
    return 2 * overlap(prediction, target, options)

def matrix(prediction, target, options):
    return np.minimum(prediction, target)

def missing(prediction, target, options):
    return np.full(len(prediction), np.nan)

def fails(prediction, target, options):
    raise ValueError("first\\nsecond")

def raw(prediction, target, options):
    return 1 - 0.5 * np.abs(prediction - target).sum(axis=1) - (prediction.sum(axis=1) > 1.4)

def first(prediction, target, options):
    assert prediction.shape == target.shape == options.shape and prediction.ndim == 2
    assert not (prediction[~options].any() or target[~options].any() or np.isnan(prediction + target).any())
    return 1.0 * (prediction.argmax(axis=1) == target.argmax(axis=1))

def spoils(prediction, target, options):
    prediction[:] = target[:] = -1
    return np.ones(len(prediction))
"""


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    guide = GUIDE.read_text().split("## A metric of your own")[1].split("```")[1].removeprefix("python")
    (tmp_path / "their_metrics.py").write_text(guide + OTHERS)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("their_metrics", None)


def test_the_guide_s_metric_by_hand():
    overlap = rewards.find("their_metrics:overlap")
    real = np.array([True, True, False])
    # .25 and .25 of what the first option and the second have in common; a half of nothing beyond that
    assert overlap([1.0, 3.0, np.nan], [0.75, 0.25, 9.0], real) == pytest.approx(0.5)
    assert overlap([[0.5, 0.5, 0.0]], [[0.5, 0.5, 0.0]], real).tolist() == [1.0]
    rewards.try_out("their_metrics:overlap", "dpa")


def test_rows_broadcast_and_missing_ones_stay_missing():
    first = rewards.find("their_metrics:first")
    rng = np.random.default_rng(0)
    option_JK = np.arange(4) < np.array([2, 3, 4])[:, None]
    prediction_JK, target_GJK = rng.random((3, 4)), rng.random((5, 3, 4))
    target_GJK[1, 2, 0] = np.nan
    reward_GJ = first(prediction_JK, target_GJK, option_JK)
    expected = np.where(option_JK, prediction_JK, -1).argmax(-1) == np.where(option_JK, target_GJK, -1).argmax(-1)
    assert np.isnan(reward_GJ[1, 2])
    reward_GJ[1, 2] = expected[1, 2]
    np.testing.assert_array_equal(reward_GJ, expected)
    assert first(np.ones((0, 4)), np.ones((0, 4)), np.ones(4, dtype=bool)).shape == (0,)


def test_a_metric_cannot_change_what_others_score():
    prediction, target = np.array([[0.5, 0.5]]), np.array([[0.2, 0.8]])
    rewards.find("their_metrics:spoils")(prediction, target, [True, True])
    assert (prediction.tolist(), target.tolist()) == ([[0.5, 0.5]], [[0.2, 0.8]])


@pytest.mark.parametrize("task", ["dpa", "opa"])
def test_what_is_tried_is_what_a_run_scores(task, monkeypatch):
    seen = []
    monkeypatch.setitem(rewards.METRICS, "spy", lambda *arrays: seen.append(arrays))
    rewards.try_out("spy", task)
    ((prediction_NK, target_NK, option_NK),) = seen
    assert not np.where(option_NK, 0.0, [prediction_NK, target_NK]).any()
    assert set(option_NK.sum(axis=1)) == {2, 3, 4, 5, 6}
    if task == "opa":  # each place once, K for the first
        for row_K, real_K in zip(prediction_NK, option_NK, strict=True):
            assert sorted(row_K[real_K]) == list(range(1, real_K.sum() + 1))
    else:
        np.testing.assert_allclose(target_NK.sum(axis=1), 1)
    for metric in rewards.metrics_of(task):
        rewards.try_out(metric, task)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("their_metrics:too_much", "gives 2; a reward lies in .0, 1., 1 is best$"),
        ("their_metrics:missing", "gives nan; a reward lies in"),
        ("their_metrics:matrix", r"gives an array of shape \(64, 6\) for 64 answers; it has to give one reward each"),
        ("their_metrics:fails", r"fails \(ValueError: first second\)$"),
        ("their_metrics:raw", "gives -0.[0-9]+; a reward lies in"),  # it takes answers to have the sum 1
        ("their_metrics:overlapp", r"their_metrics has no function overlapp\(prediction, target, options\)$"),
    ],
)
def test_a_wrong_metric_is_one_line_before_anything_runs(name, message):
    refused(message, rewards.try_out, name, "dpa")


def test_a_config_names_one_for_either_task_and_it_scores_beside_the_usual_ones():
    for task, usual in (("dpa", ("js", "js-distance", "wasserstein", "cosine")), ("opa", ("borda",))):
        metric = Config.load({"task": task, "metric": "their_metrics:overlap"}).reward_metric
        assert rewards.metrics_of(task, metric) == (*usual, "their_metrics:overlap")
        assert rewards.metrics_of(task, usual[0]) == usual
    for wrong in ("their_metrics", "their-metrics:overlap", "their_metrics:", ":overlap", "a:b:c", "os; x:y"):
        with pytest.raises(UserError, match=r"^metric = .*MODULE:NAME"):
            Config.load({"metric": wrong})
