"""Models with random weights: the small Qwen3 of the CPU benchmarks and published architectures.

What a pass costs does not depend on what the weights hold.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, PretrainedConfig, Qwen3Config

from experiments.benchmarks.sides import EOS_ID, PAD_ID

VOCABULARY = 1024
_TOKENS: dict[str, Any] = {"pad_token_id": PAD_ID, "eos_token_id": EOS_ID, "bos_token_id": None}
_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim"),
)
_SMALL = (512, 64, 128, 2, 4, 2, 16)
SMOLLM2 = "SmolLM2-135M"
_PUBLISHED: dict[str, tuple[type[PretrainedConfig], tuple[int, ...], dict[str, Any]]] = {
    "gemma-2-2b": (Gemma2Config, (256_000, 2304, 9216, 26, 8, 4, 256), {"sliding_window": 4096}),
    "Llama-3.2-3B": (LlamaConfig, (128_256, 3072, 8192, 28, 24, 8, 128), {"max_position_embeddings": 131_072}),
    "Qwen3-0.6B": (Qwen3Config, (151_936, 1024, 3072, 28, 16, 8, 128), {"max_position_embeddings": 40_960}),
    SMOLLM2: (LlamaConfig, (49_152, 576, 1536, 30, 9, 3, 64), {"max_position_embeddings": 8192}),
}
PAPER_MODELS = [name for name in _PUBLISHED if name != SMOLLM2]


def small_qwen3(*, vocabulary: int = VOCABULARY, hidden: int = 128) -> PretrainedConfig:
    """Qwen3 with 4 layers and heads of 32."""
    heads = hidden // 32
    sizes = (vocabulary, hidden, 4 * hidden, 4, heads, max(1, heads // 2), 32)
    return _model(Qwen3Config, sizes, {"max_position_embeddings": 2048})


def published(name: str, *, small: bool = False) -> PretrainedConfig:
    """A published architecture and its sizes, or scaled down to run anywhere."""
    kind, sizes, more = _PUBLISHED[name]
    return _model(kind, _SMALL if small else sizes, more)


def _model(kind: type[PretrainedConfig], sizes: tuple[int, ...], more: dict[str, Any]) -> PretrainedConfig:
    named: dict[str, Any] = dict(zip(_SIZES, sizes, strict=True))
    if kind is Gemma2Config:
        named["query_pre_attn_scalar"] = named["head_dim"]
    return kind(**_TOKENS, **named, **more, tie_word_embeddings=True)


def save_random(config: PretrainedConfig, folder: Path, *, seed: int, dtype: torch.dtype = torch.float32) -> None:
    """Write a model with random weights as a folder that Transformers loads."""
    torch.manual_seed(seed)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(folder)


def matmul_parameters(config: PretrainedConfig) -> tuple[int, int]:
    """Weights a token is multiplied with: those of the decoder layers, and those of the output head."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    layers = sum(p.numel() for p in model.base_model.layers.parameters() if p.ndim > 1)
    return layers, int(model.get_output_embeddings().weight.numel())
