"""A group's use of PluralLLM: its part of federated pretraining, and its target table from the frozen result.

The only module of this side that imports torch; `main` imports it inside the actions that need it, since deployed every
message starts a fresh process and scoring has no use for torch.

Axis letters: Q public questions, K options, N questions a group answered.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from flwr.app import ArrayRecord

from appa_flwr.config import Config
from appa_flwr.config.sections import AVERAGING, PluralLLMSection
from appa_flwr.core.errors import UserError
from appa_flwr.core.seeds import child_seed
from appa_flwr.protocol import wire
from pluralllm.architectures import build, choices
from pluralllm.data import BoolArray, FloatArray, GroupData, OptionEmbedding
from pluralllm.episodes import EpisodeConfig
from pluralllm.model import ModelConfig, PluralLLM
from pluralllm.prediction import predict_choices, predict_targets
from pluralllm.scores import PREDICTOR, local_sums, measure_sums
from pluralllm.training import local_update, step_size_factor

# sums over a few training answers would tell what these answers are
MIN_TRAINING_ANSWERS = 10


@dataclass(frozen=True)
class LocalUpdate:
    """A node's result of a round: the groups' joined weights, averaged by number of answers, that number, the loss."""

    weights: ArrayRecord
    num_examples: int
    loss: float


def train_round(
    config: Config,
    start: ArrayRecord,
    groups: Sequence[GroupData],
    embedding: OptionEmbedding,
    *,
    round_number: int,
    proximal: float = 0.0,
    secret: str = "",
) -> LocalUpdate:
    """Train a copy of the server's joined weights on each group's answers and average the copies.

    The weighted mean over a node's groups, weighted again over nodes by the server, is FedAvg over all groups. The
    episodes' seed is of the run, the group and the round, and of the node's `secret`; `proximal` is mu of FedProx.

    Raises:
        UserError: no group here has an answer.
    """
    torch.set_num_threads(1)
    total: OrderedDict[str, torch.Tensor] = OrderedDict()
    examples, loss = 0, 0.0
    settings = config.pluralllm
    model = build(ModelConfig.of(settings.architecture))
    sent = _state(model, start)
    learning_rate = settings.local_learning_rate
    if settings.strategy in AVERAGING:  # in the others the server's own step falls
        learning_rate *= step_size_factor(round_number - 1, settings.rounds)
    for data in groups:
        if not len(data):
            continue
        model.load_state_dict(sent)
        seed = child_seed(config.seed, "pluralllm", data.group, round_number, *filter(None, [secret]))
        group_loss = local_update(
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
        for key, value in model.state_dict().items():
            total[key] = total.get(key, torch.zeros_like(value)) + value * len(data)
        examples += len(data)
        loss += group_loss * len(data)
    if not examples:
        raise UserError("no group of this node has an answer to train on")
    mean = OrderedDict((key, value / examples) for key, value in total.items())
    return LocalUpdate(wire.join_weights(ArrayRecord(mean)), examples, loss / examples)


@dataclass(frozen=True)
class Predictor:
    """PluralLLM with all that its predictions depend on but the group.

    Attributes:
        model: with the weights of a round, or the final ones.
        embedding: the public table.
        train_Q: which questions are for training.
        settings: context size.
        seed: the run's.
    """

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

    def validate(self, groups: Sequence[tuple[GroupData, GroupData]]) -> tuple[int, list[float]]:
        """Number of held-out answers of these groups, and the mean natural Jensen-Shannon distance to them.

        Each group's training answers come with its answers to held-out questions. There is a distance for each of
        `architectures.choices`.
        """
        torch.set_num_threads(1)
        num_answers, error_V = 0.0, np.zeros(len(choices(self.model.config.architecture)))
        for data, truth in groups:
            if not len(truth):
                continue
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
            num_answers += sums[0]["answers"]
            error_V += [one["answers"] - one["js_distance"] for one in sums]
        return int(num_answers), [float(error) / num_answers if num_answers else 0.0 for error in error_V]

    def scores(
        self,
        data: GroupData,
        targets: FloatArray,
        held_out: GroupData,
        *,
        least: int,
        mean_of_others: FloatArray | None,
    ) -> dict[str, dict[str, dict[str, float]]]:
        """Scores of a group's targets against its own answers: part -> predictor -> sums, see `scores.local_sums`.

        Args:
            data: the group's training answers.
            targets: its table; training answers are each predicted from the others.
            held_out: its answers to held-out questions.
            least: fewest answers in a sum, and between two sums; of training answers at least `MIN_TRAINING_ANSWERS`.
            mean_of_others: (Q, K) what the other groups answered on average, rows of 0 where unknown.

        Returns:
            The part of the training answers is left out where they are so few.
        """
        parts, least_training = {wire.HELD_OUT_PART: held_out}, max(MIN_TRAINING_ANSWERS, least)
        if len(data) >= least_training:
            parts[wire.TRAINING_PART] = data
        fewest = {wire.HELD_OUT_PART: least, wire.TRAINING_PART: least_training}
        found = {}
        for part, truth in parts.items():
            told = local_sums(targets, truth=truth, known=data, embedding=self.embedding, mean_of_others=mean_of_others)
            found[part] = _without_small_differences(told, fewest[part])
        return found


def load(config: Config, weights: ArrayRecord, embedding: OptionEmbedding, train_Q: BoolArray) -> Predictor:
    """The predictor that a run is configured to have, with these joined weights."""
    model = build(ModelConfig.of(config.pluralllm.architecture))
    model.load_state_dict(_state(model, weights))
    return Predictor(model, embedding, train_Q, config.pluralllm, config.seed)


def _state(model: PluralLLM, weights: ArrayRecord) -> OrderedDict[str, torch.Tensor]:
    """Joined weights as the model's."""
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    return wire.split_weights(weights, shapes).to_torch_state_dict()


def held_out_answers(group: str, truth_QK: npt.NDArray[np.float64], train_Q: BoolArray) -> GroupData:
    """A group's answers to held-out questions, to score against and never as context; see `Predictor.scores`."""
    rows = np.flatnonzero(~train_Q & ~np.isnan(truth_QK).any(axis=1))
    return GroupData(group, rows, truth_QK[rows].astype(np.float32))


def _without_small_differences(sums: dict[str, dict[str, float]], least: int) -> dict[str, dict[str, float]]:
    """Leave out sums over a part of the answers where it, or what is missing from it, are few answers."""
    every = sums[PREDICTOR]["answers"]
    return {
        name: measures
        for name, measures in sums.items()
        if measures["answers"] == every or least <= measures["answers"] <= every - least
    }
