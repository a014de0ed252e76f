"""Sources of a run's keys: a preset, TOML files, the command line."""

import os
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path

from appa_flwr.config import KEYS, SECTIONS, Config, unknown_key
from appa_flwr.config.keys import Scalar, to_toml
from appa_flwr.core.errors import UserError
from appa_flwr.core.text import parse_toml

PRESET_KEY = "preset"

_FOLDER = resources.files("appa_flwr.config.presets")
PRESETS = sorted(file.name.removesuffix(".toml") for file in _FOLDER.iterdir() if file.name.endswith(".toml"))


def preset(name: str) -> dict[str, Scalar]:
    """Read the keys of a preset and of the preset that it is based on; an unknown name is a UserError."""
    if name not in PRESETS:
        raise UserError(f'preset = "{name}" does not exist; presets: {", ".join(PRESETS)}')
    text = (_FOLDER / f"{name}.toml").read_text(encoding="utf-8")
    return on_its_preset(flatten(tomllib.loads(text), source=f"{name}.toml"))


def on_its_preset(given: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Add the keys of the preset that is named in the given keys, if any; given keys take precedence."""
    own = {key: value for key, value in given.items() if key != PRESET_KEY}
    return preset(str(given[PRESET_KEY])) | own if PRESET_KEY in given else own


def read_toml(path: Path) -> dict[str, Scalar]:
    """Flat keys from a TOML file (which may name a `preset`).

    Raises:
        UserError: no such file, no valid TOML, a key that does not exist or is given twice, or a value that is not a
            scalar; the message names the file.
    """
    return flatten(parse_toml(path), source=str(path))


def flatten(table: Mapping[str, object], *, source: str) -> dict[str, Scalar]:
    """Flatten a TOML document to scalars under dotted keys, as Flower does."""
    flat: dict[str, Scalar] = {}
    for name, content in table.items():
        inside = {name: content}
        if isinstance(content, dict) and (content or name in SECTIONS):
            inside = {f"{name}.{leaf}": value for leaf, value in content.items()}
        for key, value in inside.items():
            if key not in KEYS and key != PRESET_KEY:
                raise UserError(f"{source}: {unknown_key(key)}")
            if not isinstance(value, Scalar):
                raise UserError(f'{source}: "{key}" must be true or false, a number or text')
            if key in flat:
                raise UserError(f'{source}: "{key}" is given twice')
            flat[key] = value
    return flat


def read_words(words: Sequence[str]) -> dict[str, Scalar]:
    """Read the keys of a command line: TOML files, and `key=value` with or without quotes; later words win.

    Raises:
        UserError: as for `read_toml`; or a word is neither a file nor `key=value`.
    """
    keys: dict[str, Scalar] = {}
    for word in words:
        key, equals, value = (part.strip() for part in word.partition("="))
        if key and equals:
            quoted = len(value) > 1 and value[0] == value[-1] == '"'
            keys[key] = value[1:-1] if quoted else value
        elif os.path.exists(word):
            keys |= read_toml(Path(word))
        else:
            raise UserError(f"{to_toml(word)} is neither a TOML file that exists nor key=value, as in seed=1")
    return keys


def assemble(words: Sequence[str], *, folder: Path | None, beneath: Mapping[str, Scalar] = {}) -> Config:
    """Assemble the config of a run: defaults, then the preset, then the files and keys of the command line.

    `preset=NAME` is allowed among the keys and in a file; keys of `beneath` override defaults, but nothing else.
    Relative paths are made absolute from `folder`; None leaves them, and skips the check of the checkpoint.

    Raises:
        UserError: as for `read_words`, `preset` and `Config.load`; or `pluralllm.checkpoint` does not exist.
    """
    config = Config.load({**beneath, **on_its_preset(read_words(words))}, folder=folder)
    if folder and (path := config.pluralllm.checkpoint) and not os.path.isfile(path):
        raise UserError(f"pluralllm.checkpoint = {to_toml(path)} is not there; give the pluralllm.safetensors of a run")
    return config
