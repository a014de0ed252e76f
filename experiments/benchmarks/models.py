"""Models with random weights: the small Qwen3 of the CPU benchmarks and the paper's architectures.

What a pass costs does not depend on what the weights hold.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, PretrainedConfig, Qwen3Config

from experiments.benchmarks.workload import EOS_ID, PAD_ID

_TOKENS: dict[str, Any] = {"pad_token_id": PAD_ID, "eos_token_id": EOS_ID, "bos_token_id": None}
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
_SMALL = (512, 64, 128, 2, 4, 2, 16)
_PAPER: dict[str, tuple[type[PretrainedConfig], tuple[int, ...], dict[str, Any]]] = {
    "gemma-2-2b": (Gemma2Config, (256_000, 2304, 9216, 26, 8, 4, 256), {"sliding_window": 4096}),
    "Llama-3.2-3B": (LlamaConfig, (128_256, 3072, 8192, 28, 24, 8, 128), {"max_position_embeddings": 131_072}),
    "Qwen3-0.6B": (Qwen3Config, (151_936, 1024, 3072, 28, 16, 8, 128), {"max_position_embeddings": 40_960}),
}
_SMOLLM2 = (49_152, 576, 1536, 30, 9, 3, 64)


def small_qwen3(*, vocabulary: int, hidden: int = 128) -> PretrainedConfig:
    """Qwen3 with 4 layers and heads of 32."""
    heads = hidden // 32
    return Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=4,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        **_TOKENS,
    )


def paper_models(*, small: bool) -> dict[str, PretrainedConfig]:
    """The paper's three architectures with the sizes of their published configs, or scaled down to run anywhere."""
    models = {}
    for name, (kind, published, more) in _PAPER.items():
        sizes: dict[str, Any] = dict(zip(_SIZES, _SMALL if small else published, strict=True))
        if kind is Gemma2Config:
            more = {**more, "query_pre_attn_scalar": sizes["head_dim"]}
        models[name] = kind(**_TOKENS, **sizes, **more, tie_word_embeddings=True)
    return models


def smollm2(*, small: bool = False) -> PretrainedConfig:
    """SmolLM2-135M's architecture and sizes, or scaled down."""
    sizes: dict[str, Any] = dict(zip(_SIZES, _SMALL if small else _SMOLLM2, strict=True))
    return LlamaConfig(**_TOKENS, **sizes, max_position_embeddings=8192, tie_word_embeddings=True)


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
