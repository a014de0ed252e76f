"""Tables with one row a respondent: counted by hand, by pandas, and as the World Values Survey comes."""

from __future__ import annotations

import csv

import numpy as np
import pandas as pd
import pytest
from surveys import reasons, refused, shares

from appa_flwr.survey import respondents
from appa_flwr.survey.cells import Reason
from appa_flwr.survey.read import Source, group_names, read_questions, read_survey

PEOPLE = """country;age;Weight;Happy?;children
Kenya;young;1;Yes;1.0
Kenya;old;3;No;2
Kenya;old;2,0;DK;10
Peru;young;1;No;NA
Peru;;5;Yes;1
Peru;old;x;Yes;2
No answer;old;1;Yes;1
"""
OF_TWO_COLUMNS = ("country/Kenya", "country/Peru", "age/old", "age/young")


def read(tmp_path, text, *group_by, name="people.csv", weight="", **how):
    (tmp_path / name).write_text(text)
    return read_survey(Source(tmp_path / name, group_by, weight), **how)


def test_people_count_with_their_weights_worked_out_by_hand(tmp_path):
    found = read(tmp_path, PEOPLE, "country", refusals="separate")
    age, happy, children = found.questions
    assert (age.question_id, age.text, age.options) == ("age", "age", ("old", "young"))
    assert (happy.text, happy.options, happy.ordinal) == ("Happy?", ("No", "Yes"), None)
    assert children.options == ("1", "2", "10")  # by size, and 1.0 is 1
    # Kenya: 1 for Yes, 3 for No, and 2 of 6 refuse. Peru: 1 for No, 5 for Yes; the third has no weight.
    assert shares(found)["Kenya"]["Happy?"] == [0.75, 0.25]
    np.testing.assert_allclose(found.answers["Kenya"]["children"], [1 / 6, 3 / 6, 2 / 6])
    np.testing.assert_allclose(found.answers["Peru"]["Happy?"], [1 / 6, 5 / 6])
    assert found.refusal_rates["Kenya"] == {"Happy?": pytest.approx(2 / 6)}
    assert found.respondents == {
        "Kenya": {"age": 3, "Happy?": 2, "children": 3},
        "Peru": {"age": 1, "Happy?": 2, "children": 1},
    }
    assert reasons(found) == [(7, Reason.BAD_WEIGHT)]
    assert found.layout == (
        "one row a respondent, 7 of them, groups by country; weighted by Weight; "
        "3 questions: the other columns, options sorted"
    )


def test_each_of_several_columns_is_an_attribute(tmp_path):
    found = read(tmp_path, PEOPLE.replace(";", "\t"), "country", "age", name="people.tsv", weight="children")
    assert found.groups == OF_TWO_COLUMNS
    assert "weighted by children" in found.layout
    assert {question.question_id for question in found.questions} == {"Happy?", "Weight"}


def test_an_excel_file_is_read_as_its_csv_is(tmp_path):
    pytest.importorskip("openpyxl")
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"id": np.arange(40), "place": rng.choice(["A", "B", "C"], 40)})
    frame = frame.assign(tea=rng.choice(["never", "often"], 40), wt=rng.uniform(0.2, 3, 40).round(3))
    file = tmp_path / "table.csv"
    frame.to_csv(file, index=False)
    sheet = file.with_suffix(".xlsx")
    with pd.ExcelWriter(sheet) as book:
        frame.to_excel(book, sheet_name="people", index=False)
        frame.to_excel(book, sheet_name="copy", index=False)
    found, expected = read_survey(Source(sheet, ("place",))), read_survey(Source(file, ("place",)))
    assert found.questions == expected.questions
    assert shares(found) == shares(expected)
    assert found.layout == f"the sheet 'people' of 2; {expected.layout}"
    assert "; weighted by wt; 1 questions: " in found.layout
    assert found.layout.endswith("; no questions are id")
    assert group_names(Source(file, ("place",))) == found.groups
    assert read_questions(Source(file, ("place",))) == found.questions


def test_a_stata_file_is_asked_by_its_labels_and_worked_out_by_hand(tmp_path):
    people = pd.DataFrame(
        {
            "country": [1, 1, 1, 2, 2],
            "q7": [1.0, 2.0, np.nan, 2.0, 1.0],  # a gap was not asked
            "cups": [1, 2, 2, 1, 1],
            "wt": [1.0, 3.0, 1.0, 1.0, -1.0],
        }
    )
    people.to_stata(
        tmp_path / "p.dta",
        write_index=False,
        value_labels={"country": {1: "Kenya", 2: "Peru"}, "q7": {1: "Yes", 2: "No"}},
        variable_labels={"q7": "Do you like tea?"},
    )
    found = read_survey(Source(tmp_path / "p.dta", ("country",)))
    assert [(q.question_id, q.text, q.options) for q in found.questions] == [
        ("q7", "Do you like tea?", ("No", "Yes")),
        ("cups", "cups", ("1", "2")),
    ]
    assert shares(found) == {
        "Kenya": {"q7": [0.75, 0.25], "cups": [0.2, 0.8]},  # weights 3 to 1, and 1 to 3 + 1
        "Peru": {"q7": [1.0, 0.0], "cups": [1.0, 0.0]},
    }
    assert found.respondents["Kenya"] == {"q7": 2, "cups": 3}
    assert reasons(found) == [(5, Reason.BAD_WEIGHT)]


