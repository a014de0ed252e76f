"""Frozen prediction: one table of target distributions per group, conditioned on its own answers.

One context serves all questions, so the context is read once and all questions are predicted in one pass. Only context
questions need a context without themselves: "attention" runs a pass for each, "residual" has a closed form.

Axis letters: Q questions, R those of them to predict, K options, N questions the group answered, C context questions,
V choices of the views' shares.
"""

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from appa_flwr.core.arrays import FloatArray, IntArray
from appa_flwr.core.seeds import child_seed
from appa_flwr.protocol.queries import Catalogue
from pluralllm.attention import FewShotAttention
from pluralllm.data import GroupData
from pluralllm.network import PluralLLM, Questions
from pluralllm.residual import VIEWS, ExactResidual, Shares

HASH_BYTES = 8
# the difference of a single answer from the mean may be chance
MIN_ANSWERS = 2
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


@dataclass(frozen=True)
class GroupPredictor:
    """A frozen PluralLLM, with everything that predictions depend on except the group's answers.

    Predictions are conditioned on answers from `D_g` (paper, appendix "PluralLLM Preference Probability Modeling"). A
    question that the group answered is predicted from the group's other answers only.
    """

    model: PluralLLM
    """Trained on features of the same size."""
    public: Catalogue
    """The Q questions; "residual" predicts training questions in another way than other questions."""
    num_context: int
    """Most context questions; with none, or a single one for "residual", the mean is predicted."""
    seed: int
    """Of the run; with the group's name it fixes the contexts."""
    by_mean: dict[str, int] = field(default_factory=dict)
    """Groups predicted so far whose answers cannot be solved for -> number of questions that get the mean of all."""

    def targets(self, data: GroupData, *, context_seed: int = 0) -> FloatArray:
        """One group's distribution over the options of every public question, (Q, K); padding is 0.

        `data` are the group's training answers, without any held-out answers; `context_seed` numbers the context.
        """
        rows = np.arange(len(self.public.questions))
        table_QK: FloatArray = self.choices(data, rows, (None,), context_seed=context_seed)[0]
        return table_QK

    @torch.inference_mode()
    def choices(
        self, data: GroupData, rows: IntArray, choices: Sequence[Shares | None], *, context_seed: int = 0
    ) -> FloatArray:
        """Predict the questions `rows`, ascending, by each of `choices`, (V, R, K).

        A choice sets the shares of the views of "residual" for questions that were not trained on. None = the shares
        in the weights, and the only choice of "attention".
        """
        model, order = self.model.eval(), self.context_order(data, context_seed=context_seed)
        if isinstance(model, FewShotAttention):
            table_VRK = self._by_attention(model, data, order, rows)[None]
        else:
            assert isinstance(model, ExactResidual)
            weight_WVR = np.stack([model.view_weights(self.public.train_Q[rows], shares) for shares in choices], axis=1)
            table_VRK = self._by_residual(model, data, np.sort(order[: self.num_context]), rows, weight_WVR)
        table_VRK /= table_VRK.sum(axis=-1, keepdims=True)
        return table_VRK

    def context_order(self, data: GroupData, *, context_seed: int = 0) -> IntArray:
        """Choose a group's context: its first C answers in a pseudo-random order, and the next answer in that order.

        Every answered question gets a key from (seed, context_seed, group) and its id, and the smallest keys win. So
        the choice depends neither on any order, nor on the process, nor on the questions to predict. "attention"
        predicts a question among the first C from the C others of these C + 1: for every single question the context is
        a uniform sample of the other answers. "residual" predicts it from the C - 1 others of the first C. Returns
        (min(C + 1, N),) distinct rows of `data`.
        """
        own_key = np.uint64(_hash(child_seed(self.seed, "context", context_seed), data.group, 0))
        ids = (self.public.questions[row].question_id for row in data.question_N)
        question_key_N = np.array([*map(_hash, ids)], dtype=np.uint64)
        order: IntArray = np.argsort(_mix(own_key ^ question_key_N), kind="stable")[: self.num_context + 1]
        return order

    def _questions(self, question: IntArray, answer: npt.NDArray[np.float32] | None = None) -> Questions:
        """Questions of the public table (B, S), with a group's answers to them (B, S, K) where these are known."""
        value, options = self.public.embedding_QKE[question], self.public.option_QK[question]
        known = None if answer is None else torch.from_numpy(answer)
        return Questions(torch.from_numpy(value), torch.from_numpy(options), known)

    def _by_attention(self, model: FewShotAttention, data: GroupData, order: IntArray, rows: IntArray) -> FloatArray:
        """Answers (R, K); a context question is predicted from the other context questions and the next in order."""

        def answers(context_BC: IntArray, question_BM: IntArray) -> FloatArray:
            context = self._questions(data.question_N[context_BC], data.answer_NK[context_BC])
            answer_BMK: FloatArray = model(context, self._questions(question_BM)).double().exp().numpy()
            return answer_BMK

        shared = order[: self.num_context]
        table_RK: FloatArray = answers(shared[None], rows[None])[0]
        if len(own := shared[np.isin(data.question_N[shared], rows)]):
            without_own_CC = np.stack([order[order != row] for row in own])
            own_C = data.question_N[own]
            table_RK[np.searchsorted(rows, own_C)] = answers(without_own_CC, own_C[:, None])[:, 0]
        return table_RK

    def _by_residual(
        self, model: ExactResidual, data: GroupData, shared: IntArray, rows: IntArray, weight_WVR: FloatArray
    ) -> FloatArray:
        """Answers (V, R, K): weighted sums over the views in `VIEWS`.

        The context is the rows `shared` of `data`, ascending.
        """
        if len(shared) < MIN_ANSWERS:
            shared = shared[:0]
        own_N = data.question_N[shared]
        context = self._questions(own_N[None], data.answer_NK[shared][None])
        answer_VRK = np.zeros((*weight_WVR.shape[1:], self.public.option_QK.shape[1]))
        for view, weight_VR in zip(VIEWS, weight_WVR, strict=True):
            counts_R = weight_VR.any(axis=0)
            if not counts_R.any():
                continue
            conditioned = model.condition(context, view)
            if len(own_N) and not conditioned.known:
                log.warning("group %s: %s", data.group, NOT_SOLVED)
                self.by_mean[data.group] = max(self.by_mean.get(data.group, 0), int(counts_R.sum()))
            view_RK = np.zeros(answer_VRK.shape[1:])
            view_RK[counts_R] = conditioned.predict(self._questions(rows[counts_R][None]))
            own = np.isin(own_N, rows[counts_R])
            if own.any() and conditioned.known:
                view_RK[np.searchsorted(rows, own_N[own])] = conditioned.left_out()[own]
            answer_VRK += weight_VR[..., None] * view_RK
        return answer_VRK
