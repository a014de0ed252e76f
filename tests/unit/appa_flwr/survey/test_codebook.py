"""The codebook of a file of respondents: what is guessed, what its owner edits, and what it restricts."""

import json
import time
import tomllib

import pandas as pd
import pyreadstat
import pytest
from small import cases
from surveys import refused, shares

from appa_flwr.survey import codebook as codebooks
from appa_flwr.survey import store
from appa_flwr.survey.codebook import Codebook, Entry, Item, Listed, Weight
from appa_flwr.survey.sources import convert, read_survey
from appa_flwr.survey.types import Question

AGREE = {1: "Agree", 2: "Neither", 3: "Disagree", 9: "I don't know", -7: "Interview deleted"}


@pytest.fixture
def file(tmp_path):
    table = {"party": [1, 1, 1, 2, 2, 2], "q": [1, 1, 3, 2, 9, -7], "wght": [2, 1, 1, 1, 1, 1], "x": [1, 2, 1, 2, 1, 2]}
    labels = {"party": {1: "Left", 2: "Right"}, "q": AGREE}
    texts = {"q": "Do you agree?"}
    path = tmp_path / "x.sav"
    pyreadstat.write_sav(pd.DataFrame(table), str(path), variable_value_labels=labels, column_labels=texts)
    return path


def test_the_command_writes_a_codebook_that_gives_the_same_answers(file, appa, tmp_path):
    said = appa("survey", file, "data.group-by=party", "--write", tmp_path / "my.jsonl")
    # Guesses: the weight (all people), 9 and -7 of q (one of six each).
    assert "3 guesses, first: weight 'wght'" in said
    assert said.count("(17% of the respondents)") == 2
    book = tmp_path / "my.codebook.toml"
    table = tomllib.loads(book.read_text())
    assert table["weight"] == {"column": "wght", "guessed": "the only column that looks like a weight"}
    marks = {row["code"]: row.get("guessed", "") != "" for row in table["questions"]["q"]["no-answers"]}
    assert marks == {"-7": True}
    assert [row["code"] for row in table["questions"]["x"]["options"] if row["seen"]] == ["1", "2"]
    appa("survey", file, "--codebook", book, "--write", tmp_path / "again.jsonl")
    first, again = store.read(tmp_path / "my.jsonl"), store.read(tmp_path / "again.jsonl")
    assert (first.questions, first.respondents, shares(first)) == (again.questions, again.respondents, shares(again))
    assert (first.about.group_by, first.about.weight) == (again.about.group_by, again.about.weight) == ("party", "wght")
    book.write_text("# mine\n" + book.read_text())
    appa("survey", file, "data.group-by=party", "--write", tmp_path / "my.jsonl")
    assert (tmp_path / "my.codebook.old").read_text().startswith("# mine\n")
    assert "data.weight" in appa("survey", file, "data.weight=none", "--codebook", book, code=2)


def test_what_the_owner_changes_counts_and_cells_in_no_list_are_named(file, tmp_path):
    codebooks.write(convert(file, group_by="party").codebook, book := tmp_path / "b.toml")
    text = book.read_text().replace('"Agree"', '"Yes"').replace('column = "wght"', 'column = "none"')
    book.write_text(
        text.replace('  { code = "2", label = "Neither" },\n', "").replace("[questions.x]", "[questions.y]")
    )
    survey = read_survey(file, codebook=book)
    # Left: 1, 1, 3. Right: 2 is in no list, 9 is a refusal, which is kept as an option and not counted.
    assert shares(survey) == {"Left": {"q": [2 / 3, 1 / 3, 0.0]}, "Right": {"q": [0.0, 0.0, 1.0]}}
    assert survey.questions[0].options == ("Yes", "Disagree", "I don't know")
    assert survey.respondents == {"Left": {"q": 3.0}, "Right": {"q": 0.0}}
    assert {
        "cells left out that no list of the codebook has: 1 of q ('2')",
        "questions of the codebook that the file does not have: y",
        "columns in no list of the codebook: wght, x",
    } <= {*survey.about.notes}
    for name in ("group_by", "weight", "missing", "refusals"):
        refused(f"data.{name.replace('_', '-')}: ", read_survey, file, codebook=book, **{name: "drop"})


@pytest.mark.parametrize(("change", "message"), cases("wrong_inputs")["codebooks"]["rows"])
def test_a_wrong_codebook_is_one_line_that_names_the_place(file, tmp_path, change, message):
    codebooks.write(convert(file, group_by="party").codebook, book := tmp_path / "b.toml")
    assert change[0] in book.read_text()
    book.write_text(book.read_text().replace(*change, 1))
    refused(message, read_survey, file, codebook=book)


def test_public_questions_restrict_and_order_and_what_does_not_fit_is_named(file, tmp_path):
    rows = [
        {"question_id": "ECON", "question": "do you agree?", "options": ["Disagree", "Never", "Neither", "Agree"]},
        {"question_id": "x", "question": "x", "options": ["1", "3"]},
        {"question_id": "gone", "question": "Gone?", "options": ["1", "3"]},
    ]
    (public := tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = convert(file, group_by="party", questions=public)
    (question,) = made.survey.questions
    assert question == Question("ECON", "do you agree?", ("Disagree", "Never", "Neither", "Agree"))
    # Left by weight: 3 of 4 agree. Right: one Neither; the refusal and the negative code are left out.
    assert shares(made.survey) == {"Left": {"ECON": [0.25, 0, 0, 0.75]}, "Right": {"ECON": [0, 0, 1, 0]}}
    (note,) = (note for note in made.survey.about.notes if note.startswith("questions that do not fit"))
    assert all(part in note for part in ("x (not among its options: '2')", "gone (the file has no such question)"))
    codebooks.write(made.codebook, book := tmp_path / "b.toml")
    assert shares(read_survey(file, codebook=book)) == shares(made.survey)
    public.write_text(json.dumps(rows[0]) + "\n")
    fitting = convert(file, group_by="party", questions=public).survey.about.notes
    assert not any("do not fit" in note for note in fitting)


def test_two_thousand_columns_are_written_and_read_in_a_second(tmp_path):
    options = tuple(Entry(code=str(code), label=f"Label {code}") for code in range(5))
    items = {
        f"Q {n}": Item(id=f"Q{n}", text=f"Text {n}?", options=options, ordinal=(1, 2, 3, 4, 9)) for n in range(2000)
    }
    book = Codebook(
        weight=Weight(), groups={"g": Listed(options=options[:2])}, questions=items, left_out={"é": 'a "b"'}
    )
    begun = time.process_time()
    codebooks.write(book, tmp_path / "b.toml")
    assert time.process_time() - begun < 1.0
    assert codebooks.read(tmp_path / "b.toml") == book
