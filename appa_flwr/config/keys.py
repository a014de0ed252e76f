"""One config key as a user sees it, and what is said about a key or value that is wrong."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ValidationError

Scalar = bool | int | float | str

_NEAREST_CUTOFF = 0.0  # always name some key: even a far one shows how keys look
_KINDS = {bool: "true or false", int: "integer", float: "number", str: "text"}


@dataclass(frozen=True)
class Key:
    """One config key.

    Attributes:
        name: kebab-case, with its section and a dot before it where it has one.
        valid: its choices or its type.
        default: value of the embedded default run.
        doc: one line.
    """

    name: str
    valid: str
    default: Scalar
    doc: str

    @property
    def section(self) -> str:
        """Empty for the keys on top."""
        return self.name.rpartition(".")[0]

    @property
    def leaf(self) -> str:
        """The name within its section."""
        return self.name.rpartition(".")[2]


def keys_of(model: type[BaseModel], *, section: str = "") -> dict[str, Key]:
    """The keys of a model and of the sections in it, by name."""
    hints = get_type_hints(model)
    keys: dict[str, Key] = {}
    for name, info in model.model_fields.items():
        if isinstance(hints[name], type) and issubclass(hints[name], BaseModel):
            keys |= keys_of(hints[name], section=f"{info.alias}.")
            continue
        valid = ", ".join(_choices(hints[name])) or _KINDS[hints[name]]
        keys[f"{section}{info.alias}"] = Key(f"{section}{info.alias}", valid, info.default, info.description or "")
    return keys


def _choices(hint: Any) -> tuple[str, ...]:
    """The values of a literal, also where a pattern is valid too; none for other types."""
    if get_origin(hint) is Union:
        return (*(name for part in get_args(hint) for name in _choices(part)), "MODULE:NAME")
    return tuple(str(choice) for choice in get_args(hint)) if get_origin(hint) is Literal else ()


def sections_of(model: type[BaseModel]) -> dict[str, str]:
    """Topic of each section of a model, by name: its docstring "[name]: what it is about."."""
    topics = {}
    for name, hint in get_type_hints(model).items():
        if isinstance(hint, type) and issubclass(hint, BaseModel):
            alias = str(model.model_fields[name].alias)
            topics[alias] = (hint.__doc__ or "").partition("\n")[0].removeprefix(f"[{alias}]: ").rstrip(".")
    return topics


def unknown_key(key: str, keys: Mapping[str, Key]) -> str:
    """Message about a key that does not exist: its right section, or the nearest one."""
    shown = to_toml(key)  # one line, whatever it holds
    if key and (inside := [name for name in keys if keys[name].section == key]):
        return f"{shown} is a section, not a key; its keys are {', '.join(inside)}"
    wanted = key.replace("_", "-")
    section, _, leaf = wanted.rpartition(".")
    namesakes = [name for name in keys if keys[name].leaf == leaf]
    if len(namesakes) > 1 and wanted not in keys:
        return f"unknown key {shown}; there are {', '.join(namesakes)}"
    in_section = [name for name in keys if section and keys[name].section == section]
    nearest = keys[difflib.get_close_matches(wanted, namesakes or in_section or keys, n=1, cutoff=_NEAREST_CUTOFF)[0]]
    return f'unknown key {shown}; the nearest is "{nearest.name}", {nearest.valid}, default {to_toml(nearest.default)}'


def first_problem(error: ValidationError, flat: Mapping[str, Scalar], keys: Mapping[str, Key]) -> str:
    """The first of pydantic's complaints about these flat keys, in one line."""
    problem = error.errors()[0]
    # Where one of two types is valid, their names follow the key's.
    paths = (".".join(map(str, problem["loc"][:length])) for length in range(len(problem["loc"]), 0, -1))
    key = next((keys[path] for path in paths if path in keys), None)
    if key is None:  # a validator of the whole
        return str(problem["ctx"]["error"])
    value: object = flat[key.name]
    shown = to_toml(value) if isinstance(value, Scalar) else type(value).__name__
    wanted = (
        problem["msg"].removeprefix("Value error, ").replace("Input should", "must").replace("String should", "must")
    )
    return f"{key.name} = {shown} is not valid: it {wanted}; {key.valid}, default {to_toml(key.default)}"


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
