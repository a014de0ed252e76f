"""One row a respondent, as SPSS, Stata and spreadsheets have it; the numbers are worked by hand."""

import pandas as pd
import pyreadstat
import pytest
from surveys import ids, refused, shares

from appa_flwr.survey.sources import read_survey

AGREE = {1: "Agree", 2: "Neither", 3: "Disagree"}


def csv(path, text):
    path.write_text(text)
    return path


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


WEIGHTED = "g,q,wtssps\nx,Yes,3\nx,No,1\ny,No,1\n"
COUNTRIES = "g,q\nDE,1\nDE,2\nDK,1\nDK,2\nNO,1\nNO,2\n,1\n"
CODES = "g,q\nA,1\nA,2\nB,3\nB,5\n"
THIRDS, HALF = {"A": [1 / 3, 2 / 3]}, [0.5, 0.5]


@pytest.mark.parametrize(
    ("text", "keys", "right", "note"),
    [
        (WEIGHTED, {}, {"x": [0.25, 0.75], "y": [1, 0]}, "weighted by wtssps, the only column that looks like it"),
        (WEIGHTED, {"weight": "none"}, {"x": [0.5, 0.5], "y": [1, 0]}, "counts once, as data.weight says"),
        ("g,q,S017,W_WEIGHT\nx,Yes,1,2\nx,No,1,1\n", {"weight": "S017"}, {"x": [0.5, 0.5]}, "weighted by S017"),
        ('g,q,weight\nA,Yes,"1,234"\nA,No,"0,617"\n', {}, THIRDS, "weighted by weight"),
        ('g,q,weight,w2\nA,Yes,"1,234",2\nA,No,"2,345",1\n', {"weight": "w2"}, THIRDS, "weighted by w2"),
        (COUNTRIES, {}, {"DE": HALF, "DK": HALF, "NO": HALF}, "without a group in g: 1 empty"),
        (COUNTRIES, {}, {"DE": HALF, "DK": HALF, "NO": HALF}, "can also mean no answer (data.missing): DK"),
        (COUNTRIES, {"missing": "DK"}, {"DE": HALF, "NO": HALF}, "without a group in g: 2 DK, 1 empty"),
        ("g,q\nM,1\nF,2\nDK,1\n", {}, {"F": [0, 1], "M": [1, 0]}, "respondents without a group in g: 1 DK"),
        (
            "g,q\nFEMALE,Yes\nfemale,No\nfemale,Yes\nFemale.,Yes\nmale,No\n",
            *({}, {"FEMALE": [0.25, 0.75], "male": [1, 0]}, "'female' is 'FEMALE'"),
        ),
        (CODES, {"missing": "4-5,1 .. 1"}, {"A": [1, 0, 0], "B": [0, 0.5, 0.5]}, "codes that no answer has: 4-5"),
        (CODES, {"missing": "r=5"}, {"A": [0.5, 0.5, 0, 0], "B": [0, 0, 0.5, 0.5]}, "that no answer has: r=5"),
        ("id,g,q\n,Response,Response\n7,A,Yes\n7,A,No\n", {}, {"A": HALF}, "SurveyMonkey's two header rows"),
        (
            "g,q\nx,Yes\nx,No\nx,Yes\ny,No\n",
            {"min_respondents": 3},
            {"x": [1 / 3, 2 / 3]},
            "than the minimum: row 1 (y, q)",
        ),
    ],
)
def test_shares_of_groups_and_what_is_said_of_them(tmp_path, text, keys, right, note):
    survey = read_survey(csv(tmp_path / "x.csv", text), group_by="g", **keys)
    assert shares(survey) == {group: {"q": pytest.approx(share_K)} for group, share_K in right.items()}
    assert note in notes(survey)


@pytest.mark.parametrize(
    ("text", "keys", "message"),
    [
        ('g,q,weight\nA,Yes,"1,234"\nA,No,987\n', {}, "column weight: 1,234 may be 1234 or 1.234"),
        ("g,q,w\nA,Yes,high\nA,No,low\n", {"weight": "w"}, "column w has no number >= 0"),
        ("g,q\n" + "".join(f"{n},{n % 2}\n" for n in range(300)), {}, "column g has 300 groups"),
        ("g,q\na,1\nb,1\n", {}, "no usable question"),
        ("g,q\n,Yes\n,No\nDK,Yes\n", {}, "no respondent has a group in g"),
        ("g,q\nx,Yes\nx,No\n", {"groups": ["X"]}, "did you mean 'x'"),
        (WEIGHTED, {"groups": ["y"], "min_respondents": 2}, "group 'y' has no usable answer"),
    ],
)
def test_what_cannot_be_used(tmp_path, text, keys, message):
    refused(message, read_survey, csv(tmp_path / "x.csv", text), group_by="g", **keys)


