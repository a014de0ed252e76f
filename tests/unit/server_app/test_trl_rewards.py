"""The groups' reward for TRL's trainers: what it returns, what it remembers, and two steps of GRPO and of RLOO on it.

Axis letters: G groups, Q questions, K options.
"""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from datasets import Dataset
from fakes import catalogue_of, federated, scoring_node
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from appa_flwr.analysis import aggregation
from appa_flwr.core.errors import UserError
from client_app import scoring
from server_app.models import tiny
from server_app.models.tiny import TinyRecipe
from server_app.trl_rewards import GroupRewards, LocalGroups

CATALOGUE = catalogue_of([2, 2, 3], train=[True, True, False])
TABLES = {
    "A": np.array([[0.6, 0.4, 0.0], [0.5, 0.5, 0.0], [0.2, 0.3, 0.5]]),
    "B": np.array([[0.4, 0.6, 0.0], [0.8, 0.2, 0.0], [0.5, 0.3, 0.2]]),
}
DECAY = 0.8


def table_scorer(table_QK):
    return partial(scoring.score, side_QK=table_QK, option_QK=CATALOGUE.option_QK)


def recorded(requests):
    """A scorer of A that keeps what it was asked."""
    return lambda request: requests.append(request) or table_scorer(TABLES["A"])(request)


def local_groups(**scorers):
    return LocalGroups({name: table_scorer(table_QK) for name, table_QK in TABLES.items()} | scorers)


def build(rule="average", *, groups=None, metric="wasserstein", kind=GroupRewards, **keys):
    made = aggregation.make(rule, ema_decay=DECAY)
    return kind(groups or local_groups(), made, catalogue=CATALOGUE, metric=metric, **keys)


def ask(rewards, completions, question_id, **columns):
    given = {"prompts": ["?"] * len(completions), "completions": completions, "question_id": question_id}
    return asyncio.run(rewards.group_reward(**given, **columns))


# With two options Wasserstein is 1 - |p1 - t1|. "0.70,0.30" to Q0: A (.6, .4) gives 0.9, B (.4, .6) gives 0.7.
# "0.90,0.10" to Q1: A (.5, .5) gives 0.6, B (.8, .2) gives 0.9. Both are written as asked for, format 1, so
# the training rewards are 0.85 r + 0.15: A 0.915 and 0.66, B 0.745 and 0.915.
TWO = ["0.70,0.30", "0.90,0.10"]
TWO_QUESTIONS = ["Q0", "Q1"]
MEAN_OF_TWO = [0.83, 0.7875]
LEAST_OF_TWO = [0.745, 0.66]
OF_A_ALONE = [0.915, 0.66]


def message(*contents):
    return [{"role": "assistant", "content": content} for content in contents]


@pytest.mark.parametrize(
    ("settings", "completions", "names", "expected"),
    [
        ({}, TWO, TWO_QUESTIONS, MEAN_OF_TWO),
        ({"rule": "min"}, TWO, TWO_QUESTIONS, LEAST_OF_TWO),
        ({}, TWO[::-1], TWO_QUESTIONS[::-1], MEAN_OF_TWO[::-1]),
        ({}, ["no idea", TWO[1]], TWO_QUESTIONS, [0.0, MEAN_OF_TWO[1]]),
        ({"alignment_weight": 1.0}, TWO, TWO_QUESTIONS, [0.8, 0.75]),
        # conversations count by their last message, whose parts may be given apart
        ({}, [message("1.00,0.00", text) for text in TWO], TWO_QUESTIONS, MEAN_OF_TWO),
        ({}, [message([{"type": "text", "text": text}]) for text in TWO], TWO_QUESTIONS, MEAN_OF_TWO),
    ],
)
def test_two_groups_and_two_answers_by_hand(settings, completions, names, expected):
    assert ask(build(**settings), completions, names) == pytest.approx(expected)


def federation(*, min_groups, silent=()):
    nodes = {node: scoring_node({name: table_QK}) for node, (name, table_QK) in enumerate(TABLES.items())}
    return federated(nodes, CATALOGUE, min_groups=min_groups, silent=silent)


