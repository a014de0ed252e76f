"""Conversion of groups' opinions to votes, for SFT and for the majority's answer.

Axis letters: Q public questions, K options.
"""

import numpy as np

from appa_flwr.core.arrays import BoolArray, FloatArray
from appa_flwr.protocol.rewards import ranking

BALLOTS = {"dpa": "mode", "opa": "ranking"}
"""Task -> the least revealing kind of vote that the task needs."""
DISTRIBUTION = "distribution"


def cast(opinion_QK: FloatArray, option_QK: BoolArray, *, kind: str) -> FloatArray:
    """Convert opinions to votes (section "SFT Baseline and Majority Aggregation"); votes of this kind stay unchanged.

    Args:
        opinion_QK: distributions or votes (..., Q, K).
        option_QK: True for real options.
        kind: "mode": 1 on the most frequent option (ties: the first); "ranking": K for the most frequent down to 1;
            "distribution": the opinion itself.

    Returns:
        Votes (..., Q, K), 0 on padding.
    """
    if kind == DISTRIBUTION:
        return np.where(option_QK, opinion_QK, 0.0)
    place_QK = np.argsort(ranking(opinion_QK, option_QK), axis=-1)
    if kind == "mode":
        return np.where(place_QK == 0, 1.0, 0.0)
    return np.where(option_QK, option_QK.sum(1, keepdims=True) - place_QK, 0.0)
