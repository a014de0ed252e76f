"""Counting votes, and fine-tuning on what they say.

Axis letters: G groups, Q questions, K options.
"""

import copy

import numpy as np
import pytest
import torch
from fakes import raising
from peft import PeftModel
from transformers import AutoModelForCausalLM

from appa_flwr.config import Config
from appa_flwr.survey.types import Question
from server_app.policy import sft, tiny
from server_app.policy.base import Base
from server_app.policy.limits import NotFinite
from server_app.policy.tiny import TinyRecipe

OPTION_QK = np.array([[True, True, True], [True, True, False]])


@pytest.mark.parametrize(
    ("choices_G", "winner"),
    [
        ([1, 2, 2, 1, 0], 1),  # two each
        ([2, 1, 1, 2, 0], 1),
        ([2, 1, 0], 0),
        ([0, 1, 2, 2], 2),
    ],
)
def test_a_majority_s_ties_go_to_the_earlier_option(choices_G, winner):
    votes_GQK = np.eye(3)[np.array(choices_G)][:, None]
    chosen_QK = sft.sft_targets(votes_GQK, OPTION_QK[:1], target="majority")
    assert chosen_QK.tolist() == [np.eye(3)[winner].tolist()]


def test_rankings_are_counted_whole():
    # K..1 by rank: A and B are first twice each, C once; the most frequent full ranking is B, A, C
    votes_GQK = np.array([[3, 2, 1], [2, 3, 1], [3, 1, 2], [2, 3, 1], [2, 1, 3]], dtype=float)[:, None]
    assert sft.sft_targets(votes_GQK, OPTION_QK[:1], target="majority").tolist() == [[2, 3, 1]]
    # mean rank scores: (3 + 2 + 3 + 2 + 2) / 5, (2 + 3 + 1 + 3 + 1) / 5, (1 + 1 + 2 + 1 + 3) / 5
    np.testing.assert_allclose(sft.sft_targets(votes_GQK, OPTION_QK[:1], target="votes"), [[2.4, 2.0, 1.6]])
    # without the second B, A, C every ranking is there once: A, B, C has earlier options first
    assert sft.sft_targets(votes_GQK[[1, 4, 2, 0]], OPTION_QK[:1], target="majority").tolist() == [[3, 2, 1]]


RECIPE = TinyRecipe("dpa", steps=1, batch_size=2, hidden_size=32, num_layers=1, num_heads=2)
QUESTIONS = tuple(
    Question(text, text, ("Yes", "No")) for text in ("Tea?", "More bread and butter?", "War", "Is it late?")
)
ANSWERS = ["0.10,0.90", "0.80,0.20", "0.50,0.25,0.25", "1.00"]
KEYS = {
    "sft.batch-size": 4,
    "sft.steps": 3,
    "sft.learning-rate": 1e-2,
    "policy.compute-dtype": "float32",
}


@pytest.fixture
def start():
    model, tokenizer = tiny.build(RECIPE, QUESTIONS)
    base = Base("", tokenizer, tokenizer.eos_token_id, (tokenizer.eos_token_id,))
    prompts = [base.prompt_ids(Config.load({"policy.prompt-style": "compact"}), question) for question in QUESTIONS]
    return model, base, prompts


@pytest.fixture
def tune(start, tmp_path):
    """Fine-tune and load what was written; gives the model and the steps that were reported."""

    def run(*, anew=False, prefix=(), **keys):
        model, base, prompts = copy.deepcopy(start) if anew else start
        untouched, steps = copy.deepcopy(model), []
        sft.fine_tune(
            model,
            base,
            Config.load({**KEYS, **keys}),
            prompts=[[*prefix, *prompt] for prompt in prompts],
            answers=ANSWERS,
            folder=tmp_path / "tuned",
            progress=lambda step, of, loss: steps.append((step, of, loss)),
        )
        assert list(tmp_path.iterdir()) == [tmp_path / "tuned"]
        if (tmp_path / "tuned" / "adapter_config.json").exists():
            return PeftModel.from_pretrained(untouched, tmp_path / "tuned").eval(), steps
        return AutoModelForCausalLM.from_pretrained(tmp_path / "tuned").eval(), steps

    return run


