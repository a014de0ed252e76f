"""The server's public side of the survey: questions and split, and the catalogue handed to the groups.

Axis letters: Q questions, K options, E features.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from appa_flwr import wire
from appa_flwr.config import GENERATED_SURVEY, Config
from appa_flwr.errors import UserError
from appa_flwr.seeds import child_seed
from appa_flwr.survey import generate, read
from appa_flwr.survey.split import split_questions
from appa_flwr.survey.types import Question
from pluralllm.embedding import embed_questions
from pluralllm.encoders import Progress, encoder
from server_app.models.base import cache_folder

IntArray = npt.NDArray[np.int64]

log = logging.getLogger("appa.server")


def public_questions(config: Config) -> tuple[Question, ...]:
    """The questions of a run; never an answer.

    Raises:
        UserError: the survey cannot be read.
    """
    if config.survey == GENERATED_SURVEY:
        questions, _ = generate.ground_truth(
            num_questions=config.data.num_questions, num_groups=config.data.num_groups, seed=config.seed
        )
    else:
        questions = read.read_questions(
            config.survey, groups=config.group_names or None, refusals=config.data.refusals, strict=config.data.strict
        )
    if config.data.max_questions and len(questions) > config.data.max_questions:
        # Not the first ones: a file's first questions often come from one battery.
        order = np.random.default_rng(child_seed(config.seed, "data.max-questions")).permutation(len(questions))
        questions = tuple(questions[i] for i in sorted(order[: config.data.max_questions]))
    return questions


def build_catalogue(config: Config, *, progress: Progress = lambda done, of: None) -> wire.Catalogue:
    """Questions, split and features, as every group gets them.

    `progress` is called with (texts done, texts) while a pretrained model embeds them.

    Raises:
        UserError: the survey or the embedding model cannot be read.
    """
    questions = public_questions(config)
    train = set(split_questions(questions, test_fraction=config.data.test_fraction, seed=config.seed).train)
    cache = cache_folder(config)
    texts_to_vectors = encoder(config.embedding.encoder, config.embedding.model, cache=cache, progress=progress)
    table = embed_questions(questions, dim=config.embedding.dim, encoder=texts_to_vectors)
    train_Q = np.array([question.question_id in train for question in questions])
    return wire.Catalogue(questions, train_Q, table.value_QKE, table.option_QK)


def fitting_questions(config: Config, catalogue: wire.Catalogue, tokens_Q: Sequence[int]) -> tuple[IntArray, IntArray]:
    """Training and held-out questions whose prompt, of so many tokens, and answer fit (SFT table: maximum length).

    Raises:
        UserError: no training or no held-out question fits.
    """
    longest, response = config.policy.max_sequence_length, config.rollout.response_length
    fits_Q = np.array(tokens_Q) + response <= longest
    train_J, test_J = np.flatnonzero(fits_Q & catalogue.train_Q), np.flatnonzero(fits_Q & ~catalogue.train_Q)
    if not len(train_J) or not len(test_J):
        raise UserError(
            f"policy.max-sequence-length = {longest} leaves no training or no held-out question: the shortest prompt "
            f"has {min(tokens_Q)} tokens and rollout.response-length is {response}"
        )
    if not fits_Q.all():
        log.warning("%d questions are left out: longer than policy.max-sequence-length", int((~fits_Q).sum()))
    return train_J, test_J
