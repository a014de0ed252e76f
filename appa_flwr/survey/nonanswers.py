"""Detection of non-answers in a survey: refusals, questions that were not asked, missing codes.

Codes and labels in `data.missing` are non-answers. Otherwise an option's label decides, as in `nonanswers.toml`, and
the labels of the question's other options. What is decided by words that can mean something else is a guess.
"""

import math
import re
import tomllib
import unicodedata
from collections.abc import Collection, Mapping, Set
from importlib import resources
from itertools import count, pairwise, takewhile
from typing import Final, Literal

from appa_flwr.core.errors import UserError
from appa_flwr.survey.names import NUM_SHOWN, same

Kind = Literal["answer", "refusal", "none"]
Kinds = dict[str, tuple[Kind, str]]
"""Code -> its kind, and why that is a guess; empty if it is none."""
NONE: Final = "none"  # entry of `data.missing`: all codes are answers

WORDS: Final = tomllib.loads(resources.files(__package__).joinpath("nonanswers.toml").read_text(encoding="utf-8"))
_REFUSALS, _NOT_ASKED = frozenset[str](WORDS["refusals"]), frozenset[str](WORDS["not_asked"])
_ALL_REFUSALS: Final = _REFUSALS | {*WORDS["perhaps_refusals"]}
_ALL_NOT_ASKED: Final = _NOT_ASKED | {*WORDS["perhaps_not_asked"]}
_LONGEST_FIRST: Final = sorted((_ALL_REFUSALS | _ALL_NOT_ASKED) - {""}, key=len, reverse=True)
_PHRASE: Final = re.compile(r"(?<!\w)(?:" + "|".join(map(re.escape, _LONGEST_FIRST)) + r")(?!\w)")
_NEUTRAL: Final = re.compile(r"(?<!\w)(?:not sure|unsure|not certain|no opinion|undecided)(?!\w)")
_FILLERS: Final = frozenset(WORDS["fillers"].split())
_EMPTY: Final = frozenset[str](WORDS["empty"])
_NEGATIONS: Final = frozenset(WORDS["negations"].split())
_NEGATED: Final = re.compile(r"^(?:un|in|non)(?=\w{4})")
_PLACE: Final = re.compile("[A-Z]{2}(?:-[A-Z]{1,3})?|[a-z]{2}")  # such as DK and NC, which mean no answer elsewhere
PLACE_OR_NONE: Final = "a place, or no answer"
_FEWEST_PLACES: Final = 5  # among the options of a question
_BRACKETS: Final = re.compile(r"\([^()]*\)|\[[^\[\]]*\]|\{[^{}]*\}|<[^<>]*>")
_VOLUNTEERED: Final = re.compile(r"\bvolunteered:|\bvol\.(?=\s|$)")
_LETTER: Final = re.compile(r"\.[a-z]\s*:\s*")
_NUMBERING: Final = re.compile(r"[(\[]?-?\d{1,4}[)\].:=]+\s*|-?\d{1,4}\s+(?:[-=–]\s*)?(?=\D)")
_REASON: Final = re.compile(r"\s*[:;,–—]|\s+-|\s*\.\s")  # after which a label says why there is no answer
_MARKS: Final = " .*_()[]{}<>\"'!:;,-/|"
_MISSING_LETTER: Final = re.compile(r"\.[a-z_]?", re.IGNORECASE)
# 9, 99, 88 and so on; and what programs of statistics make of a missing whole number of 16 or 32 bits
_MISSING_NUMBER: Final = re.compile(r"[789]|9{1,4}[4-9]|([6-8])\1{1,4}|327(?:4[1-9]|5\d|6[0-7])|21474836[2-4]\d")
_MANY, _SMALL_GAP = 10, 3  # numbers, and a gap between them
_WHOLE: Final = re.compile(r"(-?\d{1,18})\.0*")
_RANGE: Final = re.compile(r"(-?\d+(?:\.\d+)?)\s*\.\.\s*(-?\d+(?:\.\d+)?)")


def classify(label: str) -> tuple[Kind, bool]:
    """Return a label's kind, and whether that kind is doubtful because only parts of the label were recognized.

    A refusal includes "don't know". The kind is "none" if the respondent had nothing to answer.
    """
    text = unicodedata.normalize("NFC", label).casefold()
    text = " ".join(re.sub("[\u2018\u2019`\u00b4]", "'", text).split())
    reserved = _LETTER.match(text) is not None  # a missing code that statistics packages write with its label
    text = _LETTER.sub("", text, count=1)
    text = _VOLUNTEERED.sub("", _NUMBERING.sub("", text, count=1) or text)  # a number alone is an answer: [7]
    text = (_BRACKETS.sub(" ", text).strip(_MARKS) or text).strip(_MARKS)
    begins = _PHRASE.match(text)
    if begins and begins[0] in _ALL_NOT_ASKED and (begins[0] == "not asked" or _REASON.match(text, begins.end())):
        return "none", begins[0] not in _NOT_ASKED
    phrases = _PHRASE.findall(text)
    rest = re.findall(r"[^\W\d_][\w']*", _PHRASE.sub(" ", _NEUTRAL.sub(" ", text)))
    if text in _REFUSALS | _NOT_ASKED or (phrases and _FILLERS.issuperset(rest)):
        is_refusal = not _ALL_REFUSALS.isdisjoint({text, *phrases})
        is_sure = text in _REFUSALS | _NOT_ASKED or (not rest and (_REFUSALS | _NOT_ASKED).issuperset(phrases))
        return ("refusal" if is_refusal else "none"), not is_sure
    return ("none", False) if reserved else ("answer", False)