def test_fine_tuning_teaches_the_answers_and_where_they_end(start, tune):
    tuned, steps = tune(**{"sft.steps": 50, "sft.learning-rate": 3e-2, "policy.tuning": "full"})
    assert [(step, of) for step, of, _ in steps] == [(n, 50) for n in range(10, 51, 10)]
    assert steps[-1][2] < 0.5 < 2 < steps[0][2]
    _, base, prompts = start
    assert tuned.generation_config.eos_token_id == list(base.stop_ids)
    for prompt, answer in zip(prompts, ANSWERS, strict=True):
        taught = [*base.tokenizer(answer)["input_ids"], base.end_id]
        labels = torch.tensor([[-100] * len(prompt) + taught])
        with torch.no_grad():
            assert tuned(torch.tensor([prompt + taught]), labels=labels).loss < 0.5


@pytest.fixture
def passes(monkeypatch):
    """The passes of a trainer so far: for each, whether the model was in training, as dropout needs it."""
    made, step = [], sft._LeanTrainer.training_step

    def counted(trainer, model, *given, **named):
        loss = step(trainer, model, *given, **named)
        made.append(model.training)
        return loss

    monkeypatch.setattr(sft._LeanTrainer, "training_step", counted)
    return made


@pytest.mark.parametrize("steps", [2, 6])  # the last step breaks it, or an early one
def test_a_step_that_breaks_the_model_ends_sft(steps, tune, passes):
    with pytest.raises(NotFinite, match=r"sft\.learning-rate"):
        tune(**{"sft.learning-rate": 1e30, "sft.steps": steps, "policy.tuning": "lora"})
    assert len(passes) < 6


