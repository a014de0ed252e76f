"""GPU memory that a run will need, estimated before weights are loaded, and the tokens that a pass may have there.

Sizes are those of the model without its numbers, on torch's meta device. What a training pass keeps for its backward
pass is counted there too, on one row of full length: it depends on architecture, attention and adapters.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedConfig

from appa_flwr.config import TINY_MODEL, Config, split_names
from appa_flwr.core.errors import UserError
from server_app.engine.logprobs import LOGIT_BYTES, logits_at_once
from server_app.models import gguf
from server_app.models.base import cache_folder, with_dtype
from server_app.models.folder import attention, describe, locate
from server_app.models.one_product import GIBIBYTE, SHARE_OF_FREE_MEMORY, bytes_of_kept, take_place

SHARE = 0.8  # of the free memory: the estimate knows neither fragments nor what a layer needs for a moment
LEAST_TOKENS = 256
NF4_BYTES = 0.5 + (1 + 4 / 256) / 64  # a weight: four bits, and for 64 of them a scale whose own scale 256 share
FLOAT, STATE = 4, 12  # bytes of a trained number, and of its gradient and AdamW's two means
DRAW_BYTES = 28  # a logit while a token is drawn: its log-probability, then the cumulated sum in 64 bits and copies
WEIGHTS, STATES, UNPACKED = "weights", "gradients and optimizer", "unpacked weights"

log = logging.getLogger("appa.server")


@dataclass(frozen=True)
class Needs:
    """Bytes that a phase needs.

    Attributes:
        held: what is there all along, by name.
        token: what a training pass keeps of each of its tokens.
        logits: of a pass's block.
        sampling: by name, what is there while answers are sampled and no pass is under way.
    """

    held: Mapping[str, float]
    token: float
    logits: float
    sampling: Mapping[str, float] = field(default_factory=dict)

    def at_most(self, tokens: int) -> float:
        """Most bytes at once with passes of so many tokens."""
        return sum(self.held.values()) + max(sum(self.sampling.values()), self.token * tokens + self.logits)

    def told(self, tokens: int) -> str:
        """All of it in words, in GiB."""
        parts = {**self.held, **self.sampling, f"a pass of {tokens} tokens": self.token * tokens, "logits": self.logits}
        listed = ", ".join(f"{name} {size / GIBIBYTE:.1f}" for name, size in parts.items())
        return f"{self.at_most(tokens) / GIBIBYTE:.1f} ({listed})"


def estimate(config: Config, model_config: PreTrainedConfig, *, free: int | None) -> dict[str, Needs]:
    """What SFT and PPO need of a GPU on which `free` bytes are free, None = nobody knows.

    The config's number format is resolved, see `with_dtype`.
    """
    length, rows, tuning = config.policy.max_sequence_length, config.rollout.batch_size, config.policy.tuning
    with torch.device("meta"):
        dtype = getattr(torch, config.policy.compute_dtype)
        model = AutoModelForCausalLM.from_config(model_config, dtype=dtype, attn_implementation=attention(config))
    numbers, width, vocabulary = _numbers(model), dtype.itemsize, model.get_output_embeddings().weight.shape[0]
    linear = sum(layer.weight.numel() for layer in model.base_model.modules() if isinstance(layer, nn.Linear))
    block = min(logits_at_once("cuda", memory=free), rows * config.rollout.response_length * vocabulary)
    logits = float(LOGIT_BYTES * block)
    drawn = {"logits that are drawn from": float(DRAW_BYTES * rows * vocabulary)}
    cached = f"keys and values of {rows} answers"
    if tuning == "full":
        token, keys = _kept(model, length)
        trunk = _numbers(model.base_model)
        alone = {WEIGHTS: float(FLOAT * numbers), STATES: float(STATE * numbers)}
        # The policy and its reference, and a value model without a head.
        three = {WEIGHTS: float(FLOAT * (2 * numbers + trunk)), STATES: float(STATE * (numbers + trunk))}
        return {
            "SFT": Needs(alone, token, logits),
            "PPO": Needs(three, token, logits, {cached: rows * length * keys, **drawn}),
        }
    adapted = _with_adapters(config, model)
    of_sft, of_ppo = (_numbers(adapted, f".{name}.") for name in ("sft", "policy"))
    packed = (width - NF4_BYTES) * linear if tuning == "qlora" else 0.0
    # Adapters are added to weights of 32 bits while answers are sampled, from a copy of these.
    copied = {"a copy of the weights": float(FLOAT * linear)} if tuning == "lora" and width == FLOAT else {}
    answers = {cached: 0.0, **drawn, **copied}
    found = {}
    for phase, trained, less in (("SFT", "sft", 0.0), ("PPO", "policy", packed)):
        ours = of_sft if phase == "SFT" else 2 * of_ppo
        held = {WEIGHTS: width * numbers - less, f"adapters, their {STATES}": float((FLOAT + STATE) * ours)}
        unpacked = bytes_of_kept(adapted)
        if width < FLOAT and (free is None or unpacked <= SHARE_OF_FREE_MEMORY * (free - held[WEIGHTS])):
            held[UNPACKED] = float(unpacked)
        token, keys = _kept(adapted, length, active=["sft"] if phase == "SFT" else ["sft", "policy"], trained=trained)
        answers[cached] = rows * length * keys
        found[phase] = Needs(held, token, logits, {} if phase == "SFT" else answers)
    return found


def _with_adapters(config: Config, model: Any) -> Any:
    """The model without numbers, with SFT's adapter and those of policy and value."""
    targets = {"sft": config.lora.sft_targets, "policy": config.lora.ppo_targets, "value": config.lora.ppo_targets}
    made: Any = None
    with torch.device("meta"):
        for name, layers in targets.items():
            lora = LoraConfig(r=config.lora.rank, target_modules=list(split_names(layers)), task_type="CAUSAL_LM")
            if made is None:
                made = get_peft_model(model, lora, adapter_name=name)
            else:
                made.add_adapter(name, lora)
    if model.dtype.itemsize < FLOAT:
        take_place(made)
    return made


