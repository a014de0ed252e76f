"""The generated population: what a default run rests on, whatever its numbers are tuned to.

Axis letters: G groups, Q questions, K options.
"""

from dataclasses import replace

import numpy as np
import pytest
from fakes import catalogue_of
from surveys import ids, refused, shares

from appa_flwr.analysis.alignment import alignment_scores, as_arrays, deviation_correlation, shared_rewards
from appa_flwr.analysis.ceilings import shared_answer
from appa_flwr.config import Config
from appa_flwr.survey import generate as generation
from appa_flwr.survey.generate import COVERAGE, REFUSAL_OPTION, RESPONDENTS, TEMPLATES, TOPICS, generate, ground_truth
from appa_flwr.survey.generate import population as keywords
from pluralllm import embedding
from pluralllm.data import group_data
from pluralllm.scores import nearest_question

SIZE = {"num_questions": 200, "num_groups": 8}
NUM_QUESTIONS, NUM_GROUPS = SIZE.values()


@pytest.fixture(scope="module", params=range(2))
def population(request):
    return *ground_truth(**SIZE, seed=request.param), generate(**SIZE, seed=request.param)


def test_the_same_seed_gives_the_same_survey_and_another_gives_another():
    drawn, again, other = generate(**keywords(Config.load({}).data, seed=7)), generate(seed=7), generate(seed=6)
    assert drawn.questions == again.questions != other.questions
    assert shares(drawn) == shares(again)  # the default config's


def test_questions_are_well_formed_and_distinct_and_their_truth_is_distributions(population):
    questions, truth, survey = population
    assert questions == survey.questions
    assert len({*ids(questions)}) == len({q.text for q in questions}) == NUM_QUESTIONS
    for question in questions:
        target_GK = np.stack([mine[question.question_id] for mine in truth.values()])
        assert target_GK.shape == (NUM_GROUPS, len(question.options))
        assert (target_GK > 0).all()
        np.testing.assert_allclose(target_GK.sum(1), 1.0)
        assert len(question.options) == len(set(question.options)) >= 2
        assert question.ordinal is None or len(question.ordinal) == len(question.options)
        assert question.ordinal is None or REFUSAL_OPTION not in question.options  # a refusal is on no scale
    assert {q.ordinal is None for q in questions} == {True, False}


def test_surveyed_distributions_are_counts_near_the_truth(population):
    _, truth, survey = population
    gaps = []
    for group, answers in survey.answers.items():
        for question_id, share_K in answers.items():
            np.testing.assert_allclose(share_K * RESPONDENTS, np.round(share_K * RESPONDENTS), atol=1e-9)
            assert round(share_K.sum() * RESPONDENTS) == RESPONDENTS
            true_K = truth[group][question_id]
            gaps += ((share_K - true_K) / np.sqrt(true_K * (1 - true_K) / RESPONDENTS)).tolist()
    # in units of the sampling error: mean 0, spread 1, so the noise is a sample's and nothing else
    assert abs(np.mean(gaps)) < 0.05
    assert np.std(gaps) == pytest.approx(1.0, abs=0.05)


def test_coverage_is_sparse_and_differs_between_groups(population):
    answers = population[2].answers.values()
    slack = 5 * np.sqrt(COVERAGE * (1 - COVERAGE) / NUM_QUESTIONS)  # five standard deviations of 200 coin flips
    assert (np.abs(np.array([len(mine) for mine in answers]) / NUM_QUESTIONS - COVERAGE) < slack).all()
    assert len({frozenset(mine) for mine in answers}) == NUM_GROUPS
    assert all(all(generate(num_questions=2, num_groups=12, seed=seed).answers.values()) for seed in range(20))


def test_a_question_that_nobody_was_asked_goes_to_any_group(monkeypatch):
    monkeypatch.setattr(generation, "COVERAGE", 0.0)
    sizes = [len(mine) for mine in generate(num_questions=200, num_groups=2).answers.values()]
    assert sum(sizes) in (200, 201)  # each question once, and one for each group
    assert min(sizes) > 60


def test_rules_can_differ_by_more_than_runs_do(population):
    questions, truth, _ = population
    known, best = as_arrays(questions, truth), {}
    for objective in ("average", "min"):
        answer_QK = shared_answer(*known, metric="js", objective=objective)
        best[objective] = alignment_scores(shared_rewards(answer_QK, *known, metric="js")).min_as
    assert best["min"] - best["average"] >= 0.03
    assert 0.85 < best["min"] < 0.95


def test_questions_that_read_alike_divide_the_groups_alike_as_far_as_they_do_in_real_surveys(population, monkeypatch):
    """By the product's 128 features: other tests have 16."""
    for name, size in (("EMBEDDING_DIM", 128), ("QUESTION_PART", slice(0, 75)), ("OPTION_PART", slice(75, 125))):
        monkeypatch.setattr(embedding, name, size)
    survey = population[2]
    truth_GQK, option_QK = as_arrays(survey.questions, survey.answers)
    value_QKE, option_QK = embedding.embed_questions(survey.questions)
    public = replace(catalogue_of(option_QK.sum(1), embedding_QKE=value_QKE), questions=survey.questions)
    own = [group_data(name, mine, public=public) for name, mine in survey.answers.items()]
    nearest_GQK = np.stack([nearest_question(mine, public) for mine in own])
    assert 0.2 <= deviation_correlation(nearest_GQK, truth_GQK, option_QK) <= 0.45


def test_no_more_can_be_asked_than_pairs_of_frame_and_topic_and_group_names_stay_distinct():
    most = len(TEMPLATES) * len(TOPICS)
    assert len(ground_truth(num_questions=2, num_groups=60, seed=0)[1]) == 60  # more than the list of names has
    refused(f"{most + 1}.*{most}", generate, num_questions=most + 1, num_groups=2)


def test_disagreement_scales_how_far_groups_differ():
    gaps = []
    for scale in (0.0, 0.5, 1.0, 2.0):
        target_GQK, option_QK = as_arrays(*ground_truth(disagreement=scale, num_questions=60, num_groups=6, seed=3))
        gaps.append(float(target_GQK.std(0)[option_QK].mean()))
    assert gaps[0] < 0.01  # refusals alone are drawn by group
    assert 0.01 < gaps[1] < 0.75 * gaps[2] < 0.6 * gaps[3]
