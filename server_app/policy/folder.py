"""From a model's name to its folder, from the folder to its weights, and what its layers must be for LoRA."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # of the HTTP library below it
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from appa_flwr.config import Config, split_names
from appa_flwr.core.errors import UserError

HUB_PAGES = "https://huggingface.co"
FETCHED = ("*.json", "*.jinja", "*.model", "*.txt", "*.safetensors")
NOT_FETCHED = "original/*"  # the same weights once more, in a format nothing here reads


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
        raise UserError(
            f"model = {model}: no such folder here, and it cannot be fetched from the hub ({describe(error)}); where "
            f"{HUB_PAGES}/{model} can be seen, accept its licence if it has one, then `hf auth login` and try again, "
            f"or `hf download {model} --local-dir DIR` and model = DIR"
        ) from error


def describe(error: BaseException) -> str:
    """An error of a library in one line."""
    first_line = next((line for line in str(error).splitlines() if line.strip()), "no reason given")
    return f"{type(error).__name__}: {first_line.strip()}"


def load(folder: str, **how: Any) -> PreTrainedModel:
    """The causal LM in a folder, loaded as `how` tells `from_pretrained`; on the device "meta" in seconds.

    Raises:
        UserError: it cannot be loaded, or not all of its weights are there: Transformers would go on with random
            numbers in their place.
    """
    try:
        model, loaded = AutoModelForCausalLM.from_pretrained(
            folder, **how, trust_remote_code=False, ignore_mismatched_sizes=True, output_loading_info=True
        )
    except Exception as error:  # what a damaged file leads its readers to has no one class
        raise UserError(f"model folder {folder}: cannot be loaded ({describe(error)})") from error
    unfit = sorted([*loaded["missing_keys"], *(name for name, *_ in loaded["mismatched_keys"])])
    if unfit:
        raise UserError(f"model folder {folder}: {len(unfit)} weights are missing or do not fit, {unfit[0]} first")
    return model


def check_layers(config: Config, model: PreTrainedModel) -> None:
    """See that the window holds the longest sequence, and that adapters' targets are linear layers of their own.

    PEFT itself drops a name that fits no layer if another one does. On an output head that is also the embedding,
    adapters that are added to the weights change both, and apart from them only one: what is saved would not be what
    has answered. Of the model only the shapes are used.

    Raises:
        UserError: the window is shorter than `policy.max-sequence-length`, a target is no such layer, or a key names
            none.
    """
    window = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if window and window < config.policy.max_sequence_length:
        raise UserError(
            f"policy.max-sequence-length = {config.policy.max_sequence_length}: {config.model} reads {window} tokens "
            f"at most; set it to {window} or less"
        )
    if config.policy.tuning == "full":
        return
    users: Counter[object] = Counter(parameter for _, parameter in model.named_parameters(remove_duplicate=False))
    modules = dict(model.named_modules())
    own = {path for path, layer in modules.items() if isinstance(layer, nn.Linear) and users[layer.weight] == 1}
    for key in ("policy.sft-targets", "policy.ppo-targets"):
        for target in split_names(str(config.flat()[key])) or ("",):
            matched = {path for path in modules if f".{path}".endswith(f".{target}")}  # as PEFT matches names
            if not matched or not matched <= own:
                layers = ", ".join(sorted({path.rpartition(".")[2] for path in own})) or "none of its layers"
                raise UserError(
                    f"{key}: {config.model} has no linear layer {target!r} with weights of its own; LoRA can adapt "
                    f"{layers}"
                )
