"""The population prior: hand-worked means of the others, and directions that were planted.

Axis letters: Q questions, K options, E embedding, F directions, W = 1 + F: the mean and the directions.
"""

from __future__ import annotations

import numpy as np
import pytest

from appa_flwr.errors import UserError
from pluralllm.data import GroupData, OptionEmbedding
from pluralllm.model import ModelConfig, PluralLLM
from pluralllm.population import (
    DirectionSums,
    direction_sums,
    directions_from_sums,
    fit_population,
    population_sums,
    position,
    prior_from_sums,
    with_directions,
)
from pluralllm.prediction import predict_targets

TABLE = OptionEmbedding(("a", "b", "c"), np.zeros((3, 2, 5), np.float32), np.ones((3, 2), np.bool_))


def group(name: str, **answers: float) -> GroupData:
    rows = [TABLE.question_ids.index(question_id) for question_id in answers]
    shares = [[first, 1.0 - first] for first in answers.values()]
    return GroupData(name, np.array(rows, dtype=np.int64), np.array(shares, dtype=np.float32).reshape(-1, 2))


HERE, THERE, AWAY = group("Here", a=1.0, b=0.25), group("There", a=0.5, b=0.75), group("Away", a=0.0)


def test_sums_by_hand() -> None:
    total, count = population_sums([HERE, THERE, AWAY], TABLE)
    np.testing.assert_allclose(total, [[1.5, 1.5], [1.0, 1.0], [0.0, 0.0]])
    assert count.tolist() == [3, 2, 0]


def test_sums_of_nodes_add_up() -> None:
    whole = population_sums([HERE, THERE, AWAY], TABLE)
    first, second = population_sums([HERE], TABLE), population_sums([THERE, AWAY], TABLE)
    np.testing.assert_allclose(first[0] + second[0], whole[0])
    assert (first[1] + second[1]).tolist() == whole[1].tolist()


def test_the_own_share_is_removed_and_answers_of_few_groups_are_no_prior() -> None:
    sums = population_sums([HERE, THERE, AWAY], TABLE)
    for few in (1, 2):
        expected = [[0.25, 0.75], [0.75, 0.25], [0, 0]]
        np.testing.assert_allclose(prior_from_sums(*sums, own=HERE, min_groups=few), expected)
        np.testing.assert_allclose(prior_from_sums(*sums, min_groups=few), [[0.5, 0.5], [0.5, 0.5], [0, 0]])
    # question b was answered by two groups only, whoever asks
    np.testing.assert_allclose(prior_from_sums(*sums, own=HERE, min_groups=3), [[0.25, 0.75], [0, 0], [0, 0]])
    np.testing.assert_allclose(prior_from_sums(*sums, own=AWAY, min_groups=3), [[0.75, 0.25], [0, 0], [0, 0]])
    np.testing.assert_allclose(prior_from_sums(*sums, min_groups=3), [[0.5, 0.5], [0, 0], [0, 0]])


def test_nothing_is_left_of_a_share_that_stood_alone() -> None:
    third = group("Here", a=1 / 3)
    total, count = population_sums([third], TABLE)
    assert not prior_from_sums(total + 1e-9, count, own=third, min_groups=1).any()


def test_what_is_removed_leaves_the_sums_alone() -> None:
    sums = population_sums([HERE, THERE, AWAY], TABLE)
    prior_from_sums(*sums, own=HERE)
    np.testing.assert_allclose(sums[0][0], [1.5, 1.5])  # the sums themselves are left alone


def test_what_cannot_be_is_named() -> None:
    sums = population_sums([THERE], TABLE)
    with pytest.raises(UserError, match="group 'Here'"):
        prior_from_sums(*population_sums([AWAY], TABLE), own=HERE)
    with pytest.raises(UserError, match="minimum number of groups is 0"):
        prior_from_sums(*sums, min_groups=0)


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
    population = fit_population(groups, WIDE, seed=0)
    mean_only = network_error(unseen, population.outside[..., :1], num_context=16)
    assert network_error(unseen, population.outside, num_context=16) < 0.4 * mean_only
    # without context nobody knows where it lies
    assert network_error(unseen, population.outside, num_context=0) == pytest.approx(mean_only, abs=1e-6)


