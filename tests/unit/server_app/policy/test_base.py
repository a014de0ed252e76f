"""The starting model: its special tokens, its prompts, and what a user is told who names a wrong one."""

from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from bitsandbytes.functional import has_avx512bf16
from fakes import QUESTIONS, raising, tiny_causal_lm
from huggingface_hub import errors as hub
from small import CHOSEN, cases, spoil
from surveys import refused
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from appa_flwr.config import THREADS, Config
from appa_flwr.core.errors import UserError
from appa_flwr.protocol import formats
from server_app.policy import base as bases
from server_app.policy import tiny
from server_app.policy.tiny import TinyRecipe


def save_tokenizer(folder, *, special, **roles):
    """A character tokenizer with these special tokens, in this order, in these roles; it puts <bos> before any text."""
    characters = sorted({c for q in QUESTIONS for c in formats.prompt("dpa", q.text, q.options, style="compact")})
    characters = dict.fromkeys([*characters, *"<>|_,.0123456789abcdefghijklmnopqrstuvwxyz"])
    vocabulary = {c: i for i, c in enumerate(characters)}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens(list(special))
    if "<bos>" in special:
        core.post_processor = processors.TemplateProcessing("<bos> $A", None, [("<bos>", core.token_to_id("<bos>"))])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **roles)
    tokenizer.save_pretrained(folder)
    tiny_causal_lm(vocabulary=len(tokenizer)).save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    return str(folder)


def prepare(source, **keys):
    config = Config.load({**CHOSEN, "model": source, **keys})
    return bases.prepare(config, QUESTIONS), config


@pytest.mark.parametrize("style", ["compact", "counted"])
def test_the_tiny_model_by_name(style, tmp_path, monkeypatch):
    monkeypatch.setattr(tiny, "STEPS", 1)
    monkeypatch.setattr(tiny, "COUNTED_STEPS", 2)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    base, config = prepare("tiny", **{"policy.prompt-style": style, "task": "opa", "seed": 5})
    counted = style == "counted"
    recipe = TinyRecipe("opa", steps=1 + counted, counted=counted, seed=5)
    assert base.source == str(tmp_path / "appa-flwr" / f"tiny-opa-{recipe.key(QUESTIONS)}")
    assert base.stop_ids == (base.end_id,) == (base.tokenizer.eos_token_id,)
    assert base.tokenizer.pad_token_id not in base.stop_ids
    text = formats.prompt("opa", QUESTIONS[0].text, QUESTIONS[0].options, style=style)
    assert base.tokenizer.decode(base.prompt_ids(config, QUESTIONS[0])) == text


@pytest.mark.parametrize(
    ("special", "roles", "pad"),
    [
        # padding with the end token, as many models come: the unknown token takes its place
        (("<eos>", "<unk>"), {"pad_token": "<eos>", "eos_token": "<eos>", "unk_token": "<unk>"}, "<unk>"),
        # as Qwen's base models come: no unknown token, and the end token is the first of the added ones
        (("<eos>", "<|spare|>"), {"pad_token": "<eos>", "eos_token": "<eos>"}, "<|spare|>"),
        (("<bos>", "<eos>"), {"eos_token": "<eos>", "bos_token": "<bos>"}, "<bos>"),
    ],
)
def test_the_padding_token_is_never_the_end_token(tmp_path, special, roles, pad):
    base, _ = prepare(save_tokenizer(tmp_path / "model", special=special, **roles))
    assert base.tokenizer.pad_token == pad
    assert base.tokenizer.pad_token_id not in base.stop_ids


@pytest.mark.parametrize(
    ("special", "roles", "message"),
    [
        (("<pad>",), {"pad_token": "<pad>"}, "no end-of-sequence token"),
        (("<eos>",), {"eos_token": "<eos>", "pad_token": "<eos>"}, "a padding token other than its end token"),
    ],
)
def test_tokenizers_that_ppo_cannot_use(tmp_path, special, roles, message):
    folder = save_tokenizer(tmp_path / "model", special=special, **roles)
    assert f"model = {folder}" in refused(message, prepare, folder)


def test_a_padding_token_without_an_embedding_is_not_used(tmp_path):
    folder = save_tokenizer(tmp_path / "model", special=("<eos>", "<|spare|>"), eos_token="<eos>")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"pad_token": "<new>"})  # as many recipes do, who then enlarge the model
    tokenizer.save_pretrained(folder)
    base, _ = prepare(folder)
    assert base.tokenizer.pad_token == "<|spare|>"


# --- models that cannot be used -------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """A model that can be used."""
    made = Path(save_tokenizer(tmp_path / "model", special=("<pad>", "<eos>"), pad_token="<pad>", eos_token="<eos>"))
    assert prepare(str(made))[0].source == str(made)
    return made


@pytest.mark.parametrize(("how", "message"), cases("wrong_inputs")["models"]["rows"])
def test_a_folder_that_cannot_be_used_is_told_from_before_its_weights_are_read(folder, how, message):
    spoil(folder, how)
    said = refused(message, bases.check, Config.load({**CHOSEN, "model": str(folder)}))
    assert said.startswith((f"model = {folder}: ", f"model folder {folder}: "))


def test_a_check_reads_no_weights(folder, monkeypatch):
    devices, load = [], bases.AutoModelForCausalLM.from_pretrained
    loading = lambda *where, **how: devices.append(how["device_map"]) or load(*where, **how)  # noqa: E731
    monkeypatch.setattr(bases.AutoModelForCausalLM, "from_pretrained", loading)
    bases.check(Config.load({**CHOSEN, "model": str(folder)}))
    assert devices == ["meta"]


