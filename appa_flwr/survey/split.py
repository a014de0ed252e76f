"""Split of questions into training and held-out ones by a hash of each text, the same for all groups."""

import hashlib
from collections.abc import Sequence

from appa_flwr.core.errors import UserError
from appa_flwr.survey.names import some
from appa_flwr.survey.types import Question, Split, Survey

LEAST_HELD_OUT = 10
"""Fewest held-out answers of a group that can be scored; a deployed node sends no score of fewer."""


def position(text: str, seed: int | str) -> float:
    """Hash the seed and a question's folded text to a position in [0, 1)."""
    digest = hashlib.sha256(f"{seed}\n{_folded(text)}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 256**8


def split_questions(questions: Sequence[Question], *, test_fraction: float = 0.2, seed: int = 0) -> Split:
    """Split questions into training and held-out ones by a hash of each text (the paper holds out one in five).

    A question is held out if the hash of its text, with case and blanks folded, is below `test_fraction`. Hence all
    parties compute the same split from any part of the survey, new questions do not move existing ones, and a text
    that was asked twice is never on both sides. The share held out is `test_fraction` only on average: with Q texts
    its standard deviation is sqrt(f (1 - f) / Q). If one side would be empty, the nearest text is moved to it.

    Args:
        questions: at least two different texts, else `UserError`.
        test_fraction: f, the share held out on average, in (0, 1).
        seed: seed of the hash.

    Returns:
        Question ids, both sides non-empty and each in the order of `questions`.
    """
    positions = {question.question_id: position(question.text, seed) for question in questions}
    ranked = sorted(set(positions.values()))
    if len(ranked) < 2:
        raise UserError(f"a split needs at least two different question texts; the survey has {len(ranked)}")
    # Positions below the threshold are held out: always the lowest one, never the highest one.
    threshold = ranked[1] if ranked[0] >= test_fraction else min(test_fraction, ranked[-1])
    return Split(
        train=tuple(name for name, position in positions.items() if position >= threshold),
        test=tuple(name for name, position in positions.items() if position < threshold),
    )


def too_few(survey: Survey, *, test_fraction: float = 0.2, seed: int = 0) -> str:
    """Say which groups have answered too few held-out questions to be scored; empty if there are none."""
    texts = {question.text for question in survey.questions}
    test = split_questions(survey.questions, test_fraction=test_fraction, seed=seed).test if len(texts) > 1 else ()
    answered = {name: sum(key in mine for key in test) for name, mine in survey.answers.items()}
    few = [f"{name} {count}" for name, count in answered.items() if count < LEAST_HELD_OUT]
    return (
        f"held-out questions are too few to score: {len(test)} of {len(survey.questions)} are held out, and a group "
        f"should have answered {LEAST_HELD_OUT}; answered: {some(few)}"
        if few
        else ""
    )


def without_copies(questions: Sequence[Question], held_out: Sequence[Question]) -> tuple[Question, ...]:
    """Drop questions with the text and options of a held-out question, compared without case and repeated blanks."""
    texts = {_folded(question.text, *question.options) for question in held_out}
    return tuple(question for question in questions if _folded(question.text, *question.options) not in texts)


def _folded(*texts: str) -> str:
    return "\n".join(" ".join(text.casefold().split()) for text in texts)
