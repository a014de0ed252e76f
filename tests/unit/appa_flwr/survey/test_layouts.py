"""Files that people really have, as rows of tables: what stands in a file, how it is read, and what comes of it.

`texts.json` has files as lines. `layouts.json` has columns, with what SPSS's and Stata's files declare of them, or a
file of the cases. `columns.json` tells what a column of sixty people is, by its name, label and cells.
"""

from itertools import chain, cycle, islice

import numpy as np
import pandas as pd
import pyreadstat
import pytest
from small import CASES, cases
from surveys import ids, refused, shares

from appa_flwr.survey import codebook as codebooks
from appa_flwr.survey.sources import convert

TEXTS, LAYOUTS, COLUMNS = map(cases, ("texts", "layouts", "columns"))


def _code(text):
    return int(text) if text.lstrip("-").isdigit() else text


def _write(file, columns, *, labels=(), texts=None, missing=None, measures=None, dates=()):
    """A table with what SPSS or Stata declare of it, as the file's suffix says."""
    table = pd.DataFrame(columns)
    table = table.astype(dict.fromkeys(dates, "datetime64[ns]"))
    if file.suffix in (".sav", ".dta"):
        numbers = table if file.suffix == ".dta" else table.apply(lambda c: pd.to_numeric(c, errors="coerce").fillna(c))
        named = {name: {_code(code): label for code, label in own.items()} for name, own in dict(labels).items()}
        given = {"variable_value_labels": named, "column_labels": texts or {}}
        if file.suffix == ".sav":
            pyreadstat.write_sav(numbers, str(file), missing_ranges=missing, variable_measure=measures, **given)
        else:
            pyreadstat.write_dta(numbers.astype(object), str(file), missing_user_values=missing, **given)
    elif file.suffix == ".jsonl":
        table.to_json(file, orient="records", lines=True)
    elif file.suffix == ".xlsx":
        table.to_excel(file, index=False)
    else:
        table.to_csv(file, index=False)
    return file


def _check(file, case, folder):
    keys = case.get("keys", {})
    if "message" in case:
        refused(case["message"], convert, file, **keys)
        return
    made = convert(file, **keys)
    survey, notes = made.survey, " | ".join(made.survey.about.notes)
    for group, right in case.get("shares", {}).items():
        numbers = chain.from_iterable(right.values()) if isinstance(right, dict) else right
        assert np.concatenate([*survey.answers[group].values()]) == pytest.approx([*numbers], abs=1e-5)
    found = {
        "ids": ids(survey.questions),
        "question": [question.text for question in survey.questions],
        "options": [[*question.options] for question in survey.questions],
        "ordinal": [question.ordinal and [*question.ordinal] for question in survey.questions],
        "groups": [*survey.groups],
        "n": {group: [*survey.respondents[group].values()] for group in case.get("n", ())},
        "weight": survey.about.weight,
        "left_out": made.codebook and made.codebook.left_out,
        "layout": made.codebook and made.codebook.layout.model_dump(exclude_defaults=True),
    }
    assert {name: found[name] for name in found if name in case} == {name: case[name] for name in found if name in case}
    wanted = case.get("note", [])
    assert [note for note in ([wanted] if isinstance(wanted, str) else wanted) if note not in notes] == []
    assert case.get("not", "nothing") not in notes
    assert all(name in notes for name in [*case.get("left_out", ())][:4])
    assert "guess" not in case or tuple(case["guess"]) in made.guesses
    assert case.get("guessed", "") in " | ".join(words for _, words in made.guesses)
    if made.codebook:  # by which the same answers are read
        codebooks.write(made.codebook, book := folder / "book.toml")
        kept = {name: value for name, value in keys.items() if name in ("groups", "min_respondents")}
        again = convert(file, codebook=book, **kept).survey
        assert (again.questions, shares(again)) == (survey.questions, shares(survey))


@pytest.mark.parametrize("case", TEXTS, ids=lambda case: " ".join(case["text"])[:60])
def test_texts(case, tmp_path):
    file = tmp_path / case["file"]
    file.write_bytes("".join(f"{line}\n" for line in case["text"]).encode(case.get("encoding", "utf-8")))
    groups = {"groups": [*case["shares"]]} if "shares" in case else {}
    _check(file, groups | case, tmp_path)


