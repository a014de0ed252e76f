"""Answer options that are refusals: "don't know", "refused", "missing" and how surveys spell them.

The match is on the whole option, not on a part of it: "Don't know anyone" and "Not sure" are answers.
"""

from __future__ import annotations

import re
from typing import Final

# What an option may be made of, in pieces between slashes or "or", to count as a refusal.
_WORDS: Final = frozenset(
    {
        "dk",
        "don't know",
        "dont know",
        "do not know",
        "ref",
        "refused",
        "refuse",
        "refusal",
        "refused to answer",
        "no answer",
        "no response",
        "missing",
    }
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
    return all(piece in _WORDS for piece in _SEPARATOR.split(folded))
