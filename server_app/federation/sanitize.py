"""Sanitise text from another party for a log line: remove control characters and shorten the text."""

import re
from collections.abc import Collection

from appa_flwr.core.text import listed as names_listed

LENGTH, FEW = 200, 3  # most characters of a text, most texts of a list
# control characters, line and paragraph separators, surrogates, and marks that change the writing direction
_OBEYED = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]+")


def plain(text: str) -> str:
    """Return the text as one short line; a text that is such a line is unchanged."""
    cut = _OBEYED.sub(" ", text[: LENGTH + 1])
    return cut if len(text) <= LENGTH else cut[: LENGTH - 3] + "..."


def listed(texts: Collection[str], most: int = FEW) -> str:
    """The first texts, and the number of further texts."""
    return names_listed([plain(text) for text in texts], most)
