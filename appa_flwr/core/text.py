"""Normalisation of names, and durations as text."""

import re
import unicodedata
from typing import Final

_INVISIBLE: Final = re.compile("[\u200b-\u200f\u2060\ufeff\u00ad]")
_CONTROL: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]+")


def clean(name: str) -> str:
    """Normalise a name: Unicode's NFC, without invisible characters, control characters and outer blanks."""
    return unicodedata.normalize("NFC", _CONTROL.sub(" ", _INVISIBLE.sub("", name))).strip()


def duration(seconds: float) -> str:
    """Format seconds for people: "12.3 s", "6 min 5 s", "2 h 3 min"."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
