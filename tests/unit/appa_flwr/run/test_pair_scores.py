"""Rows of scores and of predictions come back; methods side by side; the table of a question that was asked."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from appa_flwr.core.errors import UserError
from appa_flwr.report import frames
from appa_flwr.run.pair_scores import (
    PREDICTIONS,
    SURVEY,
    aligned,
    as_rows,
    predicted_rows,
    predictions_of,
    put,
    read,
    read_predicted,
    replace_rows,
    table,
)
from appa_flwr.run.run_files import PREDICTIONS_FILE, SCORES_FILE
from appa_flwr.survey.types import Question

GROUPS, QUESTIONS = ("A", "B"), ("q1", "q2", "q3")
NAN = np.nan


def rows(method, reward_GQ, *, metric="js", against=PREDICTIONS, questions=QUESTIONS):
    return as_rows(method, metric, against, np.array(reward_GQ), groups=GROUPS, questions=questions)


def test_a_row_for_each_number(tmp_path):
    assert read(tmp_path).empty
    put(tmp_path, rows("ppo", [[0.1, NAN, 0.3], [NAN, NAN, 0.6]]))
    found = read(tmp_path)
    assert found.to_dict("split")["data"] == [
        ["ppo", "js", "predictions", "A", "q1", 0.1],
        ["ppo", "js", "predictions", "A", "q3", 0.3],
        ["ppo", "js", "predictions", "B", "q3", 0.6],
    ]


def test_a_method_that_is_scored_again_is_replaced(tmp_path):
    put(tmp_path, pd.concat([rows("sft", [[0.1] * 3] * 2), rows("ppo", [[0.2] * 3] * 2)]))
    put(tmp_path, rows("ppo", [[0.5, NAN, NAN], [NAN] * 3]))
    found = read(tmp_path)
    assert found.groupby("method")["reward"].agg(list).to_dict() == {"ppo": [0.5], "sft": [0.1] * 6}


def test_two_methods_side_by_side_where_both_have_a_number():
    found = pd.concat(
        [
            rows("ppo", [[0.1, 0.2, 0.3], [0.4, NAN, 0.6]]),
            rows("sft", [[0.9, 0.8], [0.6, 0.5]], questions=("q3", "q2")),
            rows("sft", [[0.0] * 3] * 2, metric="cosine"),
            rows("sft", [[0.0] * 3] * 2, against=SURVEY),
        ]
    )
    ppo, sft = (table(found, method, metric="js", against=PREDICTIONS) for method in ("ppo", "sft"))
    first_GQ, second_GQ = aligned(ppo, sft)
    np.testing.assert_array_equal(first_GQ, [[0.2, 0.3], [NAN, 0.6]])
    np.testing.assert_array_equal(second_GQ, [[0.8, 0.9], [NAN, 0.6]])
    assert aligned(ppo, table(found, "base", metric="js", against=PREDICTIONS)) is None
    assert aligned(ppo, rows("sft", [[0.1]] * 2, questions=["q9"]).pivot(index="group", columns="question")) is None


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"PAR1 and nothing else", "cannot be read"),
        (pd.DataFrame({"method": ["ppo"]}), ".* method, metric, against"),
        (rows("ppo", [[0.1]] * 2, questions=["q"]).assign(reward="x"), ".* reward"),
        (pd.concat([rows("ppo", [[0.1]] * 2, questions=["q"])] * 2), ".* reward"),  # there twice
    ],
)
def test_a_file_that_is_none_of_ours_is_the_users_to_know(tmp_path, content, says):
    if isinstance(content, bytes):
        (tmp_path / SCORES_FILE).write_bytes(content)
    else:
        content.to_parquet(tmp_path / SCORES_FILE)
    with pytest.raises(UserError, match=rf"scores\.parquet: {says}"):
        read(tmp_path)


ASKED = (Question("q1", "Is it?", ("Yes", "No")), Question("q2", "How is it?", ("Good", "Fair", "Bad")))
TARGET_GJK = np.array([[[0.9, 0.1, 0.0], [0.5, 0.3, 0.2]], [[0.3, 0.7, 0.0], [0.1, 0.1, 0.8]]])


@pytest.fixture
def kept():
    return predicted_rows(TARGET_GJK, groups=("North", "A [b]"), questions=ASKED)


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


def shown(question, options, answer_K, predictions) -> dict[str, list[object]]:
    """First cell of a row -> the others."""
    table = frames.asked(question, options, np.array(answer_K), predictions=predictions)
    return {row[0]: [*row[1:]] for row in table.itertuples(index=False)}


def test_an_answer_stands_beside_each_group_s_prediction_for_the_very_question(kept):
    found = shown("Is it?", ("No", "Yes"), [1.0, 0.0], kept)
    assert found == {"this policy": [1, 0], "predicted: North": [0.1, 0.9], "predicted: A [b]": [0.7, 0.3]}
    assert shown("Is she?", ("Yes", "No"), [0.25, 0.75], kept) == {"this policy": [0.25, 0.75]}
