"""Look-ups of answers to training questions: baselines that a policy is to beat, and what its prompts may show.

Axis letters: Q public questions, J asked ones, K options.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
from threadpoolctl import threadpool_limits

from appa_flwr.config import Config
from appa_flwr.protocol import formats, wire
from appa_flwr.run.records import NEAREST_QUESTIONS, OPTION_LIST, LookUpRecord
from appa_flwr.survey.types import Question
from pluralllm.data import GroupData, OptionEmbedding
from pluralllm.scores import nearest_question
from server_app.federation.catalogue import embedded
from server_app.models.tiny import CONCENTRATION

FloatArray = npt.NDArray[np.float64]

NUM_NEAREST = 3


def look_ups(
    mean_QK: FloatArray, catalogue: wire.Catalogue, question_J: npt.NDArray[np.int64]
) -> dict[str, FloatArray]:
    """Answers (J, K) by look-up, one for all groups.

    Args:
        mean_QK: the groups' mean answers, of any sums; only those to training questions are used.
        catalogue: the public questions.
        question_J: the questions to answer.

    Returns:
        "option-list": the mean answer to training questions with the same options, or else with as many; uniform where
        there are none. "nearest-questions": the mean over the `NUM_NEAREST` training questions with as many options
        whose options, each embedded with its question, are nearest. A question's own answer counts in neither.
    """
    total_Q1 = mean_QK.sum(axis=1, keepdims=True)
    known_Q = np.flatnonzero(catalogue.train_Q & (total_Q1[:, 0] > 0))
    share_QK = mean_QK / np.where(total_Q1 > 0, total_Q1, 1.0)
    ids = tuple(question.question_id for question in catalogue.questions)
    table = OptionEmbedding(ids, catalogue.embedding_QKE, catalogue.option_QK)
    mean = GroupData("mean", known_Q, share_QK[known_Q].astype(np.float32))
    same_JK = np.stack(
        [_by_options(share_QK, catalogue, known_Q[known_Q != j], catalogue.questions[j].options) for j in question_J]
    )
    return {OPTION_LIST: same_JK, NEAREST_QUESTIONS: nearest_question(mean, table, question_J, count=NUM_NEAREST)}


def shown(config: Config, mean_QK: FloatArray, catalogue: wire.Catalogue) -> tuple[LookUpRecord, ...]:
    """The look-ups of all questions as prompts show them: answers on the grid that SFT teaches."""
    found = look_ups(mean_QK, catalogue, np.arange(len(catalogue.questions)))
    records = []
    for q, question in enumerate(catalogue.questions):
        option_K, step = catalogue.option_QK[q], config.sft.answer_step
        same, nearest = (
            formats.answer(config.task, found[name][q][option_K], step=step)
            for name in (OPTION_LIST, NEAREST_QUESTIONS)
        )
        share = tuple(mean_QK[q][option_K].tolist()) if catalogue.train_Q[q] else None
        records.append(
            LookUpRecord(
                question_id=question.question_id,
                question=question.text,
                options=question.options,
                ordinal=question.ordinal,
                share=share,
                same=same,
                nearest=nearest,
            )
        )
    return tuple(records)


def asked(config: Config, known: Sequence[LookUpRecord], question: Question) -> formats.LookUps:
    """The look-ups of any question, one of the records or another."""
    for one in known:
        if (one.question, one.options) == (question.text, question.options):
            return formats.LookUps(one.same, one.nearest)
    questions = [Question(one.question_id, one.question, one.options, one.ordinal) for one in known]
    train_Q = np.array([*(one.share is not None for one in known), False])
    with threadpool_limits(1):  # as in a run: another number of threads may find other features
        catalogue = embedded(config, (*questions, question), train_Q, ~train_Q)
    mean_QK = np.zeros(catalogue.option_QK.shape)
    for q, one in enumerate(known):
        mean_QK[q, : len(one.options)] = one.share or 0.0
    last = shown(config, mean_QK, catalogue)[-1]
    return formats.LookUps(last.same, last.nearest)


def _by_options(
    share_QK: FloatArray, catalogue: wire.Catalogue, known_Q: npt.NDArray[np.int64], options: tuple[str, ...]
) -> FloatArray:
    alike = [q for q in known_Q if catalogue.questions[q].options == options]
    alike = alike or [q for q in known_Q if len(catalogue.questions[q].options) == len(options)]
    if alike:
        mean_K: FloatArray = share_QK[alike].mean(axis=0)
        return mean_K
    uniform_K: FloatArray = (np.arange(share_QK.shape[1]) < len(options)) / len(options)
    return uniform_K


def random_rows(
    config: Config, questions: Sequence[Question], count: int, rng: np.random.Generator
) -> Iterator[tuple[Question, formats.LookUps, str]]:
    """So many rows for SFT of questions that show random look-ups, answered halfway between these.

    From true look-ups alone a model learns the few answers by heart, and not to read.
    """
    for place in rng.integers(len(questions), size=count):
        question, step = questions[place], config.sft.answer_step
        even = np.full(len(question.options), np.exp(rng.uniform(*np.log(CONCENTRATION))))
        first_K, other_K = rng.dirichlet(even, size=2)
        second_K = first_K + rng.uniform() * other_K  # the one more or less like the other
        both = rng.permutation([first_K, second_K / second_K.sum()])
        shown = formats.LookUps(*(formats.answer(config.task, share_K, step=step) for share_K in both))
        yield question, shown, formats.answer(config.task, both.mean(axis=0), step=step, rng=rng)