def test_lists_are_no_answers(tmp_path):
    lists = csv(tmp_path / "x.jsonl", '{"g":"A","q":["a","b"],"z":"Yes"}\n{"g":"B","q":["a"],"z":"No"}\n')
    survey = read_survey(lists, group_by="g")
    assert (ids(survey.questions), "several answers in a cell" in notes(survey)) == (["z"], True)
    refused("column q has lists in its cells", read_survey, lists, group_by="q")


def test_which_columns_are_groups_and_questions(tmp_path):
    rows = "".join(f"{n},{'fm'[n % 2]},{'ab'[n % 3 > 0]},{n % 3},2022\n" for n in range(90))
    survey = read_survey(csv(tmp_path / "x.csv", f"id,sex,party,q,year\n{rows}"), group_by="sex,party")
    assert (survey.groups, ids(survey.questions)) == (("sex/f", "sex/m", "party/a", "party/b"), ["q"])
    assert "more than 30 different answers: id" in notes(survey)
    assert "not 2 to 30 options that are answers: year" in notes(survey)


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


def test_missing_codes_do_not_count_as_options(tmp_path):
    rows = "".join(f"{'ab'[n % 2]},{code}\n" for n, code in enumerate([*range(30), 97, 98, 99] * 2))
    path = csv(tmp_path / "x.csv", f"g,q\n{rows}")
    assert len(read_survey(path, group_by="g", missing="97,98,99").questions[0].options) == 30


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
    assert (question.options, question.ordinal) == (("Very", "Not"), (1.0, 2.0))
    assert shares(survey) == {"D": {"SAFE": [0.75, 0.25]}, "R": {"SAFE": [0.0, 1.0]}}
    assert survey.respondents == {"D": {"SAFE": 2.0}, "R": {"SAFE": 1.0}}
    assert "no list of the codebook has: 1 of SAFE" in notes(survey)
    refused("has no column WEIGHT_W9", read_survey, tmp_path, weight="WEIGHT_W9")
    (wave / "info.csv").write_text("key,question,references,option_ordinal\nSAFE,How safe?,Very,[1.0]\n")
    refused("info.csv: row 2: references: not a list", read_survey, tmp_path)


def test_answers_that_begin_with_numbers_stand_in_their_order(tmp_path):
    numbered = ("1 (worst)", "2", "3 - so so", "10 (best)"), ("5-9", "10-14", "30+"), ("-1 no", "0", "(2) yes")
    words = ("1,000 or more", "500 or more"), ("18-29", "under 18")  # in alphabetical order, which is said
    for answers in numbered + words:
        rows = "".join(f'A,"{answer}"\n' for answer in sorted(answers))
        survey = read_survey(csv(tmp_path / "x.csv", f"g,q\n{rows}"), group_by="g")
        assert survey.questions[0].options == answers
        assert ("the order of the alphabet" in notes(survey)) == (answers in words)


@pytest.mark.parametrize(
    ("text", "right"),
    [
        (
            "ID,g,How good?,,\n,Response,Price,Service,\n1,A,1,2,\n2,A,2,2,\n3,A,1,1,\n",  # of SurveyMonkey
            {"ID": [1 / 3] * 3, "How good?: Price": [2 / 3, 1 / 3], "How good?: Service": [1 / 3, 2 / 3]},
        ),
        ('"g"\t"Tax, or no tax, or both"\nA\tYes\nA\tNo\n', {"Tax, or no tax, or both": HALF}),
        ("g;What, if any, do you, say\n" + "A;a\nA;b\n" * 5, {"What, if any, do you, say": HALF}),
    ],
)
def test_parts_of_questions_and_delimiters_in_names(tmp_path, text, right):
    assert shares(read_survey(csv(tmp_path / "x.txt", text), group_by="g")) == {"A": right}


def test_the_time_at_which_a_form_was_sent_is_no_answer(tmp_path):
    sent = pd.to_datetime(["2026-01-02 10:30:00", "2026-01-02 11:00:05"])
    pd.DataFrame({"Timestamp": sent, "Country": ["A", "A"], "Tax": [1, 2]}).to_excel(tmp_path / "x.xlsx", index=False)
    assert read_survey(tmp_path / "x.xlsx", group_by="Country").answers["A"]["Tax"].tolist() == [0.5, 0.5]
