"""One cell of a survey file: text or list in, checked value out, a counted reason where it is unusable.

Every function here takes what a file held and returns a plain value, or raises `CellError` where it is not as said, for
the reason given where one is an argument. Work is bounded by the limits below whatever a cell holds, and no cell is
ever executed: JSON first, then Python literals by `ast.literal_eval`, limited in length.

Axis letters: K answer options.
"""

from __future__ import annotations

import ast
import hashlib
import json
import math
import re
import warnings
from collections.abc import Sequence
from enum import StrEnum
from typing import Final

import numpy as np

from appa_flwr.survey.types import FloatArray

MIN_OPTIONS: Final = 2
MAX_OPTIONS: Final = 30
MAX_TEXT_CHARS: Final = 20_000
MAX_CELL_CHARS: Final = 100_000
MAX_NAME_CHARS: Final = 500
_ID_CHARS: Final = 12  # of a hash
MAX_NUMBER_CHARS: Final = 40
SUM_TOLERANCE: Final = 0.02
# A sum written as 0.98 or 1.02 is inside the tolerance, though its binary value lies a hair outside.
_ROUNDING: Final = 1e-9
# A vector that sums to one within this is left untouched, so writing and reading again changes no bit.
_ALREADY_ONE: Final = 1e-12
# Also what breaks lines or turns the order of letters around.
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


class Reason(StrEnum):
    """Why a cell was not used; the text is what summaries and errors show."""

    BAD_LINE = "line is not a JSON object"
    WRONG_CELLS = "wrong number of cells in the row"
    TOO_LONG = "text too long"
    NOT_UNICODE = "text is not valid Unicode"
    BAD_NAME = f"name longer than {MAX_NAME_CHARS} characters or with control characters"
    MISSING = "a required column is missing in the row"
    EMPTY_ID = "empty question_id"
    EMPTY_TEXT = "empty question or option text"
    EMPTY_GROUP = "empty group"
    BAD_GROUP = "group's name with a semicolon, which stands between the names of several"
    BAD_OPTIONS = "options are not a list of texts"
    FEW_OPTIONS = f"fewer than {MIN_OPTIONS} options"
    MANY_OPTIONS = f"more than {MAX_OPTIONS} options"
    FEW_LEFT = f"fewer than {MIN_OPTIONS} options without refusals"
    BAD_ORDINAL = "ordinal is not one finite number, or null, per option"
    OTHER_TEXT = "question text differs from the question's first row"
    OTHER_OPTIONS = "options differ from the question's first row"
    OTHER_ORDINAL = "ordinal differs from the question's first row"
    DUPLICATE = "question already answered by this group"
    BAD_DISTRIBUTION = "distribution is not a list of numbers"
    LENGTH = "distribution and options differ in length"
    NOT_FINITE = "NaN or infinity in the distribution"
    NEGATIVE = "negative share in the distribution"
    ZERO = "distribution sums to zero"
    BAD_COUNT = "n is not a number of respondents"
    BAD_RATE = "refusal rate is not between 0 and 1"
    FEW_RESPONDENTS = "fewer respondents than the minimum"
    BAD_SELECTIONS = "selections are not a dict of groups and lists"
    NO_COLUMN = "responses have no column of this question"
    BAD_WEIGHT = "weight of a respondent is not a finite number >= 0"
    UNKNOWN_ANSWER = "an answer is not among the references"
    SUM = f"distribution is off one by more than {SUM_TOLERANCE}"
    BAD_NUMBER = "not a plain number, such as 1200, 12.5 or 12,5 %"
    OPTION_TWICE = "an option twice in a question's rows of one group"
    ONLY_REFUSALS = "nothing left without refusals"


class CellError(Exception):
    """A cell cannot be used, for the `reason` it carries."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason.value)
        self.reason = reason


_STRING: Final = r"""'(?:[^'\\\n]|\\.)*+'|"(?:[^"\\\n]|\\.)*+\""""
# Strings close, carry no prefix, and no two stand next to each other: Python would join them where a comma is missing.
_CLOSED: Final = re.compile(rf"(?:[^'\"]|(?<!\w)(?:{_STRING})(?!\s*+['\"]))*+", re.DOTALL)
_WORDS: Final = {"nan": "None", "NaN": "None", "null": "None", "inf": "1e999", "Infinity": "1e999"}
_TOKEN: Final = re.compile(rf"(?:{_STRING})|\b(?P<word>{'|'.join(_WORDS)})\b", re.DOTALL)
# Python reads no integer of thousands of digits, and a float holds none of hundreds.
JSON: Final = json.JSONDecoder(
    parse_int=lambda digits: int(digits) if len(digits) < MAX_NUMBER_CHARS else float(digits)
)


