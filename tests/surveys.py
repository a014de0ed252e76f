"""Small survey files in every format, one group's answers as a client reads them, and what a survey left out."""

from __future__ import annotations

import csv
import json

import pandas as pd
import pytest

from appa_flwr.core.errors import UserError
from appa_flwr.survey import read

YES_NO = ["Yes", "No", "Don't know"]


def row(question_id="q1", group="A", distribution=(0.5, 0.3, 0.2), *, options=YES_NO, question=None, **more):
    text = f"Text of {question_id}?" if question is None else question
    given = {"question_id": question_id, "question": text, "options": list(options)}
    return given | {"group": group, "distribution": list(distribution)} | more


def write(path, rows):
    """The same rows in the format that the extension names; a `str` row is a raw JSON line."""
    if path.suffix == ".jsonl":
        path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in rows) + "\n")
    elif path.suffix == ".parquet":
        pd.DataFrame(rows).to_parquet(path)
    else:
        with path.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    return path


def read_group(path, group, **answer_filter):
    """One group's answers.

    Raises:
        UserError: it has none that count.
    """
    found, _ = read.read_groups(path, (group,), answer_filter=read.AnswerFilter(**{"refusals": "keep"} | answer_filter))
    if isinstance(mine := found[group], UserError):
        raise mine
    return mine


def refused(message, call, *args, **options):
    """The one line of the user's mistake that a call must end in, which must match."""
    with pytest.raises(UserError, match=message) as caught:
        call(*args, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def bits(answers):
    """Answers as bytes, to be compared to the last digit."""
    return {question_id: shares.tobytes() for question_id, shares in answers.items()}


def shares(survey):
    """Group -> question id -> the distribution as a list; equal to what was written where that sums to one."""
    return {name: {key: shares_K.tolist() for key, shares_K in mine.items()} for name, mine in survey.answers.items()}


def ids(questions):
    return [question.question_id for question in questions]


def reasons(survey):
    return [(rejection.row, rejection.reason) for rejection in survey.rejections]


def reasons_of_groups(survey):
    return [(rejection.row, rejection.group, rejection.reason) for rejection in survey.rejections]
