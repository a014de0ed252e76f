"""One row a respondent, as SPSS, Stata and spreadsheets have it; the numbers are worked by hand."""

import pandas as pd
import pyreadstat
from surveys import refused

from appa_flwr.survey.sources import read_survey

AGREE = {1: "Agree", 2: "Neither", 3: "Disagree"}


def csv(path, text):
    path.write_text(text)
    return path


def shares(survey, group, question):
    (options,) = (q.options for q in survey.questions if q.question_id == question)
    return dict(zip(options, survey.answers[group][question], strict=True))


def notes(survey):
    return " | ".join(survey.about.notes)


def test_spss_with_missing_ranges_measures_and_a_weight(tmp_path):
    region, weight = [1, 1, 1, 1, 2, 2, 2, 9], [2.0, 1.0, 1.0, 5.0, 1.0, 1.0, None, 1.0]
    view, scale = [1, 1, 3, -8, 2, 97, 1, 1], [0, 5, 10, 10, 0, 0, 5, 5]
    labels = {
        "region": {1: "North", 2: "South", 9: "No answer"},
        "view": AGREE | {-8: "Refused", 97: "Interview broken off"},
        "scale": {0: "Not at all", 10: "Completely"},
    }
    path = tmp_path / "x.sav"
    pyreadstat.write_sav(
        pd.DataFrame({"region": region, "view": view, "scale": scale, "wght": weight}),
        str(path),
        variable_value_labels=labels,
        column_labels={"view": "Do you agree?"},
        missing_ranges={"view": [{"lo": -9, "hi": -1}, 97]},
        variable_measure={"view": "ordinal", "region": "nominal"},
    )
    survey = read_survey(path, group_by="region")
    view, scale = survey.questions
    assert (view.text, view.options, view.ordinal) == ("Do you agree?", ("Agree", "Neither", "Disagree"), (1, 2, 3))
    assert (scale.options, scale.ordinal) == (("Not at all", "5", "Completely"), (0, 5, 10))
    # North: weights 2 + 1 agree, 1 disagrees; -8 is declared. South: one Neither; 97 is declared, one has no weight.
    assert shares(survey, "North", "view") == {"Agree": 0.75, "Neither": 0.0, "Disagree": 0.25}
    assert shares(survey, "South", "view") == {"Agree": 0.0, "Neither": 1.0, "Disagree": 0.0}
    assert survey.respondents["North"] == {"view": 3.0, "scale": 4.0}
    assert survey.respondents["South"] == {"view": 1.0, "scale": 2.0}
    assert survey.about.weight == "wght"
    assert "as the file declares: 'Refused', 'Interview broken off'" in notes(survey)
    assert "1 respondents left out" in notes(survey)


def test_stata_letters_are_no_answers(tmp_path):
    table = pd.DataFrame({"sex": [1, 1, 2, 2, 2], "happy": [1, 2, 1, 1, 2]}).astype(object)
    table.loc[[1, 4], "happy"] = ["a", "d"]
    labels = {"happy": {1: "Very", 2: "Not", "a": "Inapplicable", "d": "Do not know"}, "sex": {1: "M", 2: "F"}}
    path = tmp_path / "x.dta"
    pyreadstat.write_dta(
        table, str(path), variable_value_labels=labels, missing_user_values={"happy": ["a", "d"]}, version=15
    )
    survey = read_survey(path, group_by="sex", refusals="drop")
    assert survey.answers["M"]["happy"].tolist() == [1.0, 0.0]
    assert survey.answers["F"]["happy"].tolist() == [1.0, 0.0]
    assert survey.respondents == {"F": {"happy": 2.0}, "M": {"happy": 1.0}}
    assert "as the file declares: 'Inapplicable', 'Do not know'" in notes(survey)


def test_one_weight_several_or_none(tmp_path):
    one = csv(tmp_path / "a.csv", "g,q,wtssps\nx,Yes,3\nx,No,1\ny,No,1\n")
    assert read_survey(one, group_by="g").answers["x"]["q"].tolist() == [0.25, 0.75]
    assert read_survey(one, group_by="g", weight="none").answers["x"]["q"].tolist() == [0.5, 0.5]
    two = csv(tmp_path / "d.csv", "g,q,S017,W_WEIGHT\nx,Yes,1,2\nx,No,1,1\n")
    assert read_survey(two, group_by="g", weight="S017").questions[0].question_id == "q"  # the other is no question


def test_which_columns_are_groups_and_questions(tmp_path):
    rows = "".join(f"{n},{'fm'[n % 2]},{'ab'[n % 3 > 0]},{n % 3},2022\n" for n in range(90))
    path = csv(tmp_path / "x.csv", f"id,sex,party,q,year\n{rows}")
    survey = read_survey(path, group_by="sex,party")
    assert survey.groups == ("sex/f", "sex/m", "party/a", "party/b")
    assert [question.question_id for question in survey.questions] == ["q"]
    assert "not 2 to 30 options that are answers: row 1 (id), row 1 (sex/f, year)" in notes(survey)
    many = csv(tmp_path / "y.csv", "g,q\n" + "".join(f"{n},{n % 2}\n" for n in range(300)))
    refused("column g has 300 groups", read_survey, many, group_by="g")
    refused("no usable answer", read_survey, csv(tmp_path / "z.csv", "g,q\na,1\nb,1\n"), group_by="g")


