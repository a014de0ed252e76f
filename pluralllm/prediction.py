"""Frozen prediction: one table of target distributions per group, conditioned on its own answers.

One context serves all questions, so it is encoded once and all questions are predicted in one pass. Only the few
questions that are in it themselves need one of their own, without them.

Axis letters: Q questions, K options, N questions the group answered, C context questions, R draws of a context,
W as in `pluralllm.model`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from appa_flwr.errors import UserError
from appa_flwr.rewards import js_distance
from pluralllm.data import FloatArray, GroupData, IntArray, OptionEmbedding
from pluralllm.model import PluralLLM, Questions

# bounds memory: real surveys ask thousands of questions
QUESTIONS_PER_BATCH = 1024
HASH_BYTES = 8


def _hash(*parts: object) -> int:
    """A 64-bit hash, the same in every process; ("a", "bc") and ("ab", "c") differ."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=HASH_BYTES)
    return int.from_bytes(digest.digest(), "little")


def _mix(key: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Scramble 64-bit integers with the finaliser of splitmix64 (Steele, Lea and Flood, 2014)."""
    key = (key ^ (key >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    key = (key ^ (key >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return key ^ (key >> np.uint64(31))


@dataclass(frozen=True)
class Targets:
    """One group's predicted answers.

    Attributes:
        probability_QK: (Q, K) distributions, the mean over the draws; rows sum to 1, padding is 0.
        spread_Q: (Q,) mean natural Jensen-Shannon distance of the draws to their mean, in [0, 0.833]: how much the
            prediction depends on which answers it was shown. 0 where there is one draw only.
    """

    probability_QK: FloatArray
    spread_Q: FloatArray


def context_order(
    data: GroupData, question_ids: Sequence[str], *, num_context: int, seed: int, draw: int = 0
) -> IntArray:
    """Choose a group's context: its first C answers in a pseudo-random order, and the one that comes next.

    Every answered question gets a key from (seed, group, draw) and its id, and the smallest keys win. So the choice
    depends neither on the order of anything, nor on the process, nor on what is asked. A question among the first C
    is predicted from the C others of these C + 1: for every single question the context is a uniform sample of the
    other answers.

    Returns:
        (min(C + 1, N),) distinct rows of `data`.
    """
    own_key = np.uint64(_hash(seed, data.group, draw))
    given = np.array([_hash(question_ids[row]) for row in data.question_N], dtype=np.uint64)
    order: IntArray = np.argsort(_mix(own_key ^ given), kind="stable")[: num_context + 1]
    return order


def _answers(
    model: PluralLLM, table: Questions, data: GroupData, row_BC: IntArray, question_BM: IntArray
) -> FloatArray:
    """Answers (B, M, K) to questions (B, M) of the public table, each row from the context of rows (B, C) of `data`."""

    def asked(question: IntArray) -> Questions:
        return table.map(lambda value: value[torch.from_numpy(question)])

    answer = torch.from_numpy(data.answer_NK[row_BC]).to(table.embedding.device)
    memory = model.remember(asked(data.question_N[row_BC])._replace(answer=answer))
    starts = range(0, question_BM.shape[1], QUESTIONS_PER_BATCH)
    parts = [model.predict(memory, asked(question_BM[:, start : start + QUESTIONS_PER_BATCH])) for start in starts]
    return np.concatenate([log_BMK.double().exp().cpu().numpy() for log_BMK in parts], axis=1)


@torch.inference_mode()
def predict_targets(
    model: PluralLLM,
    data: GroupData,
    embedding: OptionEmbedding,
    *,
    num_context: int,
    seed: int,
    num_draws: int = 1,
    population: FloatArray | None = None,
    rows: IntArray | None = None,
) -> Targets:
    """Predict one group's distribution over the options of every public question.

    The model is used frozen, conditioned on few-shot context from `D_g` (paper, appendix "PluralLLM Preference
    Probability Modeling"). A question the group answered is predicted from its other answers only.

    Args:
        model: trained on an embedding of the same size.
        data: the group's training answers. Held-out answers must not be among them.
        embedding: the public table of Q questions.
        num_context: context questions; fewer where the group has fewer; with none the prior is predicted.
        seed: of the run; with the group's name it fixes the context.
        num_draws: contexts to average over, >= 1.
        population: (Q, K, W) of the other groups, for a model that was trained with it.
        rows: questions to predict, ascending; all Q if None.

    Returns:
        The predictions and how far they depend on the draw, of the questions in `rows`.

    Raises:
        UserError: the embedding has another size than the model was built for, `num_draws` < 1, or a population
            prior for a model without one.
    """
    if embedding.dim != model.config.embedding_dim:
        raise UserError(
            f"PluralLLM was built for embeddings of {model.config.embedding_dim} features, "
            f"the table has {embedding.dim}"
        )
    if num_draws < 1:
        raise UserError(f"num-draws is {num_draws}; use at least 1")
    if population is not None and not model.config.population:
        raise UserError("PluralLLM was built without a population prior and cannot use one")
    model.eval()
    others = None if population is None else torch.from_numpy(population).float()
    table = Questions(torch.from_numpy(embedding.value_QKE), torch.from_numpy(embedding.option_QK), population=others)
    table = table.map(lambda value: value.to(next(model.parameters()).device))
    wanted = np.arange(len(embedding.option_QK)) if rows is None else rows
    option_QK = embedding.option_QK[wanted]
    draw_RQK = np.zeros((num_draws, *option_QK.shape))
    if not len(wanted):
        return Targets(draw_RQK[0], np.zeros(0))
    for draw, table_QK in enumerate(draw_RQK):
        order = context_order(data, embedding.question_ids, num_context=num_context, seed=seed, draw=draw)
        shared = order[:num_context]
        table_QK[:] = _answers(model, table, data, shared[None], wanted[None])[0]
        shared = shared[np.isin(data.question_N[shared], wanted)]
        if len(shared):
            without_own_CC = np.stack([order[order != row] for row in shared])
            own_C = data.question_N[shared]
            own_CK = _answers(model, table, data, without_own_CC, own_C[:, None])[:, 0]
            table_QK[np.searchsorted(wanted, own_C)] = own_CK
    mean_QK = draw_RQK.mean(axis=0)
    mean_QK /= mean_QK.sum(axis=1, keepdims=True)
    spread_Q = (1.0 - js_distance(draw_RQK, mean_QK, option_QK, base=np.e)).mean(axis=0)
    return Targets(mean_QK, spread_Q)
