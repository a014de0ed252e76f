"""What in a survey is no answer: refusals, questions that were not asked, missing codes.

An option is read by its code where the file has one, and by its label or word otherwise. Case, blanks, brackets,
numbering and apostrophes do not count.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from appa_flwr.core.errors import UserError

Kind = Literal["answer", "refusal", "none"]


def _listed(words: str) -> frozenset[str]:
    return frozenset(word.strip() for word in words.strip("\n ").replace("\n", "|").split("|"))


_REFUSALS: Final = _listed("""
    dk|dk/na|dk/ref|don't know|dont know|do not know|do not know/cannot choose|can't choose|cannot choose|can't say
    ref|refused|refuse|refusal|refused to answer|no answer|no response|declined|declined to answer|no opinion/refused
    prefer not to say|prefer not to answer|not answered|na/dk|no answer/refused
    weiß nicht|weiss nicht|keine angabe|k.a|verweigert|keine antwort
    ne sait pas|nsp|ne se prononce pas|sans réponse|sans reponse|refus|pas de réponse
    no sabe|no contesta|no responde|ns/nc|n.s|n.c|ns|nc|rehúsa|sin respuesta|não sabe|nao sabe|não respondeu|recusou
    non so|non sa|non risponde|rifiuta|nessuna risposta|weet niet|weet ik niet|geen antwoord|weigert
    nie wiem|trudno powiedzieć|odmowa|odmowa odpowiedzi|brak odpowiedzi|neví|neodpověděl|nu știu|nu răspund|nem tudja
    vet ej|vet inte|vill ej svara|ved ikke|vil ikke svare|vet ikke|en osaa sanoa|ei vastausta|δεν ξέρω|δεν απαντώ
    затрудняюсь ответить|не знаю|нет ответа|отказ|отказ от ответа|важко сказати|bilmiyorum|fikrim yok|cevap yok
    لا أعرف|لا أدري|رفض|رفض الإجابة|لا جواب|tidak tahu|tidak menjawab|không biết|不知道|不清楚|拒绝回答|無回答|无回答
    わからない|答えたくない|모름|모르겠다|무응답|응답 거절
""")  # fmt: skip
_NOT_ASKED: Final = _listed("""
    |na|n/a|nan|null|#null|#n/a|none given|iap|inap|inapplicable|not applicable|nap|not asked|question not asked
    missing|missing by design|system missing|other missing|unknown missing|not available|not ascertained|no data
    skip|skipped|skipped on web|legitimate skip|not included|item not included|no follow-up|uncodeable|uncodable
    multiple answers|multiple answers mail|variable-specific reserve code|not imputable|dk, na, iap|nicht gefragt
    trifft nicht zu|nicht erhoben|non posée|sans objet|no aplica|no procede|não se aplica|non applicabile
    niet van toepassing|nie dotyczy|неприменимо|не спрашивали|غير قابل للتطبيق|不适用|非該当
""")  # fmt: skip
_BEGINNINGS: Final = ("not asked", "missing;", "missing:", "other missing;", "not applicable;", "missing -")
_NOTES: Final = re.compile(r"\((?:vol\w*\.?|do not read|spont\w*\.?|evs|wvs|mail \(evs\))\)|\bvol\.(?=\s|$)")
_LETTER: Final = re.compile(r"\.[a-z]\s*:\s*")
_NUMBERING: Final = re.compile(r"[(\[]?-?\d{1,4}[)\].:=]+\s*|-?\d{1,4}\s+(?:[-=–]\s*)?(?=\D)")
_BETWEEN: Final = re.compile(r"\s*[/;,|]\s*|\s+(?:or|oder|ou|o)\s+")
_MISSING_LETTER: Final = re.compile(r"\.[a-z_]?", re.IGNORECASE)
_WHOLE: Final = re.compile(r"(-?\d{1,18})\.0*")
_MOST_DIGITS: Final = 5
_RANGE: Final = re.compile(r"(-?\d+(?:\.\d+)?)\.\.(-?\d+(?:\.\d+)?)")


def kind_of(label: str) -> Kind:
    """Whether an option's label is an answer, a refusal or "don't know", or says that there was nothing to answer."""
    text = unicodedata.normalize("NFC", label).casefold()
    text = " ".join(re.sub("[\u2018\u2019`\u00b4]", "'", text).split())
    reserved = _LETTER.match(text) is not None  # a reserve code that statistics packages write as words
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
    """A code as text: 3.0 and "3.0" are "3"; empty for None and NaN."""
    if value is None or (isinstance(value, float) and value != value):
        return ""
    text = str(value).strip()
    return whole[1] if (whole := _WHOLE.fullmatch(text)) else text


