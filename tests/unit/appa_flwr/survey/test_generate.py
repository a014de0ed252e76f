"""The generated population: what a default run rests on, whatever its numbers are tuned to.

Axis letters: G groups, Q questions, K options.
"""

from __future__ import annotations

import numpy as np
import pytest

from appa_flwr.errors import UserError
from appa_flwr.rewards import js
from appa_flwr.survey.generate import (
    CLUSTER_SHARES,
    CONTESTED_SHARE,
    COVERAGE,
    FRAMES,
    REFUSAL_OPTION,
    RESPONDENTS,
    TOPICS,
    generate,
    ground_truth,
)

SEEDS = (0, 1, 2)
NUM_QUESTIONS, NUM_GROUPS = 200, 8


@pytest.fixture(scope="module", params=SEEDS)
def population(request):
    """Questions, and the groups' exact distributions on each: one (G, K) array a question."""
    questions, truth = ground_truth(num_questions=NUM_QUESTIONS, num_groups=NUM_GROUPS, seed=request.param)
    return questions, [np.stack([truth[name][q.question_id] for name in truth]) for q in questions]


@pytest.fixture(scope="module", params=SEEDS)
def survey(request):
    return generate(num_questions=NUM_QUESTIONS, num_groups=NUM_GROUPS, seed=request.param)


def score(prediction_K, target_GK):
    return float(js(np.broadcast_to(prediction_K, target_GK.shape), target_GK, np.ones_like(target_GK, bool)).mean())


def same(first, second):
    return first.questions == second.questions and all(
        first.answers[g].keys() == second.answers[g].keys()
        and all(np.array_equal(first.answers[g][q], second.answers[g][q]) for q in first.answers[g])
        for g in first.groups
    )


def test_the_same_seed_gives_the_same_survey_and_another_gives_another():
    first, again, other = (generate(num_questions=60, num_groups=4, seed=seed) for seed in (5, 5, 6))
    assert same(first, again)
    assert first.questions != other.questions


def test_the_server_s_questions_are_those_of_the_groups(survey):
    # the server draws the population only, the groups the survey: both must speak of the same questions
    assert any(
        ground_truth(num_questions=NUM_QUESTIONS, num_groups=NUM_GROUPS, seed=seed)[0] == survey.questions
        for seed in SEEDS
    )


def test_questions_are_well_formed_and_distinct(population):
    questions, _ = population
    assert len({q.question_id for q in questions}) == len({q.text for q in questions}) == NUM_QUESTIONS
    for question in questions:
        assert len(question.options) == len(set(question.options)) >= 2
        assert question.ordinal is None or len(question.ordinal) == len(question.options)
        assert question.ordinal is None or REFUSAL_OPTION not in question.options  # a refusal is on no scale
    assert any(q.ordinal is None for q in questions)
    assert any(q.ordinal is not None for q in questions)
    assert any(REFUSAL_OPTION in q.options for q in questions)


def test_true_distributions_are_distributions(population):
    questions, truth = population
    for question, target_GK in zip(questions, truth, strict=True):
        assert target_GK.shape == (NUM_GROUPS, len(question.options))
        assert (target_GK > 0).all()
        np.testing.assert_allclose(target_GK.sum(1), 1.0)


def test_surveyed_distributions_are_counts_near_the_truth():
    questions, truth = ground_truth(num_questions=NUM_QUESTIONS, num_groups=NUM_GROUPS, seed=1)
    survey = generate(num_questions=NUM_QUESTIONS, num_groups=NUM_GROUPS, seed=1)
    options = {q.question_id: len(q.options) for q in questions}
    gaps = []
    for group, answers in survey.answers.items():
        for question_id, share_K in answers.items():
            assert share_K.shape == (options[question_id],)
            np.testing.assert_allclose(share_K * RESPONDENTS, np.round(share_K * RESPONDENTS), atol=1e-9)
            assert round(share_K.sum() * RESPONDENTS) == RESPONDENTS
            true_K = truth[group][question_id]
            gaps += ((share_K - true_K) / np.sqrt(true_K * (1 - true_K) / RESPONDENTS)).tolist()
    # in units of the sampling error: mean 0, spread 1, so the noise is a sample's and nothing else
    assert abs(np.mean(gaps)) < 0.05
    assert np.std(gaps) == pytest.approx(1.0, abs=0.05)


