"""The card beside PluralLLM's weights: what they were trained on and how good they are, and where they may be used.

A checkpoint is two files, `NAME.safetensors` and `NAME.json`. The card holds no answer: questions stand in it as
hashes, groups by name and number of answers, scores as means.

Axis letters: Q questions, E embedding.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from appa_flwr.config import Scalar
from appa_flwr.errors import UserError
from appa_flwr.files import replace_file
from appa_flwr.survey.types import Question
from pluralllm.data import OptionEmbedding
from pluralllm.episodes import EpisodeConfig
from pluralllm.model import ModelConfig

FORMAT = 2
"""Version of the card, and of what its weights expect."""
KEY = "pluralllm.checkpoint"
HASH_BYTES = 8
# the same texts give the same features but for the arithmetic of another machine
PROBE_TOLERANCE = 1e-2

_STRICT = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=True)


class EmbeddingSummary(BaseModel):
    """Which features the network was trained on.

    Attributes:
        kind: as the config's `embedding`.
        model: folder or name of a pretrained model, empty without one.
        dim: E.
        probe: (E,) the features of the first question's first option: another encoder gives others.
    """

    model_config = _STRICT
    kind: str
    model: str
    dim: int
    probe: tuple[float, ...]


class SurveySummary(BaseModel):
    """What the network was trained on.

    Attributes:
        table: hash of all public questions, whatever their order.
        training: hashes of the training questions.
        num_questions: of the table.
        num_held_out: questions no group trained on.
        split_seed: of the split.
        test_fraction: share of questions that was held out.
        groups: groups that trained -> training questions they answered.
        unseen_groups: groups that took part without training -> the same.
    """

    model_config = _STRICT
    table: str
    training: tuple[str, ...]
    num_questions: int
    num_held_out: int
    split_seed: int
    test_fraction: float
    groups: dict[str, int]
    unseen_groups: dict[str, int]


class Round(BaseModel):
    """A federated round.

    Attributes:
        round: its number, from 1.
        loss: the groups' mean.
        validation: mean natural Jensen-Shannon distance, in [0, 0.833], of the training groups' predictions to their
            answers to held-out questions; None in a round that was not validated.
    """

    model_config = _STRICT
    round: int
    loss: float
    validation: float | None = None


class PopulationSummary(BaseModel):
    """Which questions' answers were summed over the groups.

    Attributes:
        prior: whether the network was given the sums.
        min_groups: a sum is of the answers of so many groups at least.
        training: training questions that have a sum.
        held_out: held-out questions that have one.
    """

    model_config = _STRICT
    prior: bool
    min_groups: int
    training: int
    held_out: int


class Card(BaseModel):
    """A checkpoint's card, and the `pluralllm.json` of a run.

    Attributes:
        format: `FORMAT`.
        weights: SHA-256 of the file of weights.
        network: sizes.
        episodes: shape of a training step's batch.
        embedding: its features.
        survey: its questions and groups.
        training: the config's keys of the training.
        rounds: every round.
        chosen: the round whose weights these are: the one of the lowest validation error, the last where none was
            validated, 0 without training.
        population: the sums over the groups, None where none were made.
        scores: part -> predictor -> measure -> mean; see `server_app.predictor.scores`.
        groups: group -> the same for it alone.
        calibration: part -> what is known of the uncertainty.
        by_context: part -> number of context answers, as text -> measure -> mean over answers, and "cells".
    """

    model_config = _STRICT
    format: int = FORMAT
    weights: str = ""
    network: ModelConfig
    episodes: EpisodeConfig
    embedding: EmbeddingSummary
    survey: SurveySummary
    training: dict[str, Scalar]
    rounds: tuple[Round, ...] = ()
    chosen: int = Field(0, ge=0)
    population: PopulationSummary | None = None
    scores: dict[str, dict[str, dict[str, float]]] = {}
    groups: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
    calibration: dict[str, dict[str, float]] = {}
    by_context: dict[str, dict[str, dict[str, float]]] = {}


def question_hash(question: Question) -> str:
    """Hash of what a question says: its text, options and their order; its id may differ between files."""
    content = json.dumps([question.text, list(question.options), question.ordinal])
    return hashlib.blake2b(content.encode(), digest_size=HASH_BYTES).hexdigest()


def table_hash(questions: Sequence[Question]) -> str:
    """Hash of a set of questions: what a table of features was made of."""
    content = json.dumps(sorted(question_hash(question) for question in questions))
    return hashlib.blake2b(content.encode(), digest_size=HASH_BYTES).hexdigest()


def probe(embedding: OptionEmbedding, questions: Sequence[Question]) -> tuple[float, ...]:
    """(E,) features of the first option of the question that comes first by hash, rounded."""
    row = min(range(len(questions)), key=lambda q: question_hash(questions[q]))
    return tuple(round(float(value), 4) for value in embedding.value_QKE[row, 0])


def card_path(weights: Path) -> Path:
    """The card that belongs to a file of weights."""
    return weights.with_suffix(".json")


def write(weights: Path, card: Card) -> None:
    """Put a card beside a file of weights that is there.

    Raises:
        UserError: it cannot be written; an earlier card is intact.
    """
    tied = card.model_copy(update={"weights": _sha256(weights)})
    content = json.dumps(tied.model_dump(), indent=1, allow_nan=True) + "\n"
    replace_file(card_path(weights), content.encode())


def read(weights: Path) -> Card:
    """The card of a file of weights.

    Raises:
        UserError: one of the two files is missing, the card is of another version or is not a card, or it belongs to
            other weights.
    """
    where = f'{KEY} = "{weights}"'
    path = card_path(weights)
    for needed in (weights, path):
        if not needed.is_file():
            raise UserError(
                f"{where}: there is no file {needed}; give the pluralllm.safetensors of an earlier run, with the "
                "pluralllm.json beside it"
            )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        found = content.get("format") if isinstance(content, dict) else None
        if found != FORMAT:
            raise UserError(f"{where}: its card is of format {found}, and this version reads format {FORMAT}")
        card = Card.model_validate(content)
    except (OSError, ValueError) as error:  # pydantic's ValidationError is a ValueError
        reason = error.errors()[0]["loc"] if isinstance(error, ValidationError) else type(error).__name__
        raise UserError(f"{path}: cannot be read as the card of a PluralLLM checkpoint ({reason})") from None
    if card.weights != _sha256(weights):
        raise UserError(f"{where}: its card {path.name} belongs to other weights; both files come from one run")
    return card


def check_fit(
    card: Card,
    weights: Path,
    *,
    network: ModelConfig,
    embedding: EmbeddingSummary,
    questions: Sequence[Question],
    held_out: Sequence[Question],
    unseen_groups: Collection[str],
) -> None:
    """Refuse a checkpoint that this run cannot use, or whose use would make its scores worthless.

    Args:
        card: of the checkpoint.
        weights: its file, for messages.
        network: the run's sizes.
        embedding: the run's features.
        questions: the run's public questions.
        held_out: those of them that the run holds out.
        unseen_groups: groups that must not have trained.

    Raises:
        UserError: the features are of another kind, size or table, the network has other sizes, a held-out question
            was trained on, or an unseen group has trained.
    """
    where = f'{KEY} = "{weights}"'
    for key, mine, its in (
        ("embedding.encoder", embedding.kind, card.embedding.kind),
        ("embedding.dim", embedding.dim, card.embedding.dim),
    ):
        if mine != its:
            raise UserError(f"{where}: was trained with {key} = {its}, and this run has {mine}; use the same")
    if table_hash(questions) != card.survey.table:
        raise UserError(
            f"{where}: was trained on another table of {card.survey.num_questions} questions, and this run has "
            f"{len(questions)}; the features of a question depend on all of them, so use the same survey"
        )
    trained = set(card.survey.training)
    leaked = [question for question in held_out if question_hash(question) in trained]
    if leaked:
        raise UserError(
            f"{where}: was trained on {len(leaked)} of this run's {len(held_out)} held-out questions, such as "
            f"'{leaked[0].question_id}'; use its seed = {card.survey.split_seed} and "
            f"data.test-fraction = {card.survey.test_fraction}"
        )
    if not np.allclose(embedding.probe, card.embedding.probe, atol=PROBE_TOLERANCE):
        model = card.embedding.model or card.embedding.kind
        raise UserError(f"{where}: the features of its questions are others than this run's; it used {model}")
    for field, its in vars(card.network).items():
        mine = getattr(network, field)
        if mine != its:
            key = {"embedding_dim": "embedding.dim", "population": "sums.population-prior"}.get(
                field, f"pluralllm.{field.removeprefix('num_').replace('_', '-')}"
            )
            raise UserError(f"{where}: was trained with {key} = {its}, and this run has {mine}; use the same")
    both = sorted(set(unseen_groups) & card.survey.groups.keys())
    if both:
        raise UserError(f"{where}: group '{both[0]}' has trained it, so pluralllm.unseen-groups cannot name it")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
