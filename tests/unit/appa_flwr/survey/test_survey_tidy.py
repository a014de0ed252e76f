"""Tidy tables: one row an option, in whatever a spreadsheet separates and writes numbers with."""

from __future__ import annotations

import pytest

from appa_flwr.core.errors import UserError
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


def plain(survey):
    return {group: {key: shares.tolist() for key, shares in mine.items()} for group, mine in survey.answers.items()}


def test_counts_by_option_are_the_survey_in_our_own_columns(tmp_path):
    own, tidy = read(tmp_path, OWN), read(tmp_path, COUNTS)
    assert tidy.questions == own.questions
    assert plain(tidy) == plain(own) == {"North": {"q1": [0.75, 0.25]}, "South": {"q1": [0.0, 1.0]}}
    assert tidy.respondents == own.respondents == {"North": {"q1": 40}, "South": {"q1": 10}}
    assert (own.layout, tidy.layout) == ("", "one row an option, with counts")


@pytest.mark.parametrize("name", ["survey.csv", "survey.tsv"])
def test_percentages_with_commas_between_tabs_get_an_id_of_text_and_options(tmp_path, name):
    found = read(tmp_path, PERCENT, name)
    (question,) = found.questions
    assert (question.text, question.options, question.ordinal) == ("Coffee?", ("Yes", "No"), None)
    assert plain(found) == {"North": {question.question_id: [0.75, 0.25]}, "South": {question.question_id: [0, 1]}}
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
        ("Tea?,East,Yes,some", 6, "not a list of numbers"),
        ("Tea?,East,Yes,True", 6, "not a list of numbers"),
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
    (rejected,) = found.rejections
    assert rejected.row == row
    assert reason in rejected.reason
    with pytest.raises(UserError, match=f"row {row}: .*{reason}"):
        read(tmp_path, good + line + "\n", strict=True)


def test_a_missing_column_is_named(tmp_path):
    with pytest.raises(UserError, match=r"missing column share \(columns found: question, group, option\)"):
        read(tmp_path, "question,group,option,votes\nTea?,North,Yes,1\n")
