"""The exact residual: against a dense Gaussian process by hand, leave-one-out by leaving out, and what has no answer.

Axis letters: Q questions, K options, N option tokens of the context, M those of the targets, P of either, E embedding.
"""

import logging
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch

from appa_flwr.config import Config
from appa_flwr.protocol.queries import Catalogue
from pluralllm import data as sizes
from pluralllm import residual as exact
from pluralllm.data import GroupData
from pluralllm.network import Questions
from pluralllm.prediction import GroupPredictor
from pluralllm.residual import PLAIN, SHARES, SHARES_KEY, START_SHARES, VIEWS, ExactResidual, Shares, View
from pluralllm.training import local_update, sample_episodes

Q, K, ANSWERED = 30, 4, 20  # of the fixtures
TRAINED = np.arange(Q) < 25


@pytest.fixture
def model(residual):
    return residual


def asked(table: Catalogue, rows: np.ndarray, answer: np.ndarray | None = None) -> Questions:
    """One episode of these questions."""
    given = None if answer is None else torch.from_numpy(answer)[None]
    return Questions(
        torch.from_numpy(table.embedding_QKE[rows])[None], torch.from_numpy(table.option_QK[rows])[None], given
    )


def of(model, table, num_context=512, trained_Q=TRAINED) -> GroupPredictor:
    return GroupPredictor(model, replace(table, train_Q=trained_Q), num_context=num_context, seed=0)


def dense(model: ExactResidual, table: Catalogue, data: GroupData, targets: np.ndarray, view: View):
    """Mean and variance of the targets' roots, token by token in NumPy, centred by an explicit projection."""
    read = model._read(asked(table, np.concatenate([data.question_N, targets])), view)
    root_P = read.root_P.numpy()
    rows = np.concatenate([data.question_N, targets])
    token = [(place, row, k) for place, row in enumerate(rows) for k in range(K) if table.option_QK[row, k]]
    if view.plain:
        np.testing.assert_allclose(root_P, [table.option_QK[row].sum() ** -0.5 for _, row, _ in token], rtol=1e-6)
    kernel = 4 if view.plain else 2 * view.features + view.blind
    value = table.embedding_QKE.astype(np.float64)
    weight, length = (
        np.exp(8.0 * raw[kernel].detach().numpy()) for raw in (model.log_weight.double(), model.log_length.double())
    )
    noise = float(np.exp(8.0 * model.log_noise[kernel].item()))

    def near(a: np.ndarray, b: np.ndarray, scale: float) -> float:
        a, b = a / np.linalg.norm(a), b / np.linalg.norm(b)
        return float(np.exp(-((a - b) ** 2).sum() / (2.0 * scale**2)))

    def place(row: int, k: int) -> float:
        return -1.0 + 2.0 * k / (table.option_QK[row].sum() - 1)

    covariance = np.zeros((len(token), len(token)))
    for i, (_, q, k) in enumerate(token):
        for j, (_, r, m) in enumerate(token):
            text = near(value[q, k, sizes.QUESTION_PART], value[r, m, sizes.QUESTION_PART], length[0])
            option = near(value[q, k, sizes.OPTION_PART], value[r, m, sizes.OPTION_PART], length[1])
            beside = float(np.exp(-((place(q, k) - place(r, m)) ** 2) / (2.0 * length[2] ** 2)))
            terms = [option, beside, option * beside]
            covariance[i, j] = text * (weight[:3] @ terms) + weight[3:] @ terms
    if view.features:
        feature = read.feature_PR.detach().double().numpy()
        covariance += feature @ feature.T
    centre = np.eye(len(token))
    for i, (a, row, _) in enumerate(token):
        for j, (b, _, _) in enumerate(token):
            if a == b:
                centre[i, j] -= 1.0 / table.option_QK[row].sum()
    covariance = centre @ covariance @ centre
    known = sum(int(table.option_QK[row].sum()) for row in data.question_N)
    answer_N = np.concatenate(
        [answer[table.option_QK[row]] for answer, row in zip(data.answer_NK, data.question_N, strict=True)]
    ).astype(np.float64)
    difference = centre[:known, :known] @ (np.sqrt(answer_N) - root_P[:known])
    solved = np.linalg.inv(covariance[:known, :known] + (noise + 1e-6) * np.eye(known))
    across = covariance[known:, :known]
    mean = across @ solved @ difference
    return mean, np.diag(covariance[known:, known:] - across @ solved @ across.T)


@pytest.mark.parametrize("view", VIEWS)
@torch.no_grad()
def test_the_residual_is_that_of_a_dense_gaussian_process(model, table, data, view):
    targets = np.setdiff1d(np.arange(Q), data.question_N)
    expected_mean, expected_variance = dense(model, table, data, targets, view)
    conditioned = model.condition(asked(table, data.question_N, data.answer_NK), view)
    mean, variance = conditioned.residual(model._read(asked(table, targets), view))
    assert np.abs(expected_mean).max() > 0.01
    np.testing.assert_allclose(mean.numpy(), expected_mean, atol=1e-6)
    np.testing.assert_allclose(variance.numpy(), np.maximum(expected_variance, 1e-6), atol=1e-6)


