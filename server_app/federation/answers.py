"""Parsed answers, ready to be scored by the groups.

Axis letters: J answers, K options, G groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from appa_flwr import formats, wire

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Answers:
    """Answers to questions of the catalogue.

    Attributes:
        question_J: positions in the catalogue.
        texts: as the policy wrote them.
        prediction_JK: parsed; a row of NaN where nothing could be read.
        format_score_J: in [0, 1].
    """

    question_J: npt.NDArray[np.int64]
    texts: tuple[str, ...]
    prediction_JK: FloatArray
    format_score_J: FloatArray

    @property
    def parsed_J(self) -> npt.NDArray[np.bool_]:
        """True where a prediction could be read."""
        parsed_J: npt.NDArray[np.bool_] = np.logical_not(np.isnan(self.prediction_JK).all(axis=1))
        return parsed_J

    def request(
        self, metrics: Sequence[str], *, sides: Sequence[str] = (wire.TARGET_SIDE,), draw: int = 0
    ) -> wire.ScoreRequest:
        """What the groups are asked."""
        return wire.ScoreRequest(self.question_J, self.prediction_JK, tuple(metrics), tuple(sides), draw)


def parse_answers(
    task: str, texts: Sequence[str], question_J: npt.NDArray[np.int64], catalogue: wire.Catalogue
) -> Answers:
    """Parse what the policy wrote; `question_J` are the questions that the texts answer."""
    prediction_JK = np.full((len(texts), catalogue.option_QK.shape[1]), np.nan)
    format_score_J = np.zeros(len(texts))
    for j, (text, question) in enumerate(zip(texts, question_J, strict=True)):
        num_options = len(catalogue.questions[question].options)
        parsed = formats.parse(task, text, num_options)
        format_score_J[j] = parsed.format_score
        if parsed.prediction is not None:
            prediction_JK[j] = 0.0
            prediction_JK[j, :num_options] = parsed.prediction
    return Answers(question_J, tuple(texts), prediction_JK, format_score_J)
