"""One respondent's row decides nothing but its own counts, in every format: the file's layout is the codebook's."""

import csv
import math
import random

import pandas as pd
import pyreadstat
import pytest
from small import CASES, cases
from surveys import refused

from appa_flwr.survey.codebook import Codebook
from appa_flwr.survey.files import read_frame
from appa_flwr.survey.noise import UNITS, Promise, counts, plan

CAP = 2.0
COLUMNS = ["PARTY", "Q1", "Q2", "COMMENT", "W"]
YES_NO = [{"code": "1", "label": "Yes"}, {"code": "2", "label": "No"}, {"code": "fine", "label": "Fine"}]
CODEBOOK = Codebook.model_validate(
    {
        "weight": {"column": "W"},
        "groups": {"PARTY": {"options": [{"code": name, "label": name} for name in ("Red", "Blue")]}},
        "questions": {name: {"id": name, "text": f"{name}?", "options": YES_NO} for name in ("Q1", "Q2")},
    }
)
HEADERS, CELLS = cases("odd_rows").values()
CELLS += ["x" * 3000]
NUMBERS = [1.0, 2.0, math.nan, 0.5, -999_999_999.0, 2.0**31 - 26, 1e12, 1e300]


def _usual(rng, rows):
    answers = [[rng.choice(["Red", "Blue"]), rng.choice("12"), rng.choice("12"), ""] for _ in range(rows)]
    return [[*answer, f"{rng.uniform(0.3, 3.0):.2f}"] for answer in answers]


def _odd(rng, suffix):
    if suffix in (".sav", ".dta") or rng.random() < 0.5:
        return [rng.choice(CELLS) for _ in COLUMNS]
    return rng.choice(HEADERS)


def _write(file, rows, rng):
    table = pd.DataFrame(rows, columns=COLUMNS)
    if file.suffix in (".csv", ".tsv"):
        with file.open("w", newline="") as content:
            csv.writer(content, delimiter="\t" if file.suffix == ".tsv" else ",").writerows([COLUMNS, *rows])
    elif file.suffix == ".jsonl":
        table.to_json(file, orient="records", lines=True)
    elif file.suffix == ".xlsx":
        table.to_excel(file, index=False)
    elif file.suffix == ".parquet":
        table.to_parquet(file)
    else:  # answers and weights are numbers there; an odd row has other numbers, or a missing code's letter
        numbers = (
            table[["Q1", "Q2", "W"]]
            .apply(pd.to_numeric, errors="coerce")
            .astype(float)
            .replace(math.inf, 1e300)
            .astype(object)
        )
        for name in numbers:
            odd = numbers[name].isna()
            numbers.loc[odd, name] = [
                rng.choice(NUMBERS) if name == "W" else rng.choice([1, 2, 7, None]) for _ in range(odd.sum())
            ]
        table = table.assign(**numbers, COMMENT=table["COMMENT"].str[:200])
        letters = {}
        if file.suffix == ".dta" and len(rows) % 2:
            table.loc[len(rows) // 2, "Q1"], letters = "a", {"missing_user_values": {"Q1": ["a"]}}
        write = pyreadstat.write_dta if file.suffix == ".dta" else pyreadstat.write_sav
        write(table.assign(W=table["W"].astype(float)), str(file), **letters)


def _moved(tmp_path, suffix, rng, rows=41):
    """L2 distance of the counts of a file with and without one odd row, and the counts' columns."""
    usual, odd = _usual(rng, rows), _odd(rng, suffix)
    place = rng.choice([0, rows // 2, rows])
    both = []
    for name, table in (("without", usual), ("with", [*usual[:place], odd, *usual[place:]])):
        file = tmp_path / f"{name}{suffix}"
        _write(file, table, random.Random(0))
        both.append(counts(read_frame(str(file), CODEBOOK.layout), CODEBOOK, CAP))
    assert both[0].keys() == both[1].keys() == {("PARTY", "Q1"), ("PARTY", "Q2")}
    return math.sqrt(sum(((both[0][at] - both[1][at]) ** 2).sum() for at in both[0])), odd


FORMATS = [".csv", ".tsv", ".xlsx", ".sav", ".dta", ".parquet", ".jsonl"]


@pytest.mark.parametrize("number", [8, pytest.param(200, marks=pytest.mark.long)])
@pytest.mark.parametrize("suffix", FORMATS)
def test_one_row_moves_the_counts_by_no_more_than_the_bound(tmp_path, suffix, number):
    bound = plan(CODEBOOK, Promise(4.0, cap=CAP)).sensitivity * UNITS
    rng = random.Random(f"{suffix} {number}")
    for _ in range(number):
        moved, odd = _moved(tmp_path, suffix, rng)
        assert moved <= bound, odd


@pytest.mark.parametrize("header", HEADERS[:4])
@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".xlsx", ".sav", ".parquet", ".jsonl"])
def test_a_first_row_like_a_header_is_a_respondent(tmp_path, suffix, header):
    rows = [header, *_usual(random.Random(1), 400)]
    if suffix == ".sav":
        pyreadstat.write_sav(pd.DataFrame(rows, columns=COLUMNS), str(tmp_path / "f.sav"))
    else:
        _write(tmp_path / f"f{suffix}", rows, random.Random(0))
    frame = read_frame(str(tmp_path / f"f{suffix}"), CODEBOOK.layout)
    assert (len(frame.cells), [*frame.cells.columns]) == (401, COLUMNS)


@pytest.mark.parametrize("codebook", [True, False])
@pytest.mark.parametrize(("suffix", "delimiter"), [(".csv", ","), (".tsv", "\t"), (".txt", ";")])
@pytest.mark.parametrize("later", ["", 'Red,1,1,"fine",1', 'Red,1,1,fine",1', 'Red,1,1,ok,1\nBlue,2,2,2",1'])
def test_a_quote_that_is_not_closed_is_an_error_with_its_line(tmp_path, suffix, delimiter, later, codebook):
    rows = ["PARTY,Q1,Q2,COMMENT,W", *["Blue,1,2,,1"] * 200, 'Red,1,1,"fine,1', *["Red,2,2,,1"] * 100, later]
    (tmp_path / f"f{suffix}").write_text("\n".join(rows + ["Red,2,2,,1"] * 99).replace(",", delimiter))
    layout = CODEBOOK.layout.model_copy(update={"delimiter": delimiter}) if codebook else None
    refused("line 202: a quotation mark that is not closed", read_frame, str(tmp_path / f"f{suffix}"), layout)


@pytest.mark.parametrize("name", ["apostrophe_cp1252.sav", "latin1_label.dta", "cp1252.csv"])
def test_by_a_codebook_letters_are_those_of_its_encoding(name):
    file = str(CASES / name)
    layout = CODEBOOK.layout.model_copy(update={"delimiter": ";"})
    refused('say encoding = "cp1252" in .layout. of the codebook', read_frame, file, layout)
    assert len(read_frame(file, layout.model_copy(update={"encoding": "cp1252"})).cells)
