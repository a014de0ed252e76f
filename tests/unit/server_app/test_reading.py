"""Reading a model after answered questions, and by the letters it would choose.

Axis letters: J questions, K options.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fakes import catalogue_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from appa_flwr.config import Config
from appa_flwr.protocol import formats
from appa_flwr.survey.types import Question
from server_app import evaluation, reading
from server_app.models import tiny
from server_app.models.base import Base
from server_app.models.tiny import TinyRecipe

CATALOGUE = catalogue_of([2, 3, 4, 2, 3, 2, 4, 2], train=[True] * 5 + [False] * 3)
TRAIN_J, TEST_J = np.arange(5), np.arange(5, 8)
ANSWERS = [formats.answer("dpa", np.arange(1, len(q.options) + 1)) for q in CATALOGUE.questions]
CHAT = "{% for m in messages %}<user>{{ m.content }}<end>{% endfor %}{% if add_generation_prompt %}<model>{% endif %}"


@pytest.fixture(scope="module")
def built():
    return tiny.build(TinyRecipe("dpa", steps=2, batch_size=4), CATALOGUE.questions)


@pytest.fixture
def base(built):
    _, tokenizer = built
    return Base("", tokenizer, tokenizer.eos_token_id, (tokenizer.eos_token_id,))


def text_of(base, ids):
    return base.tokenizer.decode(ids)


# --- few-shot -------------------------------------------------------------------------------------


def shown(base, *, window=10_000, train_J=TRAIN_J, **keys):
    config = Config.load(keys)
    return reading.few_shot(base, config, CATALOGUE, answers=ANSWERS, train_J=train_J, test_J=TEST_J, window=window)


def test_every_prompt_begins_with_the_same_five_training_questions_and_their_answers(base):
    found = shown(base)
    assert (list(found.prompts), found.num_examples, found.cut) == ([5, 6, 7], 5, 0)
    texts = {q: text_of(base, ids).split("\n\n") for q, ids in found.prompts.items()}
    plain = [formats.prompt("dpa", q.text, q.options, style="compact") for q in CATALOGUE.questions]
    examples = [text + answer for text, answer in zip(plain, ANSWERS, strict=True)]
    assert sorted(texts[5][:5]) == sorted(examples[:5])
    assert all(text == [*texts[5][:5], plain[q]] for q, text in texts.items())


def test_the_examples_are_drawn_by_the_seed_and_never_of_held_out_questions(base):
    few = {"train_J": np.array([0, 3])}
    assert shown(base).prompts == shown(base).prompts
    assert len({tuple(shown(base, seed=seed).prompts[5]) for seed in range(5)}) > 1
    assert shown(base, **few).num_examples == 2
    (text,) = {text_of(base, ids).split("\n\n")[0] + "|" for ids in shown(base, **few).prompts.values()}
    assert "topic 0" in text or "topic 3" in text


@pytest.mark.parametrize("missing", [0, 1])
def test_a_prompt_that_would_exceed_the_window_gets_fewer_examples_and_is_counted(base, missing):
    key = {"rollout.response-length": 30}
    whole = shown(base, **key)
    # room for the longest prompt and 30 tokens of answer, or for one token less
    longest = max(map(len, whole.prompts.values()))
    found = shown(base, window=longest + 30 - missing, **key)
    assert found.cut == sum(len(ids) > longest - missing for ids in whole.prompts.values())
    for q, ids in found.prompts.items():
        assert len(ids) <= longest - missing
        cut = len(whole.prompts[q]) > longest - missing
        assert text_of(base, ids).count("\n\n") == 5 - cut
        assert text_of(base, ids).split("\n\n")[0] == text_of(base, whole.prompts[q]).split("\n\n")[0]
    assert shown(base, window=1).prompts == {q: base.prompt_ids(Config(), CATALOGUE.questions[q]) for q in TEST_J}


@pytest.mark.parametrize("template", [None, CHAT])
def test_within_a_chat_template_when_there_is_one_and_with_the_special_tokens_it_leaves_out(template):
    base = spelling(())
    core = base.tokenizer.backend_tokenizer
    core.post_processor = processors.TemplateProcessing("<pad> $A", None, [("<pad>", core.token_to_id("<pad>"))])
    base.tokenizer.chat_template = template
    keys = {"policy.prompt-style": "full"}
    found = shown(base, window=1, **keys)
    assert found.prompts == {q: base.prompt_ids(Config.load(keys), CATALOGUE.questions[q]) for q in TEST_J}


# --- the letters a model would choose -------------------------------------------------------------


def spelling(vocabulary, *, strip=False):
    """A tokenizer of words: each of these, and each other character, is a token."""
    characters = {c for c in "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ:., \n"}
    ids = {token: i for i, token in enumerate(["<unk>", "<pad>", *sorted(characters), *vocabulary])}
    merges = [(token[0], token[1]) for token in vocabulary if len(token) == 2]
    core = Tokenizer(models.BPE(vocab=ids, merges=merges, unk_token="<unk>"))
    # a blank belongs to the word behind it, as in most vocabularies; or is nothing at all
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit() if strip else pre_tokenizers.Split(" ", "merged_with_next")
    core.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", pad_token="<pad>")
    return Base("", made, 0, (0,))


@pytest.mark.parametrize(
    ("vocabulary", "labels", "found"),
    [
        ((), "ABC", (["A", "B", "C"], [])),  # a letter with a blank is two tokens
        ((" A", " B"), "ABC", (["A", "B", "C"], [" A", " B"])),  # as far as they go
        ((" A", " C"), "ABC", (["A", "B", "C"], [" A"])),  # and not past a gap
        ((" A", "AA"), ("A", "AA", "Ä"), (["A", "AA"], [" A"])),  # an unknown letter is none
    ],
)
def test_letters_are_single_tokens_with_and_without_a_blank(vocabulary, labels, found):
    base = spelling(vocabulary)
    tokens = reading.label_tokens(base, "Letter:", labels)
    assert tuple(base.tokenizer.convert_ids_to_tokens(ids) for ids in tokens) == found


def test_a_blank_that_a_tokenizer_drops_makes_no_second_spelling():
    base = spelling((), strip=True)
    assert [len(ids) for ids in reading.label_tokens(base, "Letter:", "AB")] == [2, 0]


@pytest.mark.parametrize("vocabulary", [(":A",), (":A", "r:")])  # in place of "r:" and "A", as many tokens
def test_a_letter_that_melts_into_the_prompt_is_no_token_behind_it(vocabulary):
    base = spelling(vocabulary)
    assert reading.label_tokens(base, "Letter:", "AB") == [[], []]


def test_the_tiny_tokenizer_has_every_letter(base):
    bare, _ = reading.label_tokens(base, "Letter:", formats.letters(27))
    assert [base.tokenizer.decode([token]) for token in bare] == [*formats.letters(26)]


def chosen(model, base, **keys):
    return reading.chosen_answers(model, base, Config.load(keys), question_J=TEST_J, catalogue=CATALOGUE)


def one_by_one(model, base, question, template="{}"):
    """The probability of each option's letter, with and without a blank, by the model's own forward."""
    text = template.format(formats.choice_prompt(question.text, question.options))
    ids = base.tokenizer(text)["input_ids"]
    with torch.no_grad():
        share_V = model(torch.tensor([ids])).logits[0, -1].double().softmax(-1)
    letters = [base.tokenizer(letter)["input_ids"] for letter in formats.letters(len(question.options))]
    blank = [base.tokenizer(f" {letter}")["input_ids"] for letter in formats.letters(len(question.options))]
    both = [letters, blank] if all(len(ids) == 1 for ids in blank) else [letters]
    share_K = sum(share_V[torch.tensor(spelled)[:, 0]] for spelled in both).numpy()
    return share_K / share_K.sum(), share_K.sum()


@pytest.mark.parametrize("template", ["{}", "<user>{}<end><model>"])
@pytest.mark.parametrize("batch", [1, 2, 64])
def test_the_distribution_is_that_of_the_letters_one_question_at_a_time(built, base, batch, template, monkeypatch):
    model, _ = built
    monkeypatch.setattr(base.tokenizer, "chat_template", None if template == "{}" else CHAT)
    monkeypatch.setattr(evaluation, "BATCH_SIZE", batch)
    found = chosen(model, base)
    assert found.answers.question_J.tolist() == TEST_J.tolist()
    masses = []
    for prediction_K, q in zip(found.answers.prediction_JK, TEST_J, strict=True):
        size = len(CATALOGUE.questions[q].options)
        share_K, mass = one_by_one(model, base, CATALOGUE.questions[q], template)
        np.testing.assert_allclose(prediction_K[:size], share_K, atol=1e-6)
        assert not prediction_K[size:].any()
        masses.append(mass)
    assert found.mass == pytest.approx(np.mean(masses), rel=1e-5)
    assert found.answers.readable_J.all()
    assert np.isnan(found.answers.format_score_J).all()  # no model wrote these


def choosing(last_hidden_state, *sizes):
    """The choices between so many options of a model whose logits at every position are these."""

    def trunk(input_ids, use_cache):
        return SimpleNamespace(last_hidden_state=last_hidden_state.expand(*input_ids.shape, -1))

    base = spelling((" A", " B"))
    model = SimpleNamespace(
        base_model=trunk, device="cpu", get_output_embeddings=lambda: lambda hidden: hidden, config=SimpleNamespace()
    )
    questions = [Question(str(size), "Tea", tuple(f"choice {'x' * i}" for i in range(size))) for size in sizes]
    option_QK = np.arange(max(sizes)) < np.array(sizes)[:, None]
    catalogue = SimpleNamespace(questions=questions, option_QK=option_QK)
    return reading.chosen_answers(model, base, Config(), question_J=np.arange(len(sizes)), catalogue=catalogue)


def test_both_spellings_of_a_letter_count_together():
    """A model whose logits are known: " B" and "B" have a probability of .2 and .1, "A" and " A" of .1 and .05."""
    base = spelling((" A", " B"))
    size = len(base.tokenizer)
    share_V = torch.full((size,), 0.55 / (size - 4))
    for token, share in (("A", 0.1), (" A", 0.05), ("B", 0.1), (" B", 0.2)):
        share_V[base.tokenizer.convert_tokens_to_ids(token)] = share
    found = choosing(share_V.log(), 2, 3)
    np.testing.assert_allclose(found.answers.prediction_JK[0], [1 / 3, 2 / 3, 0], atol=1e-6)
    # C has no spelling with a blank, so that of the others does not count there: .1, .1 and what is left for each
    rest = 0.55 / (size - 4)
    np.testing.assert_allclose(found.answers.prediction_JK[1], np.array([0.1, 0.1, rest]) / (0.2 + rest), atol=1e-6)
    assert found.mass == pytest.approx((0.45 + 0.2 + rest) / 2, rel=1e-5)


def test_questions_with_more_options_than_letters_cannot_be_read():
    logits_V = torch.zeros(len(spelling((" A", " B")).tokenizer))
    found = choosing(logits_V, 27, 2)
    assert found.answers.readable_J.tolist() == [False, True]
    np.testing.assert_allclose(found.answers.prediction_JK[1, :2], [0.5, 0.5])
    assert np.isnan(choosing(logits_V, 27).mass)
