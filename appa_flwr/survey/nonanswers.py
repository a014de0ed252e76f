"""Detection of non-answers in a survey: refusals, questions that were not asked, missing codes.

Codes and labels in `data.missing` are non-answers. Otherwise an option's label decides, as in `nonanswers.toml`.
"""

import math
import re
import tomllib
import unicodedata
from collections.abc import Mapping
from importlib import resources
from typing import Final, Literal

from appa_flwr.core.errors import UserError

Kind = Literal["answer", "refusal", "none"]
NUM_SHOWN: Final = 4  # names in a message
NONE: Final = "none"  # entry of `data.missing`: all codes are answers

WORDS: Final = tomllib.loads(resources.files(__package__).joinpath("nonanswers.toml").read_text(encoding="utf-8"))
_REFUSALS, _NOT_ASKED = frozenset[str](WORDS["refusals"]), frozenset[str](WORDS["not_asked"])
_BEGINNINGS: Final = tuple[str, ...](WORDS["not_asked_beginnings"])
_NOTES: Final = re.compile(
    r"\bvolunteered:|\((?:vol\w*\.?|do not read|spont\w*\.?|evs|wvs|mail \(evs\))\)|\bvol\.(?=\s|$)"
)
_LETTER: Final = re.compile(r"\.[a-z]\s*:\s*")
_NUMBERING: Final = re.compile(r"[(\[]?-?\d{1,4}[)\].:=]+\s*|-?\d{1,4}\s+(?:[-=–]\s*)?(?=\D)")
_BETWEEN: Final = re.compile(r"\s*[/;,|]\s*|\s+(?:or|oder|ou|o)\s+")
_MISSING_LETTER: Final = re.compile(r"\.[a-z_]?", re.IGNORECASE)
_MISSING_NUMBER: Final = re.compile(r"[789]|9{1,4}[4-9]|([6-8])\1{1,4}")
_WHOLE: Final = re.compile(r"(-?\d{1,18})\.0*")
_RANGE: Final = re.compile(r"(-?\d+(?:\.\d+)?)\s*\.\.\s*(-?\d+(?:\.\d+)?)")


def kind_of(label: str) -> Kind:
    """Classify a label as an answer, a refusal (also "don't know"), or "none" if there was nothing to answer."""
    text = unicodedata.normalize("NFC", label).casefold()
    text = " ".join(re.sub("[\u2018\u2019`\u00b4]", "'", text).split())
    reserved = _LETTER.match(text) is not None  # a missing code that statistics packages write with its label
    text = _NOTES.sub("", _NUMBERING.sub("", _LETTER.sub("", text, count=1), count=1))
    text = text.strip(" .*_()[]{}<>\"'!:;")
    if text in _REFUSALS:
        return "refusal"
    if text in _NOT_ASKED or text.startswith(_BEGINNINGS):
        return "none"
    pieces = [piece.strip(" .*()[]") for piece in _BETWEEN.split(text)]
    if all(piece in _REFUSALS or (piece in _NOT_ASKED and piece) for piece in pieces):
        return "refusal" if any(piece in _REFUSALS for piece in pieces) else "none"
    return "none" if reserved else "answer"


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
        # Column -> its codes; the empty column name has the codes of all columns that are not listed.
        self._by_column: dict[str, tuple[str, ...]] = {}
        for entry in filter(None, map(str.strip, text.split(";"))):
            column, equals, codes = (part.strip() for part in entry.rpartition("="))
            listed = tuple(filter(None, map(str.strip, codes.split(","))))
            if not listed or (equals and not column) or column in self._by_column:
                raise UserError(
                    f'data.missing = "{text}": {entry!r} is no entry of its own; give codes ("98,99"), a range '
                    '("-5..-1"), codes of a column ("polintr=7,8,9;TRUST=99"), or "none"'
                )
            self._by_column[column] = listed
        self._unused = {(column, code) for column, codes in self._by_column.items() for code in codes} - {("", NONE)}

    def kind(self, column: str, code: str, label: str) -> Kind:
        """Classify an option of a column by the user's list, then by its label."""
        return "none" if self.lists(column, code, label) else kind_of(label)

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

    def unused(self) -> list[str]:
        """List the codes that no option had."""
        return [f"{column}={code}" if column else code for column, code in sorted(self._unused) if code != NONE]

    def check(self, source: str, columns: Mapping[str, Mapping[str, str]]) -> None:
        """Raise `UserError` if an answer (column -> code -> label) has a code that looks missing and is undecided."""
        decided = columns if self._by_column.get("") == (NONE,) else self._by_column
        doubtful = {name: looks_missing(labels) for name, labels in columns.items() if name not in decided}
        doubtful = {name: codes for name, codes in doubtful.items() if codes}
        if not doubtful:
            return
        by_column = [f"{name}={','.join(codes)}" for name, codes in doubtful.items()]
        every = sorted({code for codes in doubtful.values() for code in codes}, key=lambda code: (len(code), code))
        certain = {code for name, labels in columns.items() for code in labels.keys() - {*doubtful.get(name, ())}}
        proposed = ";".join(by_column) if len(doubtful) == 1 or certain & {*every} else ",".join(every)
        more = f" and of {len(by_column) - NUM_SHOWN} more columns" if len(by_column) > NUM_SHOWN else ""
        raise UserError(
            f"{source}: codes that look like no answers: {'; '.join(by_column[:NUM_SHOWN])}{more}. "
            f'Say data.missing="{proposed}" to leave them out, or data.missing=none if they are answers'
        )


def looks_missing(labels: Mapping[str, str]) -> list[str]:
    """Find codes of a question that are probably undeclared missing codes.

    These are negative numbers, Stata's letters, and 7 to 9, 66, 77, 88, 94 to 99, 994 to 999 and so on, if they lie
    above the other codes with a gap. Of codes with a label, only negative numbers are among them, unless they are one
    half of a scale such as -2 to 2. A code without a label is its own label.
    """
    bare = [code for code, label in labels.items() if code == label]
    candidates = {code for code in bare if _MISSING_LETTER.fullmatch(code)}
    whole = {code: int(value) for code in labels if (value := number(code)) is not None and value.is_integer()}
    if whole and max(whole.values()) not in (0, -min(whole.values())):
        candidates |= {code for code, value in whole.items() if value < 0}
    usual = [value for value in whole.values() if value >= 0 and not _MISSING_NUMBER.fullmatch(str(value))]
    last = -2  # where the scale ends
    for code in sorted(whole.keys() & {*bare}, key=whole.__getitem__):
        value = whole[code]
        below = max((other for other in usual if len(str(other)) <= len(str(value))), default=-2)
        if value < 0:
            candidates.add(code)
        elif value in usual or value <= max(last, below) + 1:
            last = max(last, value)  # the scale goes on
        else:
            candidates.add(code)
    return [code for code in labels if code in candidates]
