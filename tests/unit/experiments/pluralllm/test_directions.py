"""Directions in which groups differ: that planted ones are found, and that the sums behind them tell the answers.

Axis letters: G groups, Q questions, K options, F directions, W = 1 + F: the mean and the directions.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from experiments.pluralllm import directions
from experiments.pluralllm.directions import (
    DIRECTION_ROUNDS,
    DirectionSums,
    direction_sums,
    directions_from_sums,
    fit_population,
    position,
    starting_position,
)
from pluralllm.data import GroupData, OptionEmbedding
from pluralllm.model import ModelConfig, PluralLLM
from pluralllm.population import population_sums, prior_from_sums
from pluralllm.prediction import predict_targets

NUM_QUESTIONS, NUM_OPTIONS = 60, 3
WIDE = OptionEmbedding(
    tuple(f"q{row}" for row in range(NUM_QUESTIONS)),
    np.zeros((NUM_QUESTIONS, NUM_OPTIONS, 5), np.float32),
    np.ones((NUM_QUESTIONS, NUM_OPTIONS), np.bool_),
)


def planted_groups(number: int, *, own: float = 0.0, seed: int = 0) -> list[GroupData]:
    """Groups that differ along two directions, in square roots of shares, and by `own` each in its own way."""
    rng = np.random.default_rng(seed)
    mean = rng.dirichlet(np.full(NUM_OPTIONS, 5.0), size=NUM_QUESTIONS)
    directions = rng.normal(scale=0.08, size=(2, NUM_QUESTIONS, NUM_OPTIONS))
    groups = []
    for index in range(number):
        root = np.sqrt(mean) + np.tensordot(rng.uniform(-1.5, 1.5, size=2), directions, axes=1)
        root = root + own * rng.normal(size=root.shape)
        share = np.clip(root, 0.02, None) ** 2
        share /= share.sum(axis=1, keepdims=True)
        groups.append(GroupData(f"Group {index}", np.arange(NUM_QUESTIONS), share.astype(np.float32)))
    return groups


def network_error(data: GroupData, prior: np.ndarray, *, num_context: int) -> float:
    model = PluralLLM(ModelConfig(embedding_dim=5, hidden_dim=8, num_heads=2, population=True))
    targets = predict_targets(model, data, WIDE, num_context=num_context, seed=0, population=prior)
    return float(np.abs(targets.probability_QK - data.answer_NK).mean())


def test_a_few_answers_place_an_unseen_group_where_it_lies() -> None:
    *groups, unseen = planted_groups(9)
    _, outside = fit_population(groups, WIDE, seed=0)
    mean_only = network_error(unseen, outside[..., :1], num_context=16)
    assert network_error(unseen, outside, num_context=16) < 0.4 * mean_only
    # without context nobody knows where it lies
    assert network_error(unseen, outside, num_context=0) == pytest.approx(mean_only, abs=1e-6)


def test_rounds_find_what_many_groups_have_in_common() -> None:
    *groups, unseen = planted_groups(25, own=0.04)
    _, outside = fit_population(groups, WIDE, seed=0)
    mean_only = network_error(unseen, outside[..., :1], num_context=40)
    assert network_error(unseen, outside, num_context=40) < 0.72 * mean_only


def test_a_group_sees_no_direction_of_its_own_and_groups_alike_have_none() -> None:
    one, other = planted_groups(2)
    twins = [GroupData(f"Twin {index}", one.question_N, one.answer_NK) for index in range(6)]
    own, outside = fit_population([*twins, other], WIDE, seed=0)
    assert (own[-1][..., 1:] == 0).all()
    assert np.abs(outside[..., 1:]).max() > 0.1
    _, alike = fit_population(twins, WIDE, seed=0)
    assert (alike[..., 1:] == 0).all()


def test_a_group_in_the_sums_is_placed_without_its_own_share() -> None:
    groups = planted_groups(9)
    own, _ = fit_population(groups, WIDE, seed=0)
    errors = [network_error(data, prior, num_context=16) for data, prior in zip(groups, own, strict=True)]
    means = [network_error(data, prior[..., :1], num_context=16) for data, prior in zip(groups, own, strict=True)]
    assert np.mean(errors) < 0.5 * np.mean(means)
    np.testing.assert_allclose(
        own[3][..., 0], prior_from_sums(*population_sums(groups[:3] + groups[4:], WIDE)), atol=1e-12
    )


def test_sums_without_a_group_are_those_of_the_others() -> None:
    groups = planted_groups(6)
    places = list(np.random.default_rng(1).normal(size=(6, 2)))
    others = direction_sums(groups[:5], places[:5], num_questions=NUM_QUESTIONS)
    whole = direction_sums(groups, places, num_questions=NUM_QUESTIONS)
    for left, expected in zip(whole.without(groups[5], places[5]), others, strict=True):
        np.testing.assert_allclose(left, expected, atol=1e-12)
    assert np.abs(whole.product_QKF - others.product_QKF).max() > 0.1


def test_directions_solve_least_squares_and_have_length_one() -> None:
    groups = planted_groups(6)
    places = np.random.default_rng(1).normal(size=(6, 2))
    sums = direction_sums(groups, list(places), num_questions=NUM_QUESTIONS)
    mean = prior_from_sums(*population_sums(groups, WIDE))
    found = directions_from_sums(sums, mean)
    # independent: an ordinary regression, the ridge as two more rows; it spans the same plane
    rows = np.vstack([places, np.sqrt((places**2).mean()) * np.eye(2)])
    roots = np.stack([np.sqrt(data.answer_NK) - np.sqrt(mean) for data in groups]).reshape(6, -1)
    slow = np.linalg.lstsq(rows, np.vstack([roots, np.zeros((2, roots.shape[1]))]), rcond=None)[0]
    flat = found.reshape(-1, 2)
    back = flat @ np.linalg.lstsq(flat, slow.T, rcond=None)[0]
    np.testing.assert_allclose(back, slow.T, atol=1e-9)
    np.testing.assert_allclose(flat.T @ flat / NUM_QUESTIONS, np.eye(2), atol=1e-9)


def test_questions_of_few_groups_have_no_direction() -> None:
    groups = planted_groups(5)
    # ten questions that two groups answered, as many as there are directions
    groups[2:] = [GroupData(data.group, data.question_N[10:], data.answer_NK[10:]) for data in groups[2:]]
    _, outside = fit_population(groups, WIDE, seed=0, min_groups=2, num_directions=2)
    assert outside.shape == (NUM_QUESTIONS, NUM_OPTIONS, 3)
    assert (outside[:10, :, 0] > 0).all()
    assert (outside[:10, :, 1:] == 0).all()
    assert np.abs(outside[10:, :, 1:]).sum(axis=(1, 2)).min() > 0


def test_a_position_of_nothing_is_the_middle() -> None:
    nobody = GroupData("Nobody", np.zeros(0, np.int64), np.zeros((0, NUM_OPTIONS), np.float32))
    mean = np.full((NUM_QUESTIONS, NUM_OPTIONS), 1 / NUM_OPTIONS)
    assert position(nobody, mean, np.ones((NUM_QUESTIONS, NUM_OPTIONS, 3))).tolist() == [0.0, 0.0, 0.0]
    empty = DirectionSums(np.zeros((2, 3, 1)), np.zeros((2, 1)), np.zeros((2, 1, 1)), np.zeros(2))
    assert not directions_from_sums(empty, np.zeros((2, 3))).any()


def test_the_totals_behind_directions_tell_every_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why no run exchanges them: who sees the totals of all rounds, and nothing else, solves them for the answers."""
    rng, rounds = np.random.default_rng(3), []
    groups = [
        GroupData(data.group, rows, data.answer_NK[rows])
        for data in planted_groups(4, own=0.1)
        for rows in [np.flatnonzero(rng.random(NUM_QUESTIONS) < 0.9)]
    ]

    def seen(summed: list[GroupData], *arguments: list[np.ndarray], num_questions: int) -> DirectionSums:
        sums = direction_sums(summed, *arguments, num_questions=num_questions)
        if len(summed) > 1:
            rounds.append(sums)
        return sums

    monkeypatch.setattr(directions, "direction_sums", seen)
    fit_population(groups, WIDE, seed=0)
    assert len(rounds) == DIRECTION_ROUNDS
    start_GF = np.stack([starting_position(data.group, seed=0) for data in groups])
    answered = {}  # question -> the groups whose starting positions add up to the total
    for question in np.flatnonzero(rounds[0].count_Q):
        among = itertools.combinations(range(4), int(rounds[0].count_Q[question]))
        total_F = rounds[0].total_QF[question]
        answered[question] = min(among, key=lambda those: np.abs(start_GF[list(those)].sum(0) - total_F).max())
    member_QG = np.array([[group in those for group in range(4)] for those in answered.values()], dtype=float)
    asked = list(answered)
    positions = [start_GF] + [np.linalg.lstsq(member_QG, sums.total_QF[asked], rcond=None)[0] for sums in rounds[1:]]
    for question, those in answered.items():
        known = np.concatenate([position_GF[list(those)].T for position_GF in positions])
        products = np.concatenate([sums.product_QKF[question].T for sums in rounds])
        root_GK = np.linalg.lstsq(known, products, rcond=None)[0]
        for group, root_K in zip(those, root_GK, strict=True):
            (own_K,) = groups[group].answer_NK[groups[group].question_N == question]
            np.testing.assert_allclose(root_K**2, own_K, atol=1e-6)
    assert len(answered) > 40
    assert 0 < member_QG.mean() < 1
