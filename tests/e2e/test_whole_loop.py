"""The whole loop in one process: rankings, real answers, the paper's architectures as downloaded, PluralLLM alone."""

import json
import math
import re
from typing import get_args

import families
import pandas as pd
import pytest
import torch
from audit import asked_for
from nodes import InProcessGrid, deployed
from pretended_cuda import pretended_cuda
from runs import Killed, looped, read_every_answer, run_of
from safetensors.torch import load_file
from small import SMALLEST, VALUE_MODEL, lines_of
from transformers import AutoTokenizer

from appa_flwr import load_run, loaded
from appa_flwr.config import THREADS, Config
from appa_flwr.owner.owner_policy import Leaving
from appa_flwr.protocol import messages, queries
from appa_flwr.report.page import missing
from appa_flwr.run.read import read_run
from appa_flwr.run.records import TRIVIAL_BASELINES
from appa_flwr.run.schema import PROGRESS, WEIGHTS_FILE
from appa_flwr.survey import store
from appa_flwr.survey.generate import generate
from appa_flwr.survey.store import write_split
from pluralllm.residual import SHARES, SHARES_KEY
from server_app import evaluation
from server_app.policy.ppo import PPOEngine
from server_app.questions import build_catalogue, run_survey

LEARNING = {
    **VALUE_MODEL,
    "policy.prompt-style": "full",
    "policy.tuning": "lora",
    "sft.learning-rate": 1e-2,
    "ppo.learning-rate": 1e-2,
}


def test_the_ranking_task(tmp_path, monkeypatch, appa):
    read_every_answer(monkeypatch)
    read_every_answer(monkeypatch, loaded)
    monkeypatch.setattr(evaluation, "BATCH_SIZE", 5)  # the twelve held-out questions in three passes
    ranking = {"task": "opa", "rule": "min", "data.num-questions": 60, "data.disagreement": 1.0, "eval.ceilings": True}
    folder = run_of(tmp_path, **ranking).run_folder
    rows = {(row["method"], row["metric"]) for row in json.loads((folder / "summary.json").read_text())}
    assert rows == {(method, "borda") for method in ("base", "sft", "ppo", *TRIVIAL_BASELINES)}
    for line in lines_of(folder):
        assert line["fell_back"] is None  # `min` has no threshold
        assert sum(line["weights"].values()) == pytest.approx(1.0)
    score_K = load_run(folder).policy().ask("Which?", "xyz").prediction  # 3 for the option that it puts first
    said = appa("ask", folder, "Which?", "--options", "x,y,z")
    places = [re.search(rf"│ {option}\W+(\d)", said)[1] for option in "xyz"]
    assert places == [f"{4 - score:.0f}" for score in score_K]


def killed_in_the_second_iteration(patched):
    """Once."""
    rollout, seen = PPOEngine.rollout, []

    def dying(self, prompts):
        seen.append(prompts)
        if len(seen) == 2:
            raise Killed
        return rollout(self, prompts)

    patched.setattr(PPOEngine, "rollout", dying)


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
        # as the preset `paper` has it
        ("gemma2", {"policy.tuning": "qlora", "policy.compute-dtype": "bfloat16"}),
        ("llama", {"policy.tuning": "qlora"}),
        ("qwen3", {}),
    ],
    ids=["gemma2", "llama", "qwen3"],
)
def test_the_whole_loop_of_each_family_on_a_gpu(name, keys, tmp_path, monkeypatch, capsys):
    """On a pretended one, where a tensor left on the host is an error; one is stopped in its second iteration."""
    decoded, threads, sample = [], [], evaluation.sample

    def kept(*given, **named):
        threads.append(torch.get_num_threads())
        decoded.append(sample(*given, **named))
        return decoded[-1]

    monkeypatch.setenv(THREADS, "3")

    monkeypatch.setattr(evaluation, "sample", kept)
    read_every_answer(monkeypatch)
    stopped = name == "gemma2"
    questions = build_catalogue(Config.load(SMALLEST)).questions
    keys = LEARNING | keys | {"model": str(families.save(name, tmp_path / "model", questions))}
    with pretended_cuda():
        if stopped:
            killed_in_the_second_iteration(monkeypatch)
            with pytest.raises(Killed):
                run_of(tmp_path, **keys)
        config = run_of(tmp_path, **keys, **{"run.resume": stopped})
        assert decoded[-1].logprob_JT.is_cuda
    assert {*threads} == {3}  # not the one thread of the tiny model
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

    tokenizer = AutoTokenizer.from_pretrained(folder / "policy")
    assert tokenizer.pad_token == families.FAMILIES[name].pad
    if name == "qwen3":  # as the card says; the others have four bits, which compute otherwise without a GPU
        monkeypatch.chdir(folder)
        capsys.readouterr()
        (code,) = re.findall(r"```python\n(.+?)```", (folder / "policy" / "README.md").read_text(), flags=re.DOTALL)
        exec(code, space := {})
        rows = decoded[-1].sequences
        asked = [*rows.prefix_C.tolist(), *rows.prompt_JP[0][rows.prompt_mask_JP[0]].tolist()]
        assert space["tokens"]["input_ids"].tolist() == [asked]
        answer = space["row"][len(asked) :]
        assert answer[0] == rows.response_JT[0, 0]  # of later tokens rounding may decide
        assert capsys.readouterr().out == f"{tokenizer.decode(answer, skip_special_tokens=True)}\n"


