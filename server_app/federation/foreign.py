"""Text of another party, on its way into a line of ours: without what a terminal would obey, and short."""

from __future__ import annotations

import re
from collections.abc import Collection

LENGTH, FEW = 200, 3  # characters of a text, texts of a list
# control characters, line and paragraph ends, halves of characters, and marks that turn the direction of writing
_OBEYED = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]+")


def plain(text: str) -> str:
    """The text in one short line; a text that is one already comes back as it is."""
    cut = _OBEYED.sub(" ", text[: LENGTH + 1])
    return cut if len(text) <= LENGTH else cut[: LENGTH - 3] + "..."


def listed(texts: Collection[str]) -> str:
    """The first few of them, and how many more there are."""
    few = ", ".join(plain(text) for text, _ in zip(texts, range(FEW), strict=False))
    return few if len(texts) <= FEW else f"{few} and {len(texts) - FEW} more"
