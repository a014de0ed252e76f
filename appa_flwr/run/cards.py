"""The card of PluralLLM's weights, written beside them: what they were trained on."""

from typing import Literal

from pydantic import Field

from appa_flwr.config import Scalar
from appa_flwr.run.records import PredictorScores, Record


class EmbeddingSummary(Record):
    """Features that the network was trained on.

    Attributes:
        encoder: as the config's `pluralllm.encoder`.
        probe: (E,) the features of the first question's first option, which differ for another encoder.
    """

    encoder: str
    probe: tuple[float, ...]


class SurveySummary(Record):
    """Survey that the network was trained on, by hashes of its questions.

    Attributes:
        table: hash of all public questions, whatever their order.
        training: hashes of the training questions.
        groups: groups that trained -> training questions they answered.
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
        training: the config's keys of the training.
        losses: the groups' mean loss in every round.
        scores: agreement with the groups' own survey answers; see `server_app.predictor_phase.scores`.
        groups: group -> its own scores.
    """

    format: Literal[11] = 11
    weights: str = ""
    embedding: EmbeddingSummary
    survey: SurveySummary
    training: dict[str, Scalar]
    losses: tuple[float, ...] = ()
    scores: PredictorScores = Field({})
    groups: dict[str, PredictorScores] = Field({})
