"""Rows of scores come back; methods side by side."""

import numpy as np
import pandas as pd
import pytest

from appa_flwr.core.errors import UserError
from appa_flwr.run.pair_scores import PREDICTIONS, SURVEY, aligned, as_rows, put, read, table
from appa_flwr.run.schema import SCORES_FILE

GROUPS, QUESTIONS = ("A", "B"), ("q1", "q2", "q3")
NAN = np.nan


def rows(method, reward_GQ, *, metric="js", against=PREDICTIONS, questions=QUESTIONS):
    return as_rows(method, metric, against, np.array(reward_GQ), groups=GROUPS, questions=questions)


def test_a_method_that_is_scored_again_is_replaced(tmp_path):
    put(tmp_path, pd.concat([rows("sft", [[0.1] * 3] * 2), rows("ppo", [[0.2] * 3] * 2)]))
    put(tmp_path, rows("ppo", [[0.5, NAN, NAN], [NAN] * 3]))
    put(tmp_path, rows("ppo", [[0.7] + [NAN] * 2, [NAN] * 3], metric="cosine"))  # ceilings come metric by metric
    found = read(tmp_path)
    assert found.query("metric == 'cosine'")["reward"].tolist() == [0.7]
    found = found[found["metric"] == "js"]
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
        (pd.concat([rows("ppo", [[0.1]], questions=("q1",))] * 2), "has two rewards for the same method"),
        (rows("ppo", [[np.inf]], questions=("q1",)), "has a reward that is not a number from 0 to 1"),
        (rows("ppo", [[1.001]], questions=("q1",)), "has a reward that is not a number from 0 to 1"),
    ],
)
def test_a_file_that_is_none_of_ours_is_the_users_to_know(tmp_path, content, says):
    if isinstance(content, bytes):
        (tmp_path / SCORES_FILE).write_bytes(content)
    else:
        content.to_parquet(tmp_path / SCORES_FILE)
    with pytest.raises(UserError, match=rf"scores\.parquet: {says}"):
        read(tmp_path)
