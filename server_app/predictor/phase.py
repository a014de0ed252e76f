"""PluralLLM's checkpoints on the server: the card a run writes, and the weights a run may start with.

Axis letters: Q questions.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord

from appa_flwr.config import Config
from appa_flwr.protocol.asks import Catalogue
from appa_flwr.run.cards import Card, EmbeddingSummary, EpisodeShape, SurveySummary
from pluralllm import card as cards
from pluralllm.training import EpisodeConfig
from server_app.predictor.pretraining import Pretraining
from server_app.predictor.weights import load_weights

SETTINGS = "pluralllm."


def pretrained(config: Config, catalogue: Catalogue, start: ArrayRecord) -> tuple[Pretraining, Card] | None:
    """The checkpoint that `pluralllm.checkpoint` names, and its card; None where it names none.

    `start` has the names and shapes that are expected.

    Raises:
        UserError: it cannot be read or does not fit this run.
    """
    if not config.pluralllm.checkpoint:
        return None
    path = Path(config.pluralllm.checkpoint)
    card = cards.read(path)
    cards.check_fit(
        card,
        path,
        architecture=config.pluralllm.architecture,
        embedding=_embedding(config, catalogue),
        questions=catalogue.questions,
        held_out=[catalogue.questions[q] for q in np.flatnonzero(catalogue.held_out_Q)],
        unseen_groups=config.unseen_group_names,
    )
    found = load_weights(path, start)
    assert found is not None  # its card was beside it
    return found, card


def new_card(config: Config, catalogue: Catalogue, answered: Mapping[str, int], pretraining: Pretraining) -> Card:
    """The card of weights that this run trained, without scores; `answered` counts each group's training answers."""
    unseen = config.unseen_group_names
    training = [cards.question_hash(catalogue.questions[q]) for q in np.flatnonzero(catalogue.train_Q)]
    return Card(
        architecture=config.pluralllm.architecture,
        episodes=EpisodeShape(**vars(EpisodeConfig.of(config.pluralllm))),
        embedding=_embedding(config, catalogue),
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


def _embedding(config: Config, catalogue: Catalogue) -> EmbeddingSummary:
    return EmbeddingSummary(
        encoder=config.pluralllm.encoder,
        probe=cards.probe(catalogue.embedding_QKE, catalogue.questions),
    )