def layouts_of(folder):
    """Everything that a run measured, without the seconds that it took and the messages, which are one a node."""
    lines = [{**line, "seconds": None, "traffic": None} for line in lines_of(folder)]
    return lines, json.loads((folder / "summary.json").read_text()), pd.read_parquet(folder / "scores.parquet")


def test_a_deployment_gives_the_simulation_s_numbers_digit_for_digit(tmp_path, monkeypatch):
    """Nodes with a file each whose owners allow everything, and a simulation of the same groups in the same order."""
    read_every_answer(monkeypatch)
    keys = {**SMALLEST, **VALUE_MODEL, "eval.ceilings": True, "run.output-dir": str(tmp_path / "runs")}
    survey = generate(num_questions=80, num_groups=3, seed=5)
    store.write(survey, whole := tmp_path / "whole.jsonl")
    written = write_split(survey, tmp_path / "split")
    keys["groups"] = "; ".join(survey.groups)
    simulation = Config.load({**keys, "survey": str(whole), "run-name": "simulated"})
    deployment = Config.load({**keys, "survey": str(written.questions), "run-name": "deployed"})
    looped(simulation, 2)
    everything = f"may-leave = {json.dumps(get_args(Leaving))}"
    looped(deployment, InProcessGrid(deployed(deployment, written.groups, owner_policy=everything)))
    ours, theirs = (layouts_of(config.run_folder) for config in (deployment, simulation))
    assert ours[:2] == theirs[:2]
    assert len({line["reward"] for line in ours[0]}) == SMALLEST["ppo.num-iterations"]
    pd.testing.assert_frame_equal(ours[2], theirs[2], check_exact=True)


# --- `phases = "pluralllm"`, and its checkpoint in another run ---


def alone(folder, name, *, reported=False, **keys):
    """A run until PluralLLM on three nodes: its config, its card and the kinds of all requests."""
    places = {"run.phases": "pluralllm", "run.output-dir": str(folder), "run-name": name}
    grid = looped(config := Config.load(SMALLEST | places | keys), 3, reported=reported)
    assert not any(reply.message.has_error() for reply in grid.replies)
    return config, json.loads((config.run_folder / "pluralllm.json").read_text()), {*map(asked_for, grid.requests)}


def test_the_predictor_alone_joins_trains_scores_and_ends(tmp_path):
    config, card, kinds = alone(tmp_path, "first", reported=True)
    setup = (messages.HELLO, messages.CATALOGUE, messages.TARGETS)
    assert kinds == {*setup, queries.UPDATE, queries.VALIDATION, queries.SCORES}
    phases = list(dict.fromkeys(line.phase for line in PROGRESS.read(config.run_folder)))
    assert phases == ["machine", "survey", "join", "pluralllm", "targets", "report"]
    assert (config.run_folder / "report.html").exists()
    assert not (config.run_folder / "policy").exists()
    found = read_run(config.run_folder)
    assert [*missing(found)] == []
    assert len(found.pluralllm.losses) == config.pluralllm.rounds
    assert found.pluralllm.scores.keys() == {"pluralllm", "uniform", "nearest-question"}
    assert card["survey"]["groups"].keys() == card["groups"].keys() == set(run_survey(config).groups)
    shares = tuple(load_file(config.run_folder / WEIGHTS_FILE)[SHARES_KEY].tolist())
    assert shares in SHARES
    (text,) = [line.message for line in PROGRESS.read(config.run_folder) if (line.phase, line.step) == ("targets", 1)]
    assert text.endswith("features count {:g}, the view without a network {:g}".format(*shares))


def test_a_checkpoint_of_the_attention_stands_for_pretraining(tmp_path):
    """As that of the residual, by which `keys.toml` has a row."""
    keys = {"pluralllm.architecture": "attention"}
    first, card, _ = alone(tmp_path, "first", **keys)
    path = first.run_folder / WEIGHTS_FILE
    assert card["training"].items() >= keys.items()
    assert SHARES_KEY not in load_file(path)
    second, again, kinds = alone(tmp_path, "second", **{"pluralllm.checkpoint": str(path)}, **keys)
    assert queries.UPDATE not in kinds
    assert queries.SCORES in kinds  # they are those of the first run, for the cards are the same
    # the run can be carried away and serve others in turn
    assert (second.run_folder / WEIGHTS_FILE).read_bytes() == path.read_bytes()
    assert again == card