def test_coverage_is_sparse_and_differs_between_groups(survey):
    counts_G = np.array([len(answers) for answers in survey.answers.values()])
    # five standard deviations of a share of 200 coin flips
    slack = 5 * np.sqrt(COVERAGE * (1 - COVERAGE) / NUM_QUESTIONS)
    assert (np.abs(counts_G / NUM_QUESTIONS - COVERAGE) < slack).all()
    assert len({frozenset(answers) for answers in survey.answers.values()}) == NUM_GROUPS


def test_nobody_is_left_without_an_answer():
    for seed in range(20):
        survey = generate(num_questions=2, num_groups=12, seed=seed)
        assert all(survey.answers.values())


def test_the_uniform_answer_scores_well_under_the_population_s_mean(population):
    _, truth = population
    uniform = np.mean([score(np.full(t.shape[1], 1 / t.shape[1]), t) for t in truth])
    mean = np.mean([score(t.mean(0), t) for t in truth])
    assert mean - uniform > 0.1


def cluster_of_groups():
    """Cluster of each group: the first `CLUSTER_SHARES[0]` of them are the majority, and so on."""
    edges = np.cumsum(CLUSTER_SHARES)[:-1] * NUM_GROUPS
    return np.array([int(sum(g + 0.5 > edge for edge in edges)) for g in range(NUM_GROUPS)])


def test_the_majority_is_larger_than_every_minority():
    sizes = np.bincount(cluster_of_groups(), minlength=len(CLUSTER_SHARES))
    assert sizes[0] > sizes[1:].sum() > 0
    assert sizes.all()


def test_minorities_differ_on_contested_topics_and_agree_on_the_others(population):
    # Which topics are contested is found on one half of the frames and verified on the other half.
    questions, truth = population
    cluster_G = cluster_of_groups()
    apart, close = {}, {}
    for question, target_GK in zip(questions, truth, strict=True):
        majority_GK, minority_GK = target_GK[cluster_G == 0], target_GK[cluster_G != 0]
        topic, frame = int(question.question_id[1:3]), int(question.question_id[4:])
        half = apart.setdefault(topic, ([], [])), close.setdefault(topic, ([], []))
        half[0][frame % 2].append(np.mean([1 - score(mine_K, minority_GK) for mine_K in majority_GK]))
        half[1][frame % 2].append(np.mean([1 - score(mine_K, majority_GK) for mine_K in majority_GK]))
    topics = [topic for topic, halves in apart.items() if halves[0] and halves[1]]
    ranked = sorted(topics, key=lambda topic: -np.mean(apart[topic][0]))
    contested = ranked[: int(CONTESTED_SHARE * len(ranked))]
    on_contested = np.mean([gap for topic in contested for gap in apart[topic][1]])
    on_others = np.mean([gap for topic in ranked if topic not in contested for gap in apart[topic][1]])
    within_majority = np.mean([gap for topic in contested for gap in close[topic][1]])
    assert on_contested > 3 * on_others
    assert on_contested > 3 * within_majority


def test_group_names_stay_distinct_beyond_the_list_of_names():
    _, truth = ground_truth(num_questions=2, num_groups=60, seed=0)
    assert len(truth) == 60


def test_all_pairs_of_frame_and_topic_can_be_asked_and_no_more():
    most = len(FRAMES) * len(TOPICS)
    questions, _ = ground_truth(num_questions=most, num_groups=2, seed=0)
    assert len({q.text for q in questions}) == most
    with pytest.raises(UserError, match=f"{most + 1}.*{most}"):
        generate(num_questions=most + 1, num_groups=2)
    with pytest.raises(UserError, match="at least 2 groups"):
        generate(num_questions=10, num_groups=1)
