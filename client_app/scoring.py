"""Rewards, computed by a group from its private answers and its target table.

Axis letters: Q public questions, J scored answers, K options.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from appa_flwr.core.errors import UserError
from appa_flwr.protocol import rewards, wire

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]


def score(request: wire.ScoreRequest, side_QK: FloatArray, option_QK: BoolArray) -> dict[str, FloatArray]:
    """Rewards of answers against one side's distributions, rows of NaN where it has none: a look-up and a metric.

    Returns:
        Metric -> rewards (J,): 0 for an answer nobody could read, NaN where this side has no distribution.

    Raises:
        UserError: a question outside the catalogue or an unknown metric.
    """
    if request.question_J.size and not 0 <= request.question_J.min() <= request.question_J.max() < len(side_QK):
        raise UserError("an answer's question is not in the catalogue")
    metrics = {name: rewards.find(name) for name in request.metrics}
    target_JK = side_QK[request.question_J]
    option_JK = option_QK[request.question_J]
    readable_J = ~np.isnan(np.where(option_JK, request.prediction_JK, 0.0)).any(1)
    known_J = ~np.isnan(target_JK).any(1)
    usable_J = readable_J & known_J
    result = {}
    for metric, scored in metrics.items():
        reward_J = np.where(known_J, 0.0, np.nan)
        reward_J[usable_J] = scored(request.prediction_JK[usable_J], target_JK[usable_J], option_JK[usable_J])
        result[metric] = reward_J
    return result
