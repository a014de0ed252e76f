"""Excel files, SubPOP's tables, readers of the user's own, and a survey written again as one file."""

from __future__ import annotations

import json
import re
import sys
import zipfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from surveys import bits, ids, reasons, refused, row, shares, write

from appa_flwr.survey.cells import Reason
from appa_flwr.survey.export import write_table
from appa_flwr.survey.read import Source, read_survey
from appa_flwr.survey.tables import MAX_EXCEL_BYTES

GUIDE = Path(__file__).parents[4] / "docs" / "surveys.md"


def in_cells(rows):
    """Rows as a spreadsheet holds them: lists as text."""
    return pd.DataFrame([{k: json.dumps(v) if isinstance(v, list) else v for k, v in one.items()} for one in rows])


def test_our_own_columns_from_excel_are_those_from_json(tmp_path):
    pytest.importorskip("openpyxl")
    rows = [row("q1", "A"), row("q1", "B", (0.1, 0.2, 0.7), n=12), row("q2", "A", (0.5, 0.6, 0.2), n=3)]
    in_cells(rows).to_excel(tmp_path / "survey.xlsx", index=False)
    found, expected = read_survey(tmp_path / "survey.xlsx"), read_survey(write(tmp_path / "survey.jsonl", rows))
    assert found.questions == expected.questions
    assert shares(found) == shares(expected)
    assert found.respondents["B"] == {"q1": 12}
    assert reasons(found) == [(4, Reason.SUM)]  # the sheet's row


def test_excel_without_its_package_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "openpyxl", None)
    (tmp_path / "survey.xlsx").touch()
    refused("pip install openpyxl.*save it as .csv", read_survey, tmp_path / "survey.xlsx")


SHEET = "xl/worksheets/sheet1.xml"


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("sheet", "message"),
    [
        (None, "not a readable Excel file .BadZipFile"),
        (b"", "not a readable Excel file"),
        (b"<worksheet", "not a readable Excel file"),
        ("bomb", "unpacks to too much"),
        # a million rows of which each has one cell, in the last column there can be
        ("wide", "unpacks to too much"),
        ("entities", "not a readable Excel file"),
    ],
)
def test_hostile_excel_files_cost_little(tmp_path, sheet, message):
    pytest.importorskip("openpyxl")
    in_cells([row()]).to_excel(tmp_path / "good.xlsx", index=False)
    space = 'xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main"'
    content = {
        "bomb": b" " * (MAX_EXCEL_BYTES + 1),
        "wide": f"<worksheet {space}><sheetData>"
        + "".join(f'<row r="{n}"><c r="XFD{n}"><v>1</v></c></row>' for n in range(1, 3000))
        + "</sheetData></worksheet>",
        "entities": '<!DOCTYPE x [<!ENTITY a "'
        + "x" * 1000
        + '">'
        + "".join(f'<!ENTITY {b} "{f"&{a};" * 100}">' for a, b in zip("abcd", "bcde", strict=True))
        + f"]><worksheet {space}><sheetData><row><c t='str'><v>&e;</v></c></row></sheetData></worksheet>",
    }.get(sheet, sheet)
    bad = tmp_path / "bad.xlsx"
    if content is None:
        bad.write_bytes(b"no zip")
    else:
        with zipfile.ZipFile(tmp_path / "good.xlsx") as good, zipfile.ZipFile(bad, "w", zipfile.ZIP_DEFLATED) as packed:
            for name in good.namelist():
                packed.writestr(name, content if name == SHEET else good.read(name))
    assert "bad.xlsx" in refused(message, read_survey, bad)


SUBPOP = """qkey,attribute,group,responses,refusal_rate,ordinal,question,options
Q1_W26,SEX,Male,"[0.25, 0.75]",0.02,"[1.0, 2.0]",Do you own a gun?,"['Yes', 'No', 'Refused']"
Q1_W26,SEX,Female,"[0.1, 0.9]",0.04,"[1.0, 2.0]",Do you own a gun?,"['Yes', 'No', 'Refused']"
Q2_W26,SEX,Male,"[0.1, 0.2]",0.04,,Do you drive?,"['Yes', 'No', 'Never']"
"""


