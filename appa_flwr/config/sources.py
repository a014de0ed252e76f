"""Sources of a run's keys: a preset, TOML files, the command line."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path

from appa_flwr.config.keys import Scalar, to_toml, unknown_key
from appa_flwr.config.schema import GENERATED_SURVEY, HUB_SURVEY, KEYS, SECTIONS, SMOLLM2_MODEL, TINY_MODEL, Config
from appa_flwr.config.sections import MINILM, NGRAMS, SURVEY_QUESTIONS
from appa_flwr.core import own_code
from appa_flwr.core.errors import UserError

PRESET_KEY = "preset"
PATH_KEYS = ("data.extra-questions", "run.output-dir", "run.group-keys", "pluralllm.checkpoint", "sft.checkpoint")
OWN_NAMES = {"model": (TINY_MODEL, SMOLLM2_MODEL), "pluralllm.encoder": (NGRAMS, MINILM)}
"""Keys of a folder, a file or a name on the hub, with the names that are ours and stay whatever a folder is called."""

_PRESETS = resources.files("appa_flwr.config.presets")


def to_toml_table(flat: Mapping[str, Scalar]) -> str:
    """Flat keys as a TOML document, one line a key, sections dotted."""
    return "".join(f"{key} = {to_toml(value)}\n" for key, value in flat.items())


def preset_purposes() -> dict[str, str]:
    """The names that `preset = ...` accepts, each with what it is for: the comment that its file begins with."""
    texts = {f.name: f.read_text(encoding="utf-8") for f in _PRESETS.iterdir() if f.name.endswith(".toml")}
    purposes = {name.removesuffix(".toml"): text.partition("\n")[0] for name, text in texts.items()}
    return {name: purposes[name].removeprefix("# ") for name in sorted(purposes)}


def preset(name: str) -> dict[str, Scalar]:
    """The keys of a preset, with those of the preset it starts from.

    Raises:
        UserError: there is none of that name.
    """
    if name not in (known := preset_purposes()):
        raise UserError(f'preset = "{name}" does not exist; presets: {", ".join(known)}')
    text = (_PRESETS / f"{name}.toml").read_text(encoding="utf-8")
    return on_its_preset(flatten(tomllib.loads(text), source=f"{name}.toml"))


def on_its_preset(given: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """The given keys, and under them those of the preset that they name, if they do."""
    own = {key: value for key, value in given.items() if key != PRESET_KEY}
    return preset(str(given[PRESET_KEY])) | own if PRESET_KEY in given else own


def read_toml(path: Path) -> dict[str, Scalar]:
    """Flat keys from a TOML file (which may name a `preset`).

    Raises:
        UserError: no such file, no valid TOML, a key that does not exist or is given twice, or a value that is not a
            scalar; the message names the file.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as a config file ({error})") from None
    except (ValueError, RecursionError) as error:  # an integer or a nesting beyond Python's limits is none of TOML's
        raise UserError(f"{path}: not valid TOML: {error}") from None
    return flatten(table, source=str(path))


def flatten(table: Mapping[str, object], *, source: str) -> dict[str, Scalar]:
    """The scalars of a TOML document under dotted keys, as Flower flattens it."""
    flat: dict[str, Scalar] = {}
    for name, content in table.items():
        inside = {name: content}
        if isinstance(content, dict) and (content or name in SECTIONS):
            inside = {f"{name}.{leaf}": value for leaf, value in content.items()}
        for key, value in inside.items():
            if key == f"{name}.{PRESET_KEY}":
                raise UserError(f'{source}: "{PRESET_KEY}" stands in [{name}]; it must come before the first section')
            if key not in KEYS and key != PRESET_KEY:
                raise UserError(f"{source}: {unknown_key(key, KEYS)}")
            if not isinstance(value, Scalar):
                kind = {"dict": "a table", "list": "an array"}.get(type(value).__name__, "a date or time")
                raise UserError(f'{source}: "{key}" must be true or false, a number or text, not {kind}')
            if key in flat:
                raise UserError(f'{source}: "{key}" is given twice')
            flat[key] = value
    return flat


def parse_override(text: str) -> tuple[str, str]:
    """`key=value` from the command line; quotes around the value are not part of it.

    Raises:
        UserError: no "=" in it.
    """
    key, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not key:
        raise UserError(f"{to_toml(text)} is not key=value, as in seed=1")
    quoted = len(value) > 1 and value[0] == value[-1] == '"'
    return key, value[1:-1] if quoted else value


def read_words(words: Sequence[str]) -> dict[str, Scalar]:
    """The keys of a command line: names of TOML files, then `key=value`; later words win.

    Raises:
        UserError: as for `read_toml` and `parse_override`; or a file comes after a key.
    """
    keys: dict[str, Scalar] = {}
    typed = ""
    for word in words:
        if "=" in word:
            typed = word
            keys |= dict([parse_override(word)])
        elif typed:
            raise UserError(f"{to_toml(word)} comes after {typed}; a command takes files first, then key=value")
        elif os.path.exists(word):
            keys |= read_toml(Path(word))
        else:
            raise UserError(f"{to_toml(word)} is neither a TOML file that exists nor key=value, as in seed=1")
    return keys


def assemble(words: Sequence[str], *, folder: Path | None, beneath: Mapping[str, Scalar] = {}) -> Config:
    """The config of a run: defaults, then the preset, then the files, then the keys of the command line.

    Args:
        words: as for `read_words`. `preset=NAME` is allowed among the keys and in a file.
        folder: relative paths are made absolute from here, since Flower runs elsewhere; None leaves them as they are.
        beneath: keys that all these stand on.

    Raises:
        UserError: as for `read_words`, `preset` and `Config.load`; or a checkpoint does not exist.
    """
    config = Config.load({**beneath, **on_its_preset(read_words(words))})
    if folder is None:
        return config
    flat = config.flat()
    reader = own_code.reader_of(config.survey)
    if reader.name:
        file = str(_absolute("survey", reader.file, folder)) if reader.file else ""
        flat["survey"] = ":".join(filter(None, (reader.name, file)))
    elif config.survey not in (GENERATED_SURVEY, HUB_SURVEY):
        flat["survey"] = str(_absolute("survey", config.survey, folder))
    for key in PATH_KEYS:
        if flat[key] not in ("", SURVEY_QUESTIONS):
            flat[key] = str(_absolute(key, str(flat[key]), folder))
    for key, names in OWN_NAMES.items():
        if flat[key] not in names and os.path.exists(path := _absolute(key, str(flat[key]), folder)):
            flat[key] = str(path)
    if (weights := str(flat["pluralllm.checkpoint"])) and not os.path.isfile(weights):
        raise UserError(
            f'pluralllm.checkpoint = "{weights}": there is no such file; give the pluralllm.safetensors of a run'
        )
    if (model := str(flat["sft.checkpoint"])) and not os.path.isdir(model):
        raise UserError(f'sft.checkpoint = "{model}": there is no such folder; give the sft-model of a run')
    return Config.load(flat)


def _absolute(key: str, path: str, folder: Path) -> Path:
    try:
        return (folder / Path(path).expanduser()).resolve()
    except (RuntimeError, OSError) as error:  # a home that does not exist, links in a circle
        raise UserError(f'{key} = "{path}" is not a path that can be followed ({error})') from None
