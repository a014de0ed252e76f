"""The embedded policy: tokenizer, corpus and cache."""

import dataclasses

import numpy as np
import pytest
import torch
from fakes import catalogue_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from appa_flwr.protocol import formats
from appa_flwr.survey.types import Question
from server_app.policy import tiny
from server_app.policy.tiny import TinyRecipe

RECIPE = TinyRecipe("dpa", steps=2, batch_size=2, hidden_size=16, num_layers=1, num_heads=2)
QUESTIONS = catalogue_of([2, 3, 4], train=[True] * 3).questions
ODD = Question("X", "Wie viele der 1234 Bürger — “all” of them?\tReally\n?", ("0.5 %", "100,000", "数", " a  b"))


@pytest.fixture(scope="module")
def tokenizer():
    return tiny.build_tokenizer(RECIPE, (*QUESTIONS, ODD))


def test_every_digit_is_a_token_of_its_own(tokenizer):
    of_digit = {d: i for d in "0123456789" for i in tokenizer(d)["input_ids"]}
    assert len(set(of_digit.values())) == 10
    for text in ("1234567890", "x100y7.05"):
        ids = tokenizer(text)["input_ids"]
        assert [i for i in ids if i in of_digit.values()] == [of_digit[c] for c in text if c.isdigit()]
        # and no other token hides a digit
        assert not any(c.isdigit() for i in ids if i not in of_digit.values() for c in tokenizer.decode([i]))


@pytest.mark.parametrize("task", ["dpa", "opa"])
def test_prompts_and_answers_round_trip(tokenizer, task):
    special = (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id)
    texts = [formats.prompt(task, q.text, q.options, style="compact") for q in (*QUESTIONS, ODD)]
    texts += [formats.answer(task, [0.2, 0.5, 0.3]), "never seen: ÿ 漢字 🙂  two  blanks "]
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text
        assert not set(ids) & set(special)
    assert len(set(special)) == 3
    assert len(tokenizer) <= RECIPE.vocab_size


COUNTED = dataclasses.replace(RECIPE, counted=True, batch_size=64)
LONG = Question("L", "Which of these " + "many " * 2000 + "ones?", tuple(f"option {n}" for n in range(9)))


@pytest.mark.parametrize("recipe", [RECIPE, COUNTED], ids=["compact", "counted"])
def test_a_score_is_one_token(recipe):
    tokenizer = tiny.build_tokenizer(recipe, (*QUESTIONS, LONG))
    text = "0.25,0.10,0.65,0.00,1.00"
    ids = tokenizer(text)["input_ids"]
    assert [tokenizer.decode([i]) for i in ids[::2]] == text.split(",")
    assert len(ids) == 9
    assert tokenizer.decode(ids) == text
    long = tokenizer(recipe.prompt(LONG.text, LONG.options))["input_ids"]
    assert tokenizer.decode(long) == recipe.prompt(LONG.text, LONG.options)


@pytest.mark.parametrize("task", ["dpa", "opa"])
def test_a_counted_corpus_has_every_number_of_options_about_equally_often(task):
    recipe = dataclasses.replace(COUNTED, task=task)
    batches = tiny.corpus(recipe, (*QUESTIONS, LONG), np.random.default_rng(0))
    rows = [row for _ in range(50) for row in next(batches)]
    sizes = [answer.count(",") + 1 for _, answer in rows]
    counts = np.bincount(sizes)[2:]
    assert len(counts) == 11  # 2 to 12, though the questions have 2, 3, 4 and 9
    assert abs(counts - 3200 / 11).max() < 5 * np.sqrt(3200 / 11)
    cue = {"dpa": "{} scores:", "opa": "ranking of {}:"}[task]
    assert all(prompt.split("\n")[-1] == cue.format(size) for (prompt, _), size in zip(rows, sizes, strict=True))
    asked = {size for (prompt, _), size in zip(rows, sizes, strict=True) if LONG.text in prompt}
    assert asked == set(range(2, 13))  # full prompts too, not the last line alone
    assert all(
        formats.parse(task, answer, size).format_score == 1 for (_, answer), size in zip(rows, sizes, strict=True)
    )
    tenths = {float(score) * 10 for _, answer in rows for score in answer.split(",") if task == "dpa"}
    assert tenths <= {*range(11)}  # a grid that a tiny model learns within minutes


def test_a_step_has_the_same_gradient_in_one_pass_and_in_many(monkeypatch):
    recipe, score, ends = dataclasses.replace(COUNTED, batch_size=16, steps=1), tiny.response_logprobs, set()

    def scored(model, rows, **keys):
        last_J1 = rows.mask_JT.sum(1, keepdim=True) - 1
        ends.update(rows.response_JT.gather(1, last_J1).flatten().tolist())
        return score(model, rows, **keys)

    monkeypatch.setattr(tiny, "response_logprobs", scored)
    whole, tokenizer = tiny.build(recipe, QUESTIONS)
    assert ends == {tokenizer.eos_token_id}
    monkeypatch.setattr(tiny, "TOKENS_PER_PASS", 60)
    parts, _ = tiny.build(recipe, QUESTIONS)
    for one, other in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_the_cached_folder_is_a_model_and_its_tokenizer(tmp_path):
    steps = []
    folder = tiny.load_or_build(RECIPE, QUESTIONS, tmp_path / "new" / "cache", progress=lambda *s: steps.append(s))
    assert steps == [(1, 2), (2, 2)]
    assert tiny.load_or_build(RECIPE, QUESTIONS, folder.parent, progress=lambda *_: pytest.fail("built")) == folder
    assert list(folder.parent.iterdir()) == [folder]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.config.vocab_size == len(tokenizer)
    assert (model.config.pad_token_id, model.config.eos_token_id) == (tokenizer.pad_token_id, tokenizer.eos_token_id)


def test_another_recipe_or_question_is_another_model():
    fields = [field.name for field in dataclasses.fields(TinyRecipe)]
    values = {name: "opa" if name == "task" else getattr(RECIPE, name) * 2 + 1 for name in fields}
    reworded = (dataclasses.replace(QUESTIONS[0], text="else"), *QUESTIONS[1:])
    fewer = (dataclasses.replace(QUESTIONS[0], options=("yes", "no way")), *QUESTIONS[1:])
    keys = {dataclasses.replace(RECIPE, **{name: values[name]}).key(QUESTIONS) for name in fields}
    keys |= {RECIPE.key(questions) for questions in (QUESTIONS, reworded, fewer, QUESTIONS[:2])}
    assert len(keys) == 4 + len(fields)


def test_a_build_is_reproducible_and_leaves_the_global_generator_alone():
    built = []
    for number, seed in ((123, 0), (7, 0), (7, 1)):
        torch.manual_seed(number)
        before = torch.get_rng_state()
        built.append(tiny.build(dataclasses.replace(RECIPE, seed=seed), QUESTIONS)[0].lm_head.weight)
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(built[0], built[1])
    assert not torch.equal(built[0], built[2])


def test_a_step_moves_every_parameter():
    one, two = (tiny.build(dataclasses.replace(RECIPE, steps=steps), QUESTIONS)[0] for steps in (1, 2))
    same = [name for (name, a), b in zip(one.named_parameters(), two.parameters(), strict=True) if torch.equal(a, b)]
    assert same == []
