"""Look-ups: hand-worked answers, and what they may know."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from fakes import catalogue_of

from appa_flwr.survey.types import Question
from server_app.baselines import look_ups

YES_NO, SCALE, SHORT_SCALE, FREE = ("Yes", "No"), ("Low", "Middle", "High"), ("Bad", "So so", "Good"), ("x",) * 4
OPTIONS = (YES_NO, YES_NO, YES_NO, SCALE, SCALE, SHORT_SCALE, FREE)
TRAIN = (True, True, False, True, False, False, False)
HELD_OUT_J = np.array([2, 4, 5, 6])
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
    found_JK = look_ups(ANSWERS, catalogue(), HELD_OUT_J)["option-list"]
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
    for name, found_JK in look_ups(ANSWERS, catalogue(), HELD_OUT_J).items():
        np.testing.assert_array_equal(look_ups(changed, catalogue(), HELD_OUT_J)[name], found_JK)
