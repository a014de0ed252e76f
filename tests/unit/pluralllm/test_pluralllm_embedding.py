"""The text embedding: its layout, what leaves a trace in it, and the padding of a group's answers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from appa_flwr.survey.types import Question
from pluralllm.data import group_data
from pluralllm.embedding import ORDINAL_FEATURES, embed_questions

TAXES = Question("tax", "Should income taxes be raised?", ("Yes", "No"))
WARMTH = Question("heat", "How warm is your home?", ("Cold", "Mild", "Warm"), (1.0, 2.0, 5.0))
TAXES_TOO = Question("tax2", "Should property taxes be raised?", ("No", "Yes", "Do not know"))
QUESTIONS = (TAXES, WARMTH, TAXES_TOO)


def test_shape_mask_and_padding():
    table = embed_questions(QUESTIONS, dim=16)
    assert table.value_QKE.shape == (3, 3, 16)
    assert table.value_QKE.dtype == np.float32
    assert table.dim == 16
    assert table.option_QK.tolist() == [[True, True, False], [True] * 3, [True] * 3]
    assert (table.value_QKE[~table.option_QK] == 0).all()
    np.testing.assert_array_equal(embed_questions(QUESTIONS, dim=16).value_QKE, table.value_QKE)
    assert np.isfinite(table.value_QKE).all()  # 16 features out of 3 question texts: the rest is 0
    # 13 text features: round(0.6 x 13) = 8 of the question and 5 of the option, each part of mean square 1
    for part in np.split(table.value_QKE[table.option_QK][:, :13], [8], axis=1):
        np.testing.assert_allclose((part**2).mean(axis=1), 1.0, rtol=1e-4)
    np.testing.assert_array_equal(table.value_QKE[0, 0, 8:13], table.value_QKE[2, 1, 8:13])  # both are "Yes"


def test_order_of_nominal_options_leaves_no_trace():
    turned = Question(TAXES_TOO.question_id, TAXES_TOO.text, TAXES_TOO.options[::-1])
    straight = embed_questions(QUESTIONS).value_QKE
    np.testing.assert_allclose(embed_questions((TAXES, WARMTH, turned)).value_QKE[2, ::-1], straight[2], atol=1e-6)


def test_ordinal_features_by_hand():
    # positions 1, 2, 5 on [-1, 1]: 2 (x - 1) / 4 - 1 = -1, -0.5, 1; distance from the middle 1, 0.5, 1
    table = embed_questions(QUESTIONS, dim=16)
    expected = [[1.0, -1.0, 1.0], [1.0, -0.5, 0.5], [1.0, 1.0, 1.0]]
    np.testing.assert_allclose(table.value_QKE[1, :, -ORDINAL_FEATURES:], expected)
    assert (table.value_QKE[[0, 2], :, -ORDINAL_FEATURES:] == 0).all()


def test_text_without_a_word_is_embedded_as_zero_not_nan():
    assert np.isfinite(embed_questions((TAXES, Question("blank", "", ("", "?"))), dim=8).value_QKE).all()


def test_group_data_pads_in_the_order_of_the_table():
    table = embed_questions(QUESTIONS, dim=8)
    answers = {"tax2": np.array([0.2, 0.3, 0.5]), "tax": np.array([0.6, 0.4]), "none": np.array([1.0, 0.0, 0.0])}
    data = group_data("Here", answers, embedding=table)
    assert data.question_N.tolist() == [0, 2]
    np.testing.assert_allclose(data.answer_NK, [[0.6, 0.4, 0.0], [0.2, 0.3, 0.5]])
    assert len(group_data("Here", {}, embedding=table)) == 0


def test_what_all_texts_share_is_taken_out():
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(50, 6)).astype(np.float32)

    def table(shift: float) -> npt.NDArray[np.float32]:
        return embed_questions(QUESTIONS, dim=16, encoder=lambda texts: vectors[: len(texts)] + shift).value_QKE

    np.testing.assert_allclose(table(5.0), table(0.0), atol=1e-3)