def test_who_did_not_say_is_in_no_group_and_an_unchosen_label_is_an_option(tmp_path):
    table = pd.DataFrame({"party": [1, 1, 98, 3], "q": [1, 3, 1, 1]})
    labels = {"party": {1: "Left", 3: "Right"}, "q": AGREE}
    pyreadstat.write_sav(table, str(tmp_path / "x.sav"), variable_value_labels=labels)
    refused('data.missing="party=98"', read_survey, tmp_path / "x.sav", group_by="party")
    survey = read_survey(tmp_path / "x.sav", group_by="party", missing="98")
    assert survey.groups == ("Left", "Right")
    assert survey.answers["Left"]["q"].tolist() == [0.5, 0.0, 0.5]


def test_too_few_respondents_and_an_unknown_group(tmp_path):
    path = csv(tmp_path / "x.csv", "g,q\n" + "x,Yes\nx,No\nx,Yes\ny,No\n")
    survey = read_survey(path, group_by="g", min_respondents=3)
    assert survey.groups == ("x",)
    assert "fewer respondents than the minimum: row 1 (y, q)" in notes(survey)
    refused("did you mean 'x'", read_survey, path, group_by="g", groups=["X"])
    refused("group 'y' has no usable answer", read_survey, path, group_by="g", groups=["y"], min_respondents=2)


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
    assert survey.answers["D"]["SAFE"].tolist() == [0.75, 0.25]
    assert survey.respondents["D"] == {"SAFE": 2.0}
    assert survey.answers["R"]["SAFE"].tolist() == [0.0, 1.0]
    assert "answers left out that the source does not list: 1 of SAFE" in notes(survey)
    refused("has no column WEIGHT_W9", read_survey, tmp_path, weight="WEIGHT_W9")
    (wave / "info.csv").write_text("key,question,references,option_ordinal\nSAFE,How safe?,Very,[1.0]\n")
    refused("info.csv: row 2: references: not a list", read_survey, tmp_path)


def test_codes_of_places_are_groups_and_people_without_a_group_are_counted(tmp_path):
    rows = "".join(f"{place},{answer},{sex}\n" for place in ("DE", "DK", "NO") for answer in (1, 2) for sex in "MF")
    path = csv(tmp_path / "x.csv", f"cntry,trust,sex\n{rows},1,M\nDE,1,DK\n")
    survey = read_survey(path, group_by="cntry")
    assert survey.groups == ("DE", "DK", "NO")
    assert "respondents without a group in cntry: 1 empty" in notes(survey)
    assert "groups of cntry whose code can also mean no answer (data.missing): DK" in notes(survey)
    assert read_survey(path, group_by="cntry", missing="DK").groups == ("DE", "NO")
    by_sex = read_survey(path, group_by="sex")
    assert (by_sex.groups, "respondents without a group in sex: 1 DK" in notes(by_sex)) == (("F", "M"), True)


def test_two_spellings_of_a_group_are_one_group(tmp_path):
    path = csv(tmp_path / "x.csv", "sex,q\nFEMALE,Yes\nfemale,No\nfemale,Yes\nFemale.,Yes\nmale,No\n")
    survey = read_survey(path, group_by="sex")
    assert survey.groups == ("FEMALE", "male")
    assert survey.respondents["FEMALE"] == {"q": 4.0}
    assert shares(survey, "FEMALE", "q") == {"No": 0.25, "Yes": 0.75}
    assert "'female' is 'FEMALE'" in notes(survey)


def test_answers_that_begin_with_numbers_stand_in_their_order(tmp_path):
    for answers in (("1 (worst)", "2", "3 - so so", "10 (best)"), ("5-9", "10-14", "30+"), ("-1 no", "0", "(2) yes")):
        rows = "".join(f"{group},{answer}\n" for group in "AB" for answer in sorted(answers))
        (question,) = read_survey(csv(tmp_path / "x.csv", f"g,q\n{rows}"), group_by="g").questions
        assert question.options == answers
    for answers in (("1,000 or more", "500 or more"), ("18-29", "under 18")):  # alphabet, which is said
        rows = "".join(f'{group},"{answer}"\n' for group in "AB" for answer in answers)
        survey = read_survey(csv(tmp_path / "x.csv", f"g,q\n{rows}"), group_by="g")
        assert survey.questions[0].options == answers
        assert "the order of the alphabet" in notes(survey)


