"""Frozen prediction: one table of target distributions per group, conditioned on its own answers.

One context serves all questions, so it is taken in once and all questions are predicted in one pass. Only the questions
that are in it themselves need one without them: of "attention" a pass each, of "residual" leave-one-out in closed form.

Axis letters: Q questions, K options, N questions the group answered, C context questions.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from appa_flwr.core.errors import UserError
from pluralllm.attention import FewShotAttention
from pluralllm.data import BoolArray, FloatArray, GroupData, IntArray, OptionEmbedding
from pluralllm.network import PluralLLM, Questions
from pluralllm.residual import SHARES, ExactResidual, Shares, View

# bounds memory: real surveys ask thousands of questions
QUESTIONS_PER_BATCH = 1024
HASH_BYTES = 8
# a difference from the mean that a single answer shows may be chance
MIN_ANSWERS = 2
UNIFORM_TOLERANCE = 1e-4

NOTHING_TO_TELL = "its answers are too few, or all alike, to say how it differs; it gets the mean of all groups"
NOT_SOLVED = "its answers cannot be solved for; it gets the mean of all groups"

log = logging.getLogger("appa.client")


def _hash(*parts: object) -> int:
    """A 64-bit hash, the same in every process; ("a", "bc") and ("ab", "c") differ."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=HASH_BYTES)
    return int.from_bytes(digest.digest(), "little")


