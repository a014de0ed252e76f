"""Frozen prediction: one table of target distributions per group, conditioned on its own answers.

Axis letters: Q questions, K options, N questions the group answered, C context questions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from appa_flwr.errors import UserError
from pluralllm.data import FloatArray, GroupData, IntArray, OptionEmbedding
from pluralllm.model import PluralLLM

# bounds memory: real surveys ask thousands of questions
QUESTIONS_PER_BATCH = 256
HASH_BYTES = 8
NO_KEY = np.iinfo(np.uint64).max


def _hash(*parts: object) -> int:
    """A 64-bit hash, the same in every process; ("a", "bc") and ("ab", "c") differ."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=HASH_BYTES)
    return int.from_bytes(digest.digest(), "little")


def _mix(key: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Scramble 64-bit integers with the finaliser of splitmix64 (Steele, Lea and Flood, 2014)."""
    key = (key ^ (key >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    key = (key ^ (key >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return key ^ (key >> np.uint64(31))


def context_rows(
    data: GroupData, question_ids: Sequence[str], *, num_context: int, seed: int, draw: int = 0
) -> tuple[IntArray, npt.NDArray[np.bool_]]:
    """Choose each question's context: a uniform sample of the group's answers without the question itself.

    Every pair (question, answered question) gets a pseudo-random key from (seed, group, both ids, draw) and the
    smallest keys win. So the choice for a question depends neither on the other questions asked about, nor on the
    order of anything, nor on the process.

    Args:
        data: the group's N answers, the only possible context.
        question_ids: the Q ids of the table that `data.question_N` points into.
        num_context: wanted size C.
        seed: run seed.
        draw: number of the draw where several are averaged.

    Returns:
        (Q, C') rows of `data`, C' = min(C, N), and a mask that is False only in the last place of a question the
        group answered itself where all N answers would be needed to fill the context.
    """
    size = min(num_context, len(data))
    asked = np.array([_hash(seed, data.group, draw, question_id) for question_id in question_ids], dtype=np.uint64)
    given = np.array([_hash(question_ids[row]) for row in data.question_N], dtype=np.uint64)
    key_QN = _mix(asked[:, None] ^ given[None, :])
    own = data.question_N[None, :] == np.arange(len(question_ids))[:, None]
    key_QN[own] = NO_KEY
    row_QC = np.argsort(key_QN, axis=1, kind="stable")[:, :size]
    return row_QC, ~np.take_along_axis(own, row_QC, axis=1)


@torch.inference_mode()
def target_table(
    model: PluralLLM,
    data: GroupData,
    embedding: OptionEmbedding,
    *,
    num_context: int,
    seed: int,
    num_draws: int = 1,
) -> FloatArray:
    """Predict one group's distribution over the options of every public question.

    The model is used frozen, conditioned on few-shot context from `D_g` (paper, appendix "PluralLLM Preference
    Probability Modeling"). A question the group answered is predicted from its other answers only.

    Args:
        model: trained on an embedding of the same size.
        data: the group's training answers. Held-out answers must not be among them.
        embedding: the public table of Q questions.
        num_context: context questions; fewer where the group has fewer; with none the prior is predicted.
        seed: run seed; with the group's name and the question's id it fixes the context.
        num_draws: contexts to average over, >= 1.

    Returns:
        (Q, K) probabilities; rows sum to 1, padding is 0.

    Raises:
        UserError: the embedding has another size than the model was built for, or `num_draws` < 1.
    """
    if embedding.dim != model.config.embedding_dim:
        raise UserError(
            f"PluralLLM was built for embeddings of {model.config.embedding_dim} features, "
            f"the table has {embedding.dim}"
        )
    if num_draws < 1:
        raise UserError(f"num-draws is {num_draws}; use at least 1")
    model.eval()
    device = next(model.parameters()).device
    value = torch.from_numpy(embedding.value_QKE)
    option = torch.from_numpy(embedding.option_QK)
    answer = torch.from_numpy(data.answer_NK)
    answered = torch.from_numpy(data.question_N)
    total_QK = np.zeros(option.shape)
    for draw in range(num_draws):
        row_QC, present_QC = context_rows(data, embedding.question_ids, num_context=num_context, seed=seed, draw=draw)
        for start in range(0, len(option), QUESTIONS_PER_BATCH):
            batch = slice(start, start + QUESTIONS_PER_BATCH)
            row = torch.from_numpy(row_QC[batch])
            log_probability = model(
                context_embedding=value[answered[row]].to(device),
                context_answer=answer[row].to(device),
                context_options=option[answered[row]].to(device),
                context_present=torch.from_numpy(present_QC[batch]).to(device),
                target_embedding=value[batch, None].to(device),
                target_options=option[batch, None].to(device),
            )
            total_QK[batch] += log_probability[:, 0].double().exp().cpu().numpy()
    table_QK: FloatArray = total_QK / total_QK.sum(axis=1, keepdims=True)
    return table_QK