def syntax_tree(text: str) -> ast.expr | None:
    """A Python expression as a tree, with NaN and infinity as literals; None where it is none. Nothing is executed."""
    if len(text) > MAX_CELL_CHARS:
        raise CellError(Reason.TOO_LONG)
    if not _CLOSED.fullmatch(text):
        return None
    plain = _TOKEN.sub(lambda token: _WORDS[token["word"]] if token["word"] else token[0], text)
    try:
        with warnings.catch_warnings():
            # An unknown escape such as "\d" stays as it is, with a warning nobody can act on here.
            warnings.simplefilter("ignore")
            return ast.parse(plain.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):  # the parser has a limit of its own
        return None


def literal_list(tree: ast.expr | None) -> list[object] | None:
    """The items of a list or tuple literal, numbers as floats; None where it is anything else."""
    if not isinstance(tree, (ast.List, ast.Tuple)):
        return None
    try:
        items = ast.literal_eval(tree)
        return [float(item) if isinstance(item, int) and not isinstance(item, bool) else item for item in items]
    except (ValueError, TypeError, OverflowError, MemoryError, RecursionError):
        return None


def as_list(cell: object, reason: Reason) -> list[object]:
    """The list a cell holds, itself or as JSON or Python-literal text of at most `MAX_CELL_CHARS` characters."""
    if isinstance(cell, (list, tuple)):
        return list(cell)
    if not isinstance(cell, str):
        raise CellError(reason)
    if len(cell) > MAX_CELL_CHARS:
        raise CellError(Reason.TOO_LONG)
    try:
        value: object = JSON.decode(cell)
    except (ValueError, RecursionError):
        value = literal_list(syntax_tree(cell)) if cell.lstrip().startswith(("[", "(")) else None
    if not isinstance(value, list):
        raise CellError(reason)
    return value


def as_text(cell: object, empty: Reason) -> str:
    """A cell's text without the blanks around it; numbers count as text; `empty` is the reason for none."""
    if isinstance(cell, (int, float)) and not isinstance(cell, bool):
        if isinstance(cell, float) and math.isnan(cell):  # how pandas writes an empty cell
            raise CellError(empty)
        return repr(cell)
    if not isinstance(cell, str) or not cell.strip():
        raise CellError(empty)
    if len(cell) > MAX_TEXT_CHARS:
        raise CellError(Reason.TOO_LONG)
    try:
        cell.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can spell: nothing could write it again
        raise CellError(Reason.NOT_UNICODE) from None
    return cell.strip()


def as_name(cell: object, empty: Reason) -> str:
    """A text that stands in messages, tables and commands: the name of a question, a group or an attribute.

    With line breaks or other control characters a file could write over what a terminal shows.
    """
    name = as_text(cell, empty)
    if len(name) > MAX_NAME_CHARS or _CONTROL.search(name):
        raise CellError(Reason.BAD_NAME)
    return name


def question_hash(text: str, options: Sequence[str]) -> str:
    """An id for a question that has none: the same wherever text, options and their order are."""
    return hashlib.sha256(json.dumps([text, options]).encode()).hexdigest()[:_ID_CHARS]


def is_empty(cell: object) -> bool:
    """True if an optional cell holds nothing: None, NaN, blanks or the words pandas and JSON write for it."""
    if isinstance(cell, float):
        return math.isnan(cell)
    return cell is None or (isinstance(cell, str) and cell.strip().casefold() in {"", "null", "none", "nan"})


def parse_options(cell: object) -> tuple[str, ...]:
    """The K answer options of a question, `MIN_OPTIONS` <= K <= `MAX_OPTIONS`, each with some text."""
    items = as_list(cell, Reason.BAD_OPTIONS)
    if len(items) < MIN_OPTIONS:
        raise CellError(Reason.FEW_OPTIONS)
    if len(items) > MAX_OPTIONS:
        raise CellError(Reason.MANY_OPTIONS)
    if not all(isinstance(item, (str, int, float)) and not isinstance(item, bool) for item in items):
        raise CellError(Reason.BAD_OPTIONS)
    return tuple(as_text(item, Reason.EMPTY_TEXT) for item in items)


