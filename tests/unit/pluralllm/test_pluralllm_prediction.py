"""Target tables: the right context, the same numbers everywhere, and scores beside the baselines.

Axis letters: G groups, Q questions, K options, N answered questions, C context questions, E embedding.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from pluralllm.attention import FewShotAttention
from pluralllm.data import GroupData, OptionEmbedding
from pluralllm.network import Questions
from pluralllm.prediction import Predictor

Q, K, E = 40, 3, 6
IDS = tuple(f"question {q}" for q in range(Q))


@pytest.fixture
def table() -> OptionEmbedding:
    rng = np.random.default_rng(0)
    option_QK = np.arange(K) < rng.integers(2, K + 1, size=(Q, 1))
    value_QKE = (rng.normal(size=(Q, K, E)) * option_QK[..., None]).astype(np.float32)
    return OptionEmbedding(IDS, value_QKE, option_QK)


@pytest.fixture
def data(table: OptionEmbedding) -> GroupData:
    rng = np.random.default_rng(1)
    rows = np.sort(rng.permutation(Q)[:25]).astype(np.int64)
    weight_NK = rng.random((25, K)) * table.option_QK[rows]
    return GroupData("Here", rows, (weight_NK / weight_NK.sum(1, keepdims=True)).astype(np.float32))


@pytest.fixture
def model() -> FewShotAttention:
    torch.manual_seed(2)
    network = FewShotAttention(E, 16, num_blocks=2, num_heads=2)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape))
    return network


def of(model, table, num_context, *, seed=0) -> Predictor:
    return Predictor(model, table, np.ones(Q, dtype=np.bool_), num_context=num_context, seed=seed)


@pytest.mark.parametrize("num_context", [0, 1, 8, 24, 25, 64])
def test_table_holds_distributions(model, data, table, num_context):
    predicted = of(model, table, num_context).targets(data)
    assert (predicted.shape, predicted.dtype) == ((Q, K), np.float64)
    np.testing.assert_allclose(predicted.sum(1), 1.0)
    assert (predicted[~table.option_QK] == 0).all()


def test_table_agrees_with_one_question_at_a_time(model, data, table):
    """The context of a question are the first 8 in order that are not the question itself."""
    ours = of(model, table, 8)
    targets = [ours.targets(data, draw=draw) for draw in range(3)]
    public = table.value_QKE, table.option_QK
    for question in range(Q):
        for draw in range(3):
            order = ours.context_order(data, draw=draw)
            rows = np.array([row for row in order if data.question_N[row] != question][:8])
            known = (*(part[data.question_N[rows]] for part in public), data.answer_NK[rows])
            with torch.no_grad():
                context = Questions(*(torch.from_numpy(part)[None] for part in known))
                target = Questions(*(torch.from_numpy(part[question])[None, None] for part in public))
                log_p = model(context, target)
            np.testing.assert_allclose(targets[draw][question], log_p[0, 0].exp().numpy(), atol=1e-5)


def test_a_questions_own_answer_never_reaches_its_prediction(model, data, table):
    """The context is all the group has, so any other question's prediction must notice the change."""
    before = of(model, table, 25).targets(data)
    for place in (0, 7, 24):
        answer_NK = data.answer_NK.copy()
        answer_NK[place, :2] = (0.0, 1.0) if answer_NK[place, 0] > 0.5 else (1.0, 0.0)
        answer_NK[place, 2:] = 0.0
        after = of(model, table, 25).targets(replace(data, answer_NK=answer_NK))
        own = data.question_N[place]
        np.testing.assert_array_equal(after[own], before[own])
        others = np.delete(np.arange(Q), own)
        assert (np.abs(after - before).max(axis=1)[others] > 1e-7).all()


def test_context_depends_on_seed_group_and_draw_and_on_no_process(model, table, data):
    ours = of(model, table, 8)
    found = [
        ours.context_order(data).tolist(),
        ours.context_order(data, draw=1).tolist(),
        ours.context_order(replace(data, group="There")).tolist(),
        of(model, table, 8, seed=1).context_order(data).tolist(),
    ]
    assert len({tuple(sorted(order)) for order in found}) == len(found)
    assert found[0] == [9, 20, 4, 21, 5, 0, 6, 23, 14]


def test_order_of_questions_changes_nothing(model, data, table):
    order = np.random.default_rng(3).permutation(Q)
    place = np.argsort(order)  # where an old row went
    shuffled = OptionEmbedding(tuple(IDS[q] for q in order), table.value_QKE[order], table.option_QK[order])
    moved = place[data.question_N]
    ascending = np.argsort(moved)
    same = GroupData("Here", moved[ascending], data.answer_NK[ascending])
    before = of(model, table, 8).targets(data)
    after = of(model, shuffled, 8).targets(same)
    np.testing.assert_allclose(after, before[order], atol=2e-6)


def test_a_group_without_answers_gets_the_prior(model, data, table):
    prior = of(model, table, 8).targets(data.first(0))
    found = of(model, table, 0, seed=5).targets(data)
    np.testing.assert_allclose(prior, found, atol=2e-6)


@pytest.mark.parametrize("rows", [[], [3], [0, 5, 6, 7, 21, 39]])
def test_chosen_questions_are_predicted_as_in_the_whole_table(model, data, table, rows: list[int]):
    """All answers are context, so the chosen questions are both within it and outside."""
    whole = of(model, table, 25).targets(data)
    found = of(model, table, 25).choices(data, np.array(rows, dtype=np.int64), (None,))
    np.testing.assert_allclose(found, whole[None, rows], atol=2e-6)