@pytest.mark.parametrize("groups", [local_groups, partial(federation, min_groups=2)])
def test_the_history_moves_once_a_call_with_local_groups_and_a_federation(groups):
    rewards = build("min", groups=groups())
    assert ask(rewards, TWO, TWO_QUESTIONS) == pytest.approx(LEAST_OF_TWO)
    # Mean alignment rewards: A (0.9 + 0.6) / 2 = 0.75, B (0.7 + 0.9) / 2 = 0.8; h = 0.2 of them.
    np.testing.assert_allclose(rewards.state.history_G, [0.15, 0.16])
    ask(rewards, TWO, TWO_QUESTIONS)
    np.testing.assert_allclose(rewards.state.history_G, [0.8 * 0.15 + 0.15, 0.8 * 0.16 + 0.16])
    assert rewards.rounds == 2


@pytest.mark.parametrize(
    "groups",
    [lambda: local_groups(B=lambda request: None), partial(federation, min_groups=1, silent=[1])],
)
def test_a_silent_group_is_left_out_and_keeps_its_history(groups):
    logged, rewards = {}, build("min", groups=groups())
    rewards.state = replace(rewards.state, history_G=np.array([0.15, 0.16]))
    assert ask(rewards, TWO, TWO_QUESTIONS, log_metric=logged.__setitem__) == pytest.approx(OF_A_ALONE)
    np.testing.assert_allclose(rewards.state.history_G, [0.8 * 0.15 + 0.15, 0.16])
    assert "group_reward/B" not in logged
    assert logged["group_reward/A"] == pytest.approx(0.75)


def test_what_is_logged():
    logged = {}
    ask(build(), ["0.70,0.30", "no idea"], ["Q0", "Q1"], log_metric=logged.__setitem__)
    # Alignment rewards: A 0.9 and 0, B 0.7 and 0. FI: (0.9, 0.7) has CoV 0.1 / 0.8, so 64 / 65; equal zeros count 1.
    assert logged == pytest.approx(
        {
            "group_reward/fairness_index": (64 / 65 + 1) / 2,
            "group_reward/format_score": 0.5,
            "group_reward/A": 0.45,
            "group_reward/B": 0.35,
        }
    )


@pytest.mark.parametrize(
    ("groups", "names", "message"),
    [
        (local_groups, None, "no column question_id"),
        (local_groups, ["Q0", "Q7"], r"question_id 'Q7'.*3 questions.*'Q0'"),
        (lambda: local_groups(A=lambda _: None, B=lambda _: None), TWO_QUESTIONS, "none of the groups A, B"),
        (partial(federation, min_groups=2, silent=[1]), TWO_QUESTIONS, "only 1 of 2 groups"),
        *[
            (partial(local_groups, B=lambda _, reply=reply: reply), TWO_QUESTIONS, r"'B'.*2 wasserstein .*in \[0, 1\]")
            for reply in ({}, *({"wasserstein": bad} for bad in ([0.5], [0.5, 1.5], [0.5, np.nan])))
        ],
    ],
)
def test_what_cannot_be_scored_is_named_and_nothing_is_lost(groups, names, message):
    rewards = build(groups=groups())
    with pytest.raises(UserError, match=message):
        ask(rewards, TWO, names)
    assert not rewards.state.answered_G.any()
    assert rewards.rounds == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"groups": LocalGroups({})}, "no groups"), ({"metric": "jss"}, "unknown metric of task 'dpa' 'jss'")],
)
def test_unusable_settings(settings, message):
    with pytest.raises(UserError, match=message):
        build(**settings)


