"""From a model's name to a folder with all of it: fetched, complete, and a causal language model.

Faults that show without loading weights are found here, in seconds, before any group is asked.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError: of the HTTP library below it
    GatedRepoError,
    HTTPError,
    RepositoryNotFoundError,
)
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from appa_flwr.config import SMOLLM2_MODEL, TINY_MODEL
from appa_flwr.core.errors import UserError, unknown_name

PAPER_MODELS = ("google/gemma-2-2b-it", "meta-llama/Llama-3.2-3B-Instruct", "Qwen/Qwen3-0.6B")
"""The paper's policies by their names on the hub."""

HUB_PAGES = "https://huggingface.co"
FETCHED = ("*.json", "*.jinja", "*.model", "*.txt", "*.safetensors")
NOT_FETCHED = "original/*"  # the same weights once more, in a format nothing here reads
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
INDEX_FILE, ADAPTER_FILE = "model.safetensors.index.json", "adapter_config.json"


def locate(model: str) -> Path:
    """The folder that a model's files lie in; those of a hub id are fetched into the hub's cache.

    Raises:
        UserError: no such folder, no such model, a licence that is not accepted, or no way to the hub.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    by_hand = f"`hf download {model} --local-dir DIR` and model = DIR"
    try:
        return Path(snapshot_download(model, allow_patterns=list(FETCHED), ignore_patterns=NOT_FETCHED))
    except GatedRepoError as error:
        raise UserError(
            f"model = {model}: its licence has to be accepted first, at {HUB_PAGES}/{model}; then log in here by "
            f"`hf auth login`, or where you are logged in: {by_hand}"
        ) from error
    except RepositoryNotFoundError as error:
        others = ("a model folder or .gguf file", f"the name of any model you can see on {HUB_PAGES}")
        raise unknown_name("model", model, valid=(TINY_MODEL, SMOLLM2_MODEL, *PAPER_MODELS, *others)) from error
    except (OSError, ValueError, HTTPError) as error:
        raise UserError(
            f"model = {model}: no such folder here, and it cannot be fetched from the hub ({describe(error)}); where "
            f"{HUB_PAGES} can be reached: {by_hand}, copied here"
        ) from error


def describe(error: BaseException) -> str:
    """An error of a library in one line."""
    first_line = next((line for line in str(error).splitlines() if line.strip()), "no reason given")
    return f"{type(error).__name__}: {first_line.strip()}"


def read_config(model: str, folder: Path) -> PreTrainedConfig:
    """The model's own config, once its folder has passed every check that needs no weights.

    Raises:
        UserError: not a causal language model that Transformers knows, or weights missing or cut short.
    """
    if (folder / ADAPTER_FILE).exists() and not (folder / "config.json").exists():
        raise UserError(f"model = {model}: holds adapters only; give a folder they have been merged into")
    try:
        model_config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UserError(f"model = {model}: cannot be loaded ({describe(error)})") from error
    held = model_config.architectures or []
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_config.model_type)
    # A model saved for another purpose would load all the same, with a random head or looking ahead.
    if known is None or (held and known not in held):
        raise UserError(
            f"model = {model}: is no causal language model but {' or '.join(held) or model_config.model_type}; "
            f"the paper's are {', '.join(PAPER_MODELS)}"
        )
    _check_weights(model, folder)
    return model_config


def _check_weights(model: str, folder: Path) -> None:
    files = sorted(path for pattern in WEIGHTS for path in folder.glob(pattern))
    missing = set() if files else {" or ".join(WEIGHTS)}
    try:
        if (index := folder / INDEX_FILE).exists():
            missing = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()) - {
                f.name for f in files
            }
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise UserError(f"model = {model}: {INDEX_FILE} cannot be read ({describe(error)})") from error
    if missing:
        raise UserError(f"model = {model}: has no weights: {', '.join(sorted(missing))} is not there")
    for path in folder.glob("*.safetensors"):
        try:
            with safe_open(path, framework="pt"):  # reads the header, which must fit the file's size
                pass
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"model = {model}: {path.name} is damaged or was not copied to its end ({describe(error)})"
            ) from error


def check_loaded(source: str, loaded: Mapping[str, Collection[Any]]) -> None:
    """See that Transformers has found all weights of a model, by what `output_loading_info` gives.

    Raises:
        UserError: it has not, and would go on with random numbers in their place.
    """
    unfit = sorted([*loaded["missing_keys"], *(name for name, *_ in loaded["mismatched_keys"])])
    if unfit:
        raise UserError(f"{source}: {len(unfit)} weights are missing or do not fit, {unfit[0]} first")
