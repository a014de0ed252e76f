"""Decoding of files, TOML among them, normalisation and lists of names, and durations as text."""

import html
import re
import tomllib
import unicodedata
from collections.abc import Collection
from itertools import islice
from pathlib import Path
from typing import Any, Final

from appa_flwr.core.errors import UserError

NAMES = 10
"""Most names in a sentence."""

_INVISIBLE: Final = re.compile("[\u200b-\u200f\u2060\ufeff\u00ad]")
_CONTROL: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]+")
# Tags by their names, since a text can hold "<5 years" and "<Refusal>".
_BLOCK: Final = re.compile(
    r"<(style|script)\b.*?</\1\s*>|</?(?:br|p|div|h[1-6]|hr|li|ul|ol|table|t[rdh]|tbody|center|img)(?:\s[^<>]*)?/?>",
    re.I,
)
_INLINE: Final = re.compile(r"</?(?:a|b|i|u|s|em|strong|span|font|big|small|su[bp]|o:p|label)(?:\s[^<>]*)?/?>", re.I)
_ENTITY: Final = re.compile(r"&(?:#\w{1,8}|[A-Za-z]\w{1,30});")


def decode(data: bytes) -> str:
    """Decode UTF-8 or UTF-16, with or without a byte order mark; raises UnicodeDecodeError."""
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return data.decode("utf-16")
    if b"\0" in data[:2]:
        return data.decode("utf-16-le" if data[1:2] == b"\0" else "utf-16-be")
    return data.decode("utf-8-sig")


def parse_toml(path: Path) -> dict[str, Any]:
    """Parse a TOML file in UTF-8 or UTF-16; raises UserError if there is no such file, or no valid TOML in it."""
    text = ""
    try:
        text = decode(path.read_bytes())
        return tomllib.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as a TOML file ({error})") from None
    except (ValueError, RecursionError) as error:  # integers and nesting can exceed Python's limits
        curly = re.search("[\u2018-\u201f\u00ab\u00bb]", text)
        advice = f'; line {text.count(chr(10), 0, curly.start()) + 1} has typographic quotes, write ""' if curly else ""
        raise UserError(f"{path}: not valid TOML: {error}{advice}") from None


def clean(name: str) -> str:
    """Normalise a name: Unicode's NFC, without invisible characters, control characters and outer blanks."""
    return unicodedata.normalize("NFC", _CONTROL.sub(" ", _INVISIBLE.sub("", name))).strip()


def plain(text: str) -> str:
    """Text of a piece of HTML, as survey programs export it: without tags, and with letters in place of entities."""
    if "<" not in text and "&" not in text:
        return text
    plain_text = _INLINE.sub("", _BLOCK.sub(" ", text))
    plain_text = _ENTITY.sub(lambda entity: html.unescape(entity[0]), plain_text).replace("\xa0", " ")
    return text if plain_text == text else " ".join(plain_text.split())


def duration(seconds: float) -> str:
    """Format seconds for people: "12.3 s", "6 min 5 s", "2 h 3 min"."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def listed(names: Collection[str], most: int = NAMES) -> str:
    """The first names, separated by commas, and the number of the others."""
    few = ", ".join(islice(names, most))
    return few if len(names) <= most else f"{few} and {len(names) - most:,} more"
