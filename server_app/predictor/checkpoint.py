"""PluralLLM's checkpoint: the weights, and the card beside them that says what they were trained on."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import safetensors.numpy
from flwr.app import Array, ArrayRecord
from safetensors import SafetensorError

from appa_flwr.config import Config
from appa_flwr.core.errors import UserError
from appa_flwr.core.files import replace_file
from appa_flwr.protocol.asks import Catalogue
from appa_flwr.run.records import Card, EmbeddingSummary, SurveySummary
from pluralllm import card as cards

SETTINGS, CHECKPOINT = "pluralllm.", "pluralllm.checkpoint"


def save(path: Path, weights: ArrayRecord, card: Card) -> None:
    """Write weights, and then their card.

    Raises:
        UserError: a file cannot be written.
    """
    arrays = {name: np.ascontiguousarray(array.numpy()) for name, array in weights.items()}
    replace_file(path, safetensors.numpy.save(arrays))
    cards.write(path, card)


def load(path: Path, config: Config, catalogue: Catalogue, start: ArrayRecord) -> tuple[ArrayRecord, Card]:
    """Read weights and card written by `save`; `start` has the names and shapes that this run expects.

    Raises:
        UserError: the files cannot be read or do not fit this run.
    """
    card = cards.read(path)
    cards.check_fit(card, path, config, catalogue)
    try:
        arrays = safetensors.numpy.load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be read ({str(error).partition(chr(10))[0]})") from None
    if {name: array.shape for name, array in arrays.items()} != {name: value.shape for name, value in start.items()}:
        own = config.pluralllm.architecture
        raise UserError(f"{path}: its weights do not fit pluralllm.architecture = {own}")
    return ArrayRecord({name: Array(arrays[name]) for name in start}), card


def new_card(config: Config, catalogue: Catalogue, answered: Mapping[str, int], losses: Sequence[float]) -> Card:
    """Make the card, without scores, of weights from this run; `answered` counts each group's training answers."""
    probe = cards.probe(catalogue.embedding_QKE, catalogue.questions)
    training = [cards.question_hash(catalogue.questions[q]) for q in np.flatnonzero(catalogue.train_Q)]
    return Card(
        embedding=EmbeddingSummary(encoder=config.pluralllm.encoder, probe=probe),
        survey=SurveySummary(
            table=cards.table_hash(catalogue.questions),
            training=tuple(sorted(training)),
            num_questions=len(catalogue.questions),
            split_seed=config.seed,
            test_fraction=config.data.test_fraction,
            groups=dict(answered),
        ),
        training={k: value for k, value in config.flat().items() if k.startswith(SETTINGS) and k != CHECKPOINT},
        losses=tuple(losses),
    )
