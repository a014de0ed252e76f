"""Checks of a model's config before anything trains: its context window, and the layers that LoRA adapts."""

from __future__ import annotations

import difflib
from collections import Counter

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from appa_flwr.config import Config, split_names
from appa_flwr.core.errors import UserError

QKV, GATE_UP = ("qkv", "query_key_value"), ("gate_up",)
FUSED = {"q_proj": QKV, "k_proj": QKV, "v_proj": QKV, "gate_proj": GATE_UP, "up_proj": GATE_UP}
"""What the name of a layer holds that does the work of these in one matrix."""


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
    for key, targets in (
        ("policy.sft-targets", config.policy.sft_targets),
        ("policy.ppo-targets", config.policy.ppo_targets),
    ):
        for name in split_names(targets) or ("",):
            if fault := _fault(model, name):
                raise UserError(f"{key}: {config.model} {fault}")


def _fault(model: nn.Module, target: str) -> str:
    """What keeps a target from being adapted, which PEFT finds by the end of a layer's path; empty if nothing does."""
    users: Counter[object] = Counter(parameter for _, parameter in model.named_parameters(remove_duplicate=False))
    tied = {path for path, layer in model.named_modules() if users[getattr(layer, "weight", None)] > 1}
    linear = {path for path, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    paths = {path for path, _ in model.named_modules() if f".{path}".endswith(f".{target}")}
    layers = sorted({path.rpartition(".")[2] for path in linear - tied})
    valid = f"LoRA can adapt {', '.join(layers) or 'none of its layers'}"
    if paths & tied:
        return f"has one matrix for {' and '.join(sorted(tied))}, so {target!r} cannot be adapted; {valid}"
    if paths and paths <= linear:
        return ""
    fused = [layer for layer in layers if any(part in layer.lower() for part in FUSED.get(target, ()))]
    near = difflib.get_close_matches(target, layers, n=1)
    hint = f"it is part of {fused[0]!r}, name that; " if fused else f"did you mean {near[0]!r}? " if near else ""
    return f"has no linear layer {target!r}: {hint}{valid}"