@pytest.mark.parametrize("limit", [{"max_position_embeddings": 40}, {"sliding_window": 40, "use_sliding_window": True}])
def test_a_model_that_reads_fewer_tokens_than_the_longest_sequence_is_refused(folder, limit):
    spoil(folder, {"config": limit})
    prepare(str(folder), **{"policy.max-sequence-length": 40})
    with pytest.raises(UserError, match=r"policy\.max-sequence-length = 41: .* reads 40 tokens at most"):
        prepare(str(folder), **{"policy.max-sequence-length": 41})
    with pytest.raises(UserError, match="tiny reads 2048 tokens at most"):  # before it is built
        bases.check(Config.load({"policy.max-sequence-length": 2049}))


# --- the hub --------------------------------------------------------------------------------------

ANSWER = SimpleNamespace(headers={}, request=None)
GEMMA = "google/gemma-2-2b-it"


@pytest.mark.parametrize(
    "raised",
    [hub.GatedRepoError("403\nAsk", response=ANSWER), hub.HTTPError("timed out\n."), OSError(28, "No space left")],
)
def test_a_hub_that_does_not_give_the_model(raised, monkeypatch):
    monkeypatch.setattr(bases, "snapshot_download", raising(raised))
    says = rf"cannot be fetched .*{type(raised).__name__}.*hf download {GEMMA} "
    refused(says, bases.check, Config.load({**CHOSEN, "model": GEMMA}))


def test_all_files_of_a_model_by_name_are_fetched_once(folder, monkeypatch):
    asked = []
    fetch = lambda name, **keys: asked.append((name, keys)) or str(folder)  # noqa: E731
    monkeypatch.setattr(bases, "snapshot_download", fetch)
    config = Config.load({**CHOSEN, "model": "Qwen/Qwen3-0.6B"})
    base = bases.prepare(config, QUESTIONS)
    bases.load_model(config, base.source, quantized=False)
    ((name, keys),) = asked
    assert name == "Qwen/Qwen3-0.6B"
    files = [*(path.name for path in folder.iterdir()), "merges.txt", "chat_template.jinja", "tokenizer.model"]
    assert all(any(fnmatch(file, pattern) for pattern in keys["allow_patterns"]) for file in files)
    assert not any(fnmatch("pytorch_model.bin", pattern) for pattern in keys["allow_patterns"])


def test_without_a_template_a_turn_end_is_a_token_like_others(tmp_path):
    special = ("<pad>", "<eos>", "<bos>", "<|im_start|>", "<|im_end|>")
    base, config = prepare(save_tokenizer(tmp_path / "plain", special=special, pad_token="<pad>", eos_token="<eos>"))
    ids = base.prompt_ids(config, QUESTIONS[0])
    text = formats.prompt("dpa", QUESTIONS[0].text, QUESTIONS[0].options, style=config.prompt_style)
    assert base.tokenizer.convert_ids_to_tokens(ids[:2]) == ["<bos>", text[0]]
    assert base.stop_ids == (base.end_id,) == (base.tokenizer.eos_token_id,)


# --- the machine ---------------------------------------------------------------------------------


def test_a_real_model_takes_the_threads_that_the_user_names_else_all_cores_and_the_tiny_one_takes_one(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(bases.os, "sched_getaffinity", lambda _: set(range(6)), raising=False)
    monkeypatch.setattr(bases.psutil, "cpu_count", lambda logical: 16 if logical else 4)
    assert bases.threads(Config.load({})) == 1
    assert bases.threads(Config.load({**CHOSEN, "model": "org/name"})) == 4  # six, of which two are a core's second
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert bases.threads(Config.load({})) == 1
    assert bases.threads(Config.load({**CHOSEN, "model": "org/name"})) == 3
    monkeypatch.setenv(THREADS, "")  # of the launcher, which sets the other where the user does not
    monkeypatch.setattr(bases.psutil, "cpu_count", lambda logical: None)  # a system that does not tell
    assert bases.threads(Config.load({**CHOSEN, "model": "org/name"})) == 6
    monkeypatch.setenv(THREADS, "two")
    with pytest.raises(UserError, match="OMP_NUM_THREADS"):
        bases.threads(Config.load({**CHOSEN, "model": "org/name"}))


@pytest.mark.parametrize(("task", "sample"), [("dpa", "0.25,0.75"), ("opa", "B,A")])
def test_a_tokenizer_must_write_the_answers_of_the_task(task, sample):
    class Empty:
        eos_token_id, __call__, decode = 0, lambda self, text: {"input_ids": []}, lambda self, ids: ""

    refused(f"cannot write {sample};", bases._check_tokenizer, Config.load({"task": task}), Empty())


@pytest.mark.skipif(not has_avx512bf16(), reason="bitsandbytes packs weights only on a CPU with AVX512-BF16")
def test_a_pass_without_gradient_leaves_weights_in_four_bits_as_they_were(folder):
    base, config = prepare(str(folder), **{"policy.tuning": "qlora"})
    model, ids = bases.load_model(config, base.source, quantized=True), torch.arange(5, 25)[None]

    def gradient():
        embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
        model(inputs_embeds=embedded).logits.square().sum().backward()
        return embedded.grad

    before = gradient()
    with torch.no_grad():
        model(ids)
    torch.testing.assert_close(gradient(), before, rtol=0, atol=0)
