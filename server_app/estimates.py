"""Estimates of answers for the policy's prompts: between PluralLLM's prediction and the mean of both look-ups.

PluralLLM predicts from what SFT teaches of training questions as if these were one group's answers, which comes close
to the mean of the groups' predictions and asks no group. The network knows its training questions by heart, and from
so good estimates of them a policy would learn to trust all estimates too much. So these are predicted by the view
without a network, where the architecture has one; and how much a prediction counts is decided by them too.

SFT's prompts show estimates of the mean. PPO's show estimates of what its rule makes of the groups' answers, so that
a policy that only copies follows the rule too.

Axis letters: G groups, Q public questions, K options.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from threadpoolctl import threadpool_limits

from appa_flwr.analysis.aggregation import configured
from appa_flwr.analysis.destinations import destination
from appa_flwr.config import Config
from appa_flwr.core.seeds import child_seed
from appa_flwr.protocol import formats, wire
from appa_flwr.run.records import EstimateRecord
from appa_flwr.survey.types import Question
from pluralllm.data import GroupData, OptionEmbedding
from pluralllm.model import PluralLLM
from pluralllm.prediction import predict_targets
from pluralllm.residual import ExactResidual, Shares
from server_app.federation.catalogue import embedded
from server_app.lookups import look_ups
from server_app.models.tiny import random_shares

FloatArray = npt.NDArray[np.float64]

RANDOM_ROWS = 3
"""Of SFT for each that shows a true estimate."""


@dataclass(frozen=True, eq=False)
class Estimator:
    """Makes the estimates of a run.

    Attributes:
        catalogue: the public questions.
        taught_QK: what SFT teaches, of any sums.
        votes_GQK: the distributions that it is the mean of; None where these are not known or there are none.
        network: the trained PluralLLM.
    """

    catalogue: wire.Catalogue
    taught_QK: FloatArray
    votes_GQK: FloatArray | None
    network: PluralLLM

    def for_sft(self, config: Config) -> tuple[EstimateRecord, ...]:
        """Each question's, of the groups' mean."""
        return estimates(config, self.taught_QK, self.catalogue, self.network)

    def by_rule(self, config: Config) -> tuple[EstimateRecord, ...]:
        """Each question's, of where free answers end that follow the config's rule; of the mean without votes."""
        if self.votes_GQK is None:
            return self.for_sft(config)
        train_Q = self.catalogue.train_Q
        ended_QK = np.zeros(self.taught_QK.shape)
        ended_QK[train_Q] = destination(
            configured(config.rule, config.appa),
            self.votes_GQK[:, train_Q],
            self.catalogue.option_QK[train_Q],
            metric=config.reward_metric,
            seed=child_seed(config.seed, "estimates"),
        ).answer_QK
        return estimates(config, ended_QK, self.catalogue, self.network)


def estimates(
    config: Config, mean_QK: FloatArray, catalogue: wire.Catalogue, network: PluralLLM
) -> tuple[EstimateRecord, ...]:
    """Each question's, on the grid that SFT teaches; its own answer does not count.

    Args:
        config: of the run.
        mean_QK: one answer for all groups, of any sums; only those to training questions are used.
        catalogue: the public questions.
        network: the trained PluralLLM.
    """
    found = look_ups(mean_QK, catalogue, np.arange(len(catalogue.questions)))
    looked_up_QK = np.mean([part_QK / part_QK.sum(1, keepdims=True) for part_QK in found.values()], axis=0)
    predicted_QK = _predicted(config, mean_QK, catalogue, network)
    weight = _weight(mean_QK, looked_up_QK, predicted_QK, catalogue) if isinstance(network, ExactResidual) else 0.5
    estimate_QK = (1 - weight) * looked_up_QK + weight * predicted_QK
    return tuple(
        EstimateRecord(
            question_id=question.question_id,
            question=question.text,
            options=question.options,
            ordinal=question.ordinal,
            share=tuple(mean_QK[q][option_K].tolist()) if catalogue.train_Q[q] else None,
            estimate=formats.answer(config.task, estimate_QK[q][option_K], step=config.sft.answer_step),
        )
        for q, (question, option_K) in enumerate(zip(catalogue.questions, catalogue.option_QK, strict=True))
    )


def _weight(
    mean_QK: FloatArray, looked_up_QK: FloatArray, predicted_QK: FloatArray, catalogue: wire.Catalogue
) -> float:
    """Of the prediction, in [0.5, 1]: by least squares on the training questions.

    Those lack what the network knows, so it is too low for others.
    """
    known_Q = catalogue.train_Q & (mean_QK.sum(axis=1) > 0)
    missed_QK = mean_QK[known_Q] / mean_QK[known_Q].sum(axis=1, keepdims=True) - looked_up_QK[known_Q]
    step_QK = (predicted_QK - looked_up_QK)[known_Q]
    return float(np.clip(np.vdot(step_QK, missed_QK) / max(np.vdot(step_QK, step_QK), 1e-12), 0.5, 1.0))


def _predicted(config: Config, mean_QK: FloatArray, catalogue: wire.Catalogue, network: PluralLLM) -> FloatArray:
    known_Q = np.flatnonzero(catalogue.train_Q & (mean_QK.sum(axis=1) > 0))
    share_NK = mean_QK[known_Q] / mean_QK[known_Q].sum(axis=1, keepdims=True)
    ids = tuple(question.question_id for question in catalogue.questions)
    table = OptionEmbedding(ids, catalogue.embedding_QKE, catalogue.option_QK)
    as_group = GroupData("mean", known_Q, share_NK.astype(np.float32))

    def predicted(rows: npt.NDArray[np.int64]) -> FloatArray:
        return predict_targets(
            network,
            as_group,
            table,
            num_context=config.pluralllm.num_context_questions,
            seed=child_seed(config.seed, "context", 0),
            rows=rows,
        ).probability_QK

    found_QK = np.zeros(mean_QK.shape)
    found_QK[~catalogue.train_Q] = predicted(np.flatnonzero(~catalogue.train_Q))
    with _without_network(network):
        found_QK[catalogue.train_Q] = predicted(np.flatnonzero(catalogue.train_Q))
    return found_QK


@contextmanager
def _without_network(network: PluralLLM) -> Iterator[None]:
    if not isinstance(network, ExactResidual):
        yield
        return
    chosen = network.shares
    network.choose(Shares(features=0.0, plain=1.0))
    yield
    network.choose(chosen)


def asked(config: Config, known: Sequence[EstimateRecord], question: Question, network: PluralLLM) -> str:
    """The estimate for any question, one of the records or another."""
    for one in known:
        if (one.question, one.options) == (question.text, question.options):
            return one.estimate
    questions = [Question(one.question_id, one.question, one.options, one.ordinal) for one in known]
    train_Q = np.array([*(one.share is not None for one in known), False])
    with threadpool_limits(1):  # as in a run: another number of threads may find other features
        catalogue = embedded(config, (*questions, question), train_Q, ~train_Q)
    mean_QK = np.zeros(catalogue.option_QK.shape)
    for q, one in enumerate(known):
        mean_QK[q, : len(one.options)] = one.share or 0.0
    return estimates(config, mean_QK, catalogue, network)[-1].estimate


def random_rows(
    config: Config, questions: Sequence[Question], count: int, rng: np.random.Generator
) -> Iterator[tuple[Question, str]]:
    """So many rows for SFT of questions with random estimates, which are the answers too.

    From true estimates alone a model learns the few answers by heart, and not to read.
    """
    for place in rng.integers(len(questions), size=count):
        question = questions[place]
        share_K = random_shares(len(question.options), rng)
        yield question, formats.answer(config.task, share_K, step=config.sft.answer_step)
