"""Look-ups: hand-worked answers, and what they may know."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fakes import catalogue_of

from appa_flwr.config import Config
from appa_flwr.protocol import formats
from appa_flwr.survey.types import Question
from server_app import lookups
from server_app.federation.catalogue import embedded
from server_app.lookups import look_ups

YES_NO, SCALE, SHORT_SCALE, FREE = ("Yes", "No"), ("Low", "Middle", "High"), ("Bad", "So so", "Good"), ("x",) * 4
OPTIONS = (YES_NO, YES_NO, YES_NO, SCALE, SCALE, SHORT_SCALE, FREE)
TRAIN = (True, True, False, True, False, False, False)
ANSWERS = np.array(
    [[0.2, 0.8, 0, 0], [0.4, 0.6, 0, 0], [1, 0, 0, 0], [0.1, 0.2, 0.7, 0], [1, 0, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]]
)


def catalogue(place_Q=(0.0, 1.0, 0.9, 5.0, 4.0, 6.0, 7.0)):
    """One feature an option: the question's place on a line."""
    drawn = catalogue_of([len(options) for options in OPTIONS], train=TRAIN)
    questions = tuple(Question(f"Q{q}", f"text {q}", options) for q, options in enumerate(OPTIONS))
    embedding_QKE = (np.array(place_Q)[:, None, None] * drawn.option_QK[..., None]).astype(np.float32)
    return replace(drawn, questions=questions, embedding_QKE=embedding_QKE)


def test_the_same_options_else_as_many_else_uniform():
    found_JK = look_ups(ANSWERS, catalogue(), np.array([2, 4, 5, 6]))["option-list"]
    expected = [[0.3, 0.7, 0, 0], [0.1, 0.2, 0.7, 0], [0.1, 0.2, 0.7, 0], [0.25, 0.25, 0.25, 0.25]]
    np.testing.assert_allclose(found_JK, expected)


def test_the_nearest_of_as_many_options_are_averaged():
    found_JK = look_ups(ANSWERS, catalogue(), np.array([2, 4, 6]))["nearest-questions"]
    # there are two of two options and one of three: fewer than three are averaged alike
    expected = [[0.3, 0.7, 0, 0], [0.1, 0.2, 0.7, 0], [0.25, 0.25, 0.25, 0.25]]
    np.testing.assert_allclose(found_JK, expected, atol=1e-7)
    many_JK = look_ups(10 * ANSWERS, catalogue(), np.array([2, 4, 6]))["nearest-questions"]  # a group that shouts
    np.testing.assert_allclose(many_JK, expected, atol=1e-7)


def test_answers_to_held_out_questions_are_not_known():
    changed = np.where(np.array(TRAIN)[:, None], ANSWERS, 0.25)
    for name, found_JK in look_ups(ANSWERS, catalogue(), np.arange(7)).items():
        np.testing.assert_array_equal(look_ups(changed, catalogue(), np.arange(7))[name], found_JK)


def test_a_training_question_does_not_look_up_itself():
    found = look_ups(ANSWERS, catalogue(), np.array([0, 1, 3]))
    # of two questions with the same options each has the other's answer, and one that is alone has none
    expected = [[0.4, 0.6, 0, 0], [0.2, 0.8, 0, 0], [1 / 3, 1 / 3, 1 / 3, 0]]
    for name in ("option-list", "nearest-questions"):
        np.testing.assert_allclose(found[name], expected, atol=1e-7)


def test_prompts_show_them_on_the_grid_that_sft_teaches():
    found = lookups.shown(Config.load({"sft.answer-step": 0.1}), ANSWERS, catalogue())
    assert [(one.same, one.nearest) for one in found[:3]] == [
        ("0.40,0.60", "0.40,0.60"),
        ("0.20,0.80", "0.20,0.80"),
        ("0.30,0.70", "0.30,0.70"),
    ]
    assert [one.share is not None for one in found] == list(TRAIN)
    assert found[3].share == (0.1, 0.2, 0.7)
    ranked = lookups.shown(Config.load({"task": "opa"}), ANSWERS, catalogue())
    assert (ranked[4].same, ranked[6].nearest) == ("C,B,A", "A,B,C,D")


def test_any_question_is_looked_up_as_those_of_the_run_were():
    config = Config.load({"embedding.dim": 16})
    texts = (
        "Is tea good?",
        "Is coffee good?",
        "Is rain bad?",
        "How is tea?",
        "How is rain?",
        "How was it?",
        "What is x?",
    )
    questions = tuple(Question(f"Q{q}", texts[q], options) for q, options in enumerate(OPTIONS))
    built = embedded(config, questions, np.array(TRAIN), np.zeros(len(TRAIN), dtype=bool))
    known = lookups.shown(config, ANSWERS, built)
    for one in known:
        assert lookups.asked(config, known, Question("new", one.question, one.options)) == (one.same, one.nearest)
    other = lookups.asked(config, known, Question("new", "Is coffee very good?", YES_NO))
    assert other == ("0.30,0.70", "0.30,0.70")
    assert lookups.asked(config, known, Question("new", "Is coffee good?", SCALE)) == (
        "0.10,0.20,0.70",
        "0.10,0.20,0.70",
    )
    assert lookups.asked(config, known, Question("new", "Which?", (*"abcde",))).same == "0.20,0.20,0.20,0.20,0.20"


@pytest.mark.parametrize("task", ["dpa", "opa"])
def test_random_rows_are_answered_halfway_between_what_they_show(task):
    questions = [Question("a", "Good?", YES_NO), Question("b", "How?", SCALE), Question("c", "Which?", ("v", *"wxyz"))]
    config = Config.load({"task": task, "sft.answer-step": 0.05})
    rows = list(lookups.random_rows(config, questions, 300, np.random.default_rng(1)))
    assert len(rows) == 300
    assert {question.question_id for question, *_ in rows} == {"a", "b", "c"}
    apart = []
    for question, shown, answer in rows:
        same, nearest, told = (formats.parse(task, text, len(question.options)) for text in (*shown, answer))
        assert same.format_score == nearest.format_score == told.format_score == 1.0
        apart.append(np.abs(same.prediction - nearest.prediction).max())
        if task == "dpa":  # each look-up is rounded by less than a step, and so is the answer
            assert np.abs((same.prediction + nearest.prediction) / 2 - told.prediction).max() < 0.1
    assert min(apart) <= 0.05 < 0.25 < max(apart)
