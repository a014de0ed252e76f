"""The public names; and a run's policy that is asked, as a folder that Transformers loads or as an adapter."""

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import families
import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from small import CHOSEN
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import appa_flwr
from appa_flwr import public
from appa_flwr.config import Config
from appa_flwr.launch import cli
from appa_flwr.loaded import LocalModel
from appa_flwr.protocol import formats
from appa_flwr.protocol.messages import join_weights
from appa_flwr.run.schema import POLICY, WEIGHTS_FILE, write_config
from appa_flwr.survey import generate
from appa_flwr.survey.types import Question
from client_app import predictor as client_predictor
from pluralllm.data import group_data
from server_app.policy.base import prepare
from server_app.policy.models import load_policy
from server_app.predictor.checkpoint import new_card, save
from server_app.predictor.pretraining import initial_weights
from server_app.questions import build_catalogue

QUESTION, OPTIONS = "Is the sky blue?", ("Yes", "No", "Perhaps")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return families.save("gemma2", tmp_path_factory.mktemp("gemma2") / "model", [Question("q", QUESTION, OPTIONS)])


@pytest.fixture
def run(base, tmp_path):
    """A run's folder without its policy."""
    write_config(tmp_path, Config.load({**CHOSEN, "model": str(base), "ppo.response-length": 8}))
    return tmp_path


def greedy(model, tokenizer):
    """The eight likeliest tokens one by one, without a cache, or those before an end."""
    text = formats.prompt("dpa", QUESTION, OPTIONS, style="compact")
    chat = [{"role": "user", "content": text}]
    ids = tokenizer(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))["input_ids"]
    ids, ends = ids[1:], tokenizer.convert_tokens_to_ids(["<eos>", "<end_of_turn>"])  # the template has begun already
    start = len(ids)
    while len(ids) < start + 8 and ids[-1] not in ends:
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return tokenizer.decode(ids[start:], skip_special_tokens=True)


@torch.inference_mode()
@pytest.mark.parametrize("adapted", [False, True])
def test_a_policy_answers_as_its_weights_say(adapted, base, run):
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    before = greedy(model, tokenizer)
    torch.manual_seed(1)
    if adapted:
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "o_proj"], init_lora_weights=False))
        model.eval()
    else:
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.3)
    model.save_pretrained(run / POLICY)
    tokenizer.save_pretrained(run / POLICY)
    policy = appa_flwr.load_run(run).policy()
    answer = policy.ask(QUESTION, OPTIONS)
    assert answer.text == greedy(model, tokenizer) != before
    parsed = formats.parse("dpa", answer.text, 3)
    assert (answer.prediction is None) == (parsed.prediction is None)
    assert answer.format_score == parsed.format_score


