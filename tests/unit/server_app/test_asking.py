"""The public names; and a run's policy that is asked, as a folder that Transformers loads or as an adapter."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import families
import numpy as np
import pytest
import report_runs
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import appa_flwr
from appa_flwr import public
from appa_flwr.config import Config
from appa_flwr.launch import cli
from appa_flwr.protocol import formats
from appa_flwr.run.run_files import POLICY, write_config
from appa_flwr.survey.types import Question

QUESTION, OPTIONS = "Is the sky blue?", ("Yes", "No", "Perhaps")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return families.save("gemma2", tmp_path_factory.mktemp("gemma2") / "model", [Question("q", QUESTION, OPTIONS)])


@pytest.fixture
def run(base, tmp_path):
    """A run's folder without its policy."""
    write_config(tmp_path, Config.load({"model": str(base), "rollout.response-length": 8}))
    return tmp_path


def greedy(model, tokenizer):
    """The eight likeliest tokens one by one, without a cache, or those before an end."""
    chat = [{"role": "user", "content": formats.prompt("dpa", QUESTION, OPTIONS, style="compact")}]
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
    answer = appa_flwr.load_run(run).policy().ask(QUESTION, OPTIONS)
    assert answer.text == greedy(model, tokenizer) != before
    parsed = formats.parse("dpa", answer.text, 3)
    assert (answer.prediction is None) == (parsed.prediction is None)
    assert answer.format_score == parsed.format_score


def test_a_run_without_a_policy_and_a_question_without_a_choice_are_said(base, run):
    opened = appa_flwr.load_run(run)
    with pytest.raises(appa_flwr.UserError, match="has no policy/; only a run that has ended with PPO leaves one"):
        opened.policy()
    shutil.copytree(base, run / POLICY)
    with pytest.raises(appa_flwr.UserError, match="options: 1 given; a question needs 2 to 30"):
        opened.policy().ask(QUESTION, OPTIONS[:1])
    with pytest.raises(appa_flwr.UserError, match=r"config\.json"):
        appa_flwr.load_run(run / "nowhere")


def test_the_command_shows_shares_and_says_what_cannot_be_read(run, monkeypatch):
    asked = []

    class Said:
        def ask(self, question, options):
            asked.append((question, options))
            parsed = formats.parse("dpa", "0.2,0.3,0.5" if len(options) == 3 else "no", len(options))
            return appa_flwr.Answer("what it wrote", parsed.prediction, parsed.format_score)

    monkeypatch.setattr(public.Run, "policy", lambda self: Said())
    shown = CliRunner().invoke(cli.app, ["ask", str(run), QUESTION, "--options", "Yes; No, never; Perhaps"])
    assert asked == [(QUESTION, ("Yes", "No, never", "Perhaps"))]
    assert re.search(r"No, never\W+0\.30", shown.output)
    assert "it wrote 'what it wrote'\n" in shown.output
    unread = CliRunner().invoke(cli.app, ["ask", str(run), QUESTION, "--options", "Yes,No"])
    assert "it wrote 'what it wrote', which cannot be read" in unread.output


def test_the_package_alone_imports_nothing_large_and_has_what_it_names():
    code = "import sys, appa_flwr; print(any(m.partition('.')[0] in ('numpy', 'torch', 'pandas') for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
    assert all(getattr(appa_flwr, name) is not None for name in appa_flwr.__all__)
    stub = Path(appa_flwr.__file__).with_suffix(".pyi").read_text()
    assert all(re.search(rf"\b{name}\b", stub) for name in appa_flwr.__all__)
    with pytest.raises(AttributeError, match="no attribute 'lode_run'"):
        appa_flwr.lode_run  # noqa: B018


def test_a_finished_run_s_tables(tmp_path):
    found = appa_flwr.load_run(report_runs.fake_run(tmp_path, groups=("a", "b"), iterations=3))
    assert set(found.summary["method"]) >= {"sft", "ppo"}
    ppo = found.summary.query("method == 'ppo'").iloc[0]
    groups = [name for name in found.summary if name.startswith("group/") and not name.endswith("_survey")]
    assert ppo["avg_as"] == pytest.approx(ppo[groups].mean(), abs=1e-6)
    assert found.iterations["iteration"].tolist() == list(range(1, len(found.iterations) + 1))


def test_aggregate_is_the_rule_s_first_iteration():
    reward_GJ = np.array([[0.9, 0.2], [0.1, 0.4]])
    assert appa_flwr.aggregate(reward_GJ, "average").aggregate_J.tolist() == [0.5, pytest.approx(0.3)]
    assert appa_flwr.aggregate(reward_GJ.tolist(), rule="min").aggregate_J.tolist() == [0.1, 0.2]
    with pytest.raises(appa_flwr.UserError, match="unknown rule"):
        appa_flwr.aggregate(reward_GJ, "mean")
    with pytest.raises(appa_flwr.UserError, match="a row a group"):
        appa_flwr.aggregate([])
    with pytest.raises(appa_flwr.UserError, match="rewards: "):
        appa_flwr.aggregate([[0.9, np.nan], [0.1, 0.4]])
