"""A group's use of PluralLLM: its part of federated pretraining, and its target table from the frozen result.

The only module of this side that imports torch; others import it inside the functions that need it, since deployed
every message starts a fresh process and scoring has no use for torch.

Axis letters: P weights, Q public questions, K options, V choices of what views count.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from flwr.app import ArrayRecord

from appa_flwr.config import Config
from appa_flwr.config.sections import AVERAGING, PluralLLMSection
from appa_flwr.core.seeds import child_seed
from appa_flwr.protocol.messages import join_weights, split_weights
from pluralllm.data import BoolArray, FloatArray, GroupData, OptionEmbedding
from pluralllm.network import PluralLLM
from pluralllm.prediction import predict_choices, predict_targets
from pluralllm.scores import measure_sums
from pluralllm.training import EpisodeConfig, build, choices, local_update, step_size_factor

Weights = npt.NDArray[np.float32]


def train(
    config: Config,
    weight_P: Weights,
    data: GroupData,
    embedding: OptionEmbedding,
    *,
    round_number: int,
    proximal: float,
    secret: str,
) -> tuple[Weights, float]:
    """Train a copy of the server's joined weights (P,) on a group's answers, at least one, with FedProx' mu `proximal`.

    `round_number`, from 1 on, decides the step size and, with the run's seed and the group, the episodes; so does the
    node's `secret`, that nobody can repeat the round with guessed answers.

    Returns:
        The weights (P,) after training, and the mean loss over the steps.
    """
    torch.set_num_threads(1)
    settings, model = config.pluralllm, _model(config, weight_P)
    learning_rate = settings.local_learning_rate
    if settings.strategy in AVERAGING:  # in the others the server's own step falls
        learning_rate *= step_size_factor(round_number - 1, settings.rounds)
    seed = child_seed(config.seed, "pluralllm", data.group, round_number, *filter(None, [secret]))
    loss = local_update(
        model,
        data,
        embedding,
        steps=settings.local_steps,
        learning_rate=learning_rate,
        optimizer=settings.local_optimizer,
        episodes=EpisodeConfig.of(settings),
        generator=torch.Generator().manual_seed(seed),
        proximal=proximal,
    )
    return join_weights(ArrayRecord(OrderedDict(model.state_dict()))), loss


@dataclass(frozen=True)
class Predictor:
    """PluralLLM with all that its predictions depend on but the group; `train_Q` are the questions for training."""

    model: PluralLLM
    embedding: OptionEmbedding
    train_Q: BoolArray
    settings: PluralLLMSection
    seed: int

    def table(self, data: GroupData, *, draw: int) -> FloatArray:
        """The group's predicted distribution on every public question, (Q, K): the targets of the rollouts' rewards.

        Its training answers `data` are the only source of context; `draw` is 0 for the contexts of a run's fixed table.
        """
        torch.set_num_threads(1)
        return predict_targets(
            self.model,
            data,
            self.embedding,
            num_context=self.settings.num_context_questions,
            seed=child_seed(self.seed, "context", draw),
            trained=self.train_Q,
        )

    def errors(self, data: GroupData, truth: GroupData) -> FloatArray:
        """Sums (V,) of the natural Jensen-Shannon distance to a group's held-out answers, for each choice of views.

        `data` are its training answers, the context.
        """
        torch.set_num_threads(1)
        if not len(truth):
            return np.zeros(len(choices(self.settings.architecture)))
        predicted_VNK = predict_choices(
            self.model,
            data,
            self.embedding,
            num_context=self.settings.num_context_questions,
            seed=child_seed(self.seed, "context", 0),
            trained=self.train_Q,
            rows=truth.question_N,
        )
        option_NK = self.embedding.option_QK[truth.question_N]
        sums = [measure_sums(predicted_NK, truth.answer_NK, option_NK) for predicted_NK in predicted_VNK]
        return np.array([measures["answers"] - measures["js_distance"] for measures in sums])


def load(config: Config, weight_P: Weights, embedding: OptionEmbedding, train_Q: BoolArray) -> Predictor:
    """The predictor that a run is configured to have, with these joined weights."""
    return Predictor(_model(config, weight_P), embedding, train_Q, config.pluralllm, config.seed)


def _model(config: Config, weight_P: Weights) -> PluralLLM:
    model = build(config.pluralllm.architecture)
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    model.load_state_dict(split_weights(weight_P, shapes).to_torch_state_dict())
    return model