def _numbers(model: nn.Module, name: str = "") -> int:
    return sum(parameter.numel() for key, parameter in model.named_parameters() if name in key)


def _kept(made: Any, tokens: int, *, active: list[str] | None = None, trained: str = "") -> tuple[float, float]:
    """Bytes a token that a training pass of one row keeps for its backward pass, and of its keys and values."""
    if active is not None:
        made.base_model.set_adapter(active)
    for key, parameter in made.named_parameters():
        parameter.requires_grad_(active is None or f".{trained}." in key)
    model = made if active is None else made.get_base_model()
    own, kept = {parameter.untyped_storage()._cdata for parameter in model.parameters()}, {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    # A cache, because without one Transformers looks at positions, which have no numbers here.
    cache, ids_1L = DynamicCache(config=model.config), torch.zeros(1, tokens, dtype=torch.long, device=model.device)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        last = model.base_model(input_ids=ids_1L, past_key_values=cache, use_cache=True).last_hidden_state
    del last  # it held what is kept, so that no two tensors came to lie at one address
    rows = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    return sum(kept.values()) / tokens, rows / tokens


def _free() -> int | None:
    return int(torch.cuda.mem_get_info()[0]) if torch.cuda.is_available() else None


def _fitting(config: Config, found: Mapping[str, Needs], free: int) -> int:
    """Tokens of a pass that leave some of the memory: a power of two, so that a little more or less changes nothing.

    No more than the next one above a whole batch.
    """
    room = min((SHARE * free - need.at_most(0)) / need.token for need in found.values())
    batch = config.rollout.batch_size * config.policy.max_sequence_length
    return min(1 << max(LEAST_TOKENS, int(room)).bit_length() - 1, 1 << (batch - 1).bit_length())


def with_tokens(config: Config, source: str) -> Config:
    """The config with `ppo.micro-batch-tokens` = 0 resolved for this machine and the model in a folder.

    Nothing has been loaded onto the GPU yet.
    """
    if config.ppo.micro_batch_tokens:
        return config
    free, tokens = _free(), config.ppo.tokens_at_once
    if free is not None:
        found = estimate(config, AutoConfig.from_pretrained(source, trust_remote_code=False), free=free)
        tokens = _fitting(config, found, free)
        log.info("GPU memory, GiB of %.1f free: %s", free / GIBIBYTE, _told(found, tokens))
    log.info("ppo.micro-batch-tokens = 0: %d tokens a pass", tokens)
    return Config.load({**config.flat(), "ppo.micro-batch-tokens": tokens})


def _told(found: Mapping[str, Needs], tokens: int) -> str:
    return "; ".join(f"{phase} {need.told(tokens)}" for phase, need in found.items())


def told(config: Config) -> str:
    """What a run of this config will need of the GPU's memory, part by part, and what is free.

    Of the model no more than its config is fetched.

    Raises:
        UserError: more is needed than free, or there is no such model.
    """
    if config.model == TINY_MODEL:
        return "the tiny policy fits any GPU"
    config, free = with_dtype(config), _free()
    if (file := gguf.find(config.model)) is not None:
        folder = gguf.load_or_unpack(config.model, file, cache_folder(), say=log.info)
    else:
        folder = locate(config.model, weights=False)
    try:
        found = estimate(config, AutoConfig.from_pretrained(folder, trust_remote_code=False), free=free)
    except (OSError, ValueError, ImportError) as error:
        raise UserError(f"model = {config.model}: cannot be loaded ({describe(error)})") from error
    tokens = config.ppo.micro_batch_tokens or (
        config.ppo.tokens_at_once if free is None else _fitting(config, found, free)
    )
    policy = config.policy
    text = f"an estimate for {policy.tuning} in {policy.compute_dtype}, GiB at most (parts): {_told(found, tokens)}"
    if free is None:
        return f"{text}; there is no GPU here"
    text += f"; {free / GIBIBYTE:.1f} free on the first GPU"
    if max(need.at_most(tokens) for need in found.values()) > free:
        raise UserError(f"{text}: too little; lower ppo.micro-batch-tokens (0 = what fits) or rollout.batch-size")
    return text
