"""Where a run's keys come from: a preset, a TOML file, the command line."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path

from appa_flwr.config.keys import Scalar, to_toml
from appa_flwr.config.schema import GENERATED_SURVEY, HUB_SURVEY, KEYS, TINY_MODEL, Config
from appa_flwr.errors import UserError

PRESET_KEY = "preset"
PATH_KEYS = ("survey", "run.output-dir", "run.cache-dir", "pluralllm.checkpoint")

_PRESETS = resources.files("appa_flwr.config.presets")


def to_toml_table(flat: Mapping[str, Scalar]) -> str:
    """Flat keys as a TOML document, one line a key, sections dotted."""
    return "".join(f"{key} = {to_toml(value)}\n" for key, value in flat.items())


def preset_names() -> tuple[str, ...]:
    """Names that `preset = ...` accepts."""
    files = _PRESETS.iterdir()
    return tuple(sorted(f.name.removesuffix(".toml") for f in files if f.name.endswith(".toml")))


def preset(name: str) -> dict[str, Scalar]:
    """The keys of a preset.

    Raises:
        UserError: there is none of that name.
    """
    if name not in preset_names():
        raise UserError(f'preset = "{name}" does not exist; presets: {", ".join(preset_names())}')
    text = (_PRESETS / f"{name}.toml").read_text(encoding="utf-8")
    return _checked_table(tomllib.loads(text), source=f"{name}.toml")


def read_toml(path: Path) -> dict[str, Scalar]:
    """Flat keys from a TOML file (which may name a `preset`).

    Raises:
        UserError: no such file, no valid TOML, or a value that is not a scalar.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as a config file ({error})") from None
    try:
        return _checked_table(tomllib.loads(text), source=str(path))
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}: not valid TOML: {error}") from None


def _checked_table(table: Mapping[str, object], *, source: str) -> dict[str, Scalar]:
    """The scalars of a TOML document under dotted keys."""
    flat: dict[str, Scalar] = {}
    for name, content in table.items():
        inside = content if isinstance(content, dict) else {"": content}
        for leaf, value in inside.items():
            key = f"{name}.{leaf}" if leaf else name
            if not isinstance(value, Scalar):
                raise UserError(
                    f'{source}: "{key}" must be true or false, a number or text, not a {type(value).__name__}'
                )
            if key in flat:
                raise UserError(f'{source}: "{key}" is given twice')
            flat[key] = value
    return flat


def parse_override(text: str) -> tuple[str, Scalar]:
    """`key=value` from the command line; the value is a TOML scalar, or bare text.

    Raises:
        UserError: no "=" in it.
    """
    key, equals, raw = text.partition("=")
    key, raw = key.strip(), raw.strip()
    if not equals or not key:
        raise UserError(f'"{text}" is not key=value, as in -c seed=1')
    try:
        value = tomllib.loads(f"value = {raw}")["value"]
    except (tomllib.TOMLDecodeError, KeyError):
        value = raw
    wants_text = key == PRESET_KEY or (key in KEYS and KEYS[key].kind is str)
    if not isinstance(value, Scalar) or (wants_text and not isinstance(value, str)):
        value = raw  # a run called 42, a date, a list: the characters as they were typed
    return key, value


def assemble(file: Path | None, overrides: Sequence[str], *, folder: Path | None) -> Config:
    """The config of a run: defaults, then the preset, then the file, then the overrides.

    Args:
        file: a TOML file of keys, or None.
        overrides: `key=value` texts; later ones win. `preset=NAME` is allowed here and in the file.
        folder: relative paths are made absolute from here, since Flower runs elsewhere; None leaves them as they are.

    Raises:
        UserError: as for `read_toml`, `preset`, `parse_override` and `Config.load`.
    """
    given: dict[str, Scalar] = {}
    if file is not None:
        given |= read_toml(file)
    given |= dict(parse_override(text) for text in overrides)
    name = given.pop(PRESET_KEY, None)
    base = preset(str(name)) if name is not None else {}
    config = Config.load({**base, **given})
    if folder is None:
        return config
    flat = config.flat()
    for key in PATH_KEYS:
        if flat[key] not in ("", GENERATED_SURVEY, HUB_SURVEY) or key == "run.output-dir":
            flat[key] = str(_absolute(key, str(flat[key]), folder))
    if (weights := str(flat["pluralllm.checkpoint"])) and not os.path.isfile(weights):
        raise UserError(
            f'pluralllm.checkpoint = "{weights}": there is no such file; give the pluralllm.safetensors of a run'
        )
    for key in ("model", "embedding.model"):  # a folder, or a name
        if flat[key] not in ("", TINY_MODEL) and os.path.isdir(path := _absolute(key, str(flat[key]), folder)):
            flat[key] = str(path)
    return Config.load(flat)


def _absolute(key: str, path: str, folder: Path) -> Path:
    try:
        return (folder / Path(path).expanduser()).resolve()
    except (RuntimeError, OSError) as error:  # a home that does not exist, links in a circle
        raise UserError(f'{key} = "{path}" is not a path that can be followed ({error})') from None
