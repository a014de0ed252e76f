"""Files that people really have, one kind of fault a test; the numbers are worked by hand."""

from pathlib import Path

import numpy as np
import openpyxl
import pandas as pd
import pyreadstat
import pytest
from surveys import ids, refused

from appa_flwr.config import Config
from appa_flwr.config.sources import read_toml
from appa_flwr.launch.checks import read_survey as read_checked
from appa_flwr.survey.names import usual_name
from appa_flwr.survey.sources import convert, read_survey

CASES = Path(__file__).parents[3] / "cases"


def people(path, n=60, **columns):
    """A CSV of people, half of them in N, with the answers a, b, c in turn."""
    table = {"g": ["N", "S"] * (n // 2), "q": [*"abc"] * (n // 3)} | columns
    pd.DataFrame(table).to_csv(path, index=False)
    return path


def test_negative_codes_with_labels_are_guessed_to_be_no_answers_unless_all_between_occur(tmp_path):
    table = pd.DataFrame({"g": [1] * 8, "a": [1, 2, 3, -3] * 2, "b": [-2, -1, 0, 1, 2, 0, 1, 2]})
    labels = {"a": {1: "x", 2: "y", 3: "z", -3: "Failure"}, "b": {k: f"is {k}" for k in range(-2, 3)}}
    pyreadstat.write_sav(table, str(tmp_path / "x.sav"), variable_value_labels=labels)
    made = convert(tmp_path / "x.sav", group_by="g")
    assert [len(question.options) for question in made.survey.questions] == [3, 5]
    assert made.survey.respondents == {"1": {"a": 6.0, "b": 8.0}}
    assert (0.25, "a: -3 'Failure': a negative code beside positive ones") in made.guesses
    pyreadstat.write_sav(table, str(tmp_path / "x.sav"))
    refused('"a=-3"', read_survey, tmp_path / "x.sav", group_by="g")


@pytest.mark.parametrize(
    ("columns", "weight"),
    [
        ({"w1": [0.5, 1.5] * 30}, "w1"),
        ({"w1": [1, 2] * 30}, ""),  # the first wave, or a question
        ({"weight_kg": [60.5, 80.2] * 30}, ""),
        ({"my_wgt": [0.5, 1.5] * 30, "body_weight": [60.5, 80.2] * 30}, "my_wgt"),
    ],
)
def test_weights(tmp_path, columns, weight):
    assert read_survey(people(tmp_path / "x.csv", **columns), group_by="g").about.weight == weight


def test_weights_that_only_their_owner_can_choose(tmp_path):
    half = people(tmp_path / "x.csv", weight=[0.5, ""] * 30)
    refused("weight looks like the weight, and 30 of 60", read_survey, half, group_by="g")
    several = people(tmp_path / "x.csv", postweight=[0.5, ""] * 30, w=[0.5, 1.5] * 30)
    refused("postweight, w may each", read_survey, several, group_by="g")
    table = pd.DataFrame({"g": [1, 2] * 5, "q": [1, 2] * 5, "W1": [1, 2] * 5})
    pyreadstat.write_sav(table, str(tmp_path / "x.sav"), column_labels={"W1": "Survey weight"})
    assert read_survey(tmp_path / "x.sav", group_by="g").about.weight == "W1"


@pytest.mark.parametrize(
    ("columns", "group_by", "message"),
    [
        ({"pid": [*range(30)] * 2, "wave": ["1"] * 30 + ["2"] * 30}, "g", "'pid' are repeated, and 'wave'"),
        ({"Item": ["x", "y"] * 30, "Val": ["1", "2"] * 30}, "q", "'Item' names the question of the answer in 'Val'"),
        ({"redcap_event_name": ["base", "later"] * 30}, "g", "'redcap_event_name' has several events"),
    ],
)
def test_several_rows_a_respondent(tmp_path, columns, group_by, message):
    refused(f"{message}.*pivot", read_survey, people(tmp_path / "x.csv", **columns), group_by=group_by)


def test_numbers_of_people_within_countries_are_no_repetition(tmp_path):
    columns = {"idno": [*range(30)] * 2, "cntry": ["DE"] * 30 + ["FR"] * 30, "sex": ["f"] * 20 + ["m"] * 40}
    file = people(tmp_path / "x.csv", **columns)
    assert read_survey(file, group_by="cntry").groups == ("DE", "FR")
    assert read_survey(file, group_by="sex").groups == ("f", "m")


def test_several_answers_in_a_cell(tmp_path):
    columns = {"media": ["TV", "Radio", "TV, Radio"] * 20, "web": ["A|B", "B|C", "A|C"] * 20}
    columns |= {"view": ["Yes, fully", "Yes, partly", "No, fully", "No, partly"] * 15}
    survey = read_survey(people(tmp_path / "x.csv", **columns), group_by="g")
    assert ids(survey.questions) == ["q", "view"]


def test_countries_whose_codes_mean_no_answer_elsewhere(tmp_path):
    file = people(tmp_path / "x.csv", c=["NA", "EU"] * 30, d=["no", "dk"] * 30, e=["m", "DK"] * 30)
    assert read_survey(file, group_by="c;d").groups == ("c/EU", "c/NA", "d/dk", "d/no")
    assert read_survey(file, group_by="e").groups == ("m",)
    made = convert(people(tmp_path / "x.csv", c=["Britain", "Peru"] * 30), group_by="c")
    assert (0.5, "c: Britain 'Great Britain': another name of Britain") in made.guesses
    assert usual_name("c/Britain") == "c/Great Britain"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Table 1,Poll,,\n,,Gender,\n,Total,Male,Female\nYes,41 %,40 %,42 %\n", "crosstab"),
        ("Poll of adults\n\n,Total,Male\nYes,41 %,40 %\n", "line 3 has 3 cells.* row an option"),
        ("\ufeff\n<!DOCTYPE html>\n", "is a web page"),
    ],
)
def test_what_is_no_table(tmp_path, text, message):
    (tmp_path / "x.csv").write_text(text)
    refused(message, read_survey, tmp_path / "x.csv", group_by="Gender")


