"""One row a respondent, as SPSS, Stata and spreadsheets have it; the numbers are worked by hand."""

import pandas as pd
import pyreadstat
from surveys import ids, refused, shares

from appa_flwr.survey.sources import read_survey

AGREE = {1: "Agree", 2: "Neither", 3: "Disagree"}


def sav(path, table, labels, **more):
    pyreadstat.write_sav(pd.DataFrame(table), str(path), variable_value_labels=labels, **more)
    return path


def notes(survey):
    return " | ".join(survey.about.notes)


def test_spss_with_missing_ranges_measures_and_a_weight(tmp_path):
    table = {
        "region": [1, 1, 1, 1, 2, 2, 2, 9],
        "view": [1, 1, 3, -8, 2, 97, 1, 1],
        "wght": [2, 1, 1, 5, 1, 1, None, 1],
    }
    region, view = {1: "North", 2: "South", 9: "No answer"}, AGREE | {-8: "Refused", 97: "Interview broken off"}
    path = sav(
        tmp_path / "x.sav",
        table,
        {"region": region, "view": view},
        column_labels={"view": "Do you agree?"},
        missing_ranges={"view": [{"lo": -9, "hi": -1}, 97]},
        variable_measure={"view": "ordinal", "region": "nominal"},
    )
    survey = read_survey(path, group_by="region")
    (view,) = survey.questions
    assert (view.text, view.options, view.ordinal) == ("Do you agree?", ("Agree", "Neither", "Disagree"), (1, 2, 3))
    # North: weights 2 + 1 agree, 1 disagrees; -8 is declared. South: one Neither; 97 is declared, one has no weight.
    assert shares(survey) == {"North": {"view": [0.75, 0.0, 0.25]}, "South": {"view": [0.0, 1.0, 0.0]}}
    assert survey.respondents == {"North": {"view": 3.0}, "South": {"view": 1.0}}
    assert "left out as no answers: Refused, Interview broken off" in notes(survey)
    assert "1 respondents left out" in notes(survey)


def test_stata_letters_are_no_answers(tmp_path):
    table = pd.DataFrame({"sex": [1, 1, 2, 2, 2], "happy": [1, 2, 1, 1, 2]}).astype(object)
    table.loc[[1, 4], "happy"] = ["a", "d"]
    labels = {"happy": {1: "Very", 2: "Not", "a": "Inapplicable", "d": "Do not know"}, "sex": {1: "M", 2: "F"}}
    missing = {"happy": ["a", "d"]}
    pyreadstat.write_dta(table, tmp_path / "x.dta", variable_value_labels=labels, missing_user_values=missing)
    survey = read_survey(tmp_path / "x.dta", group_by="sex", refusals="drop")
    assert shares(survey) == {"F": {"happy": [1, 0]}, "M": {"happy": [1, 0]}}
    assert survey.respondents == {"F": {"happy": 2.0}, "M": {"happy": 1.0}}
    assert "left out as no answers: Inapplicable, Do not know" in notes(survey)


def test_labels_say_who_has_no_group_what_an_option_and_what_a_weight_is(tmp_path):
    labels = {"party": {1: "Left", 3: "Right"}, "q": AGREE, "mood": {1: "Low", 3: "High"}}
    labels |= {"faith": {1: "X", 2: "Y", 3: "Z"}, "weightsat": {1: "Good", 2: "Bad"}, "weight": {9999: "No weight"}}
    table = {"party": [1, 1, 98, 3], "q": [1, 3, 1, 1], "mood": [1, 2, 1, 3], "faith": [1, 2, 3, 4]}
    table |= {"weightsat": [1.0, 2.0, 1.0, 1.0], "weight": [1.5, 0.5, 1.0, 1.0]}
    path = sav(tmp_path / "x.sav", table, labels)
    refused('data.missing="party=98"', read_survey, path, group_by="party")
    survey = read_survey(path, group_by="party", missing="98")
    assert (survey.groups, survey.about.weight) == (("Left", "Right"), "weight")
    assert ids(survey.questions) == ["q", "mood", "faith", "weightsat"]
    assert survey.answers["Left"]["q"].tolist() == [0.75, 0.0, 0.25]
    # The ends of a scale have labels, names without one are no scale.
    assert [question.ordinal for question in survey.questions[1:3]] == [(1, 2, 3), None]


def test_opinionqa_as_published(tmp_path):
    wave = tmp_path / "human_resp" / "American_Trends_Panel_W26"
    wave.mkdir(parents=True)
    (wave / "metadata.csv").write_text("key,options\nPARTY,\"['D', 'R']\"\n")
    (wave / "info.csv").write_text(
        "key,question,references,option_ordinal\n"
        "SAFE,How safe?,\"['Very', 'Not', 'Refused']\",\"[1.0, 2.0]\"\nGONE,?,\"['a', 'b']\",\"[1.0, 2.0]\"\n"
    )
    (wave / "responses.csv").write_text(
        "SAFE,PARTY,WEIGHT_W26\nVery,D,3\nNot,D,1\nRefused,D,4\n,D,9\nNot,R,1\nVery,R,x\nMaybe,R,1\n"
    )
    survey = read_survey(tmp_path, refusals="drop")
    (question,) = survey.questions
    assert (question.text, question.options, question.ordinal) == ("How safe?", ("Very", "Not"), (1.0, 2.0))
    assert shares(survey) == {"D": {"SAFE": [0.75, 0.25]}, "R": {"SAFE": [0.0, 1.0]}}
    assert survey.respondents == {"D": {"SAFE": 2.0}, "R": {"SAFE": 1.0}}
    assert "no list of the codebook has: 1 of SAFE" in notes(survey)
    refused("has no column WEIGHT_W9", read_survey, tmp_path, weight="WEIGHT_W9")
    (wave / "info.csv").write_text("key,question,references,option_ordinal\nSAFE,How safe?,Very,[1.0]\n")
    refused("info.csv: row 2: references: not a list", read_survey, tmp_path)


def test_the_time_at_which_a_form_was_sent_is_no_answer(tmp_path):
    sent = pd.to_datetime(["2026-01-02 10:30:00", "2026-01-02 11:00:05"])
    pd.DataFrame({"Timestamp": sent, "Country": ["A", "A"], "Tax": [1, 2]}).to_excel(tmp_path / "x.xlsx", index=False)
    assert read_survey(tmp_path / "x.xlsx", group_by="Country").answers["A"]["Tax"].tolist() == [0.5, 0.5]


def test_a_column_of_more_than_200_groups_is_none(tmp_path):
    (tmp_path / "x.csv").write_text("g,q\n" + "".join(f"{n},{n % 2}\n" for n in range(300)))
    refused("column g has 300 groups", read_survey, tmp_path / "x.csv", group_by="g")
