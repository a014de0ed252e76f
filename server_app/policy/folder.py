"""Locate a model's folder, and load its weights."""

from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # of the HTTP library below it
from transformers import AutoModelForCausalLM, PreTrainedModel

from appa_flwr.core.errors import UserError

HUB_PAGES = "https://huggingface.co"
FETCHED = ("*.json", "*.jinja", "*.model", "*.txt", "*.safetensors")
NOT_FETCHED = "original/*"  # the same weights in a format that is not used here


def locate(model: str) -> Path:
    """Folder of a model's files; the files of a hub id are fetched into the hub's cache.

    Raises:
        UserError: there is no such folder or model, its licence is not accepted, or the hub cannot be reached.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    try:
        return Path(snapshot_download(model, allow_patterns=list(FETCHED), ignore_patterns=NOT_FETCHED))
    except (OSError, ValueError, HTTPError) as error:
        raise UserError(
            f"model = {model}: no such folder here, and it cannot be fetched from the hub ({describe(error)}); where "
            f"{HUB_PAGES}/{model} can be seen, accept its licence if it has one, then `hf auth login` and try again, "
            f"or `hf download {model} --local-dir DIR` and model = DIR"
        ) from error


def describe(error: BaseException) -> str:
    """Describe a library's error in one line."""
    first_line = next((line for line in str(error).splitlines() if line.strip()), "no reason given")
    return f"{type(error).__name__}: {first_line.strip()}"


def load(folder: str, **how: Any) -> PreTrainedModel:
    """Load the causal LM of a folder; `how` goes to `from_pretrained`. On the device "meta" this takes seconds.

    Raises:
        UserError: the model cannot be loaded, or weights are missing, which Transformers would fill with random
            numbers.
    """
    try:
        model, loaded = AutoModelForCausalLM.from_pretrained(
            folder, **how, trust_remote_code=False, ignore_mismatched_sizes=True, output_loading_info=True
        )
    except Exception as error:  # damaged files raise errors of many classes
        raise UserError(f"model folder {folder}: cannot be loaded ({describe(error)})") from error
    unfit = sorted([*loaded["missing_keys"], *(name for name, *_ in loaded["mismatched_keys"])])
    if unfit:
        raise UserError(f"model folder {folder}: {len(unfit)} weights are missing or do not fit, {unfit[0]} first")
    return model