def _number(item: object, reason: Reason) -> float:
    if item is None:
        return math.nan
    if isinstance(item, bool) or not isinstance(item, (int, float)):
        raise CellError(reason)
    return float(item)


def parse_ordinal(cell: object, num_options: int) -> tuple[float | None, ...] | None:
    """The scale positions of the options, shape (K,), or None where the cell is empty.

    An option that has no place on the scale, such as a refusal, is None; `MIN_OPTIONS` have a finite one.
    """
    if is_empty(cell):
        return None
    items = as_list(cell, Reason.BAD_ORDINAL)
    if len(items) != num_options:
        raise CellError(Reason.BAD_ORDINAL)
    values = tuple(None if item is None else _number(item, Reason.BAD_ORDINAL) for item in items)
    placed = [value for value in values if value is not None]
    if len(placed) < MIN_OPTIONS or not all(map(math.isfinite, placed)):
        raise CellError(Reason.BAD_ORDINAL)
    return values


def parse_quantity(cell: object, reason: Reason, *, most: float = math.inf) -> float | None:
    """A number from 0 to `most`, itself or as text; None where the cell is empty."""
    if is_empty(cell):
        return None
    if isinstance(cell, str):
        try:
            cell = float(cell) if len(cell) <= MAX_NUMBER_CHARS else None
        except ValueError:
            raise CellError(reason) from None
    value = _number(cell, reason)
    if not (math.isfinite(value) and 0.0 <= value <= most):
        raise CellError(reason)
    return value


def parse_distribution(cell: object, num_options: int, kept: Sequence[int] | None = None) -> FloatArray:
    """The answer shares of one group to one question, shape (len(kept) or K,), each in [0, 1], sum 1.

    The cell, a list of K numbers or its text or why there is none, is checked as it was written, refusals included:
    finite shares >= 0 that sum to one within `SUM_TOLERANCE`. Then the `kept` options, None for all, are renormalised.
    """
    if isinstance(cell, Reason):  # a loader has found it
        raise CellError(cell)
    items = as_list(cell, Reason.BAD_DISTRIBUTION)
    if len(items) != num_options:
        raise CellError(Reason.LENGTH)
    values = [_number(item, Reason.BAD_DISTRIBUTION) for item in items]
    if not all(map(math.isfinite, values)):
        raise CellError(Reason.NOT_FINITE)
    if min(values) < 0.0:
        raise CellError(Reason.NEGATIVE)
    # Only values over one can overflow the sum, and they are far off one anyway.
    if max(values) > 1.0 + SUM_TOLERANCE + _ROUNDING:
        raise CellError(Reason.SUM)
    total = math.fsum(values)
    if total <= 0.0:
        raise CellError(Reason.ZERO)
    if abs(total - 1.0) > SUM_TOLERANCE + _ROUNDING:
        raise CellError(Reason.SUM)
    shares = np.array(values if kept is None else [values[position] for position in kept], dtype=np.float64)
    total = math.fsum(shares)
    if total <= 0.0:
        raise CellError(Reason.ONLY_REFUSALS)
    return shares if abs(total - 1.0) <= _ALREADY_ONE else shares / total


# What an option may be made of, in pieces between slashes or "or", to count as a refusal: the whole option, for
# "Don't know anyone" and "Not sure" are answers.
_REFUSALS: Final = frozenset(
    {"dk", "don't know", "dont know", "do not know", "ref", "refused", "refuse", "refusal", "refused to answer"}
    | {"no answer", "no response", "missing"}
)
# World Values Survey codes: "Missing; Unknown", "Other missing; Multiple answers Mail (EVS)".
_MISSING_CODE: Final = re.compile(r"(?:other )?missing\s*;.*", re.DOTALL)
# What interviewers' scripts append: "Don't know (VOL)", "Refused (DO NOT READ)".
_INTERVIEWER_NOTE: Final = re.compile(r"\((?:vol\.?|volunteered|do not read)\)")
_SEPARATOR: Final = re.compile(r"\s*/\s*|\s+or\s+")


def is_refusal(option: str) -> bool:
    """True if an option stands for not answering, whatever its case, apostrophes, blanks and final period."""
    folded = " ".join(option.replace("\N{RIGHT SINGLE QUOTATION MARK}", "'").casefold().split())
    folded = _INTERVIEWER_NOTE.sub("", folded).strip(" .")
    if _MISSING_CODE.fullmatch(folded):
        return True
    return all(piece in _REFUSALS for piece in _SEPARATOR.split(folded))