@torch.inference_mode()
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_adapter_on_four_bits_is_asked_as_it_was_scored(dtype, base, run):
    keys = {"policy.tuning": "qlora", "policy.compute-dtype": dtype}
    config = Config.load({**CHOSEN, "model": str(base), "ppo.response-length": 8, **keys})
    write_config(run, config)
    torch.manual_seed(1)
    given = LoraConfig(r=4, target_modules=["q_proj", "o_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    whole = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), given)
    whole.save_pretrained(run / "sft-model")
    trained = load_policy(config, prepare(config, []), run / "sft-model")
    for weight in trained.policy_parameters:
        weight.add_(torch.randn_like(weight), alpha=0.1)
    trained.save_policy(run / POLICY)
    AutoTokenizer.from_pretrained(base).save_pretrained(run / POLICY)
    policy = appa_flwr.load_run(run).policy()
    assert policy.ask(QUESTION, OPTIONS).text
    loaded = policy._model._model
    merged = LocalModel(str(run / POLICY))._model
    ids = torch.arange(5, 25)[None]
    scored, found, other = (model(ids).logits.float() for model in (trained.policy, loaded, merged))
    error = (found - scored).abs().max()
    assert error <= (1e-5 if dtype == "float32" else 0.1 * (other - scored).abs().max())


@pytest.mark.parametrize(
    ("written", "options", "shown"),
    [
        ("0.2,0.3,0.5", "Yes; No, never; Perhaps", r"Yes\W+20%\W+No, never\W+30%\W+Perhaps\W+50%"),
        ("no", "Yes,No", "it wrote 'no', which cannot be read"),
    ],
)
def test_the_command_shows_shares_and_says_what_cannot_be_read(written, options, shown, run, monkeypatch):
    def ask(question, options):
        parsed = formats.parse("dpa", written, len(options))
        return appa_flwr.Answer(written, parsed.prediction, parsed.format_score)

    monkeypatch.setattr(public.Run, "policy", lambda self: SimpleNamespace(ask=ask))
    assert re.search(shown, CliRunner().invoke(cli.app, ["ask", str(run), QUESTION, "--options", options]).output)


def test_the_package_alone_imports_nothing_large_and_has_what_it_names():
    code = "import sys, appa_flwr; print(any(m.partition('.')[0] in ('numpy', 'torch', 'pandas') for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
    assert all(getattr(appa_flwr, name) is not None for name in appa_flwr.__all__)
    stub = Path(appa_flwr.__file__).with_suffix(".pyi").read_text()
    assert all(re.search(rf"\b{name}\b", stub) for name in appa_flwr.__all__)
    with pytest.raises(AttributeError, match="no attribute 'lode_run'"):
        appa_flwr.lode_run  # noqa: B018


@pytest.fixture(scope="module")
def predicting(tmp_path_factory):
    """A run's folder with the weights of an untrained network and their card, and what a group's node makes of them."""
    config = Config.load({"data.num-groups": 2, "data.num-questions": 40})
    folder, catalogue, start = tmp_path_factory.mktemp("run"), build_catalogue(config), initial_weights(config)
    write_config(folder, config)
    save(folder / WEIGHTS_FILE, start, new_card(config, catalogue, {}, (), []))
    node = client_predictor.load(config, join_weights(start), catalogue)
    name, answers = next(iter(generate.generate(**generate.population(config.data, config.seed)).answers.items()))
    training = {catalogue.questions[q].question_id for q in np.flatnonzero(catalogue.train_Q)} & answers.keys()
    given = {question: answers[question] for question in training}
    return folder, given, node.targets(group_data(name, given, public=catalogue)), catalogue


def test_the_predictor_says_of_a_group_what_its_own_node_would(predicting):
    folder, given, expected_QK, catalogue = predicting
    found = appa_flwr.load_run(folder).predictor().predict(given)
    np.testing.assert_allclose(found["share"], expected_QK[catalogue.option_QK], rtol=0, atol=1e-5)
    assert found.columns.tolist() == ["question", "text", "option", "share"]
    assert found["question"].unique().tolist() == [question.question_id for question in catalogue.questions]
    nothing = appa_flwr.load_run(folder).predictor().predict({})
    assert np.abs(nothing["share"] - found["share"]).max() > 0.01


def test_answers_that_do_not_fit_and_a_run_without_a_predictor_are_said(predicting, run):
    folder, given, _, _ = predicting
    predictor = appa_flwr.load_run(folder).predictor()
    name, shares = next(iter(given.items()))
    for answers, says in (
        ({"none": [0.5, 0.5]}, "question 'none' is none of the run's"),
        ({name: [*shares, 0.0]}, f"question '{name}' has {len(shares)} options"),
        ({name: 0.9 * shares}, f"those to question '{name}' are no shares that sum to 1"),
        ({name: [1.5, -0.5, *shares[2:]]}, "no shares"),
    ):
        with pytest.raises(appa_flwr.UserError, match=says):
            predictor.predict(answers)
    with pytest.raises(appa_flwr.UserError, match=r"has no pluralllm\.safetensors"):
        appa_flwr.load_run(run).predictor()
