"""The starting model: its special tokens, its prompts, and what a user hears who names a wrong one.

Axis letters: J answers, T tokens.
"""

from __future__ import annotations

import pytest
import torch
from fakes import catalogue_of, tiny_causal_lm
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from appa_flwr import formats
from appa_flwr.config import Config
from appa_flwr.errors import UserError
from server_app import base as bases
from server_app import tiny
from server_app.tiny import TinyRecipe

QUESTIONS = catalogue_of([2, 3], train=[True, True]).questions
TEMPLATE = (
    "{{ '<bos>' }}{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant "
    "{% if enable_thinking is false %}<nothink>{% endif %}{% endif %}"
)


def save_tokenizer(folder, *, special, **roles):
    """A character tokenizer with these special tokens, in this order, in these roles; it puts <bos> before any text."""
    characters = sorted({c for q in QUESTIONS for c in formats.prompt("dpa", q.text, q.options, style="compact")})
    vocabulary = {c: i for i, c in enumerate([*characters, *"<>|_,.0123456789abcdefghijklmnopqrstuvwxyz"])}
    vocabulary = {c: i for i, c in enumerate(vocabulary)}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens(list(special))
    if "<bos>" in special:
        core.post_processor = processors.TemplateProcessing("<bos> $A", None, [("<bos>", core.token_to_id("<bos>"))])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **roles)
    tokenizer.save_pretrained(folder)
    return str(folder)


def prepare(source, **keys):
    config = Config.load({"model": source, **keys})
    return bases.prepare(config, QUESTIONS), config


def test_the_tiny_model_by_name(tmp_path, monkeypatch):
    asked = []
    small = TinyRecipe("opa", steps=1, batch_size=2, hidden_size=16, num_layers=1, num_heads=2)
    load_or_build = tiny.load_or_build

    def smaller(recipe, questions, cache, *, progress):
        asked.append((recipe, questions, cache))
        return load_or_build(small, questions, cache, progress=progress)

    monkeypatch.setattr(tiny, "load_or_build", smaller)
    base, config = prepare(
        "tiny", **{"task": "opa", "cache-dir": str(tmp_path), "base-steps": 57, "seed": 5, "prompt-style": "compact"}
    )
    ((recipe, questions, cache),) = asked
    assert (recipe.task, recipe.steps, recipe.seed) == ("opa", 57, 5)
    assert (questions, cache) == (QUESTIONS, tmp_path)
    assert base.stop_ids == (base.end_id,) == (base.tokenizer.eos_token_id,)
    assert base.pad_id not in base.stop_ids
    text = formats.prompt("opa", QUESTIONS[0].text, QUESTIONS[0].options, style="compact")
    assert base.prompt_text(config, QUESTIONS[0]) == text
    assert base.tokenizer.decode(base.prompt_ids(config, QUESTIONS[0])) == text


@pytest.mark.parametrize(
    ("special", "roles", "pad"),
    [
        (("<pad>", "<eos>"), {"pad_token": "<pad>", "eos_token": "<eos>"}, "<pad>"),
        # padding with the end token, as many models come: the unknown token takes its place
        (("<eos>", "<unk>"), {"pad_token": "<eos>", "eos_token": "<eos>", "unk_token": "<unk>"}, "<unk>"),
        # as Qwen's base models come: no unknown token, and the end token is the first of the added ones
        (("<eos>", "<|im_end|>", "<|spare|>"), {"pad_token": "<eos>", "eos_token": "<eos>"}, "<|spare|>"),
        (("<bos>", "<eos>"), {"eos_token": "<eos>", "bos_token": "<bos>"}, "<bos>"),
    ],
)
def test_the_padding_token_is_never_the_end_token(tmp_path, special, roles, pad):
    base, _ = prepare(save_tokenizer(tmp_path / "model", special=special, **roles))
    assert base.tokenizer.pad_token == pad
    assert base.pad_id == base.tokenizer.convert_tokens_to_ids(pad)
    assert base.pad_id not in base.stop_ids
    assert base.tokenizer.padding_side == "left"


