"""The config of a run: its keys, and where they come from. Imported by both sides."""

from appa_flwr.config.keys import Scalar, to_toml, to_word
from appa_flwr.config.schema import (
    GENERATED_SURVEY,
    HUB_SURVEY,
    KEYS,
    SECTIONS,
    SMOLLM2_MODEL,
    THREADS,
    TINY_MODEL,
    Config,
    check_groups,
    keys_in,
    split_names,
)
from appa_flwr.config.sources import (
    assemble,
    parse_override,
    preset,
    preset_purposes,
    read_words,
    to_toml_table,
)

__all__ = [
    "GENERATED_SURVEY",
    "HUB_SURVEY",
    "KEYS",
    "SECTIONS",
    "SMOLLM2_MODEL",
    "THREADS",
    "TINY_MODEL",
    "Config",
    "Scalar",
    "assemble",
    "check_groups",
    "keys_in",
    "parse_override",
    "preset",
    "preset_purposes",
    "read_words",
    "split_names",
    "to_toml",
    "to_toml_table",
    "to_word",
]
