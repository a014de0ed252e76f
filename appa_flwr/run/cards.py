"""The card of PluralLLM's weights, written beside them: what they were trained on."""

from typing import Literal

from pydantic import Field

from appa_flwr.config import Scalar
from appa_flwr.run.records import PredictorScores, Record


class EmbeddingSummary(Record):
    """Features of `pluralllm.encoder` that the network was trained on.

    `probe` (E,) are those of the first question's first option, which differ for another encoder.
    """

    encoder: str
    probe: tuple[float, ...]


class SurveySummary(Record):
    """Survey that the network was trained on.

    `table` is a hash of all public questions in any order, `training` has one for each training question; `groups` maps
    the groups that trained to the number of training questions that they answered.
    """

    table: str
    training: tuple[str, ...]
    num_questions: int
    split_seed: int
    test_fraction: float
    groups: dict[str, int]


class Card(Record):
    """pluralllm.json: what PluralLLM's weights were trained on and how good they are. It holds no answer.

    Attributes:
        format: version of the card and of the inputs that its weights expect; both may be copied out of a run's folder.
        weights: SHA-256 of the file of weights.
        losses: the groups' mean loss in every round.
        scores: agreement with all groups' own survey answers; `groups` has that with each group's.
    """

    format: Literal[11] = 11
    weights: str = ""
    embedding: EmbeddingSummary
    survey: SurveySummary
    training: dict[str, Scalar]
    losses: tuple[float, ...] = ()
    scores: PredictorScores = Field({})
    groups: dict[str, PredictorScores] = Field({})
