"""Llama models as GGUF files, written from a model folder as llama.cpp's converter writes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

gguf = pytest.importorskip("gguf", reason="needs the package gguf, which the extra dev installs")

BLOCKS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OTHERS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    """The folder's weights by their names in GGUF, query and key rows in llama.cpp's order."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    heads = {"attn_q": model.config.num_attention_heads, "attn_k": model.config.num_key_value_heads}
    found = {}
    for name, weight in model.named_parameters():  # a tied head is not named a second time
        module, _, last = name.rpartition(".")
        if module in OTHERS:
            found[f"{OTHERS[module]}.{last}"] = weight.detach().numpy()
            continue
        layer, _, inner = module.removeprefix("model.layers.").partition(".")
        rows = weight.detach()
        if BLOCKS[inner] in heads:  # a head's two halves, which rotary embedding pairs, become pairs of neighbours
            rows = rows.unflatten(0, (heads[BLOCKS[inner]], 2, -1)).transpose(1, 2).flatten(0, 2)
        found[f"blk.{layer}.{BLOCKS[inner]}.{last}"] = rows.numpy()
    return found


def write(
    path: Path,
    folder: Path,
    *,
    architecture: str = "llama",
    pre: str = "gpt-2",
    change: Callable[[dict[str, np.ndarray]], Mapping[str, np.ndarray]] = lambda tensors: tensors,
    packed: Mapping[str, gguf.GGMLQuantizationType] | None = None,
    parts: int = 1,
) -> Path:
    """Write the model in the folder; one layer's tensors in blocks where `packed` says so."""
    model = AutoModelForCausalLM.from_pretrained(folder).config
    tokenizer = AutoTokenizer.from_pretrained(folder)
    bpe = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    special = {tokenizer.convert_tokens_to_ids(str(t)) for t in tokenizer.added_tokens_decoder.values() if t.special}
    spare = [f"[PAD{i}]" for i in range(len(tokenizer), model.vocab_size)]
    kinds = gguf.TokenType

    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(model.num_hidden_layers)
    writer.add_context_length(model.max_position_embeddings)
    writer.add_embedding_length(model.hidden_size)
    writer.add_feed_forward_length(model.intermediate_size)
    writer.add_head_count(model.num_attention_heads)
    writer.add_head_count_kv(model.num_key_value_heads)
    writer.add_rope_freq_base(model.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(model.rms_norm_eps)
    writer.add_vocab_size(model.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([*tokenizer.convert_ids_to_tokens(range(len(tokenizer))), *spare])
    types = [kinds.CONTROL if i in special else kinds.NORMAL for i in range(len(tokenizer))]
    writer.add_token_types([*types, *(kinds.UNUSED for _ in spare)])
    writer.add_token_merges([" ".join(pair) for pair in bpe["merges"]])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_add_bos_token(True)
    writer.add_chat_template(tokenizer.chat_template)
    if parts > 1:
        writer.add_uint16("split.count", parts)
    for name, weight in change(tensors_of(folder)).items():
        kind = (packed or {}).get(name)
        data = weight if kind is None else gguf.quants.quantize(weight, kind)
        writer.add_tensor(name, np.ascontiguousarray(data), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