@dataclass(frozen=True)
class Missing:
    """The codes that a user calls missing, `data.missing`: "98,99", "-5..-1", "polintr=7,8,9;TRUST=none" or "none".

    Attributes:
        by_column: column -> its codes, in place of those for all columns; "" is the entry for all columns.
    """

    by_column: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Missing:
        """Read the key.

        Raises:
            UserError: an entry without codes, or two entries for one column.
        """
        by_column: dict[str, tuple[str, ...]] = {}
        for entry in filter(None, map(str.strip, text.split(";"))):
            column, equals, codes = (part.strip() for part in entry.rpartition("="))
            listed = tuple(filter(None, map(str.strip, codes.split(","))))
            if not listed or (equals and not column) or column in by_column:
                raise UserError(
                    f'data.missing = "{text}": {entry!r} is no entry of its own; give codes ("98,99"), a range '
                    '("-5..-1"), codes of a column ("polintr=7,8,9;TRUST=99"), or "none"'
                )
            by_column[column] = listed
        return cls(by_column)

    def _codes(self, column: str) -> tuple[str, ...]:
        return self.by_column.get(column, self.by_column.get("", ()))

    def kind(self, column: str, code: str, label: str) -> Kind:
        """What an option of a column is: "none" if the user calls its code or label missing, else by its label."""
        for listed in self._codes(column):
            ends, value = _RANGE.fullmatch(listed), number(code)
            if listed in (code, label) or code_text(listed) == code:
                return "none"
            if ends and value is not None and float(ends[1]) <= value <= float(ends[2]):
                return "none"
        return kind_of(label)

    def doubtful(self, column: str, labels: Mapping[str, str]) -> list[str]:
        """Codes (code -> label) of a column that look missing, unless the user has decided about all of them."""
        if column in self.by_column or self._codes(column) == ("none",):
            return []
        return looks_missing([*labels], unlabelled=[code for code, label in labels.items() if code == label])


def number(code: str) -> float | None:
    """The finite number that a code is, None where it is none."""
    try:
        value = float(code)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def looks_missing(codes: Sequence[str], *, unlabelled: Iterable[str]) -> list[str]:
    """Unlabelled codes of a question that are probably missing codes which nobody declared.

    These are negative numbers, Stata's letters, and 7 to 9, 66 to 99 alike or 94 to 99, 994 to 999 and so on, where
    they lie apart from the other codes and above them.

    Args:
        codes: of all options that count as answers; words are not numbers and are ignored.
        unlabelled: those of them without a label.
    """
    candidates = {code for code in unlabelled if _MISSING_LETTER.fullmatch(code)}
    whole = {code: int(value) for code in codes if (value := number(code)) is not None and value.is_integer()}
    unknown = {code: whole[code] for code in unlabelled if code in whole}
    candidates |= {code for code, value in unknown.items() if value < 0}
    for digits in range(1, _MOST_DIGITS + 1):
        nines = 10**digits - 1
        special = {nines - k for k in range(3 if digits == 1 else 6)} | {nines // 9 * k for k in (6, 7, 8, 9)}
        if digits == 1:
            special.discard(6)  # half of an eleven-point scale ends there
        top = max((value for value in whole.values() if value not in special and 0 <= value <= nines), default=-2)
        for code, value in sorted(unknown.items(), key=lambda pair: pair[1]):
            if value not in special or value <= top:
                continue
            if value == top + 1:
                top = value  # the scale goes on
            else:
                candidates.add(code)
    return [code for code in codes if code in candidates]