def in_context(labels: Mapping[str, str], *, fewest_places: int = _FEWEST_PLACES) -> Kinds:
    """Classify the labels of a question's codes.

    A label that could mean "no answer" is an answer if another one has its words without the negation, as "Trifft
    nicht zu" beside "Trifft voll zu", or if all others, `fewest_places` at least, are abbreviations of places.
    """
    kinds: Kinds = {}
    for code, label in labels.items():
        kind, is_doubtful = classify(label)
        kinds[code] = kind, "reads as no answer" if is_doubtful else ""
    answers = {code: labels[code] for code, (kind, _) in kinds.items() if kind == "answer"}
    are_places = len(answers) >= fewest_places and all(map(_PLACE.fullmatch, answers.values()))
    words_of = [_words(label) for label in answers.values()]
    for code in labels.keys() - answers.keys():
        words = _words(labels[code])
        if are_places and _PLACE.fullmatch(labels[code]):
            kinds[code] = "answer", PLACE_OR_NONE
        elif kinds[code] != ("refusal", "") and words and any(map(words.issubset, words_of)):
            kinds[code] = "answer", "reads as no answer, and another option has its words"
    return kinds


def _words(label: str) -> frozenset[str]:
    """Beginnings of a label's words, without negations; empty for a label that begins with "no"."""
    words = re.findall(r"[^\W\d_]{3,}", _BRACKETS.sub(" ", label.casefold()))
    if label.casefold().startswith("no "):
        return frozenset()
    return frozenset(_NEGATED.sub("", word)[:4] for word in words if word not in _NEGATIONS)


def code_text(value: object) -> str:
    """A code as text: 3.0 and "3.0" are "3", None and NaN are empty."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    text = str(value).strip()
    return whole[1] if (whole := _WHOLE.fullmatch(text)) else text


def number(code: str) -> float | None:
    """A code as a finite number, if it is one."""
    try:
        value = float(code)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


class Missing:
    """The user's missing codes (`data.missing`), such as "98,99", "-5..-1", "polintr=7,8,9;TRUST=none" or "none"."""

    def __init__(self, text: str = "") -> None:
        """Parse the key; raises `UserError` for an entry without codes, or for two entries of one column."""
        # Column -> its codes, none if all are answers; the empty name has those of all columns that are not listed.
        self._by_column: dict[str, tuple[str, ...]] = {}
        for entry in filter(None, map(str.strip, text.split(";"))):
            column, equals, codes = (part.strip() for part in entry.rpartition("="))
            listed = tuple(filter(None, map(str.strip, codes.split(","))))
            if not listed or (equals and not column) or column in self._by_column:
                raise UserError(
                    f'data.missing = "{text}": {entry!r} is no entry of its own; give codes ("98,99"), a range '
                    '("-5..-1"), codes of a column ("polintr=7,8,9;TRUST=99"), or "none"'
                )
            self._by_column[column] = () if listed == (NONE,) else listed
        self._unused = {(column, code) for column, codes in self._by_column.items() for code in codes}

    def kinds(self, column: str, labels: Mapping[str, str], *, fewest_places: int = _FEWEST_PLACES) -> Kinds:
        """Classify the codes of a column by the user's list, else by their labels, or since they are negative.

        Where the user says that all are answers, refusals beyond doubt remain refusals, and "NA" remains an empty cell.
        """
        kinds = in_context(labels, fewest_places=fewest_places)
        for code in labels:
            if self.lists(column, code, labels[code]):
                kinds[code] = "none", ""
            elif self._are_answers(column) and kinds[code] != ("refusal", "") and same(labels[code]) not in _EMPTY:
                kinds[code] = "answer", ""
        answers = {code: labels[code] for code, (kind, _) in kinds.items() if kind == "answer"}
        if not self._decides(column):
            if any((number(code) or 0.0) > 0.0 for code in answers):
                bad = (c for c in looks_missing(answers) if labels[c] != c and (number(c) or 0.0) < 0.0)
                kinds |= dict.fromkeys(bad, ("none", "a negative code beside positive ones"))
            elsewhere = {code for codes in self._by_column.values() for code in codes}
            kinds |= dict.fromkeys(_ends(answers, elsewhere), ("answer", "no answer of other columns"))
        return kinds

    def lists(self, column: str, code: str, label: str) -> bool:
        """True if the user lists this code or label of the column."""
        value, place = number(code), column if column in self._by_column else ""
        for listed in self._by_column.get(place, ()):
            ends = _RANGE.fullmatch(listed)
            inside = ends and value is not None and float(ends[1]) <= value <= float(ends[2])
            if listed in (code, label) or code_text(listed) == code or inside:
                self._unused.discard((place, listed))
                return True
        return False

    def _decides(self, column: str) -> bool:
        """True if the user's list settles all codes of a column."""
        return column in self._by_column or self._are_answers(column)

    def _are_answers(self, column: str) -> bool:
        """True if the user says that all codes of a column are answers."""
        return self._by_column.get(column, self._by_column.get("")) == ()

    def unused(self) -> list[str]:
        """List the codes that no option had."""
        return [f"{column}={code}" if column else code for column, code in sorted(self._unused)]

    def check(self, source: str, columns: Mapping[str, Mapping[str, str]]) -> None:
        """Raise `UserError` if an answer (column -> code -> label) has a code that looks missing and is undecided."""
        open_columns = {name: labels for name, labels in columns.items() if not self._decides(name)}
        doubtful = {name: codes for name, labels in open_columns.items() if (codes := looks_missing(labels))}
        if not doubtful:
            return
        by_column = [f"{name}={','.join(codes)}" for name, codes in doubtful.items()]
        every = sorted({code for codes in doubtful.values() for code in codes}, key=lambda code: (len(code), code))
        certain = {code for name, labels in columns.items() for code in labels.keys() - {*doubtful.get(name, ())}}
        proposed = ";".join(by_column) if len(doubtful) == 1 or certain & {*every} else ",".join(every)
        more = f" and of {len(by_column) - NUM_SHOWN} more columns" if len(by_column) > NUM_SHOWN else ""
        # Where they follow the scale, these codes may be its last points or no answers, too.
        beside = {name: _ends(labels, every) for name, labels in open_columns.items() if name not in doubtful}
        ends = [f"{name}={','.join(codes)}" for name, codes in beside.items() if codes]
        also = (
            f". Next to the scale, and answers unless you say otherwise: {'; '.join(ends[:NUM_SHOWN])}" if ends else ""
        )
        raise UserError(
            f"{source}: codes that look like no answers: {'; '.join(by_column[:NUM_SHOWN])}{more}. "
            f'Say data.missing="{proposed}" to leave them out, or data.missing=none if they are answers{also}'
        )


