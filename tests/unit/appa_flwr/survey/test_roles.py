"""What a column is, by its name, its label and its cells: the rows of `cases/columns.json`."""

import json
from itertools import cycle, islice
from pathlib import Path

import pandas as pd
import pyreadstat
import pytest
from surveys import ids, refused

from appa_flwr.survey.sources import convert

ROWS = 60
CASES = json.loads((Path(__file__).parents[3] / "cases" / "columns.json").read_text())
# Columns that no list of a few cells describes; ten blocks of six rows.
NUMBERED = {
    "COUNT": [str(1000 + n) for n in range(ROWS)],
    "TEXT": [f"my own words {n}" for n in range(ROWS)],
    "BLOCK": [str(n // 6) for n in range(ROWS)],
    "WITHIN": [str(n % 6) for n in range(ROWS)],
}


def _cells(text):
    return NUMBERED.get(text) or [*islice(cycle(text.split("|") if "|" in text else text.split()), ROWS)]


def _file(folder, case, suffix):
    columns = {name: _cells(text) for name, text in case["columns"].items()}
    # Groups of whole blocks, or else in turn.
    table = pd.DataFrame({"g": ["N"] * 30 + ["S"] * 30, "q": _cells("a b c")} | columns)
    if suffix == ".sav":
        numeric = table.apply(lambda column: pd.to_numeric(column, errors="coerce").fillna(column))
        pyreadstat.write_sav(numeric, str(folder / "x.sav"), column_labels=case["texts"])
    elif suffix == ".jsonl":
        table.to_json(folder / "x.jsonl", orient="records", lines=True)
    elif suffix == ".xlsx":
        table.to_excel(folder / "x.xlsx", index=False)
    else:
        table.to_csv(folder / "x.csv", index=False)
    return folder / f"x{suffix}"


@pytest.mark.parametrize("case", CASES, ids=[case["why"] for case in CASES])
@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".xlsx"])
def test_columns(case, suffix, tmp_path):
    file = _file(tmp_path, case, ".sav" if "texts" in case else suffix)
    keys = {"group_by": "g", **case.get("keys", {})}
    if "message" in case:
        refused(case["message"], convert, file, **keys)
        return
    made = convert(file, **keys)
    assert made.survey.about.weight == case.get("weight", "")
    left_out = case.get("left_out", {})
    reasons = left_out if isinstance(left_out, dict) else dict.fromkeys(case["columns"], left_out)
    assert made.codebook.left_out == reasons
    assert all(name in " ".join(made.survey.about.notes) for name in [*reasons][:4])
    if "options" in case:
        assert made.survey.questions[-1].options == tuple(case["options"])
    else:
        assert ids(made.survey.questions) == case.get("questions", ["q"])
    assert case.get("guessed", "") in " | ".join(words for _, words in made.guesses)
