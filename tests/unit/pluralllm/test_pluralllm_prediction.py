"""Target tables by either architecture: the right context, and the same numbers everywhere.

Axis letters: Q questions, N answered questions, R chosen questions.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from pluralllm.data import GroupData
from pluralllm.network import Questions
from pluralllm.prediction import GroupPredictor


@pytest.fixture(params=["attention", "residual"])
def model(request):
    return request.getfixturevalue(request.param)


def of(model, table, num_context=512, *, seed=0) -> GroupPredictor:
    return GroupPredictor(model, table, num_context=num_context, seed=seed)


@pytest.mark.parametrize("num_context", [0, 1, 2, 7, 20, 64])
def test_a_table_holds_distributions(model, data, table, num_context):
    predicted = of(model, table, num_context).targets(data)
    assert (predicted.shape, predicted.dtype) == (table.option_QK.shape, np.float64)
    np.testing.assert_allclose(predicted.sum(1), 1.0)
    assert (predicted[~table.option_QK] == 0).all()
    assert (predicted[table.option_QK] > 0).all()


def test_the_context_are_the_first_in_order_that_are_not_the_question_itself(attention, data, table):
    """One question at a time, by the network alone."""
    ours, public = of(attention, table, 8), (table.embedding_QKE, table.option_QK)
    for draw in range(2):
        targets, order = ours.targets(data, context_seed=draw), ours.context_order(data, context_seed=draw)
        for question in range(len(table.option_QK)):
            rows = np.array([row for row in order if data.question_N[row] != question][:8])
            known = (*(part[data.question_N[rows]] for part in public), data.answer_NK[rows])
            with torch.no_grad():
                context = Questions(*(torch.from_numpy(part)[None] for part in known))
                target = Questions(*(torch.from_numpy(part[question])[None, None] for part in public))
                log_p = attention(context, target)
            np.testing.assert_allclose(targets[question], log_p[0, 0].exp().numpy(), atol=1e-5)


def test_the_residual_knows_the_first_in_order_alone(residual, data, table):
    ours = of(residual, table, 8)
    rows = np.sort(ours.context_order(data)[:8])
    first = GroupData(data.group, data.question_N[rows], data.answer_NK[rows])
    np.testing.assert_allclose(ours.targets(data), of(residual, table).targets(first), atol=2e-6)


def test_a_questions_own_answer_never_reaches_its_prediction(model, data, table):
    """The context is all the group has, so any other question's prediction must notice the change."""
    before = of(model, table).targets(data)
    for place in (0, 7, 19):
        own = data.question_N[place]
        answer_NK = data.answer_NK.copy()
        size = table.option_QK[own].sum()
        answer_NK[place, :size] = answer_NK[place, :size][::-1] ** 2 / (answer_NK[place, :size] ** 2).sum()
        change_Q = np.abs(of(model, table).targets(replace(data, answer_NK=answer_NK)) - before).max(axis=1)
        assert change_Q[own] < 1e-9
        assert (np.delete(change_Q, own) > 1e-7).all()


def test_context_depends_on_seed_group_and_draw_and_on_no_process(attention, table, data):
    ours = of(attention, table, 8)
    orders = [
        ours.context_order(data).tolist(),
        ours.context_order(data, context_seed=1).tolist(),
        ours.context_order(replace(data, group="There")).tolist(),
        of(attention, table, 8, seed=1).context_order(data).tolist(),
    ]
    assert len({tuple(sorted(order)) for order in orders}) == len(orders)
    assert orders[0] == [18, 8, 9, 13, 7, 5, 19, 16, 6]


def test_order_of_questions_changes_nothing(attention, data, table):
    order = np.random.default_rng(3).permutation(len(table.option_QK))
    place = np.argsort(order)  # where an old row went
    questions = tuple(table.questions[q] for q in order)
    parts = {name: getattr(table, name)[order] for name in ("train_Q", "embedding_QKE", "option_QK")}
    shuffled = replace(table, questions=questions, **parts)
    moved = place[data.question_N]
    ascending = np.argsort(moved)
    same = GroupData("Here", moved[ascending], data.answer_NK[ascending])
    after = of(attention, shuffled, 8).targets(same)
    np.testing.assert_allclose(after, of(attention, table, 8).targets(data)[order], atol=2e-6)


def test_too_few_answers_give_the_mean(attention, residual, data, table):
    """What a single answer tells the residual may be chance."""
    for model, few in ((attention, 0), (residual, 1)):
        mean = of(model, table, 0, seed=5).targets(data)
        np.testing.assert_allclose(of(model, table).targets(data.first(few)), mean, atol=2e-6)
        assert np.abs(of(model, table).targets(data.first(few + 1)) - mean).max() > 1e-4


@pytest.mark.parametrize("rows", [[], [3], [0, 5, 6, 7, 21, 29]])
def test_chosen_questions_are_predicted_as_in_the_whole_table(model, data, table, rows: list[int]):
    """All answers are context, so the chosen questions are both within it and outside."""
    whole = of(model, table).targets(data)
    chosen_1RK = of(model, table).choices(data, np.array(rows, dtype=np.int64), (None,))
    np.testing.assert_allclose(chosen_1RK, whole[None, rows], atol=2e-6)