def _mix(key: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Scramble 64-bit integers with the finaliser of splitmix64 (Steele, Lea and Flood, 2014)."""
    key = (key ^ (key >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    key = (key ^ (key >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return key ^ (key >> np.uint64(31))


def context_order(
    data: GroupData, question_ids: Sequence[str], *, num_context: int, seed: int, draw: int = 0
) -> IntArray:
    """Choose a group's context: its first C answers in a pseudo-random order, and the one that comes next.

    Every answered question gets a key from (seed, group, draw) and its id, and the smallest keys win. So the choice
    depends neither on the order of anything, nor on the process, nor on what is asked. With "attention" a question
    among the first C is predicted from the C others of these C + 1: for every single question the context is a uniform
    sample of the other answers. "residual" leaves it out of the first C.

    Returns:
        (min(C + 1, N),) distinct rows of `data`.
    """
    own_key = np.uint64(_hash(seed, data.group, draw))
    question_key_N = np.array([_hash(question_ids[row]) for row in data.question_N], dtype=np.uint64)
    order: IntArray = np.argsort(_mix(own_key ^ question_key_N), kind="stable")[: num_context + 1]
    return order


def _answers(
    model: FewShotAttention, table: Questions, data: GroupData, row_BC: IntArray, question_BM: IntArray
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
    draw: int = 0,
    trained: BoolArray | None = None,
    rows: IntArray | None = None,
) -> FloatArray:
    """Predict one group's distribution over the options of every public question.

    The model is used frozen, conditioned on answers from `D_g` (paper, appendix "PluralLLM Preference Probability
    Modeling"). A question the group answered is predicted from its other answers only.

    Args:
        model: trained on an embedding of the same size.
        data: the group's training answers. Held-out answers must not be among them.
        embedding: the public table of Q questions.
        num_context: most context questions; with none, or a single one for "residual", the mean is predicted.
        seed: of the run; with the group's name it fixes the context.
        draw: number of the context, among those that the seed gives.
        trained: (Q,) the questions that the network was trained on; none of them if None. Only "residual" asks.
        rows: questions to predict, ascending; all Q if None.

    Returns:
        Distributions (Q, K) for the questions in `rows`; rows sum to 1, padding is 0.

    Raises:
        UserError: the embedding has another size than the model was built for.
    """
    if embedding.dim != model.embedding_dim:
        raise UserError(
            f"PluralLLM was built for embeddings of {model.embedding_dim} features, the table has {embedding.dim}"
        )
    model.eval()
    table = Questions(torch.from_numpy(embedding.value_QKE), torch.from_numpy(embedding.option_QK))
    table = table.map(lambda value: value.to(next(model.parameters()).device))
    wanted = np.arange(len(embedding.option_QK)) if rows is None else rows
    order = context_order(data, embedding.question_ids, num_context=num_context, seed=seed, draw=draw)
    if isinstance(model, FewShotAttention):
        table_QK = _from_attention(model, table, data, order, num_context, wanted)
    else:
        assert isinstance(model, ExactResidual)
        known_Q = np.zeros(len(wanted), dtype=np.bool_) if trained is None else trained[wanted]
        table_QK = _from_residual(model, table, data, np.sort(order[:num_context]), wanted, known_Q)
    table_QK /= table_QK.sum(axis=1, keepdims=True)
    return table_QK


@torch.inference_mode()
def predict_choices(
    model: PluralLLM,
    data: GroupData,
    embedding: OptionEmbedding,
    *,
    num_context: int,
    seed: int,
    trained: BoolArray,
    rows: IntArray,
) -> FloatArray:
    """Predictions of each of `training.choices`, (choices, rows, K), at little more than the cost of one.

    Arguments are those of `predict_targets`; nothing of the answers to `rows` may be in `data`.
    """

    def predicted() -> FloatArray:
        return predict_targets(model, data, embedding, num_context=num_context, seed=seed, trained=trained, rows=rows)

    if not isinstance(model, ExactResidual):
        return predicted()[None]
    chosen = model.shares
    ends = []
    for end in (Shares(0.0, 0.0), Shares(1.0, 0.0), Shares(0.0, 1.0)):
        model.choose(end)
        ends.append(predicted())
    model.choose(chosen)
    none, features, plain = ends
    return np.stack(
        [(1.0 - to.plain) * ((1.0 - to.features) * none + to.features * features) + to.plain * plain for to in SHARES]
    )


def _from_attention(
    model: FewShotAttention, table: Questions, data: GroupData, order: IntArray, num_context: int, wanted: IntArray
) -> FloatArray:
    """Answers to the wanted questions, (Q, K); those of the context from the others and the one that comes next."""
    if not len(wanted):
        return np.zeros((0, table.options.shape[1]))
    shared = order[:num_context]
    table_QK: FloatArray = _answers(model, table, data, shared[None], wanted[None])[0]
    shared = shared[np.isin(data.question_N[shared], wanted)]
    if len(shared):
        without_own_CC = np.stack([order[order != row] for row in shared])
        own_C = data.question_N[shared]
        own_CK = _answers(model, table, data, without_own_CC, own_C[:, None])[:, 0]
        table_QK[np.searchsorted(wanted, own_C)] = own_CK
    return table_QK


def _from_residual(
    model: ExactResidual,
    table: Questions,
    data: GroupData,
    shared: IntArray,
    wanted: IntArray,
    trained_Q: BoolArray,
) -> FloatArray:
    """Answers to the wanted questions (Q, K), averaged over the views that count.

    The context are the rows `shared` of `data`, ascending.
    """
    answer_NK = data.answer_NK[shared]
    if len(shared) < MIN_ANSWERS or _constant(answer_NK, table.options[data.question_N[shared]].cpu().numpy()):
        if len(data) and len(shared) >= min(MIN_ANSWERS, len(data)):  # not where a single one was asked for
            log.warning("group %s: %s", data.group, NOTHING_TO_TELL)
        shared, answer_NK = shared[:0], answer_NK[:0]

    def asked(question: IntArray) -> Questions:
        return table.map(lambda value: value[torch.from_numpy(question)][None])

    own_N = data.question_N[shared]
    context = asked(own_N)._replace(answer=torch.from_numpy(answer_NK)[None].to(table.embedding.device))

    def seen_by(view: View, chosen: IntArray) -> FloatArray:
        found_QK = np.zeros((len(wanted), table.options.shape[1]))
        if not len(chosen):
            return found_QK
        conditioned = model.condition(context, view)
        if len(own_N) and not conditioned.known:
            log.warning("group %s: %s", data.group, NOT_SOLVED)
        found_QK[chosen] = conditioned.predict(asked(wanted[chosen]))
        own = np.isin(own_N, wanted[chosen])
        if own.any() and conditioned.known:
            found_QK[np.searchsorted(wanted, own_N[own])] = conditioned.left_out()[own]
        return found_QK

    answer_QK = np.zeros((len(wanted), table.options.shape[1]))
    for view, weight_Q in model.views(trained_Q).items():
        answer_QK += weight_Q[:, None] * seen_by(view, np.flatnonzero(weight_Q))
    return answer_QK


def _constant(answer_NK: npt.NDArray[np.float32], option_NK: BoolArray) -> bool:
    """True if all answers are one and the same, or all of them uniform."""
    uniform_NK = option_NK / option_NK.sum(axis=1, keepdims=True)
    same = bool((np.ptp(answer_NK, axis=0) == 0.0).all())
    return same or bool(np.abs(answer_NK - uniform_NK).max() < UNIFORM_TOLERANCE)
