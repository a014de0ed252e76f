"""The groups' predictions as a run keeps them, and the table of a question that was asked."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from appa_flwr.core.errors import UserError
from appa_flwr.report import frames
from appa_flwr.run.pair_scores import predicted_rows, predictions_of, read_predicted, replace_rows
from appa_flwr.run.run_files import PREDICTIONS_FILE
from appa_flwr.survey.types import Question

QUESTIONS = (Question("q1", "Is it?", ("Yes", "No")), Question("q2", "How is it?", ("Good", "Fair", "Bad")))
TARGET_GJK = np.array([[[0.9, 0.1, 0.0], [0.5, 0.3, 0.2]], [[0.3, 0.7, 0.0], [0.1, 0.1, 0.8]]])


@pytest.fixture
def kept():
    return predicted_rows(TARGET_GJK, groups=("North", "A [b]"), questions=QUESTIONS)


def test_what_is_written_is_read_and_a_question_is_found_by_its_words_and_options(kept, tmp_path):
    assert read_predicted(tmp_path).empty
    replace_rows(tmp_path / PREDICTIONS_FILE, kept)
    found = read_predicted(tmp_path)
    pd.testing.assert_frame_equal(found, kept)
    assert len(found) == 2 * (2 + 3)
    asked = predictions_of(found, " How is it?", ("Bad", "Good", "Fair"))
    assert asked.index.tolist() == ["North", "A [b]"]
    assert asked.to_numpy().tolist() == [[0.2, 0.5, 0.3], [0.8, 0.1, 0.1]]
    assert predictions_of(found, "How is it?", ("Good", "Bad")) is None
    assert predictions_of(found, "Is she?", ("Yes", "No")) is None
    assert predictions_of(kept[:0], "Is it?", ("Yes", "No")) is None
    replace_rows(tmp_path / PREDICTIONS_FILE, kept.drop(columns="text"))
    with pytest.raises(UserError, match=r"predictions\.parquet: .* question, group, option, share"):
        read_predicted(tmp_path)


def shown(*arguments, **keywords) -> dict[str, list[object]]:
    """First cell of a row -> the others."""
    return {row[0]: [*row[1:]] for row in frames.asked(*arguments, **keywords).itertuples(index=False)}


def test_an_answer_stands_beside_each_group_s_prediction_and_the_best_shared_ones(kept):
    table = shown("Is it?", ("Yes", "No"), np.array([1.0, 0.0]), predictions=kept, metric="cosine")
    # (1 + cos) / 2: cos .9 / sqrt(.82) = .9939 and .3 / sqrt(.58) = .3939; of equal shares .7809 and .9285
    assert table["this policy"] == [1.0, 0.0, pytest.approx(0.847, abs=5e-4), pytest.approx(0.697, abs=5e-4), "A [b]"]
    *numbers, worst = table["Uniform answer"]
    assert (numbers, worst) == (pytest.approx([0.5, 0.5, 0.927, 0.890], abs=5e-4), "North")
    assert table["predicted: A [b]"][:2] == [0.3, 0.7]
    # the bisector of both directions serves both alike
    north, other = (np.array(one) / np.linalg.norm(one) for one in ([0.9, 0.1], [0.3, 0.7]))
    both = (north + other) / (north + other).sum()
    best = table["Ceiling (worst group)"]
    assert best[:2] == pytest.approx(both, abs=1e-3)
    assert best[2] == pytest.approx((1 + north @ both / np.linalg.norm(both)) / 2, abs=1e-3)


def test_another_question_has_the_policy_s_shares_alone(kept):
    table = shown("Is she?", ("Yes", "No"), np.array([0.25, 0.75]), predictions=kept, metric="js")
    assert table == {"Yes": [0.25], "No": [0.75]}
