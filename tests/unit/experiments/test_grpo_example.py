"""The GRPO example: what it teaches, what it scores, what it writes.

Axis letters: G groups, Q questions, K options.
"""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from appa_flwr.config import Config, assemble
from appa_flwr.core.errors import UserError
from appa_flwr.survey.generate import ground_truth
from experiments import grpo
from server_app import evaluation
from server_app.federation.answers import Answers
from server_app.serve import rule_rounds

pytestmark = pytest.mark.long

STEPS = 2
GROUPS = ("Avaria", "Belmora", "Castria")
KEYS = (
    "data.num-questions=40",
    "data.num-groups=3",
    "policy.base-steps=20",
    "sft.steps=2",
    "rollout.batch-size=16",
    "rollout.response-length=12",
    "rule=min",
)


def random_answers(task, texts, question_J, catalogue):
    """What so little trained a model would have said, had it learned to write answers."""
    option_JK = catalogue.option_QK[question_J]
    share_JK = np.random.default_rng(1).random(option_JK.shape) * option_JK
    parsed_J = np.ones(len(texts), dtype=bool)
    return Answers(question_J, tuple(texts), share_JK / share_JK.sum(1, keepdims=True), parsed_J * 1.0, parsed_J)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run in small: its config, scores, lines of progress and folder, and what GRPO asked and left."""
    out = tmp_path_factory.mktemp("grpo")
    config = assemble(None, [*grpo.DEFAULTS, *KEYS], folder=None)
    run = SimpleNamespace(config=config, lines=[], out=out / "results", here=tmp_path_factory.mktemp("here"))
    train, score, asked = grpo.train, grpo.LocalGroups.score, []

    def watched(model, *arguments, **keys):
        before = len(asked)
        log = train(model, *arguments, **keys)
        run.asked = asked[before:]
        run.weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        return log

    def scored(groups, request, **keys):
        asked.append(request.question_J)
        return score(groups, request, **keys)

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(run.here)
        # A tiny policy that another file of this worker built would be taken from the cache, without progress.
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(grpo, "train", watched)
        patch.setattr(grpo.LocalGroups, "score", scored)
        patch.setattr(rule_rounds, "parse_answers", random_answers)
        scores = grpo.run(config, steps=STEPS, out=run.out, say=run.lines.append)
    run.scores = {row.method: row for row in scores}
    run.setup = grpo.set_up(config, lambda line: None)
    run.written = json.loads((run.out / "grpo.json").read_text())
    return run


def test_the_table_holds_the_methods_and_the_frame_to_read_them_in(finished):
    scores = finished.scores
    assert list(scores) == ["base", "sft", "grpo", "uniform", "ceiling-average", "ceiling-min"]
    for row in scores.values():
        assert row.avg_as <= scores["ceiling-average"].avg_as
        assert row.min_as <= scores["ceiling-min"].min_as + 1e-4
        assert 0 <= row.min_as <= row.avg_as
    assert scores["uniform"].format_score is None
    uniform = grpo.table(list(scores.values())).splitlines()[5]
    assert uniform.startswith("| uniform | 0.")
    assert uniform.endswith("| - |")


def test_scores_are_of_held_out_questions_against_the_true_distributions(finished):
    catalogue, scores = finished.setup.catalogue, finished.scores
    _, truth = ground_truth(num_questions=40, num_groups=3, seed=0)
    held_out = [q for q, train in zip(catalogue.questions, catalogue.train_Q, strict=True) if not train]
    assert 0 < len(held_out) < 20
    group_means = []
    for by_question in truth.values():
        rewards = []
        for question in held_out:  # 1 - JSD in base 2, in the form with entropies
            p_K = by_question[question.question_id]
            u_K = np.full(len(p_K), 1 / len(p_K))
            entropy = lambda x_K: -np.sum(x_K * np.log2(x_K))  # noqa: E731
            rewards.append(1 - entropy((p_K + u_K) / 2) + entropy(p_K) / 2 + entropy(u_K) / 2)
        group_means.append(np.mean(rewards))
    assert scores["uniform"].avg_as == pytest.approx(np.mean(group_means))
    assert scores["uniform"].min_as == pytest.approx(np.min(group_means))


def test_only_training_questions_are_trained_on(finished):
    assert [len(question_J) for question_J in finished.asked] == [16] * STEPS
    for question_J in finished.asked:
        assert set(question_J) <= set(finished.setup.train_J.tolist())
        assert set(np.unique(question_J, return_counts=True)[1]) == {grpo.COMPLETIONS_PER_QUESTION}


def test_progress_is_shown_and_the_result_written(finished):
    written = finished.written
    assert written["steps"] == STEPS
    assert written["config"] == finished.config.flat()
    assert [row["method"] for row in written["scores"]] == list(finished.scores)
    assert [line["step"] for line in written["log"]] == [1, 2]
    steps = [line for line in finished.lines if line.startswith("GRPO step")]
    for number, (line, logged) in enumerate(zip(steps, written["log"], strict=True), start=1):
        rewards = [logged[f"group_reward/group/{name}"] for name in GROUPS]
        means = f"reward {np.mean(rewards):.3f}, worst group {min(rewards):.3f}, aggregate {logged['reward']:.3f}"
        assert line.startswith(f"GRPO step {number}/{STEPS}: {means}")
    assert any("building the tiny policy" in line and "20/20" in line for line in finished.lines)
    assert (finished.out / "grpo.png").read_bytes().startswith(b"\x89PNG")
    assert not list(finished.out.glob(".*"))
    assert not list(finished.here.iterdir())  # the folder it was called from


def test_the_saved_policy_is_the_trained_one_and_the_scored_one(finished):
    setup, weights = finished.setup, finished.weights
    method, start = (
        AutoModelForCausalLM.from_pretrained(finished.out / name).eval() for name in ("policy", "sft-model")
    )
    assert all((p == weights[name]).all() for name, p in method.named_parameters())
    assert any((p != weights[name]).any() for name, p in start.named_parameters())
    given = {"prompts": setup.prompts, "question_J": setup.test_J, "catalogue": setup.catalogue}
    answers = evaluation.greedy_answers(method, setup.base, finished.config, **given)
    assert grpo.score("grpo", answers, setup) == finished.scores["grpo"]


def test_with_adapters_grpo_begins_at_a_whole_model(finished, tmp_path):
    keys = {**finished.config.flat(), "policy.tuning": "lora", "sft.steps": 2}
    setup = replace(finished.setup, config=Config.load(keys))
    model = grpo.fine_tuned(setup, tmp_path / "sft", finished.lines.append)
    assert (tmp_path / "sft" / "adapter_config.json").exists()
    base = dict(AutoModelForCausalLM.from_pretrained(setup.base.source).named_parameters())
    changed = {name: not torch.equal(p, base[name]) for name, p in model.named_parameters()}
    assert changed.keys() == base.keys()
    assert changed["model.layers.0.self_attn.q_proj.weight"]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"survey": "globalqa.jsonl"}, "generated population only"),
        (
            {"rollout.batch-size": 12, "rollout.answers-per-question": 4, "ppo.num-mini-batches": 1},
            "rollout.batch-size = 12: must be a multiple of 8",
        ),
    ],
)
def test_what_it_cannot_do_is_said_at_once(keys, said, tmp_path):
    with pytest.raises(UserError, match=said):
        grpo.run(Config.load(keys), steps=1, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_mistyped_rule_is_named():
    with pytest.raises(UserError, match="average"):
        grpo.main(rule="averge")