def test_rounds_find_what_many_groups_have_in_common() -> None:
    *groups, unseen = planted_groups(25, own=0.04)
    population = fit_population(groups, WIDE, seed=0)
    mean_only = network_error(unseen, population.outside[..., :1], num_context=40)
    assert network_error(unseen, population.outside, num_context=40) < 0.72 * mean_only


def test_a_group_sees_no_direction_of_its_own() -> None:
    one, other = planted_groups(2)
    twins = [GroupData(f"Twin {index}", one.question_N, one.answer_NK) for index in range(6)]
    population = fit_population([*twins, other], WIDE, seed=0)
    assert (population.own[-1][..., 1:] == 0).all()
    assert np.abs(population.outside[..., 1:]).max() > 0.1


def test_a_group_in_the_sums_is_placed_without_its_own_share() -> None:
    groups = planted_groups(9)
    population = fit_population(groups, WIDE, seed=0)
    errors = [network_error(data, prior, num_context=16) for data, prior in zip(groups, population.own, strict=True)]
    means = [
        network_error(data, prior[..., :1], num_context=16) for data, prior in zip(groups, population.own, strict=True)
    ]
    assert np.mean(errors) < 0.5 * np.mean(means)
    np.testing.assert_allclose(
        population.own[3][..., 0], prior_from_sums(*population_sums(groups[:3] + groups[4:], WIDE)), atol=1e-12
    )


def test_direction_sums_add_up_and_leave_no_share_behind() -> None:
    groups = planted_groups(6)
    places = np.random.default_rng(1).normal(size=(6, 2))
    shares = [
        direction_sums(data, place, num_questions=NUM_QUESTIONS) for data, place in zip(groups, places, strict=True)
    ]
    others = shares[0] + shares[1] + shares[2] + shares[3] + shares[4]
    left = (others + shares[5]).without(groups[5], places[5])
    mean = prior_from_sums(*population_sums(groups[:5], WIDE))
    np.testing.assert_allclose(directions_from_sums(left, mean), directions_from_sums(others, mean), atol=1e-8)
    whole = prior_from_sums(*population_sums(groups, WIDE))
    assert np.abs(directions_from_sums(others + shares[5], whole) - directions_from_sums(left, mean)).max() > 0.01


def test_directions_solve_least_squares_and_have_length_one() -> None:
    groups = planted_groups(6)
    places = np.random.default_rng(1).normal(size=(6, 2))
    sums = direction_sums(groups[0], places[0], num_questions=NUM_QUESTIONS)
    for data, place in zip(groups[1:], places[1:], strict=True):
        sums = sums + direction_sums(data, place, num_questions=NUM_QUESTIONS)
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
    groups = groups[:2] + [
        GroupData(data.group, data.question_N[10:], data.answer_NK[10:]) for data in groups[2:]
    ]  # ten questions that two groups answered, as many as there are directions
    outside = fit_population(groups, WIDE, seed=0, min_groups=2, num_directions=2).outside
    assert outside.shape == (NUM_QUESTIONS, NUM_OPTIONS, 3)
    assert (outside[:10, :, 0] > 0).all()
    assert (outside[:10, :, 1:] == 0).all()
    assert np.abs(outside[10:, :, 1:]).sum(axis=(1, 2)).min() > 0


def test_groups_that_do_not_differ_have_no_direction() -> None:
    one = planted_groups(1)[0]
    groups = [GroupData(f"Twin {index}", one.question_N, one.answer_NK) for index in range(6)]
    outside = fit_population(groups, WIDE, seed=0).outside
    assert (outside[..., 1:] == 0).all()


def test_a_position_of_nothing_is_the_middle() -> None:
    nobody = GroupData("Nobody", np.zeros(0, np.int64), np.zeros((0, NUM_OPTIONS), np.float32))
    mean = np.full((NUM_QUESTIONS, NUM_OPTIONS), 1 / NUM_OPTIONS)
    assert position(nobody, mean, np.ones((NUM_QUESTIONS, NUM_OPTIONS, 3))).tolist() == [0.0, 0.0, 0.0]
    assert with_directions(mean).shape == (NUM_QUESTIONS, NUM_OPTIONS, 1)
    empty = DirectionSums(np.zeros((2, 3, 1)), np.zeros((2, 1)), np.zeros((2, 1, 1)), np.zeros(2, np.int64))
    assert not directions_from_sums(empty, np.zeros((2, 3))).any()
