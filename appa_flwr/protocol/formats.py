"""Prompts that put survey questions to a language model, and the parser of its answers.

Legend: K answer options. Tasks: "dpa" asks for a distribution over the options, "opa" for a ranking of them.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from string import ascii_uppercase

import numpy as np
import numpy.typing as npt

from appa_flwr.core.arrays import FloatArray
from appa_flwr.protocol.rewards import distribution, ranking

STYLES = ("full", "counted", "compact")
"""`full`: instructions for a model that follows instructions; `compact`: cues for a model trained on the format;
`counted`: cues with the number of options, which small pretrained models miscount."""

SUM_TOLERANCE = 0.01
"""Tolerance of a written distribution's sum: one unit of the second decimal."""

MAX_CHARACTERS = 4096
"""Characters of an answer that are read. The limit bounds the work; no answer to a survey question is that long."""

_ROUNDING_SLACK = 1e-9
_LABELS = (*ascii_uppercase, *map("".join, product(ascii_uppercase, repeat=2)))

_FULL_INSTRUCTIONS = {
    "dpa": """\
You know well how groups of people feel about public questions. You are given one question and its K \
possible answers; K differs from question to question.

What to do:
- Judge how much each answer is preferred and give every answer its own score.
- Write K scores, no more and no fewer: skip no answer and merge no two answers.
- Every score is a decimal number from 0 to 1. Once rounded, the scores add up to 1.00.
- The likelier it is that a typical group picks an answer, the higher its score.

How to write it:
- All scores on one line, with a comma and no space between them.
- Two digits behind each decimal point.
- No words, labels or symbols besides.
- With four answers it could look like this: 0.15,0.50,0.25,0.10""",
    "opa": """\
You know well in which order groups of people prefer answers to public questions. You are given one question \
and its K possible answers; K differs from question to question.

What to do:
- Put all K answers in order, from the most preferred to the least preferred.
- Use each answer once: skip no answer and merge no two answers.
- Go by what a typical group is likeliest to choose.
- The most preferred answer comes first.

How to write it:
- All letters on one line, with a comma and no space between them.
- The letters are those that stand before the answers.
- No words, labels or symbols besides.
- With four answers it could look like this: C,A,D,B""",
}
_FULL_REMINDERS = {
    "dpa": "Here K is {K}: reply with {K} scores and nothing else, in the order in which the answers are listed.",
    "opa": "Here K is {K}: reply with {K} letters and nothing else, the most preferred answer first.",
}

_CUES = {
    ("dpa", "compact"): "scores:",
    ("opa", "compact"): "ranking:",
    ("dpa", "counted"): "{K} scores:",
    ("opa", "counted"): "ranking of {K}:",
}

# Digits are spelled out: \d would also match those of other scripts, which float() accepts.
_NUMBER = re.compile(r"(?<![\w.])[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?(?!\.?\w)")
_DECIMALS = re.compile(r"(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:[ \t]*,[ \t]*(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+))*")
_LETTERS = re.compile(r"(?<!\w)[A-Z]{1,2}(?!\w)")


@dataclass(frozen=True, eq=False)
class Parsed:
    """Content parsed from an answer.

    Attributes:
        prediction: float64 (K,), or None if the answer cannot be used. DPA: a distribution. OPA:
            preference scores K..1, the first-ranked option has K.
        format_score: how well the answer keeps to the format asked for, in [0, 1].
        parsed: False where the answer is "completely unparseable" and earns no training reward: for DPA without a
            prediction, for OPA without any option's letter.
    """

    prediction: FloatArray | None
    format_score: float
    parsed: bool


def letters(num_options: int) -> tuple[str, ...]:
    """Labels of the options: A to Z, then AA, AB and so on; raises ValueError unless there are 1 to 702 options."""
    if not 1 <= num_options <= len(_LABELS):
        raise ValueError(f"num_options must lie between 1 and {len(_LABELS)}, got {num_options}")
    return _LABELS[:num_options]


def prompt(task: str, question: str, options: Sequence[str], *, style: str = "full") -> str:
    """Make the prompt for a question, a rewording of Figures prob-prompt and rank-prompt.

    The instructions, which do not depend on the question, come first, so that all prompts of a task and style share a
    prefix. Line breaks in the question and its K options become spaces.
    """
    if style != "full":
        cue = _CUES[task, style].format(K=len(options))
        return "\n".join([task, f"Q: {_one_line(question)}", *_listed(options), cue])
    asked = "\n".join([f"Question: {_one_line(question)}", "Answers:", *_listed(options)])
    reminder = _FULL_REMINDERS[task].format(K=len(options))
    return "\n\n".join([_FULL_INSTRUCTIONS[task], asked, reminder])


