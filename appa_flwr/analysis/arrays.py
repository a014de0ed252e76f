"""A survey's answers as arrays.

Axis letters: G groups, Q questions, K answer options.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from appa_flwr.survey.types import FloatArray, Question


def as_arrays(
    questions: Sequence[Question], answers: Mapping[str, Mapping[str, FloatArray]]
) -> tuple[FloatArray, npt.NDArray[np.bool_]]:
    """Distributions (G, Q, K), 0 on padding and NaN where a group has none, and the real options (Q, K)."""
    sizes_Q = np.array([len(question.options) for question in questions])
    option_QK = np.arange(sizes_Q.max()) < sizes_Q[:, None]
    target_GQK = np.full((len(answers), *option_QK.shape), np.nan)
    for target_QK, mine in zip(target_GQK, answers.values(), strict=True):
        for q, question in enumerate(questions):
            if question.question_id in mine:
                target_QK[q] = 0.0
                target_QK[q, : sizes_Q[q]] = mine[question.question_id]
    return target_GQK, option_QK
