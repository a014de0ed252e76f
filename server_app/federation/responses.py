"""Parsed answers, ready to be scored by the groups.

Axis letters: J answers, K options, G groups.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from appa_flwr.core.arrays import BoolArray, FloatArray, IntArray
from appa_flwr.protocol import formats
from appa_flwr.protocol.queries import Catalogue


@dataclass(frozen=True, eq=False)
class Responses:
    """Answers to questions of the catalogue."""

    question_J: IntArray  # positions of the questions in the catalogue
    texts: tuple[str, ...]  # as the policy wrote them
    prediction_JK: FloatArray  # parsed; a row of NaN for an unreadable answer
    format_score_J: FloatArray  # in [0, 1]
    parsed_J: BoolArray  # False for a completely unparseable answer; see `formats.Parsed`


def parse_responses(task: str, texts: Sequence[str], question_J: IntArray, catalogue: Catalogue) -> Responses:
    """Parse the policy's answers; `question_J` are the catalogue positions of their questions."""
    prediction_JK = np.full((len(texts), catalogue.option_QK.shape[1]), np.nan)
    format_score_J, parsed_J = np.zeros(len(texts)), np.zeros(len(texts), dtype=bool)
    for j, (text, question) in enumerate(zip(texts, question_J, strict=True)):
        num_options = len(catalogue.questions[question].options)
        parsed = formats.parse(task, text, num_options)
        format_score_J[j], parsed_J[j] = parsed.format_score, parsed.parsed
        if parsed.prediction is not None:
            prediction_JK[j] = 0.0
            prediction_JK[j, :num_options] = parsed.prediction
    return Responses(question_J, tuple(texts), prediction_JK, format_score_J, parsed_J)
