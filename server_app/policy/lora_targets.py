"""Checks of a model's config before anything trains: its context window, and the layers that LoRA adapts."""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from appa_flwr.config import Config, split_names
from appa_flwr.core.errors import UserError


def check(config: Config, model_config: PreTrainedConfig) -> None:
    """See that the window holds the longest sequence, and that adapters' targets are linear layers of their own.

    PEFT itself drops a name that fits no layer if another one does. On an output head that is also the embedding,
    adapters that are added to the weights change both, and apart from them only one: what is saved would not be what
    has answered.

    Raises:
        UserError: the window is shorter than `policy.max-sequence-length`, a target is no such layer, or a key names
            none.
    """
    window = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    if window and window < config.policy.max_sequence_length:
        raise UserError(
            f"policy.max-sequence-length = {config.policy.max_sequence_length}: {config.model} reads {window} tokens "
            f"at most; set it to {window} or less"
        )
    if config.policy.tuning == "full":
        return
    with torch.device("meta"):  # its shapes without its weights
        model = AutoModelForCausalLM.from_config(model_config)
    for key in ("policy.sft-targets", "policy.ppo-targets"):
        for name in split_names(str(config.flat()[key])) or ("",):
            _check_target(model, name, f"{key}: {config.model}")


def _check_target(model: nn.Module, target: str, owner: str) -> None:
    """See that all layers that PEFT would adapt, by the end of their paths, can be adapted."""
    users: Counter[object] = Counter(parameter for _, parameter in model.named_parameters(remove_duplicate=False))
    linear = {path: layer for path, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    own = {path for path, layer in linear.items() if users[layer.weight] == 1}
    matched = {path for path, _ in model.named_modules() if f".{path}".endswith(f".{target}")}
    if not matched or not matched <= own:
        layers = ", ".join(sorted({path.rpartition(".")[2] for path in own})) or "none of its layers"
        raise UserError(f"{owner} has no linear layer {target!r} with weights of its own; LoRA can adapt {layers}")