@pytest.mark.parametrize("trained", [True, False])
def test_a_kernel_in_blocks_is_the_whole_kernel(model, table, data, monkeypatch, trained):
    whole = of(model, table, trained_Q=TRAINED & trained).targets(data)
    sizes, kernel = [], ExactResidual._kernel
    monkeypatch.setattr(ExactResidual, "_kernel", lambda *of: sizes.append(len(of[1].tokens.size_S)) or kernel(*of))
    monkeypatch.setattr(exact, "WHOLE", 0)
    monkeypatch.setattr(exact, "BLOCK", 7)
    np.testing.assert_allclose(of(model, table, trained_Q=TRAINED & trained).targets(data), whole, rtol=1e-9)
    assert max(sizes) == 7


@pytest.mark.parametrize("view", VIEWS)
@torch.no_grad()
def test_leave_one_out_is_what_leaving_out_gives(model, table, data, view):
    found = model.condition(asked(table, data.question_N, data.answer_NK), view).left_out()
    for place in range(0, ANSWERED, 3):
        rest = np.delete(np.arange(ANSWERED), place)
        others = model.condition(asked(table, data.question_N[rest], data.answer_NK[rest]), view)
        expected = others.predict(asked(table, data.question_N[place : place + 1]))
        np.testing.assert_allclose(found[place], expected[0], atol=2e-5)


def test_questions_trained_on_are_read_and_others_seen_from_both_sides(model):
    weights = model.view_weights(np.array([True, False]), Shares(features=0.25, plain=0.5))
    np.testing.assert_allclose(weights.sum(axis=0), 1.0)
    by_view = dict(zip(VIEWS, weights.tolist(), strict=True))
    assert by_view[View(blind=False, features=True)] == [1.0, 0.0625]
    assert by_view[View(blind=True, features=False)] == [0.0, 0.1875]
    assert by_view[PLAIN] == [0.0, 0.5]


def test_every_choice_is_the_prediction_with_its_shares_of_views(model, table, data):
    """A mean of what the views predict alone; the choice None is the one that the weights hold."""
    rows = np.setdiff1d(np.arange(Q), data.question_N)
    unseen_Q = np.zeros(Q, dtype=bool)
    choices = of(model, table, trained_Q=unseen_Q).choices(data, rows, SHARES)
    for shares, choice in zip(SHARES, choices, strict=True):
        model.get_buffer(SHARES_KEY).copy_(torch.tensor(shares))
        np.testing.assert_allclose(choice, of(model, table, trained_Q=unseen_Q).targets(data)[rows], atol=1e-12)
    context, expected = asked(table, data.question_N, data.answer_NK), np.zeros(choices.shape[1:])
    for view, weight_1 in zip(VIEWS, model.view_weights(np.array([False]), SHARES[1]), strict=True):
        with torch.no_grad():
            expected += weight_1 * model.condition(context, view).predict(asked(table, rows))
    np.testing.assert_allclose(choices[1], expected, atol=1e-12)
    assert min(np.abs(a - b).max() for a, b in combinations(choices, 2)) > 1e-3


def test_a_kernel_that_cannot_be_factored_gives_the_mean_and_a_warning(model, table, data, caplog):
    with torch.no_grad():
        model.log_weight.fill_(10.0)  # e^80: rounding alone leaves negative eigenvalues
    expected = of(model, table).targets(data.first(0))
    with caplog.at_level(logging.WARNING, logger="appa.client"):
        found = of(model, table).targets(data)
    assert np.isfinite(found).all()
    assert "cannot be solved for" in caplog.text
    np.testing.assert_allclose(found[data.question_N], expected[data.question_N])


def test_training_moves_mean_and_every_kernel_and_lowers_the_loss(table, data):
    torch.manual_seed(0)
    network = ExactResidual()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    keys = {"local-steps": 60, "num-context-questions": 8, "learning-rate": 3e-3}
    settings = Config.load({f"pluralllm.{key}": value for key, value in keys.items()}).pluralllm
    examiner, generator = torch.Generator().manual_seed(9), torch.Generator().manual_seed(1)
    exam = [sample_episodes(data, table, settings, generator=examiner) for _ in range(40)]

    def loss() -> float:
        with torch.no_grad():
            return float(np.mean([float(network.loss(episodes)) for episodes in exam]))

    start = loss()
    local_update(network, data, table, settings, round_number=5, generator=generator)
    assert loss() < start - 0.2
    moved = {name for name, value in network.state_dict().items() if (value != before[name]).all()}
    assert {"log_weight", "log_length", "log_noise", "log_feature", "unread"} <= moved
    assert all(value.is_floating_point() for value in network.state_dict().values())
    assert network.shares == START_SHARES


def test_the_noise_of_training_is_for_the_mean_and_not_for_the_kernel(model, table, data):
    context = asked(table, data.question_N, data.answer_NK)
    model.train()
    still = model.condition(context, View(blind=False, features=False))
    loud = model.condition(context, View(blind=False, features=False), noise=torch.randn(ANSWERED, sizes.EMBEDDING_DIM))
    torch.testing.assert_close(loud.lower_NN, still.lower_NN)
    assert (loud.difference_N - still.difference_N).abs().max() > 1e-3
