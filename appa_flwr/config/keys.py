"""Keys and values as a user reads them: TOML, the words of a command line, and what a key may be."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

Scalar = bool | int | float | str

_KINDS: Mapping[object, str] = {bool: "true or false", int: "integer", float: "number", str: "text"}


def valid(field: FieldInfo) -> str:
    """What a key may be: its choices or its type."""
    kind = field.annotation
    choices = [name for part in (kind, *get_args(kind)) if get_origin(part) is Literal for name in get_args(part)]
    own = ["MODULE:NAME"] if get_origin(kind) is Union else []
    return ", ".join([*choices, *own]) or _KINDS[kind]


def to_word(value: Scalar) -> str:
    """A scalar as a command line takes it: text without quotes, anything else as in TOML."""
    return value if isinstance(value, str) else to_toml(value)


def to_toml(value: Scalar) -> str:
    """A scalar as TOML text; a float keeps its point or exponent so that it reads back as a float."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # A JSON string is a TOML basic string, but for DEL, which TOML wants escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)


def to_toml_table(flat: Mapping[str, Scalar]) -> str:
    """Flat keys as a TOML document, one line a key, sections dotted."""
    return "".join(f"{key} = {to_toml(value)}\n" for key, value in flat.items())
