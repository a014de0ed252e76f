"""The whole loop in one process: rankings, real answers, and the paper's architectures as a download leaves them."""

from __future__ import annotations

import json
import math

import families
import numpy as np
import pytest
import torch
from fakes import ROUNDING
from peft import AutoPeftModelForCausalLM, PeftModel
from pretended_cuda import pretended_cuda
from real_surveys import GLOBALQA, needs_surveys
from safetensors.torch import load_file
from scipy.spatial.distance import jensenshannon
from transformers import AutoTokenizer
from whole_loop import SMALL, lines_of, read_every_answer, run_of

from appa_flwr.config import Config, split_names
from appa_flwr.config.sources import preset
from appa_flwr.protocol import formats
from appa_flwr.run.records import TRIVIAL_BASELINES
from server_app import evaluation
from server_app.policy.base import load_model
from server_app.policy.ppo import PPOEngine
from server_app.questions import build_catalogue


def test_the_ranking_task(tmp_path, monkeypatch):
    read_every_answer(monkeypatch)
    ranking = {"task": "opa", "rule": "min", "data.num-questions": 60, "data.disagreement": 1.0, "eval.ceilings": True}
    tiny = {"policy.prompt-style": "compact", "policy.tuning": "full"}
    config = run_of(tmp_path, **ranking, **tiny)
    folder = config.run_folder
    rows = {(row["method"], row["metric"]): row for row in json.loads((folder / "summary.json").read_text())}
    written = ("base", "sft", "ppo")
    assert rows.keys() == {(method, "borda") for method in (*written, *TRIVIAL_BASELINES)}
    assert all(rows[method, "borda"]["readable"] == 1 for method in (*written, *TRIVIAL_BASELINES))
    for line in lines_of(folder):
        assert line["fell_back"] is None  # `min` has no threshold
        assert sum(line["weights"].values()) == pytest.approx(1.0)


@needs_surveys
def test_real_answers_of_the_papers_countries_with_adapters(tmp_path):
    countries = split_names(str(preset("paper")["groups"]))
    real = {"survey": str(GLOBALQA), "groups": ";".join(countries), "data.max-questions": 60}
    tiny = {"policy.prompt-style": "compact", "sft.steps": 25, "ppo.response-length": 48}
    config = run_of(tmp_path, **real, **tiny)
    # Single digits make an answer to K options 5 K tokens, so nine options are the most that 48 tokens hold.
    public = build_catalogue(config)
    fits_Q = public.option_QK.sum(1) <= 9
    counts = json.loads((config.run_folder / "questions.json").read_text())
    assert counts["unanswerable"] == (~fits_Q).sum() > 0
    assert (counts["training"], counts["held_out"]) == (
        (fits_Q & public.train_Q).sum(),
        (fits_Q & ~public.train_Q).sum(),
    )
    policy = AutoPeftModelForCausalLM.from_pretrained(config.run_folder / "policy")
    learned = [p for name, p in policy.named_parameters() if "lora_B" in name]
    assert len(learned) == 21  # SFT's seven projections in each of three layers, and the policy's four among them
    assert all(p.abs().max() > 0 for p in learned)
    rows = json.loads((config.run_folder / "summary.json").read_text())
    assert all(tuple(row["per_group"]) == countries for row in rows)
    assert all(tuple(line["rewards"]) == countries for line in lines_of(config.run_folder))
    # The uniform answer against the countries' own answers, straight from the file.
    held_out = {public.questions[q].question_id for q in np.flatnonzero(fits_Q & ~public.train_Q)}
    rewards = {name: [] for name in countries}
    for line in GLOBALQA.read_text().splitlines():
        row = json.loads(line)
        if row["group"] in rewards and row["question_id"] in held_out:
            # "Missing; Not asked" and the like are no answers.
            pairs = zip(row["options"], row["distribution"], strict=True)
            shares = [share for option, share in pairs if "missing" not in option.lower()]
            rewards[row["group"]].append(1 - jensenshannon([1] * len(shares), shares, base=2) ** 2)
    assert 0 < len(held_out) < len(public.questions) == 60
    (uniform,) = [row for row in rows if (row["method"], row["metric"]) == ("uniform", "js")]
    for name, found in rewards.items():
        if found:
            assert uniform["survey"]["per_group"][name] == pytest.approx(sum(found) / len(found), abs=1e-9)


class Killed(BaseException):
    """Nothing that a run could catch."""


