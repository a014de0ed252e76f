"""Small survey files in every format."""

import json

import pandas as pd
import pytest

from appa_flwr.core.errors import UserError

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
        pd.DataFrame(rows).to_csv(path, index=False)
    return path


def refused(message, call, *args, **options):
    """The one line of the user's mistake that a call must end in, which must match."""
    with pytest.raises(UserError, match=message) as caught:
        call(*args, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def ids(questions):
    return [question.question_id for question in questions]


def shares(survey):
    """Group -> question id -> list of shares, which are compared with ==."""
    return {name: {key: share_K.tolist() for key, share_K in mine.items()} for name, mine in survey.answers.items()}