def test_one_unlabelled_code_beside_names_is_no_scale(tmp_path):
    people = pd.DataFrame({"g": [1, 1, 2, 2], "religion": [1, 2, 3, 4], "mood": [1, 2, 3, 99]})
    labels = {"g": {1: "A", 2: "B"}, "religion": {1: "X", 2: "Y", 3: "Z"}, "mood": {1: "Low", 3: "High"}}
    pyreadstat.write_sav(people, str(tmp_path / "x.sav"), variable_value_labels=labels)
    religion, mood = read_survey(tmp_path / "x.sav", group_by="g", missing="99").questions
    assert (religion.ordinal, mood.ordinal) == (None, (1, 2, 3))


def test_a_weight_that_may_be_read_in_two_ways_or_not_at_all_is_an_error(tmp_path):
    start = 'g,q,weight\nA,Yes,"1,234"\nA,No,{}\n'
    thousands = csv(tmp_path / "x.csv", start.format("987"))
    refused("column weight: 1,234 may be 1234 or 1.234", read_survey, thousands, group_by="g")
    survey = read_survey(csv(tmp_path / "x.csv", start.format('"0,617"')), group_by="g")
    assert shares(survey, "A", "q") == {"No": 1 / 3, "Yes": 2 / 3}  # 1.234 is twice 0.617
    thousands = csv(tmp_path / "x.csv", 'g,q,weight,w2\nA,Yes,"1,234",2\nA,No,"2,345",1\n')
    assert shares(read_survey(thousands, group_by="g", weight="w2"), "A", "q")["Yes"] == 2 / 3
    words = csv(tmp_path / "x.csv", "g,q,w\nA,Yes,high\nA,No,low\n")
    refused("column w has no number >= 0", read_survey, words, group_by="g", weight="w")
    labelled = pd.DataFrame({"g": ["A", "A"], "q": ["Yes", "No"], "weightsat": [1.0, 2.0]})
    labels = {"weightsat": {1: "Satisfied", 2: "Not satisfied"}}
    pyreadstat.write_sav(labelled, str(tmp_path / "x.sav"), variable_value_labels=labels)
    survey = read_survey(tmp_path / "x.sav", group_by="g")
    assert [question.question_id for question in survey.questions] == ["q", "weightsat"]
    labelled["weightsat"] = [1.5, 0.5]
    pyreadstat.write_sav(labelled, str(tmp_path / "x.sav"), variable_value_labels={"weightsat": {9999: "No weight"}})
    assert shares(read_survey(tmp_path / "x.sav", group_by="g"), "A", "q") == {"No": 0.25, "Yes": 0.75}


def test_columns_of_lists_and_of_no_groups_are_named(tmp_path):
    lists = csv(tmp_path / "x.jsonl", '{"g":"A","q":["a","b"],"z":"Yes"}\n{"g":"B","q":["a"],"z":"No"}\n')
    refused("column q has lists in its cells", read_survey, lists, group_by="g")
    nobody = csv(tmp_path / "x.csv", "g,q\n,Yes\n,No\nDK,Yes\n")
    refused("no respondent has a group in g", read_survey, nobody, group_by="g")


def test_codes_of_data_missing_that_no_answer_has_are_said(tmp_path):
    path = csv(tmp_path / "x.csv", "g,POL\nA,1\nA,2\nB,3\nB,5\n")
    survey = read_survey(path, group_by="g", missing="4-5,1 .. 1")
    assert survey.questions[0].options == ("2", "3", "5")
    assert "data.missing lists codes that no answer has: 4-5" in notes(survey)
    assert "that no answer has: pol=5" in notes(read_survey(path, group_by="g", missing="pol=5"))


def test_the_second_header_row_of_surveymonkey_is_no_respondent(tmp_path):
    header = '"Respondent ID","Country","Tax, or no tax"\n"","Response","Response"\n'
    people = "".join(f'"{i}","{group}","{answer}"\n' for i, (group, answer) in enumerate([("A", "Yes"), ("A", "No")]))
    survey = read_survey(csv(tmp_path / "x.csv", header + people), group_by="Country")
    assert (survey.groups, shares(survey, "A", "Tax, or no tax")) == (("A",), {"No": 0.5, "Yes": 0.5})


def test_tabs_between_headers_with_commas(tmp_path):
    text = '"Country"\t"Tax, or no tax, or both"\n' + "A\tYes\nA\tNo\n"
    assert shares(read_survey(csv(tmp_path / "x.txt", text), group_by="Country"), "A", "Tax, or no tax, or both")


def test_the_time_at_which_a_form_was_sent_is_no_answer(tmp_path):
    sent = pd.to_datetime(["2026-01-02 10:30:00", "2026-01-02 11:00:05"])
    pd.DataFrame({"Timestamp": sent, "Country": ["A", "A"], "Tax": [1, 2]}).to_excel(tmp_path / "x.xlsx", index=False)
    survey = read_survey(tmp_path / "x.xlsx", group_by="Country")
    assert shares(survey, "A", "Tax") == {"1": 0.5, "2": 0.5}