def killed_in_the_second_iteration(patched):
    """Once."""
    rollout, seen = PPOEngine.rollout, []

    def dying(self, prompts):
        seen.append(prompts)
        if len(seen) == 2:
            raise Killed
        return rollout(self, prompts)

    patched.setattr(PPOEngine, "rollout", dying)


EXACT = {"policy.compute-dtype": "float32"}


def test_a_gpu_refuses_what_lies_on_the_host():
    with pretended_cuda():
        there = torch.ones(2, device="cuda")
        with pytest.raises(RuntimeError, match="two devices"):
            there + torch.ones(2)
        with pytest.raises(TypeError, match=r"Use Tensor\.cpu\(\)"):
            there.numpy()


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        # as the preset `paper` has it; the others in 32 bits on every processor, so that their answers can be told
        ("gemma2", {"policy.tuning": "qlora", "policy.compute-dtype": "bfloat16"}),
        ("llama", EXACT | {"policy.tuning": "qlora"}),
        ("qwen3", EXACT),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_whole_loop_of_each_family_on_a_gpu(name, keys, tmp_path, monkeypatch):
    """On a pretended one, where a tensor left on the host is an error; one is stopped in its second iteration."""
    decoded, sample = [], evaluation.sample

    def kept(*given, **named):
        decoded.append(sample(*given, **named))
        return decoded[-1]

    monkeypatch.setattr(evaluation, "sample", kept)
    read_every_answer(monkeypatch)
    stopped = name == "gemma2"
    questions = build_catalogue(Config.load(SMALL)).questions
    keys = keys | {"model": str(families.save(name, tmp_path / "model", questions))}
    with pretended_cuda():
        if stopped:
            killed_in_the_second_iteration(monkeypatch)
            with pytest.raises(Killed):
                run_of(tmp_path, **keys)
        config = run_of(tmp_path, **keys, **{"run.resume": stopped})
        assert decoded[-1].logprob_JT.is_cuda
    folder = config.run_folder
    lines = lines_of(folder)
    assert [line["iteration"] for line in lines] == [1, 2]
    assert all(math.isfinite(line[key]) for line in lines for key in ("policy_loss", "value_loss", "kl"))
    assert abs(lines[0]["kl"]) < 1e-2  # the policy begins as the reference
    assert lines[1]["kl"] != lines[0]["kl"]  # and leaves it

    described = json.loads((folder / "policy" / "adapter_config.json").read_text())
    assert described["base_model_name_or_path"] == config.model
    projections = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert set(described["target_modules"]) == projections  # SFT's and the policy's in one, not the value's
    saved = load_file(folder / "policy" / "adapter_model.safetensors")
    assert len(saved) == 2 * len(projections) * 2  # layers, projections, factors
    assert all(tensor.any() for tensor in saved.values())

    base = load_model(config, config.model, quantized=config.policy.tuning == "qlora")
    loaded = PeftModel.from_pretrained(base, folder / "policy").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "policy")
    assert tokenizer.pad_token == families.FAMILIES[name].pad
    in_force = {key: value for key, value in loaded.state_dict().items() if "lora_" in key}
    for key, tensor in saved.items():
        assert torch.equal(in_force[key.replace(".weight", ".default.weight")], tensor)
    if config.policy.compute_dtype == "bfloat16":
        return
    questions = {question.text: question for question in build_catalogue(config).questions}
    examples = json.loads((folder / "examples.json").read_text())
    answers = decoded[-1]  # the last that was asked is the policy
    told = [answers.sequences.response_JT.cpu(), answers.sequences.mask_JT.cpu(), answers.logprob_JT.cpu()]
    assert len(examples) == len(told[0]) > 0
    for example, ids_T, mask_T, logprob_T in zip(examples, *told, strict=True):
        written_T = ids_T[mask_T]
        assert tokenizer.decode(written_T, skip_special_tokens=True) == example["ppo"]
        question = questions[example["question"]]
        text = formats.prompt("dpa", question.text, question.options, style="full")
        text = families.FAMILIES[name].opens + text
        ids = tokenizer(text + families.FAMILIES[name].closes, add_special_tokens=False, return_tensors="pt")
        whole = torch.cat([ids["input_ids"][0], written_T])
        with torch.no_grad():
            found_TV = loaded(whole[None]).logits[0, -len(written_T) - 1 : -1].log_softmax(-1)
        # Not which word comes out: at a near tie that is another one on another processor.
        torch.testing.assert_close(found_TV.gather(1, written_T[:, None])[:, 0], logprob_T[mask_T], **ROUNDING)
