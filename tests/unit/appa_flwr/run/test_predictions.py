"""The groups' predictions as a run keeps them, and the table of a question that was asked."""

from __future__ import annotations

import io
import re

import numpy as np
import pandas as pd
import pytest
from report_runs import figure_of
from rich.console import Console

from appa_flwr.core.errors import UserError
from appa_flwr.report.asked import Asked
from appa_flwr.run import predictions
from appa_flwr.run.pair_scores import replace_rows
from appa_flwr.run.run_files import PREDICTIONS_FILE
from appa_flwr.survey.types import Question

QUESTIONS = (Question("q1", "Is it?", ("Yes", "No")), Question("q2", "How is it?", ("Good", "Fair", "Bad")))
TARGET_GJK = np.array([[[0.9, 0.1, 0.0], [0.5, 0.3, 0.2]], [[0.3, 0.7, 0.0], [0.1, 0.1, 0.8]]])


@pytest.fixture
def kept():
    return predictions.as_rows(TARGET_GJK, groups=("North", "A [b]"), questions=QUESTIONS)


def test_what_is_written_is_read_and_a_question_is_found_by_its_words_and_options(kept, tmp_path):
    assert predictions.read(tmp_path) is None
    replace_rows(tmp_path / PREDICTIONS_FILE, kept)
    found = predictions.read(tmp_path)
    pd.testing.assert_frame_equal(found, kept)
    assert len(found) == 2 * (2 + 3)
    asked = predictions.of_question(found, " How is it?", ("Bad", "Good", "Fair"))
    assert asked.index.tolist() == ["North", "A [b]"]
    assert asked.to_numpy().tolist() == [[0.2, 0.5, 0.3], [0.8, 0.1, 0.1]]
    assert predictions.of_question(found, "How is it?", ("Good", "Bad")) is None
    assert predictions.of_question(found, "Is she?", ("Yes", "No")) is None
    assert predictions.of_question(None, "Is it?", ("Yes", "No")) is None
    replace_rows(tmp_path / PREDICTIONS_FILE, kept.drop(columns="text"))
    with pytest.raises(UserError, match=r"predictions\.parquet: .* question, group, option, share"):
        predictions.read(tmp_path)


def shown(*arguments, **keywords) -> dict[str, list[str]]:
    """First cell of a row -> the others."""
    out = io.StringIO()
    Console(file=out, width=160).print(Asked.of(*arguments, **keywords).table())
    rows = (re.split(r"[│┃]", line)[1:-1] for line in out.getvalue().splitlines())
    return {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows if row}


def test_an_answer_stands_beside_each_group_s_prediction_and_the_best_shared_ones(kept):
    table = shown("Is it?", ("Yes", "No"), np.array([1.0, 0.0]), predictions=kept, metric="cosine")
    assert table["answer"] == ["Yes", "No", "cosine, mean", "worst served"]
    # (1 + cos) / 2: cos .9 / sqrt(.82) = .9939 and .3 / sqrt(.58) = .3939; of equal shares .7809 and .9285
    assert table["this policy"] == ["1.00", "0.00", "0.847", "0.697 A [b]"]
    assert table["uniform answer"] == ["0.50", "0.50", "0.927", "0.890 North"]
    assert table["predicted: A [b]"] == ["0.30", "0.70", "", ""]
    # the bisector of both directions serves both alike
    north, other = (np.array(one) / np.linalg.norm(one) for one in ([0.9, 0.1], [0.3, 0.7]))
    both = (north + other) / (north + other).sum()
    best = table["best answer, worst served"]
    assert [float(cell) for cell in best[:2]] == pytest.approx(both, abs=0.011)
    assert float(best[2]) == pytest.approx((1 + north @ both / np.linalg.norm(both)) / 2, abs=0.002)


def test_another_question_has_the_policy_s_shares_alone(kept):
    table = shown("Is she?", ("Yes", "No"), np.array([0.25, 0.75]), predictions=kept, metric="js")
    assert table == {"option": ["share"], "Yes": ["0.25"], "No": ["0.75"]}


def test_the_picture_has_a_bar_an_answer_and_a_prediction_divided_into_the_options_shares(kept):
    asked = Asked.of("Is it?", ("No", "Yes"), np.array([0.25, 0.75]), predictions=kept, metric="js")
    (axes,) = figure_of(Asked.draw, asked).axes
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names[0] == "this policy"
    assert names[-2:] == ["predicted: North", "predicted: A [b]"]
    no, yes = ([(bar.get_x(), bar.get_width()) for bar in bars] for bars in axes.containers)
    assert (no[0], yes[0]) == ((0, 0.25), (0.25, 0.75))
    assert np.array([no[-1], yes[-1]]) == pytest.approx(np.array([[0, 0.7], [0.7, 0.3]]))
