"""A group's use of PluralLLM: its part of federated pretraining, and its target table from the frozen result.

The only module of this side that imports torch; `main` imports it inside the actions that need it, since deployed every
message starts a fresh process and scoring has no use for torch.

Axis letters: Q public questions, K options, N questions a group answered, W as in `pluralllm.model`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from flwr.app import ArrayRecord

from appa_flwr import wire
from appa_flwr.config import Config
from appa_flwr.config.sections import PluralLLMSection
from appa_flwr.errors import UserError
from appa_flwr.seeds import child_seed
from pluralllm.data import BoolArray, FloatArray, GroupData, IntArray, OptionEmbedding
from pluralllm.episodes import EpisodeConfig
from pluralllm.model import ModelConfig, PluralLLM
from pluralllm.prediction import Targets, predict_targets
from pluralllm.scores import CONTEXT_SIZES, MEASURES, PREDICTOR, by_size, local_sums, measure_sums
from pluralllm.training import local_update

# sums over a few training answers would tell what these answers are
MIN_TRAINING_CELLS = 10


@dataclass(frozen=True)
class Member:
    """A group with what PluralLLM may be given of it.

    Attributes:
        data: its training answers, the only source of context.
        population: (Q, K, W) what the other groups answered, or None without a population prior.
    """

    data: GroupData
    population: FloatArray | None


@dataclass(frozen=True)
class Trained:
    """A node's result of a round: the mean of its groups' weights by number of answers, that number, the loss."""

    weights: ArrayRecord
    num_examples: int
    loss: float


def train_round(
    config: Config,
    start: ArrayRecord,
    groups: Sequence[Member],
    embedding: OptionEmbedding,
    *,
    round_number: int,
    proximal: float = 0.0,
) -> Trained:
    """Train a copy of the server's weights on each group's answers and average the copies.

    The weighted mean over a node's groups, weighted again over nodes by the server, is FedAvg over all groups. The
    episodes' seed is of the run, the group and the round; `proximal` is mu of FedProx.

    Raises:
        UserError: no group here has an answer.
    """
    torch.set_num_threads(1)
    total: OrderedDict[str, torch.Tensor] = OrderedDict()
    examples, loss = 0, 0.0
    settings, sent = config.pluralllm, start.to_torch_state_dict()
    model = PluralLLM(ModelConfig.of(config.embedding, settings, config.sums))
    for member in groups:
        data = member.data
        if not len(data):
            continue
        model.load_state_dict(sent)
        seed = child_seed(config.seed, "pluralllm", data.group, round_number)
        group_loss = local_update(
            model,
            data,
            embedding,
            steps=settings.local_steps,
            learning_rate=settings.learning_rate,
            optimizer=settings.optimizer,
            episodes=EpisodeConfig(num_context=settings.num_context_questions),
            generator=torch.Generator().manual_seed(seed),
            proximal=proximal,
            population=member.population,
        )
        for key, value in model.state_dict().items():
            total[key] = total.get(key, torch.zeros_like(value)) + value * len(data)
        examples += len(data)
        loss += group_loss * len(data)
    if not examples:
        raise UserError("no group of this node has an answer to train on")
    mean = OrderedDict((key, value / examples) for key, value in total.items())
    return Trained(ArrayRecord(mean), examples, loss / examples)


@dataclass(frozen=True)
class Predictor:
    """PluralLLM with all that its predictions depend on but the group.

    Attributes:
        model: with the weights of a round, or the final ones.
        embedding: the public table.
        settings: context size and number of contexts.
        seed: the run's.
    """

    model: PluralLLM
    embedding: OptionEmbedding
    settings: PluralLLMSection
    seed: int

    def table(
        self, member: Member, *, draw: int, rows: IntArray | None = None, num_context: int | None = None
    ) -> Targets:
        """The group's predicted distribution on every public question, (Q, K), and its spread over draws.

        Args:
            member: the group, with its training answers: the only source of context.
            draw: 0 for the contexts of a run's fixed table; another number for fresh ones.
            rows: questions to predict instead of all, ascending.
            num_context: another context size than the config's.
        """
        torch.set_num_threads(1)
        found = predict_targets(
            self.model,
            member.data,
            self.embedding,
            num_context=self.settings.num_context_questions if num_context is None else num_context,
            seed=child_seed(self.seed, "context", draw),
            num_draws=self.settings.draws,
            population=member.population,
            rows=rows,
        )
        if self.settings.draws == 1:  # rounding is no uncertainty
            return Targets(found.probability_QK, np.zeros_like(found.spread_Q))
        return found

    def validate(self, groups: Sequence[tuple[Member, GroupData]]) -> tuple[int, float]:
        """Number of held-out answers of these groups, and the mean natural Jensen-Shannon distance to them.

        `groups` are those this node hosts that train, each with its answers to held-out questions.
        """
        cells, error = 0.0, 0.0
        for member, truth in groups:
            if len(truth):
                found = self.table(member, draw=0, rows=truth.question_N)
                sums = self._measured(found.probability_QK, truth)
                cells += sums["cells"]
                error += sums["cells"] - sums["js_distance"]
        return int(cells), error / cells if cells else 0.0

    def scores(
        self,
        member: Member,
        targets: Targets,
        truth_QK: npt.NDArray[np.float64],
        train_Q: BoolArray,
        *,
        mean_of_others: FloatArray | None,
    ) -> dict[str, dict[str, dict[str, float]]]:
        """How good a group's targets are against its own answers: part -> predictor -> sums, see `scores.local_sums`.

        Args:
            member: the group.
            targets: its table; training answers are each predicted from the others.
            truth_QK: all its answers, rows of NaN elsewhere.
            train_Q: which questions are for training.
            mean_of_others: (Q, K) what the other groups answered on average, rows of 0 where unknown.

        Returns:
            The part of the training answers is left out where they are fewer than `MIN_TRAINING_CELLS`. "context-4" and
            the like are PluralLLM with so many context questions, left out for both parts where the answers are so few.
        """
        data = member.data
        parts = {wire.HELD_OUT_PART: held_out_answers(data.group, truth_QK, train_Q)}
        if len(data) >= MIN_TRAINING_CELLS:
            parts[wire.TRAINING_PART] = data
        found = {
            part: local_sums(
                targets.probability_QK,
                targets.spread_Q,
                truth=truth,
                known=data,
                embedding=self.embedding,
                mean_of_others=mean_of_others,
            )
            for part, truth in parts.items()
        }
        if wire.TRAINING_PART in parts:
            found[wire.TRAINING_PART] = _without_small_differences(found[wire.TRAINING_PART])
            for size in CONTEXT_SIZES:
                for part, sums in self._sums_by_size(member, parts, size=size).items():
                    found[part][by_size(size)] = sums
        return found

    def _sums_by_size(self, member: Member, parts: dict[str, GroupData], *, size: int) -> dict[str, dict[str, float]]:
        """Part -> sums of PluralLLM's scores with `size` context questions.

        Small contexts are drawn so often that at least `MIN_TRAINING_CELLS` answers have been in one: the server knows
        the weights, and the scores that follow from a single answer would tell it.
        """
        answered = np.sort(np.concatenate([truth.question_N for truth in parts.values()]))
        num_draws = -(-MIN_TRAINING_CELLS // size)
        total = {part: dict.fromkeys((*MEASURES, "cells"), 0.0) for part in parts}
        for draw in range(num_draws):
            found = self.table(member, draw=draw, rows=answered, num_context=size)
            for part, truth in parts.items():
                places = np.searchsorted(answered, truth.question_N)
                for name, value in self._measured(found.probability_QK[places], truth).items():
                    total[part][name] += value / num_draws
        # a number of answers divided and added up again may miss itself by a bit
        return {part: sums | {"cells": float(round(sums["cells"]))} for part, sums in total.items()}

    def _measured(self, prediction_NK: FloatArray, truth: GroupData) -> dict[str, float]:
        return measure_sums(prediction_NK, truth.answer_NK, self.embedding.option_QK[truth.question_N])


def load(config: Config, weights: ArrayRecord, embedding: OptionEmbedding) -> Predictor:
    """The predictor that a run is configured to have, with these weights."""
    model = PluralLLM(ModelConfig.of(config.embedding, config.pluralllm, config.sums))
    model.load_state_dict(weights.to_torch_state_dict())
    return Predictor(model, embedding, config.pluralllm, config.seed)


def held_out_answers(group: str, truth_QK: npt.NDArray[np.float64], train_Q: BoolArray) -> GroupData:
    """A group's answers to held-out questions, to score against and never as context; see `Predictor.scores`."""
    rows = np.flatnonzero(~train_Q & ~np.isnan(truth_QK).any(axis=1))
    return GroupData(group, rows, truth_QK[rows].astype(np.float32))


def _without_small_differences(sums: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Leave out sums over a part of the answers where it, or what is missing from it, are few answers."""
    every = sums[PREDICTOR]["cells"]
    return {
        name: measures
        for name, measures in sums.items()
        if measures["cells"] == every or MIN_TRAINING_CELLS <= measures["cells"] <= every - MIN_TRAINING_CELLS
    }
