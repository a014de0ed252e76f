"""Files that people really have, one kind of fault a test; the numbers are worked by hand."""

from pathlib import Path

import numpy as np
import openpyxl
import pandas as pd
import pyreadstat
from surveys import refused

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


def test_a_weight_by_its_label(tmp_path):
    table = pd.DataFrame({"g": [1, 2] * 5, "q": [1, 2] * 5, "W1": [1, 2] * 5})
    pyreadstat.write_sav(table, str(tmp_path / "x.sav"), column_labels={"W1": "Survey weight"})
    assert read_survey(tmp_path / "x.sav", group_by="g").about.weight == "W1"


def test_another_name_of_a_country_is_a_guess(tmp_path):
    made = convert(people(tmp_path / "x.csv", c=["Britain", "Peru"] * 30), group_by="c")
    assert (0.5, "c: Britain 'Great Britain': another name of Britain") in made.guesses
    assert usual_name("c/Britain") == "c/Great Britain"


def test_a_row_of_texts_in_excel(tmp_path):
    book = openpyxl.Workbook()
    for row in [["Q1", "Q2"], ["Where do you live?", "Should taxes rise?"], *[["N", "a"], ["S", "b"]] * 6]:
        book.active.append(row)
    book.save(tmp_path / "x.xlsx")
    survey = read_survey(tmp_path / "x.xlsx", group_by="Q1")
    assert (survey.groups, survey.questions[0].text) == (("N", "S"), "Should taxes rise?")


def test_a_text_below_a_thousand_numbers_in_excel_is_an_answer(tmp_path):
    book = openpyxl.Workbook()
    for row in [["g", "q"], *[["N", 1], ["N", 2]] * 600, *[["N", "Other"]] * 300]:
        book.active.append(row)
    book.save(tmp_path / "x.xlsx")
    survey = read_survey(tmp_path / "x.xlsx", group_by="g")
    assert survey.questions[0].options == ("1", "2", "Other")
    assert survey.answers["N"]["q"].tolist() == [0.4, 0.4, 0.2]


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