def test_a_tidy_stata_file_and_what_is_none(tmp_path):
    tidy = [["Tea?", "A", "Yes", 3], ["Tea?", "A", "No", 1]]
    frame = pd.DataFrame(tidy, columns=["question", "group", "option", "count"])
    frame.to_stata(tmp_path / "t.dta", write_index=False)
    assert list(shares(read_survey(tmp_path / "t.dta"))["A"].values()) == [[0.75, 0.25]]
    whole = (tmp_path / "t.dta").read_bytes()
    for content in (b"", b"no Stata file", whole[: len(whole) // 2]):
        (tmp_path / "t.dta").write_bytes(content)
        refused("t.dta: not a readable Stata file", read_survey, tmp_path / "t.dta")
    refused("u.dta: no such survey file", read_survey, tmp_path / "u.dta")


WVS = ["A_YEAR", "B_COUNTRY", "B_COUNTRY_ALPHA", "W_WEIGHT", "Q1", "Q50", "Q57", "Q260"]
ROWS = [
    [2018, 404, "KEN", 1.0, 1, 10, 1, 1],
    [2018, 404, "KEN", 1.5, 2, 7, 2, 2],
    [2018, 404, "KEN", 0.5, -1, 7, -2, 2],
    [2018, 604, "PER", 1.0, 4, -5, -4, 1],
    [2018, 604, "PER", 1.0, 3, 7, 2, 1],
]


def wvs(tmp_path, *columns, **how):
    with (tmp_path / "WVS_7.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows([list(columns) or WVS, *ROWS])
    return read_survey(Source(tmp_path / "WVS_7.csv"), **how)


def test_the_world_values_survey_is_known_by_its_columns(tmp_path):
    found = wvs(tmp_path)
    family, q50, trust = found.questions  # not who the respondent is
    assert family.text == "How important is this in your life: family?"
    assert family.options[::4] == ("Very important", "Don't know")
    assert (q50.question_id, q50.text, q50.options) == ("Q50", "World Values Survey, question Q50", ("7", "10"))
    assert trust.options == ("Most people can be trusted", "Need to be very careful", "No answer")
    assert shares(found)["KEN"]["Q57"] == [1 / 3, 0.5, 0.5 / 3]
    assert shares(found)["PER"]["Q57"] == [0.0, 1.0, 0.0]  # one was not asked
    assert "groups by B_COUNTRY_ALPHA; weighted by W_WEIGHT; 3 questions: World Values" in found.layout
    apart = wvs(tmp_path, refusals="separate")
    assert apart.questions[0].ordinal == (1, 2, 3, 4)
    np.testing.assert_allclose(apart.answers["KEN"]["Q57"], [0.4, 0.6])
    assert apart.refusal_rates["KEN"]["Q57"] == pytest.approx(1 / 6)


def test_the_world_values_survey_from_stata_has_the_words_of_its_csv(tmp_path):
    csv_s = wvs(tmp_path)
    labels = {"Q1": {1: "Very", 2: "Rather", -1: "?"}}
    pd.DataFrame(ROWS, columns=WVS).to_stata(tmp_path / "WVS.dta", write_index=False, value_labels=labels)
    found = read_survey(Source(tmp_path / "WVS.dta"))
    assert found.questions == csv_s.questions
    assert shares(found) == shares(csv_s)


def test_the_world_values_survey_with_labels_in_the_header_and_countries_by_number(tmp_path):
    labelled = [f"{name}: Something, said at length" if name[0] == "Q" else name for name in WVS]
    labelled[2] = "C_COW_ALPHA"
    found = wvs(tmp_path, *labelled)
    assert found.groups == ("404", "604")
    assert [question.question_id for question in found.questions] == ["Q1", "Q50", "Q57"]


@pytest.mark.parametrize(
    ("text", "group_by", "message"),
    [
        (PEOPLE, (), "data.group-by names the columns of groups"),
        (PEOPLE, ("land",), "has no column land; it has country, age, Weight, Happy. and 1 more$"),
        ("country,id\nA,1\nB,2\n", ("country", "id"), "no other column than country, id has 2 to 30 answers"),
        ("country,tea,tea\nA,1,2\n", ("country",), "column tea occurs twice"),
        ("country,tea\nA,1\nA,1,2\n", ("country",), "cannot be read as CSV"),
        ('country,tea\nA,"1\nB,2\n', ("country",), "cannot be read as CSV"),
        ("a" + ",x" * respondents.MAX_COLUMNS + "\n1\n", ("a",), "has 10001 columns; at most 10000 can be"),
        ("id,tea\n" + "".join(f"{k},{k % 2}\n" for k in range(201)), ("id",), "column id has 201 groups; at most 200"),
        ("country,tea,weight\nA,1,-1\nA,2,-1\n", ("country",), "no usable answer .2 x weight of a respondent"),
    ],
)
def test_what_is_no_table_of_respondents_is_one_line(tmp_path, text, group_by, message):
    refused(message, read, tmp_path, text, *group_by)


def test_other_formats_have_no_rows_of_respondents(tmp_path):
    refused("from .csv, .tsv, .xlsx and .dta$", read, tmp_path, '{"country": "A"}\n', "country", name="people.jsonl")


def test_in_our_own_columns_there_is_nothing_to_group(tmp_path):
    own = 'question_id,question,options,group,distribution\nq,Tea?,"[1, 2]",A,"[0.5, 0.5]"\n'
    assert read(tmp_path, own, "country").groups == ("A",)
