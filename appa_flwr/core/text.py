"""Text as people and files write it."""

from __future__ import annotations

import re
import unicodedata
from typing import Final

_INVISIBLE: Final = re.compile("[\u200b-\u200f\u2060\ufeff\u00ad]")
_CONTROL: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]+")


def clean(name: str) -> str:
    """One spelling of a name: Unicode's NFC, without invisible characters, control characters and outer blanks."""
    return unicodedata.normalize("NFC", _CONTROL.sub(" ", _INVISIBLE.sub("", name))).strip()
