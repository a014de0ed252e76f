"""Tidy tables: one row an option, in whatever a spreadsheet separates and writes numbers with."""

from __future__ import annotations

import pytest
from surveys import refused, shares

from appa_flwr.survey.read import read_survey

OWN = """question_id,question,options,ordinal,group,distribution,n
q1,Coffee?,"[""Yes"", ""No""]","[1, 2]",North,"[0.75, 0.25]",40
q1,Coffee?,"[""Yes"", ""No""]","[1, 2]",South,"[0.0, 1.0]",10
"""
COUNTS = """question_id;question;group;option;ordinal;count
q1;Coffee?;North;Yes;1;30
q1;Coffee?;North;No;2;10
q1;Coffee?;South;No;2;10
"""
PERCENT = """group\tquestion\tpercent\toption\tremark
North\tCoffee?\t75,0 %\tYes\tx
South\tCoffee?\t0\tYes\tx
North\tCoffee?\t25,0\tNo\tx
South\tCoffee?\t100.0\tNo\tx
"""


def read(tmp_path, text, name="survey.csv", **how):
    (tmp_path / name).write_text(text)
    return read_survey(tmp_path / name, **how)


def test_counts_by_option_are_the_survey_in_our_own_columns(tmp_path):
    own, tidy = read(tmp_path, OWN), read(tmp_path, COUNTS)
    assert tidy.questions == own.questions
    assert shares(tidy) == shares(own) == {"North": {"q1": [0.75, 0.25]}, "South": {"q1": [0.0, 1.0]}}
    assert tidy.respondents == own.respondents == {"North": {"q1": 40}, "South": {"q1": 10}}
    assert (own.layout, tidy.layout) == ("", "one row an option, with counts")


@pytest.mark.parametrize("name", ["survey.csv", "survey.tsv"])
def test_percentages_with_commas_between_tabs_get_an_id_of_text_and_options(tmp_path, name):
    found = read(tmp_path, PERCENT, name)
    (question,) = found.questions
    assert (question.text, question.options, question.ordinal) == ("Coffee?", ("Yes", "No"), None)
    assert shares(found) == {"North": {question.question_id: [0.75, 0.25]}, "South": {question.question_id: [0, 1]}}
    other = read(tmp_path, PERCENT.replace("\tNo\t", "\tNever\t")).questions[0]
    assert len(question.question_id) == 12
    assert question.question_id != other.question_id


def test_groups_of_an_attribute_are_named_by_both(tmp_path):
    lines = ["question,attribute,group,option,share"]
    lines += [f"Coffee?,{a},Other,{o},0.5" for a in ("party", "faith") for o in ("Yes", "No")]
    assert read(tmp_path, "\n".join(lines)).groups == ("party/Other", "faith/Other")


@pytest.mark.parametrize(
    ("line", "row", "reason"),
    [
        ("Tea?,East,Yes,0.5", 6, "off one by more than"),  # half of its people are missing
        ("Tea?,East,Maybe,some", 6, "not a plain number"),
        ("Tea?,East,Yes,1_0", 6, "not a plain number"),
        ("Tea?,East,Yes,nan", 6, "not a plain number"),
        ("Tea?,East,Yes,1e99", 6, "not a plain number"),
        ("Tea?,East,,1.0", 6, "empty question or option text"),
        ("Tea?,,Yes,1.0", 6, "empty group"),
        (",East,Yes,1.0", 6, "empty question or option text"),
        ("Tea?,East,Yes,-1.0", 6, "negative share"),
        ("Tea?,North,Yes,0.5", 2, "an option twice"),
    ],
)
def test_a_bad_row_costs_its_group_that_question_and_no_more(tmp_path, line, row, reason):
    good = "question,group,option,share\nTea?,North,Yes,0.5\nTea?,North,No,0.5\nTea?,South,Yes,1\nTea?,South,No,0\n"
    found = read(tmp_path, good + line + "\n")
    kept = {"South"} if reason == "an option twice" else {"North", "South"}
    assert set(found.groups) == kept
    assert found.questions[0].options == ("Yes", "No")
    (rejected,) = found.rejections
    assert rejected.row == row
    assert reason in rejected.reason
    if ",East," in line and not line.startswith(","):
        assert read(tmp_path, good + line + "\n", groups=["South"]).rejections == ()  # who never looks at it


THREE_ROWS = "question_id;question;group;option;count;ordinal\nq;Tea?;North;Yes;3;1\nq;Tea?;North;No;1;2\n"


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ("q;Tea?;East;Yes;1,200;\nq;Tea?;East;No;800;", "plain number"),  # could be read in two ways
        ("q;Tea?;East;Yes;-30;\nq;Tea?;East;No;-10;", "negative"),
        ("q;Tea?;East;Yes;0;1\nq;Beer?;East;No;1;2", "question text differs"),
        ("q;Tea?;East;Yes;0;1\nq;Tea?;East;No;1;7", "ordinal differs"),
    ],
)
def test_counts_that_are_none_and_rows_that_differ_from_the_first_cost_their_group(tmp_path, rows, reason):
    found = read(tmp_path, "\n\n" + THREE_ROWS + rows)  # blank lines on top
    assert found.groups == ("North",)
    assert found.questions[0].ordinal == (1, 2)
    assert reason in found.rejections[0].reason


def test_columns_of_that_name_in_other_files_are_somebody_s_own(tmp_path):
    own = OWN.replace("question_id,", "count,count,option,question_id,").replace("\nq1", "\n1,2,3,q1")
    assert shares(read(tmp_path, own)) == shares(read(tmp_path, OWN))


def test_a_missing_column_is_named(tmp_path):
    text = "question,group,option,votes\nTea?,North,Yes,1\n"
    refused(r"missing column share \(columns found: question, group, option\)", read, tmp_path, text)