def parse(task: str, text: str, num_options: int) -> Parsed:
    """Parse a model's answer, which may be any text (Appendix "Format Scoring").

    Only the first `MAX_CHARACTERS` of the text are read.

    DPA. The values are the numbers on the first line that holds exactly K of them, else all numbers of the text. They
    give a prediction, scaled to sum to one, if there are K, none negative or infinite and not all zero. The format
    score is the mean of three checks: the text consists of K decimals separated by commas (blanks around commas and
    around the text are allowed); all values lie in [0, 1]; the values sum to one within `SUM_TOLERANCE`. Without
    values the score is 0.

    OPA. The letters are the capital letters that stand alone on the first line that holds each option's letter exactly
    once and nothing else that looks like a letter, else those of the text. The format score is the share of the K
    options whose letter occurs; a complete ranking is a prediction, by first occurrence.

    An answer is readable if it gives a prediction; without a prediction its alignment is 0. In training an incomplete
    ranking still earns its format score, a completely unparseable answer earns 0 (see `rewards.training_reward`).
    """
    labels = letters(num_options)
    return _parse_distribution(text, num_options) if task == "dpa" else _parse_ranking(text, labels)


def answer(task: str, scores: npt.ArrayLike, *, step: float = 0.01, rng: np.random.Generator | None = None) -> str:
    """Write scores as a perfectly formatted answer for `parse`, such as "0.65,0.20,0.10,0.05".

    Args:
        task: "dpa" or "opa".
        scores: (K,) finite. DPA: non-negative with a positive sum, rounded to multiples of `step` that sum to exactly
            one by the largest remainders, ties in option order. OPA: higher is preferred, ties in option order.
        step: DPA only; 0.01 or a multiple of it that divides one.
        rng: DPA only; rounds up or down at random instead, so that the expected answer is the distribution.

    Raises:
        ValueError: for DPA, scores that are no distribution, or a step that does not fit.
    """
    scores_K = np.asarray(scores, dtype=np.float64)
    labels = letters(scores_K.size)
    if task == "opa":
        return ",".join(labels[index] for index in ranking(scores_K, np.ones(scores_K.size, bool)))
    distribution_K = _normalised(scores_K)
    if distribution_K is None:
        raise ValueError(f"scores must be non-negative with a positive sum, got {scores_K!r}")
    hundredths = round(step * 100)
    if hundredths < 1 or 100 % hundredths or abs(hundredths / 100 - step) > _ROUNDING_SLACK:
        raise ValueError(f"step must be 0.01 or a multiple of it that divides 1, got {step}")
    units = 100 // hundredths
    exact_K = distribution_K * units
    count_K = np.floor(exact_K).astype(int)
    left = units - count_K.sum()
    if rng is None:
        count_K[ranking(exact_K - count_K, np.ones(exact_K.size, bool))[:left]] += 1
    else:  # systematic sampling: an option with a remainder of .3 is rounded up in three of ten draws
        places_K = np.minimum(np.floor(np.cumsum(exact_K - count_K) + rng.random()), left).astype(int)
        places_K[-1] = left
        count_K += np.diff(places_K, prepend=0)
    return ",".join(f"{count * hundredths / 100:.2f}" for count in count_K)


def _parse_distribution(text: str, num_options: int) -> Parsed:
    read = text[:MAX_CHARACTERS]
    numbers = _first_complete(read, _NUMBER.findall, lambda line: len(line) == num_options)
    if not numbers:
        return Parsed(None, 0.0, parsed=False)
    values = np.array([float(number) for number in numbers])
    is_complete = values.size == num_options
    is_bare = is_complete and len(text) <= MAX_CHARACTERS and _DECIMALS.fullmatch(read.strip()) is not None
    in_range = ((values >= 0.0) & (values <= 1.0)).all()
    with np.errstate(over="ignore", invalid="ignore"):  # numbers such as 1e999 overflow, and then fail the check
        sums_to_one = abs(values.sum() - 1.0) <= SUM_TOLERANCE + _ROUNDING_SLACK
    format_score = float(np.mean([is_bare, in_range, sums_to_one]))
    prediction = _normalised(values) if is_complete else None
    return Parsed(prediction, format_score, parsed=prediction is not None)


def _parse_ranking(text: str, labels: Sequence[str]) -> Parsed:
    index_of = {label: index for index, label in enumerate(labels)}
    tokens = _first_complete(text[:MAX_CHARACTERS], _LETTERS.findall, lambda line: sorted(line) == sorted(labels))
    ranked = [index_of[token] for token in dict.fromkeys(tokens) if token in index_of]
    prediction = None
    if len(ranked) == len(labels):
        prediction = np.empty(len(labels))
        prediction[ranked] = np.arange(len(labels), 0, -1)
    return Parsed(prediction, len(ranked) / len(labels), parsed=bool(ranked))


def _first_complete(text: str, find: Callable[[str], list[str]], is_complete: Callable[[list[str]], bool]) -> list[str]:
    """Result of `find` on the first line that satisfies `is_complete`, else on the whole text.

    Models often write explanations before or after a correct answer.
    """
    for line in text.splitlines():
        tokens = find(line)
        if is_complete(tokens):
            return tokens
    return find(text)


def _normalised(values_K: FloatArray) -> FloatArray | None:
    """Values scaled to sum to one; None if one is negative or infinite or all are zero."""
    try:
        return distribution(values_K) if np.isfinite(values_K).all() else None
    except ValueError:
        return None


def _listed(options: Sequence[str]) -> list[str]:
    return [f"{letter}: {_one_line(option)}" for letter, option in zip(letters(len(options)), options, strict=True)]


def _one_line(text: str) -> str:
    return " ".join(text.split())