def test_subpop_s_columns_are_read_as_our_own(tmp_path):
    (tmp_path / "subpop.csv").write_text(SUBPOP)
    found = read_survey(tmp_path / "subpop.csv", refusals="separate")
    assert shares(found) == {"SEX/Male": {"Q1_W26": [0.25, 0.75]}, "SEX/Female": {"Q1_W26": [0.1, 0.9]}}
    assert found.questions[0].options == ("Yes", "No")
    assert found.questions[0].ordinal == (1, 2)
    assert found.refusal_rates["SEX/Female"] == {"Q1_W26": 0.04}
    assert found.layout == "SubPOP's columns, with refusals apart"
    assert reasons(found) == [(4, Reason.LENGTH)]  # "Never" is an answer without a share


@pytest.mark.parametrize("name", ["clean.csv", "clean.jsonl"])
def test_what_was_understood_is_written_and_reads_the_same_to_every_bit(tmp_path, name):
    text = {"question": 'two "lines"\nand, ä comma', "ordinal": [1, 2, None]}
    rows = [
        row("q1", "A", (1 / 3, 1 / 3, 1 / 3), n=7, **text),
        row("q2", "A", n=0.5),
        row("q1", "North, West", (0.1, 0.2, 0.7), **text),
    ]
    found = read_survey(write(tmp_path / "survey.jsonl", rows), refusals="separate")
    write_table(found, tmp_path / name)
    again = read_survey(tmp_path / name, refusals="separate")
    assert again.questions == found.questions
    assert {group: bits(mine) for group, mine in again.answers.items()} == {
        group: bits(mine) for group, mine in found.answers.items()
    }
    assert (again.respondents, again.refusal_rates, again.layout) == (found.respondents, found.refusal_rates, "")


def test_a_survey_is_written_in_two_formats_only(tmp_path):
    found = read_survey(write(tmp_path / "survey.jsonl", [row()]))
    refused(r"--write .*clean.xlsx: is written as .csv or .jsonl", write_table, found, tmp_path / "clean.xlsx")


POLLS = [
    {"text": "Tea?", "choices": ["Yes", "No"], "answers": {"North": [3, 1], "South": [0, 5]}},
    {"text": "Milk?", "choices": ["Yes", "No", "DK"], "answers": {"North": [1, 1, 2]}},
]
OTHERS = """
import numpy as np
import pandas as pd

def frame():
    options, distribution = [["a", "b"]] * 2, [np.array([0.5, 0.5]), np.array([1.0, 1.0])]
    return pd.DataFrame({"question_id": ["q1", "q2"], "question": ["Q?", "R?"], "options": options, "group": ["A", "A"],
                         "distribution": distribution, "n": np.array([3, 4])})

def empty():
    return []

def number():
    return 3

def texts():
    return ["a", "b"]

def fails(file):
    raise ValueError("first\\nsecond")

def ends():
    raise SystemExit("usage: ends")
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with readers of somebody's own on the path, the guide's among them, and the file that it reads."""
    guide = re.search(r"```python\n(import json.*?)```", GUIDE.read_text(), re.DOTALL)
    (tmp_path / "their_readers.py").write_text(guide[1] + OTHERS)
    (tmp_path / "polls.json").write_text("\n".join(map(json.dumps, POLLS)))
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("their_readers", None)


def test_the_guide_s_reader_gives_the_survey(here):
    found = read_survey(f"their_readers:read:{here / 'polls.json'}")
    assert {group: list(mine.values()) for group, mine in shares(found).items()} == {
        "North": [[0.75, 0.25], [0.25, 0.25, 0.5]],
        "South": [[0.0, 1.0]],
    }
    assert list(found.respondents["North"].values()) == [4, 4]
    assert found.layout == "one row an option, with counts"


def test_a_reader_s_rows_are_judged_as_a_file_s_are(here):
    found = read_survey("their_readers:frame")
    assert ids(found.questions) == ["q1"]
    assert found.respondents == {"A": {"q1": 3}}
    assert reasons(found) == [(2, Reason.SUM)]
    assert found.layout == "their_readers:frame says"
    assert np.array_equal(read_survey(Source("their_readers:frame", ("country",))).answers["A"]["q1"], [0.5, 0.5])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("their_readers:empty", 'survey "their_readers:empty": gives no rows$'),
        ("their_readers:number", "their_readers:number.*TypeError"),
        ("their_readers:texts", "their_readers:texts.*ValueError"),
        ("their_readers:fails:x", r"ValueError: first second\)$"),
        ("their_readers:fails", r"TypeError: fails\(\) missing 1"),
        ("their_readers:ends", r"SystemExit: usage: ends\)$"),
        ("their_readers:reed", "their_readers has no function reed$"),
    ],
)
def test_a_reader_that_gives_no_rows_is_one_line(here, source, message):
    refused(message, read_survey, source)