def test_headers_of_qualtrics_in_excel_and_of_others(tmp_path):
    book = openpyxl.Workbook()
    for row in [["Q1", "Q2"], ["Where do you live?", "Should taxes rise?"], *[["N", "a"], ["S", "b"]] * 6]:
        book.active.append(row)
    book.save(tmp_path / "x.xlsx")
    survey = read_survey(tmp_path / "x.xlsx", group_by="Q1")
    assert (survey.groups, survey.questions[0].text) == (("N", "S"), "Should taxes rise?")
    # A first respondent with rare answers is no header.
    (tmp_path / "x.csv").write_text("g,q\nW,c\n" + "N,a\nS,b\n" * 6)
    assert read_survey(tmp_path / "x.csv", group_by="g").groups == ("N", "S", "W")


def test_literal_percent_signs_and_ordered_categories(tmp_path):
    book = openpyxl.Workbook()
    for row in [["question", "group", "option", "percent"], ["Q?", "A", "Yes", 40], ["Q?", "A", "No", 60]]:
        book.active.append(row)
    for cell in book.active["D"]:
        cell.number_format = '0"%"'
    book.save(tmp_path / "x.xlsx")
    assert next(iter(read_survey(tmp_path / "x.xlsx").answers["A"].values())).tolist() == [0.4, 0.6]
    answers = pd.Categorical(["Low", "High", "Mid", ""] * 3, ["Low", "Mid", "High", ""], ordered=True)
    pd.DataFrame({"list": [["a"]] * 12, "g": ["N"] * 12, "q": answers}).to_parquet(tmp_path / "x.parquet")
    (question,) = read_survey(tmp_path / "x.parquet", group_by="g").questions
    assert (question.options, question.ordinal) == (("Low", "Mid", "High"), (1.0, 2.0, 3.0))


def test_toml_of_windows(tmp_path):
    (tmp_path / "x.toml").write_bytes('task = "opa"\r\n'.encode("utf-16"))
    assert read_toml(tmp_path / "x.toml") == {"task": "opa"}
    assert read_toml(CASES / "bom.toml")["data.num-questions"] == 60
    (tmp_path / "x.toml").write_text("seed = 1\ntask = “opa”\n")
    refused("line 2 has typographic quotes", read_toml, tmp_path / "x.toml")


def test_too_few_held_out_questions_are_said(tmp_path, appa, capsys):
    rng = np.random.default_rng(0)
    file = people(tmp_path / "x.csv", **{f"q{n}": rng.choice(["a", "b"], 60) for n in range(11)})
    said = appa("survey", file, "data.group-by=g", "--write", tmp_path / "x.jsonl", "--out", tmp_path / "out")
    assert "too few to score" in said
    read_checked(Config.load({"survey": str(tmp_path / "x.jsonl")}))
    assert "too few to score" in capsys.readouterr().out
    group, questions = tmp_path / "out" / "groups" / "n.jsonl", tmp_path / "out" / "questions.jsonl"
    assert "too few to score" in appa("group", "check", group, "--questions", questions)


def test_excel_s_line_may_name_a_tab(tmp_path):
    (tmp_path / "x.csv").write_text("sep=\t\ng\tq; or not\n" + "N\ta, b\nS\tc\n" * 6)
    survey = read_survey(tmp_path / "x.csv", group_by="g")
    assert [(question.text, question.options) for question in survey.questions] == [("q; or not", ("a, b", "c"))]