def test_several_training_processes_are_refused(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(UserError, match="one training process; there are 2"):
        ask(build(), TWO, TWO_QUESTIONS)


def test_held_out_questions_are_scored_and_leave_no_trace():
    rewards = build()
    # "0.20,0.30,0.50" is A's own distribution of Q2. From B's (.5, .3, .2) it differs by .3 and .3 in the cumulative
    # shares, so 1 - 0.6 / 2 = 0.7. The mean of 1 and 0.85 * 0.7 + 0.15 = 0.745 is 0.8725.
    assert ask(rewards, ["0.20,0.30,0.50"], ["Q2"]) == pytest.approx([0.8725])
    assert not rewards.state.history_G.any()
    assert not rewards.state.answered_G.any()


def test_rankings():
    rewards = build(groups=LocalGroups({"A": table_scorer(TABLES["A"])}), metric=None, task="opa")
    # Q2 of A ranks C, B, A: the same ranking is worth 1
    assert ask(rewards, ["C,B,A"], ["Q2"]) == pytest.approx([1.0])
    assert ask(rewards, ["A,C,B"], ["Q2"])[0] < 0.5


def test_rounds_come_one_after_the_other_while_others_go_on():
    inside, most, ticks = [], [], []

    def slow(request):
        inside.append(threading.get_ident())
        most.append(len(inside))
        time.sleep(0.1)
        inside.pop()
        return table_scorer(TABLES["A"])(request)

    rewards = build(groups=LocalGroups({"A": slow}))

    async def other():
        for _ in range(5):
            await asyncio.sleep(0.01)
            ticks.append(bool(inside))

    async def both():
        calls = [
            rewards.group_reward(prompts=["?"], completions=[text], question_id=[name])
            for text, name in zip(TWO, TWO_QUESTIONS, strict=True)
        ]
        return await asyncio.gather(*calls, other())

    first, second, _ = asyncio.run(both())
    assert most == [1, 1]
    assert ticks == [True] * 5  # the other reward function went on while a group was scoring
    assert [*first, *second] == pytest.approx(OF_A_ALONE)
    # Both rounds are in the history, in one order or the other: 0.2 and 0.8 * 0.2 of 0.9 and 0.6
    expected = [0.2 * 0.6 + 0.16 * 0.9, 0.2 * 0.9 + 0.16 * 0.6]
    assert any(rewards.state.history_G[0] == pytest.approx(value) for value in expected)


def test_fresh_contexts_are_asked_for_by_round():
    requests = []
    for fresh in (False, True):
        rewards = build(groups=LocalGroups({"A": recorded(requests)}), fresh_context=fresh)
        for _ in range(2):
            ask(rewards, TWO, TWO_QUESTIONS)
    assert [request.draw for request in requests] == [0, 0, 1, 2]


STEPS, BATCH = 2, 4
SETTINGS = {
    "max_steps": STEPS,
    "per_device_train_batch_size": BATCH,
    "num_generations": 2,
    "max_completion_length": 4,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "dataloader_pin_memory": False,
}


class Dressed(GroupRewards):
    """A random model writes no answers, so the length of its noise decides which answer is scored in its place."""

    def __init__(self, *arguments, **keys):
        super().__init__(*arguments, **keys)
        self.returned = []

    async def group_reward(self, prompts, completions, **columns):
        shares = [len(text) % 10 / 10 for text in completions]
        dressed = [f"{share:.2f},{1 - share:.2f}" for share in shares]
        self.returned.append(await super().group_reward(prompts, dressed, **columns))
        return self.returned[-1]


@pytest.mark.parametrize(("trainer", "settings"), [(GRPOTrainer, GRPOConfig), (RLOOTrainer, RLOOConfig)])
def test_two_steps_of_trl_s_trainers(trainer, settings, tmp_path):
    recipe = TinyRecipe("dpa", steps=1, batch_size=2, hidden_size=32, num_layers=1, num_heads=2)
    built, tokenizer = tiny.build(recipe, CATALOGUE.questions)
    built.save_pretrained(tmp_path)  # RLOO loads its reference from where the model came from
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    requests = []
    rewards = build(groups=local_groups(A=recorded(requests)), kind=Dressed)
    rows = [{"prompt": q.text, "question_id": q.question_id} for q in CATALOGUE.questions[:2]]
    running = trainer(
        model,
        rewards.group_reward,
        settings(output_dir=str(tmp_path), **SETTINGS),
        Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    running.train()
    assert rewards.rounds == len(requests) == STEPS
    for request in requests:  # two completions of each question, in TRL's order
        assert sorted(request.question_J) == [0, 0, 1, 1]
    # The trainer's own log holds what came from the groups.
    lines = [line for line in running.state.log_history if "reward" in line]
    assert [line["rewards/group_reward/mean"] for line in lines] == pytest.approx(
        [np.mean(values) for values in rewards.returned]
    )
    history = 0.0
    for line in lines:
        history = DECAY * history + (1 - DECAY) * line["group_reward/A"]
    assert history > 0
    assert rewards.state.history_G[0] == pytest.approx(history)
    assert any(np.ptp(values) > 0 for values in rewards.returned)
    assert any(not torch.equal(before[name], p) for name, p in model.named_parameters())
