"""The card beside PluralLLM's weights: their training data and scores, and checks that a run may use the weights.

A checkpoint is two files, `NAME.safetensors` and `NAME.json`. The card holds no answers, only hashes of questions,
names of groups with their numbers of answers, and mean scores.

Axis letters: Q questions, E embedding.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from appa_flwr.config import Config
from appa_flwr.core.errors import UserError
from appa_flwr.protocol.asks import Catalogue
from appa_flwr.run import run_files
from appa_flwr.run.records import Card
from appa_flwr.survey.types import Question

HASH_BYTES = 8
# features of the same texts differ only by the arithmetic of different machines
PROBE_TOLERANCE = 1e-2


def question_hash(question: Question) -> str:
    """Hash of a question's text, options and their order, without its id, which may differ between files."""
    return _hash([question.text, list(question.options), question.ordinal])


def table_hash(questions: Sequence[Question]) -> str:
    """Hash of a set of questions, from which a table of features is computed."""
    return _hash(sorted(question_hash(question) for question in questions))


def _hash(content: object) -> str:
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=HASH_BYTES).hexdigest()


def probe(value_QKE: npt.NDArray[np.float32], questions: Sequence[Question]) -> tuple[float, ...]:
    """(E,) features of the first option of the question that comes first by hash, rounded."""
    row = min(range(len(questions)), key=lambda q: question_hash(questions[q]))
    return tuple(round(float(value), 4) for value in value_QKE[row, 0])


def write(weights: Path, card: Card) -> None:
    """Write a card beside an existing file of weights.

    Raises:
        UserError: the card cannot be written; an earlier card is intact.
    """
    run_files.write(weights.with_suffix(".json"), card.model_copy(update={"weights": _sha256(weights)}))


def read(weights: Path) -> Card:
    """Read the card of a file of weights.

    Raises:
        UserError: one of the two files is missing, the card has another version or is not a card, or the card belongs
            to other weights.
    """
    path = weights.with_suffix(".json")
    for needed in (weights, path):
        if not needed.is_file():
            raise UserError(
                f"there is no file {needed}; give the pluralllm.safetensors of an earlier run, with the "
                "pluralllm.json beside it"
            )
    card = run_files.read(path, Card)
    assert card is not None  # the file exists, see above
    if card.weights != _sha256(weights):
        raise UserError(f"{weights}: its card {path.name} belongs to other weights; both files come from one run")
    return card


def check_fit(card: Card, weights: Path, config: Config, public: Catalogue) -> None:
    """Refuse a checkpoint that this run cannot use or must not use; `weights` is its path, for messages.

    Raises:
        UserError: the features differ or belong to another table, or a held-out question was trained on.
    """
    trained = set(card.survey.training)
    if table_hash(public.questions) != card.survey.table:
        raise UserError(
            f"{weights}: was trained on another table of {card.survey.num_questions} questions, and this run has "
            f"{len(public.questions)}; the features of a question depend on all of them, so use the same survey"
        )
    held_out = [public.questions[q] for q in np.flatnonzero(public.held_out_Q)]
    leaked = [question for question in held_out if question_hash(question) in trained]
    if leaked:
        raise UserError(
            f"{weights}: was trained on {len(leaked)} of this run's {len(held_out)} held-out questions, such as "
            f"'{leaked[0].question_id}'; use its seed = {card.survey.split_seed} and "
            f"data.test-fraction = {card.survey.test_fraction}"
        )
    if not np.allclose(probe(public.embedding_QKE, public.questions), card.embedding.probe, atol=PROBE_TOLERANCE):
        raise UserError(
            f"{weights}: the features of its questions are others than this run's, which has pluralllm.encoder = "
            f"{config.pluralllm.encoder}; it was trained with {card.embedding.encoder}"
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
