"""PluralLLM's checkpoint: the weights, and the card beside them that says what they were trained on.

A checkpoint is two files, `NAME.safetensors` and `NAME.json`. The card holds no answers, only hashes of questions,
names of groups with their numbers of answers, and mean scores.

Axis letters: E embedding.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import safetensors.numpy
from flwr.app import Array, ArrayRecord
from safetensors import SafetensorError

from appa_flwr.config import Config
from appa_flwr.core.errors import UserError, first_line
from appa_flwr.core.files import replace_file, sha256_of
from appa_flwr.protocol.queries import Catalogue
from appa_flwr.run import schema
from appa_flwr.run.records import Card, EmbeddingSummary, Means, SurveySummary
from appa_flwr.survey.types import Question

SETTINGS, CHECKPOINT = "pluralllm.", "pluralllm.checkpoint"
HASH_BYTES = 8
# features of the same texts differ only by the arithmetic of different machines
PROBE_TOLERANCE = 1e-2


def save(path: Path, weights: ArrayRecord, card: Card) -> None:
    """Write weights, and then their card; raises as `replace_file`."""
    arrays = {name: np.ascontiguousarray(array.numpy()) for name, array in weights.items()}
    replace_file(path, safetensors.numpy.save(arrays))
    write_card(path, card)


def write_card(path: Path, card: Card) -> None:
    """Write the card of the file of weights at this path; raises as `replace_file`."""
    schema.write(path.with_suffix(".json"), card.model_copy(update={"weights": sha256_of(path)}))


def load(path: Path, config: Config, catalogue: Catalogue, start: ArrayRecord) -> tuple[ArrayRecord, Card]:
    """Read weights and card written by `save`; `start` has the names and shapes that this run expects.

    Raises:
        UserError: a file is missing or cannot be read, the card is of other weights or of another version, or this run
            cannot or must not use the weights.
    """
    card_path = path.with_suffix(".json")
    for needed in (path, card_path):
        if not needed.is_file():
            raise UserError(
                f"there is no file {needed}; give the pluralllm.safetensors of an earlier run, with the "
                "pluralllm.json beside it"
            )
    card = schema.read(card_path, Card)
    assert card is not None  # the file exists, see above
    if card.weights != sha256_of(path):
        raise UserError(f"{path}: its card {card_path.name} belongs to other weights; both files come from one run")
    _check_fit(card, path, config, catalogue)
    try:
        arrays = safetensors.numpy.load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be read ({first_line(error)})") from None
    if {name: array.shape for name, array in arrays.items()} != {name: value.shape for name, value in start.items()}:
        own = config.pluralllm.architecture
        raise UserError(f"{path}: its weights do not fit pluralllm.architecture = {own}")
    return ArrayRecord({name: Array(arrays[name]) for name in start}), card


def new_card(
    config: Config, catalogue: Catalogue, answered: Mapping[str, int], losses: Sequence[float], distances: list[Means]
) -> Card:
    """Make the card, without scores, of weights from this run; `answered` counts each group's training answers."""
    training = [_question_hash(catalogue.questions[q]) for q in np.flatnonzero(catalogue.train_Q)]
    return Card(
        embedding=EmbeddingSummary(encoder=config.pluralllm.encoder, probe=_probe(catalogue)),
        survey=SurveySummary(
            table=_table_hash(catalogue.questions),
            training=tuple(sorted(training)),
            num_questions=len(catalogue.questions),
            split_seed=config.seed,
            test_fraction=config.data.test_fraction,
            groups=dict(answered),
        ),
        training={k: value for k, value in config.flat().items() if k.startswith(SETTINGS) and k != CHECKPOINT},
        losses=tuple(losses),
        distances=tuple({name: round(value, 3) for name, value in by_group.items()} for by_group in distances),
    )


def _check_fit(card: Card, weights: Path, config: Config, catalogue: Catalogue) -> None:
    """Check that features and training questions are those of the training, and no held-out question was trained on."""
    if _table_hash(catalogue.questions) != card.survey.table:
        raise UserError(
            f"{weights}: was trained on another table of {card.survey.num_questions} questions, and this run has "
            f"{len(catalogue.questions)}; the features of a question depend on all of them, so use the same survey"
        )
    trained_Q = np.array([_question_hash(question) in card.survey.training for question in catalogue.questions])
    for part, verb, part_Q, wrong_Q in (
        ("held-out", "was", catalogue.held_out_Q, catalogue.held_out_Q & trained_Q),
        ("training", "was not", catalogue.train_Q, catalogue.train_Q & ~trained_Q),
    ):
        if wrong_Q.any():
            raise UserError(
                f"{weights}: {verb} trained on {wrong_Q.sum()} of this run's {part_Q.sum()} {part} questions, such as "
                f"'{catalogue.questions[wrong_Q.argmax()].question_id}'; use its groups, its seed = "
                f"{card.survey.split_seed} and its data.test-fraction = {card.survey.test_fraction}"
            )
    if not np.allclose(_probe(catalogue), card.embedding.probe, atol=PROBE_TOLERANCE):
        raise UserError(
            f"{weights}: the features of its questions are others than this run's, which has pluralllm.encoder = "
            f"{config.pluralllm.encoder}; it was trained with {card.embedding.encoder}"
        )


def _question_hash(question: Question) -> str:
    """Hash of a question's text, options and their order, without its id, which may differ between files."""
    return _hash([question.text, list(question.options), question.ordinal])


def _table_hash(questions: Sequence[Question]) -> str:
    """Hash of a set of questions, from which a table of features is computed."""
    return _hash(sorted(map(_question_hash, questions)))


def _hash(content: object) -> str:
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=HASH_BYTES).hexdigest()


def _probe(catalogue: Catalogue) -> tuple[float, ...]:
    """(E,) features of the first option of the question that comes first by hash, rounded."""
    first = min(range(len(catalogue.questions)), key=lambda q: _question_hash(catalogue.questions[q]))
    return tuple(round(float(value), 4) for value in catalogue.embedding_QKE[first, 0])