@pytest.mark.parametrize(
    ("special", "roles", "message"),
    [
        (("<pad>",), {"pad_token": "<pad>"}, "no end-of-sequence token"),
        (("<eos>",), {"eos_token": "<eos>", "pad_token": "<eos>"}, "a padding token other than its end token"),
    ],
)
def test_tokenizers_that_ppo_cannot_use(tmp_path, special, roles, message):
    folder = save_tokenizer(tmp_path / "model", special=special, **roles)
    with pytest.raises(UserError, match=message) as error:
        prepare(folder)
    assert f"model = {folder}" in str(error.value)


@pytest.mark.parametrize("make", [False, True], ids=["no such folder", "an empty folder"])
def test_a_model_that_is_not_there(tmp_path, make):
    source = tmp_path / "nothing"
    if make:
        source.mkdir()
    config = Config.load({"model": str(source)})
    loads = (lambda: prepare(str(source)), lambda: bases.load_model(config, str(source), quantized=False))
    for load in loads:
        with pytest.raises(UserError, match=f"model = {source}: cannot be loaded") as error:
            load()
        assert "\n" not in str(error.value)


CHAT = ("<pad>", "<eos>", "<bos>", "<|im_start|>", "<|im_end|>", "<nothink>")


@pytest.fixture
def chat(tmp_path):
    return save_tokenizer(
        tmp_path / "chat",
        special=CHAT,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        chat_template=TEMPLATE,
    )


def test_chat_models_get_their_own_template_once(chat):
    base, config = prepare(chat)
    question = formats.prompt("dpa", QUESTIONS[1].text, QUESTIONS[1].options, style=config.prompt_style)
    text = base.prompt_text(config, QUESTIONS[1])
    assert text == f"<bos><|im_start|>user {question}<|im_end|><|im_start|>assistant <nothink>"
    ids = base.prompt_ids(config, QUESTIONS[1])
    bos = base.tokenizer.bos_token_id
    assert ids[0] == bos
    assert ids.count(bos) == 1


def test_chat_models_stop_at_the_end_of_their_turn_too(chat):
    base, _ = prepare(chat)
    turn_end = base.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert base.end_id == turn_end
    assert set(base.stop_ids) == {turn_end, base.tokenizer.eos_token_id}


def test_without_a_template_a_turn_end_is_a_token_like_others(tmp_path):
    base, config = prepare(save_tokenizer(tmp_path / "plain", special=CHAT, pad_token="<pad>", eos_token="<eos>"))
    ids = base.prompt_ids(config, QUESTIONS[0])
    assert base.tokenizer.convert_ids_to_tokens(ids[:2]) == ["<bos>", base.prompt_text(config, QUESTIONS[0])[0]]
    assert base.stop_ids == (base.tokenizer.eos_token_id,)
    assert base.end_id == base.tokenizer.eos_token_id


def test_texts_hold_what_the_mask_shows_without_special_tokens(chat):
    base, _ = prepare(chat)
    ids = base.tokenizer("0.50,0.50", add_special_tokens=False)["input_ids"]
    stop, padding = base.end_id, base.pad_id
    response_JT = torch.tensor([[*ids, stop, padding], [*ids, ids[0], ids[0]]])
    mask_JT = torch.tensor([[True] * 10 + [False], [True] * 9 + [False] * 2])
    assert base.texts(response_JT, mask_JT) == ["0.50,0.50", "0.50,0.50"]


@pytest.mark.parametrize(("key", "dtype"), [("float32", torch.float32), ("bfloat16", torch.bfloat16)])
def test_models_load_in_the_config_s_number_format(tmp_path, key, dtype):
    tiny_causal_lm().save_pretrained(tmp_path)
    for attention in ("eager", "sdpa"):
        config = Config.load({"compute-dtype": key, "attention": attention})
        model = bases.load_model(config, str(tmp_path), quantized=False)
        assert {p.dtype for p in model.parameters()} == {dtype}
        assert model.config._attn_implementation == attention
        assert not model.training


def test_the_cache_follows_the_xdg_convention(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert bases.user_cache() == tmp_path / "appa-flwr"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert bases.user_cache() == tmp_path / "home" / ".cache" / "appa-flwr"