def looks_missing(labels: Mapping[str, str]) -> list[str]:
    """Find codes of a question that are probably undeclared missing codes; a code without a label is its own label.

    `nonanswers.toml` has the codes of known surveys.
    """
    bare = {code for code, label in labels.items() if code == label}
    whole = {code: int(value) for code in labels if (value := number(code)) is not None and value.is_integer()}
    apart = _apart({*whole.values()})
    scale = {*whole.values()} - apart
    low, high = min(scale, default=0), max(scale, default=0)
    num_gaps = high - low + 1 - len(scale)
    # Negative codes are half of a scale of which each number occurs, such as -2 to 2, or -2 to 0.
    has_halves = high in (0, -low) and (not num_gaps or (num_gaps == 1 and 0 not in scale and high > 1))
    # Without labels the zero must occur, too, and more than -1 to 1, which may be a missing code beside no and yes.
    has_bare_halves = has_halves and high > 1 and 0 in scale
    return [
        code
        for code in labels
        if (code in bare and (_MISSING_LETTER.fullmatch(code) or whole.get(code) in apart))
        or (whole.get(code, 0) < 0 and not (has_bare_halves if code in bare else has_halves))
    ]


def _ends(labels: Mapping[str, str], codes: Collection[str]) -> list[str]:
    """The largest numbers without labels among a question's codes, as far as they are in `codes`."""
    bare = {value: code for code, label in labels.items() if code == label and (value := number(code)) is not None}
    return [code for _, code in takewhile(lambda pair: pair[1] in codes, sorted(bare.items(), reverse=True))][::-1]


def _apart(values: Set[int]) -> set[int]:
    """7 to 9, 66, 77, 88, 94 to 99, 994 to 999 and so on, if they lie above the other codes with a gap.

    Codes from which each number up to other codes occurs are the beginning of a scale, such as 7 to 30. Among many
    numbers that have gaps of their own, such as heights, a gap as small as these tells nothing.
    """
    reserved = {value for value in values if value >= 0 and _MISSING_NUMBER.fullmatch(str(value))}
    others = sorted(values - reserved)
    widest = max((after - before for before, after in pairwise(others)), default=1)
    gap = min(widest, _SMALL_GAP) if len(others) >= _MANY else 1
    apart, last = set(), -1 - gap  # where the scale ends
    for value in sorted(reserved):
        below = max((other for other in others if len(str(other)) <= len(str(value))), default=last)
        end = next(number for number in count(value) if number not in reserved)
        if value <= max(last, below) + gap or end in values:
            last = value  # the scale goes on
        else:
            apart.add(value)
    return apart
