"""lm-evaluation-harness's scores of survey answers; `appa export lm-eval` puts a copy of this file beside the task.

It needs appa-flwr in the harness's environment: what counts as readable and how scores are made stands there once.

Legend: G groups, Q questions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from appa_flwr.analysis.alignment import Scores, alignment_scores
from appa_flwr.protocol import formats
from appa_flwr.protocol.rewards import find

Rewards = Mapping[str, float]
"""Group -> reward of one answer; groups that were not asked the question are absent."""


def process_results(doc: Mapping[str, object], results: Sequence[str]) -> dict[str, object]:
    """One answer: each group's reward under every measure's name, and the format score."""
    options, task = list(doc["options"]), str(doc["task"])  # type: ignore[call-overload]
    parsed = formats.parse(task, results[0], len(options))
    real_K = np.ones(len(options), dtype=bool)
    answers = {name: shares for name, shares in dict(doc["answers"]).items() if shares is not None}  # type: ignore[call-overload]
    metric = find(str(doc["metric"]))
    rewards = {
        name: 0.0 if parsed.prediction is None else float(metric(parsed.prediction, shares, real_K))
        for name, shares in answers.items()
    }
    return {"avg_as": rewards, "min_as": rewards, "fi": rewards, "format_score": parsed.format_score}


def avg_as(items: Sequence[Rewards]) -> float:
    """Mean over the groups' scores."""
    return _scores(items).avg_as


def min_as(items: Sequence[Rewards]) -> float:
    """The worst group's score."""
    return _scores(items).min_as


def fi(items: Sequence[Rewards]) -> float:
    """Fairness Index over the questions that two groups or more were asked."""
    return _scores(items).fairness_index


def _scores(items: Sequence[Rewards]) -> Scores:
    groups = sorted({name for rewards in items for name in rewards})
    return alignment_scores([[rewards.get(name, np.nan) for rewards in items] for name in groups])