def test_a_step_in_several_passes_is_the_step_in_one(tune, monkeypatch):
    """Of answers of unequal length, so that a mean of the passes' means would be another."""
    found = []
    for rows in (4, 1):
        monkeypatch.setattr(sft, "MAX_PASS", rows)
        found.append(tune(anew=True, **{"policy.tuning": "full", "sft.steps": 2})[0])
    for ours, theirs in zip(*(model.parameters() for model in found), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_adapters_stay_apart_from_weights_that_stay_as_they_were(start, tune):
    before = {name: p.detach().clone() for name, p in start[0].named_parameters()}
    tuned, _ = tune(**{"policy.tuning": "lora", "policy.sft-targets": "q_proj,v_proj", "policy.lora-rank": 2})
    after = dict(tuned.named_parameters())
    adapters = {name for name in after if "lora_" in name}
    assert {name.split(".")[-4] for name in adapters} == {"q_proj", "v_proj"}
    assert all(after[name].dtype == torch.float32 and after[name].any() for name in adapters)
    trained = dict(start[0].named_parameters())
    for name, old in before.items():
        layer, _, kind = name.rpartition(".")
        kept = trained.get(name, trained.get(f"{layer}.base_layer.{kind}"))
        assert torch.equal(kept, old)


@pytest.mark.parametrize(
    ("steps", "shares"),
    [
        # a warm-up of a tenth of the steps, rounded down; (1 + cos(pi n / 5)) / 2 without one
        (1, [1]),
        (5, [1, 0.90451, 0.65451, 0.34549, 0.09549]),
        (11, [0, 1]),
    ],
)
def test_a_single_step_trains_and_the_last_step_is_reported(steps, shares, tune, start, monkeypatch):
    rates, step = [], torch.optim.AdamW.step
    before = start[0].get_input_embeddings().weight.detach().clone()
    monkeypatch.setattr(
        torch.optim.AdamW, "step", lambda self, *_: (rates.append(self.param_groups[0]["lr"]), step(self))[1]
    )
    tuned, told = tune(**{"policy.tuning": "full", "sft.steps": steps})
    assert rates[: len(shares)] == pytest.approx([1e-2 * share for share in shares], rel=1e-4)
    assert [number for number, _, _ in told] == [number for number in (10, steps) if number <= steps]
    assert not torch.equal(tuned.get_input_embeddings().weight, before)


def test_without_steps_every_row_is_taught_once(tune, passes):
    tune(**{"policy.tuning": "full", "sft.steps": 0, "sft.epochs": 3, "sft.batch-size": 2})
    assert passes == [True, True]  # four by twos: they are those of all passes over the questions already


def rows_of(scores_QK, **keys):
    config = Config.load({**KEYS, **keys})
    option_QK = np.isfinite(scores_QK)
    return sft.passes_of_texts(config, np.nan_to_num(scores_QK), option_QK, np.array([0, 2]))


def test_every_pass_has_answers_of_its_own_that_are_right_on_average():
    scores_QK = np.array([[0.33, 0.67, np.nan], [1.0, 0.0, np.nan], [0.25, 0.25, 0.5]])
    rows = rows_of(scores_QK, **{"sft.steps": 200})  # of four answers each
    assert [q for q, _ in rows] == [0, 2] * 400
    taught = {q: np.array([list(map(float, text.split(","))) for of, text in rows if of == q]) for q in (0, 2)}
    assert {text for q, text in rows if q == 0} == {"0.30,0.70", "0.40,0.60"}
    np.testing.assert_allclose(taught[0].mean(0), [0.33, 0.67], atol=0.01)
    np.testing.assert_allclose(taught[2].mean(0), [0.25, 0.25, 0.5], atol=0.01)
    assert [q for q, _ in rows_of(scores_QK, **{"sft.steps": 0, "sft.epochs": 3})] == [0, 2] * 3
    once = {"sft.steps": 0, "sft.epochs": 1}
    assert rows_of(scores_QK, **once, **{"sft.answer-step": 0.01}) == [(0, "0.33,0.67"), (2, "0.25,0.25,0.50")]
    assert rows_of(scores_QK, **once, task="opa") == [(0, "B,A"), (2, "C,A,B")]


@pytest.mark.parametrize(("batch_size", "passes_of"), [(7, 7), (40, 20), (64, 32), (37, 1)])
def test_a_batch_is_taught_in_equal_passes_of_at_most_32(batch_size, passes_of, tmp_path):
    made = sft.arguments(Config.load({"sft.batch-size": batch_size}), tmp_path, cpu=True)
    assert (made.per_device_train_batch_size, made.gradient_accumulation_steps) == (passes_of, batch_size // passes_of)


def test_a_pass_that_memory_does_not_hold_is_taught_with_half_the_tokens(tune, monkeypatch, caplog):
    """It fails in a step's second pass, whose first has left its gradients."""
    monkeypatch.setattr(sft, "LORA_DROPOUT", 0.0)
    monkeypatch.setattr(sft, "MAX_PASS", 2)
    keys = {"policy.tuning": "lora", "sft.batch-size": 4, "sft.steps": 1}
    expected, _ = tune(anew=True, **keys, **{"ppo.micro-batch-tokens": 64})
    full = raising(torch.OutOfMemoryError("CUDA out of memory"), sft.response_logprobs)
    monkeypatch.setattr(sft, "response_logprobs", full)
    found, _ = tune(**keys, **{"ppo.micro-batch-tokens": 128})
    assert "passes have 64 tokens" in caplog.text
    for ours, theirs in zip(found.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_of_two_gpus_the_first_is_used(tune, monkeypatch):
    """Two are counted and none is there, so that Transformers places on the CPU what it would spread over both."""
    arguments, used = sft.arguments, []

    def on_gpus(config, folder, *, cpu):
        settings = arguments(config, folder, cpu=False)
        used.append((settings.n_gpu, settings.train_batch_size))
        return settings

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(sft, "arguments", on_gpus)
    tune(**{"sft.steps": 1})
    assert used == [(1, KEYS["sft.batch-size"])]


@pytest.mark.parametrize(("tuning", "tokens"), [("full", 20), ("lora", 10**6)], ids=["row by row", "at once"])
def test_a_step_s_loss_and_gradient_are_those_of_the_model_s_own_loss(tune, tuning, tokens, monkeypatch):
    """Against Transformers' loss on the whole padded batch, without a shared prefix."""
    compared = []

    def step(trainer, trained, inputs, num_items_in_batch=None):
        parameters = {name: p for name, p in trained.named_parameters() if p.requires_grad}
        batch = {name: inputs[name] for name in ("input_ids", "attention_mask", "labels")}
        plain = copy.deepcopy(trained)
        for module in plain.modules():  # accelerate's and TRL's, which compute with the original's weights
            vars(module).pop("forward", None)
        plain(**batch).loss.backward()
        expected = {name: p.grad for name, p in plain.named_parameters() if p.requires_grad}
        loss = own_step(trainer, trained, inputs, num_items_in_batch)
        torch.testing.assert_close(loss, plain(**batch).loss.detach(), rtol=0, atol=1e-5)
        for name, gradient in expected.items():
            torch.testing.assert_close(
                parameters[name].grad, gradient, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
            )
        compared.append(any(bool(gradient.any()) for gradient in expected.values()))
        return loss

    own_step = sft._LeanTrainer.training_step
    monkeypatch.setattr(sft._LeanTrainer, "training_step", step)
    monkeypatch.setattr(sft, "LORA_DROPOUT", 0.0)
    tune(prefix=range(20, 34), **{"policy.tuning": tuning, "sft.steps": 2, "ppo.micro-batch-tokens": tokens})
    assert compared == [True, True]
