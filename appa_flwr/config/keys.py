"""Keys and values as text for users: TOML, words of a command line, and the valid values of a key."""

import json
from collections.abc import Mapping
from typing import Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

Scalar = bool | int | float | str

_KINDS: Mapping[object, str] = {bool: "true or false", int: "integer", float: "number", str: "text"}


def valid(field: FieldInfo) -> str:
    """Valid values of a key: its choices or its type."""
    kind = field.annotation
    choices = [name for part in (kind, *get_args(kind)) if get_origin(part) is Literal for name in get_args(part)]
    own = ["MODULE:NAME"] if get_origin(kind) is Union else []
    return ", ".join([name or '""' for name in (*choices, *own)]) or _KINDS[kind]


def to_toml(value: Scalar) -> str:
    """Write a scalar as TOML; a float keeps its point or exponent, so that it is read back as a float."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # A JSON string is a TOML basic string, except that TOML requires DEL to be escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)


def to_toml_table(flat: Mapping[str, Scalar]) -> str:
    """Write flat keys as a TOML document, one line per key, sections dotted."""
    return "".join(f"{key} = {to_toml(value)}\n" for key, value in flat.items())
