"""From a model's name to a folder with all of it: fetched, complete, and a causal language model.

Faults that show without loading weights are found here, in seconds, before any group is asked.
"""

from __future__ import annotations

import json
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError: of the HTTP library below it
    GatedRepoError,
    HFValidationError,
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
    try:
        return Path(snapshot_download(model, allow_patterns=list(FETCHED), ignore_patterns=NOT_FETCHED))
    except (OSError, ValueError, HTTPError) as error:
        raise UserError(_cannot_fetch(model, error)) from error


def _cannot_fetch(model: str, error: Exception) -> str:
    if isinstance(error, HFValidationError):
        return f"model = {model}: no such folder, and no name that a model on the hub can have"
    by_hand = f"`hf download {model} --local-dir DIR` and model = DIR"
    if isinstance(error, GatedRepoError):
        return (
            f"model = {model}: its licence has to be accepted first, at {HUB_PAGES}/{model}; then log in here by "
            f"`hf auth login`, or where you are logged in: {by_hand}"
        )
    if isinstance(error, RepositoryNotFoundError):
        others = ("a model folder or .gguf file", f"the name of any model you can see on {HUB_PAGES}")
        return str(unknown_name("model", model, valid=(TINY_MODEL, SMOLLM2_MODEL, *PAPER_MODELS, *others)))
    return (
        f"model = {model}: no such folder here, and it cannot be fetched from the hub ({describe(error)}); where "
        f"{HUB_PAGES} can be reached: {by_hand}, copied here"
    )


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
    found = sorted(path for pattern in WEIGHTS for path in folder.glob(pattern))
    wanted: set[str] = set()
    if (folder / INDEX_FILE).exists():
        try:
            wanted = set(json.loads((folder / INDEX_FILE).read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise UserError(f"model = {model}: {INDEX_FILE} cannot be read ({describe(error)})") from error
    missing = sorted(wanted - {path.name for path in found})
    if missing or not found:
        raise UserError(f"model = {model}: has no weights: {', '.join(missing) or ' or '.join(WEIGHTS)} is not there")
    for path in found:
        if path.suffix != ".safetensors":
            continue
        try:
            with safe_open(path, framework="pt"):  # reads the header, which must fit the file's size
                pass
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"model = {model}: {path.name} is damaged or was not copied to its end ({describe(error)})"
            ) from error
