"""The server's public side of the survey: questions and split, and the catalogue handed to the groups.

Axis letters: Q questions, K options, E features.
"""

from collections.abc import Iterator, Sequence
from itertools import chain, count, islice
from pathlib import Path

import numpy as np

from appa_flwr.config import Config
from appa_flwr.config.sections import PPOSection
from appa_flwr.core.arrays import IntArray
from appa_flwr.core.errors import UserError
from appa_flwr.core.seeds import child_seed
from appa_flwr.protocol.queries import Catalogue
from appa_flwr.run.records import QuestionCounts
from appa_flwr.run.schema import SURVEY_FILE
from appa_flwr.survey import sources, store
from appa_flwr.survey.split import split_questions, without_copies
from appa_flwr.survey.types import Question, Survey
from pluralllm.embedding import Progress, embed_questions


def run_survey(config: Config) -> Survey:
    """Read the survey of a run from the run's folder, or else from its source; UserError if it cannot be read."""
    # The folder of a baseline rule lies inside the run's folder.
    folders = (config.run_folder, config.run_folder.parent) if config.run_name else ()
    kept = next((folder / SURVEY_FILE for folder in folders if (folder / SURVEY_FILE).exists()), None)
    return sources.read_run(config) if kept is None else store.read(kept)


def keep_survey(config: Config, file: Path) -> Survey:
    """Read the survey in a run's folder; store it there first if the launcher has not.

    Raises:
        UserError: the survey cannot be read, or has changed since the run began.
    """
    survey = sources.kept_survey(config, file)
    if survey is None:
        survey = sources.read_run(config)
        store.write(survey, file)
    return survey


def divided_questions(config: Config, survey: Survey) -> tuple[tuple[Question, ...], tuple[Question, ...], set[str]]:
    """The questions of a run, further questions without answers, and the ids of the run's training questions."""
    asked = survey.questions
    if config.data.max_questions and len(asked) > config.data.max_questions:
        # A random choice, since the first questions of a file often come from one battery.
        order = np.random.default_rng(child_seed(config.seed, "data.max-questions")).permutation(len(asked))
        asked = tuple(asked[i] for i in sorted(order[: config.data.max_questions]))
    split = split_questions(asked, test_fraction=config.data.test_fraction, seed=config.seed)
    test = set(split.test)
    held_out = [question for question in asked if question.question_id in test]
    return asked, tuple(without_copies(survey.extra, held_out)), set(split.train)


def build_catalogue(
    config: Config, survey: Survey | None = None, *, progress: Progress = lambda done, of: None
) -> Catalogue:
    """Build the catalogue of questions, split and features that every group gets; `survey` is the run's, if it is read.

    `progress` is called with (texts done, texts) while a pretrained model embeds them.

    Raises:
        UserError: the survey or the embedding model cannot be read.
    """
    asked, unanswered, train = divided_questions(config, survey or run_survey(config))
    questions = (*asked, *unanswered)
    train_Q = np.array([question.question_id in train for question in questions])
    unanswered_Q = np.arange(len(questions)) >= len(asked)
    value_QKE, option_QK = embed_questions(questions, encoder=config.pluralllm.encoder, progress=progress)
    return Catalogue(train_Q, option_QK, questions, value_QKE, unanswered_Q)


def fitting_questions(
    config: Config, catalogue: Catalogue, *, prompt_tokens_Q: Sequence[int], answer_tokens_Q: Sequence[int]
) -> tuple[IntArray, IntArray, QuestionCounts]:
    """Choose the questions whose prompt and answer fit the maximum lengths (SFT and PPO tables), and count them.

    `answer_tokens_Q` includes the end token.

    Returns:
        Training questions that fit, including questions without answers; held-out questions that fit; counts.

    Raises:
        UserError: no training or no held-out question fits.
    """
    longest, response = config.policy.max_sequence_length, config.ppo.response_length
    answerable_Q = np.array(answer_tokens_Q) <= response
    fits_Q = answerable_Q & (np.array(prompt_tokens_Q) + response <= longest)
    learned_Q = ~catalogue.held_out_Q
    no_answer = f"the shortest answer has {min(answer_tokens_Q)} tokens"
    no_prompt = f"the shortest prompt has {min(prompt_tokens_Q)} tokens and ppo.response-length is {response}"
    for key, value, fitting_Q, why in (
        ("ppo.response-length", response, answerable_Q, no_answer),
        ("policy.max-sequence-length", longest, fits_Q, no_prompt),
    ):
        if not (fitting_Q & learned_Q).any() or not (fitting_Q & catalogue.held_out_Q).any():
            raise UserError(f"{key} = {value} leaves no training or no held-out question: {why}")
    train_J, test_J = np.flatnonzero(fits_Q & learned_Q), np.flatnonzero(fits_Q & catalogue.held_out_Q)
    counts = QuestionCounts(
        training=len(train_J),
        unanswered=int(catalogue.unanswered_Q[train_J].sum()),
        held_out=len(test_J),
        unanswerable=int((~answerable_Q).sum()),
        too_long=int((answerable_Q & ~fits_Q).sum()),
    )
    return train_J, test_J, counts


def question_batches(questions: IntArray, settings: PPOSection, seed: int) -> Iterator[IntArray]:
    """Endless batches of shuffled passes over the questions, one per rollout; rollouts of a question are adjacent."""
    rng, number = np.random.default_rng(seed), settings.answers_per_question
    order = chain.from_iterable(rng.permutation(questions)[::-1] for _ in count())
    while True:
        yield np.repeat([*islice(order, settings.batch_size // number)], number)