@pytest.mark.parametrize("case", LAYOUTS, ids=[case["why"][:60] for case in LAYOUTS])
def test_layouts(case, tmp_path):
    file = CASES / case["file"]
    if "columns" in case:
        declared = {key: case[key] for key in ("labels", "texts", "missing", "measures", "dates") if key in case}
        file = _write(tmp_path / case["file"], case["columns"], **declared)
    _check(file, case, tmp_path)


@pytest.mark.parametrize(
    ("column", "repeats", "note"),
    [
        ("caseid", 3, "each of which counts: 3 by caseid"),
        ("caseid", 0, ""),
        ("caseid", 70, ""),  # as often as once: a code of something else
        ("household_id", 3, ""),  # its members
    ],
)
def test_respondents_who_stand_in_several_rows(column, repeats, note, tmp_path):
    ids = [*range(70), *range(repeats)]
    rows = [f"{number},{'AB'[k % 2]},{'Yes' if k % 3 else 'No'}" for k, number in enumerate(ids)]
    (file := tmp_path / "x.csv").write_text("\n".join([f"{column},g,q", *rows]))
    notes = " | ".join(convert(file, group_by="g").survey.about.notes)
    assert note in notes
    assert ("id of an earlier row" in notes) == bool(note)
    lists = pd.DataFrame(
        {
            column: [[number] for number in ids],
            "g": ["A"] * len(ids),
            "q": ["Yes", "No"] * (len(ids) // 2) + ["No"] * (len(ids) % 2),
        }
    )
    lists.to_parquet(tmp_path / "x.parquet")
    assert "id of an earlier row" not in " | ".join(convert(tmp_path / "x.parquet", group_by="g").survey.about.notes)


ROWS = 60
# Columns that no list of a few cells describes; ten blocks of six rows.
NUMBERED = {
    "COUNT": [str(1000 + n) for n in range(ROWS)],
    "TEXT": [f"my own words {n}" for n in range(ROWS)],
    "BLOCK": [str(n // 6) for n in range(ROWS)],
    "WITHIN": [str(n % 6) for n in range(ROWS)],
}


def _cells(text):
    return NUMBERED.get(text) or [*islice(cycle(text.split("|") if "|" in text else text.split()), ROWS)]


@pytest.mark.parametrize("case", COLUMNS, ids=[case["why"] for case in COLUMNS])
@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".xlsx"])
def test_columns(case, suffix, tmp_path):
    own = {name: _cells(text) for name, text in case["columns"].items()}
    groups = ["N"] * 30 + ["S"] * 30  # of whole blocks
    columns = {"g": groups, "q": _cells("a b c")} | own
    file = tmp_path / f"x{'.sav' if 'texts' in case else suffix}"
    left_out = case.get("left_out", {})
    reasons = left_out if isinstance(left_out, dict) else dict.fromkeys(own, left_out)
    rest = {"ids": case.get("questions", ["q"])} if "options" not in case else {"options": [[*"abc"], case["options"]]}
    by_group = {"keys": {"group_by": "g", **case.get("keys", {})}}
    _check(
        _write(file, columns, texts=case.get("texts")),
        {"weight": ""} | case | rest | by_group | {"left_out": reasons},
        tmp_path,
    )


def test_a_column_of_more_than_200_groups_is_none(tmp_path):
    file = _write(tmp_path / "x.csv", {"g": range(300), "q": [0, 1] * 150})
    refused("column g has 300 groups", convert, file, group_by="g")


def test_a_text_below_a_thousand_numbers_in_excel_is_an_answer(tmp_path):
    file = _write(tmp_path / "x.xlsx", {"g": ["N"] * 1500, "q": [*[1, 2] * 600, *["Other"] * 300]})
    right = {"options": [["1", "2", "Other"]], "shares": {"N": [0.4, 0.4, 0.2]}}
    _check(file, right | {"keys": {"group_by": "g"}}, tmp_path)
