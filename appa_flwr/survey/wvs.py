"""The World Values Survey's wave 7 as its users download it: codes instead of words, one row a respondent.

The file has no codebook. Known here: countries, which columns ask about opinions, what negative codes mean, and the
words of some batteries. Another question is its code, and its options are their codes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

COUNTRY: Final = ("B_COUNTRY_ALPHA", "B_COUNTRY")
NOT_ASKED: Final = frozenset({"", "-3", "-4", "-5"})
_REFUSALS: Final = {"-1": "Don't know", "-2": "No answer"}
_QUESTION: Final = re.compile(r"Q(\d{1,3})")
_LAST_OPINION: Final = 259  # Q260 to Q290 ask who the respondent is
GUESSED: Final = (
    "World Values Survey, wave 7, where -1 and -2 are refusals and other negative codes were not asked; some have "
    "words, by memory of the questionnaire, the others are codes: compare with the codebook"
)
_CONFIDENCE: Final = "A great deal; Quite a lot; Not very much; None at all"
_BATTERIES: Final = (
    (1, "How important is this in your life: {}?",
     "Very important; Rather important; Not very important; Not at all important",
     "family; friends; leisure time; politics; work; religion"),
    (46, "{}", "Very happy; Quite happy; Not very happy; Not at all happy",
     "Taking all things together, how happy would you say you are?"),
    (47, "{}", "Very good; Good; Fair; Poor; Very poor", "How would you describe your state of health these days?"),
    (57, "{}", "Most people can be trusted; Need to be very careful",
     "Can most people be trusted, or do you need to be very careful in dealing with people?"),
    (58, "How much do you trust {}?",
     "Trust completely; Trust somewhat; Do not trust very much; Do not trust at all",
     "your family; people in your neighborhood; people you know personally; people you meet for the first time; "
     "people of another religion; people of another nationality"),
    (64, "How much confidence do you have in {}?", _CONFIDENCE,
     "churches; the armed forces; the press; television; labor unions; the police; the courts; the government; "
     "political parties; parliament; the civil service; universities; elections; major companies; banks; "
     "environmental organizations; women's organizations; charitable or humanitarian organizations"),
    (177, "Can this be justified: {}?", "1, never justifiable; 2; 3; 4; 5; 6; 7; 8; 9; 10, always justifiable",
     "claiming government benefits to which you are not entitled; avoiding a fare on public transport; "
     "stealing property; cheating on taxes; someone accepting a bribe; homosexuality; prostitution; abortion; divorce; "
     "sex before marriage; suicide; euthanasia; a man beating his wife; parents beating children; "
     "violence against other people; terrorism; casual sex; political violence; the death penalty"),
    (235, "As a way of governing this country, how good is {}?", "Very good; Fairly good; Fairly bad; Very bad",
     "a strong leader who does not have to bother with parliament and elections; experts who decide; army rule; "
     "a democratic political system"),
)  # fmt: skip
"""Number of the first question, its words, options of the codes 1, 2, ..., what stands in the words."""
_WORDS: Final = {
    f"Q{number}": (words.format(item), options.split("; "))
    for first, words, options, items in _BATTERIES
    for number, item in enumerate(items.split("; "), start=first)
}


def code(column: str) -> str:
    """The code of a column, which some waves' files name "Q1: Important in life: Family"."""
    return column.partition(":")[0].strip()


def is_wvs(header: Iterable[str]) -> bool:
    """True if the columns are those of wave 7: a country's, and questions' by their codes."""
    codes = {code(column) for column in header}
    return not codes.isdisjoint(COUNTRY) and any(map(is_question, codes))


def is_question(column: str) -> bool:
    """True for a column of opinions."""
    found = _QUESTION.fullmatch(column)
    return found is not None and int(found[1]) <= _LAST_OPINION


def in_words(column: str, codes: Sequence[str]) -> dict[str, object]:
    """A question's text, options and, where their words are known, scale for the codes that are its answers."""
    text, known = _WORDS.get(column, (f"World Values Survey, question {column}", []))
    words = {str(number): option for number, option in enumerate(known, start=1)} | _REFUSALS
    if any(answer not in words for answer in codes):
        return {"question": text, "options": tuple(_REFUSALS.get(answer, answer) for answer in codes)}
    place = [None if answer in _REFUSALS else float(answer) for answer in codes]
    return {"question": text, "options": tuple(words[answer] for answer in codes), "ordinal": place}
