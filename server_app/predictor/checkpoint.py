"""PluralLLM's checkpoint: the weights, and the card beside them that says what they were trained on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import safetensors.numpy
from flwr.app import Array, ArrayRecord
from safetensors import SafetensorError, safe_open

from appa_flwr.config import Config
from appa_flwr.core.errors import UserError
from appa_flwr.core.files import replace_file
from appa_flwr.protocol.asks import Catalogue
from appa_flwr.run.cards import Card, EmbeddingSummary, SurveySummary
from pluralllm import card as cards
from pluralllm.network import PluralLLM
from pluralllm.training import build
from server_app.predictor.pretraining import Pretraining

PRETRAINING = "pretraining"
SETTINGS = "pluralllm."


def save_weights(path: Path, pretraining: Pretraining) -> None:
    """Write PluralLLM's weights and how its rounds went.

    Raises:
        UserError: it cannot be written.
    """
    arrays = {name: np.ascontiguousarray(array.numpy()) for name, array in pretraining.weights.items()}
    # One entry: safetensors writes several in the order of a hash, and the same weights would be other bytes.
    known = {"losses": pretraining.losses, "validation": pretraining.validation}
    replace_file(path, safetensors.numpy.save(arrays, metadata={PRETRAINING: json.dumps(known)}))


def load_weights(path: Path, start: ArrayRecord) -> Pretraining | None:
    """Weights as `save_weights` wrote them; None where nothing is. `start` has the names and shapes that are expected.

    Raises:
        UserError: it cannot be read, or holds other names or shapes.
    """
    if not path.exists():
        return None
    try:
        with safe_open(path, "np") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            known = json.loads((file.metadata() or {})[PRETRAINING])
            losses, validation = tuple(known["losses"]), known["validation"]
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise UserError(
            f"{path}: cannot be read ({str(error).partition(chr(10))[0]}); without it PluralLLM is trained anew"
        ) from None
    expected = {name: tuple(array.shape) for name, array in start.items()}
    if {name: array.shape for name, array in arrays.items()} != expected:
        raise UserError(f"{path}: holds other weights than PluralLLM's of this config; without it it is trained anew")
    return Pretraining(ArrayRecord({name: Array(arrays[name]) for name in start}), losses, validation)


def network(config: Config, weights: ArrayRecord) -> PluralLLM:
    """The network of these weights."""
    model = build(config.pluralllm.architecture)
    model.load_state_dict(weights.to_torch_state_dict())
    return model


def read_checkpoint(config: Config, catalogue: Catalogue, start: ArrayRecord) -> tuple[Pretraining, Card] | None:
    """The weights that `pluralllm.checkpoint` names, and their card; None where it names none.

    `start` has the names and shapes that are expected.

    Raises:
        UserError: it cannot be read or does not fit this run.
    """
    if not config.pluralllm.checkpoint:
        return None
    path = Path(config.pluralllm.checkpoint)
    card = cards.read(path)
    cards.check_fit(card, path, config, catalogue)
    pretraining = load_weights(path, start)
    assert pretraining is not None  # its card was beside it
    return pretraining, card


def new_card(config: Config, catalogue: Catalogue, answered: Mapping[str, int], pretraining: Pretraining) -> Card:
    """The card of weights that this run trained, without scores; `answered` counts each group's training answers."""
    unseen, probe = config.unseen_group_names, cards.probe(catalogue.embedding_QKE, catalogue.questions)
    training = [cards.question_hash(catalogue.questions[q]) for q in np.flatnonzero(catalogue.train_Q)]
    return Card(
        architecture=config.pluralllm.architecture,
        embedding=EmbeddingSummary(encoder=config.pluralllm.encoder, probe=probe),
        survey=SurveySummary(
            table=cards.table_hash(catalogue.questions),
            training=tuple(sorted(training)),
            num_questions=len(catalogue.questions),
            num_held_out=int(catalogue.held_out_Q.sum()),
            split_seed=config.seed,
            test_fraction=config.data.test_fraction,
            groups={name: count for name, count in answered.items() if name not in unseen},
            unseen_groups={name: count for name, count in answered.items() if name in unseen},
        ),
        training={key: value for key, value in config.flat().items() if key.startswith(SETTINGS) and key != cards.KEY},
        losses=pretraining.losses,
        validation=pretraining.validation,
    )
