"""Which rows of a survey count, for whom, under which policy."""

from __future__ import annotations

import json
import math

import pytest
from surveys import bits, ids, read_group, reasons, refused, row, shares, write

from appa_flwr.core.errors import UserError
from appa_flwr.survey import read
from appa_flwr.survey.cells import Reason
from appa_flwr.survey.types import Question


def without(cells, *columns):
    return {column: cell for column, cell in cells.items() if column not in columns}


def test_bad_cells_are_rejected_one_by_one_and_counted(jsonl):
    given = [
        (row("q1", "A"), None),
        (row("q5", ""), Reason.EMPTY_GROUP),
        (row("q1", "B", [0.5, 0.5]), Reason.LENGTH),
        (row("q1", "C", [math.nan, 0.5, 0.5]), Reason.NOT_FINITE),  # JSON lines have it as NaN
        (row("q2", "A", [1.0], options=["one"]), Reason.FEW_OPTIONS),
        (row("q4", "A", question=" "), Reason.EMPTY_TEXT),
        (row("q1", "G", options=["Yes", "No", "Other"]), Reason.OTHER_OPTIONS),
        (row("q1", "H", question="Another text?"), Reason.OTHER_TEXT),
        (row("q1", "A", [0.2, 0.2, 0.6]), Reason.DUPLICATE),
        (row("", "A"), Reason.EMPTY_ID),
        (without(row("q6", "A"), "distribution"), Reason.MISSING),
        (row("q7", "A", ordinal=[1, 2]), Reason.BAD_ORDINAL),
        (row("q1", "I", [1, 1, 1]), Reason.SUM),
        (row("q1", "I", [0.2, 0.2, 0.6]), None),
    ]
    survey = read.read_survey(jsonl(*(cells for cells, _ in given)))
    assert reasons(survey) == [(line, reason) for line, (_, reason) in enumerate(given, start=1) if reason]
    # The first of the two answers of A stays; the second counts where the first was bad.
    assert shares(survey) == {"A": {"q1": [0.5, 0.3, 0.2]}, "I": {"q1": [0.2, 0.2, 0.6]}}
    table = read.summary(survey)
    assert (table.loc["A", "kept"], table.loc["B", "kept"], table["kept"].sum()) == (1, 0, 2)
    assert table.loc["B", Reason.LENGTH.value] == table.loc["A", Reason.DUPLICATE.value] == 1
    assert table.index[-1] == read.UNREADABLE  # the row without a group
    assert int(table.to_numpy().sum()) == len(given)  # every row once


def test_the_first_row_decides_a_question_whoever_reads(jsonl):
    path = jsonl(
        row("q1", "Z", [0.5, 0.5], options=["a", "b"]),
        row("q1", "A", [0.4, 0.6], options=["c", "d"]),
        row("q2", "A", ordinal=[1, 2, 3]),
        row("q2", "B"),
        row("q2", "C", ordinal=[3, 2, 1]),
    )
    assert "q1" not in read_group(path, "A")
    survey = read.read_survey(path, groups=["A", "B"])
    assert ids(survey.questions) == ["q2"]
    assert reasons(survey) == [(2, Reason.OTHER_OPTIONS)]
    refused("1 x ordinal differs", read_group, path, "C")


def test_nothing_usable_says_why(jsonl):
    path = jsonl(row("q1", "A", [1, 1, 1]), row("q2", "A", [1]), row("q3", "A", [2]), row("q1", "B"))
    why = r"group 'A' has no usable answer \(2 x .*length; 1 x .*off one"
    refused(why, read.read_survey, path, groups=["B", "A"])
    assert read.read_survey(path).groups == ("B",)
    refused("refusals: 'hide' is not one of 'keep', 'drop', 'separate'", read.read_survey, path, refusals="hide")
    refused("no usable answer", read.read_survey, jsonl(row("q1", "A", [1])))
    refused("no usable question", read.read_questions, jsonl(row(options=["one"])))


def test_groups_come_in_the_wanted_order_with_their_questions_only(jsonl):
    path = jsonl(row("q1", "A"), row("q2", "B"), row("q3", "C"), row("q3", "A"))
    survey = read.read_survey(path, groups=["C", "A"])
    assert survey.groups == ("C", "A")
    assert ids(survey.questions) == ["q1", "q3"]
    assert read.read_questions(path, groups=["C", "A"]) == survey.questions
    assert ids(read.read_questions(path, groups=["B"])) == ["q2"]


FOUR = ("Germany", "France", "Spain", "Italy")


@pytest.mark.parametrize(
    ("there", "asked", "message"),
    [
        (FOUR, ["France", "germny"], "unknown group 'germny'; nearest: 'Germany'"),
        (FOUR[:2], ["Xyz"], r"unknown group 'Xyz'; the groups there are 'Germany', 'France'$"),
        (FOUR, ["Xyz"], r"'Xyz'; the 4 groups there begin with 'Germany', 'France', 'Spain'$"),
        (FOUR, ["France", "France"], "'France' is asked for twice"),
        (FOUR, [], "no group was asked for"),
    ],
)
def test_groups_that_cannot_be_meant_are_named(jsonl, there, asked, message):
    path = jsonl(*(row("q1", name) for name in there))
    refused(message, read.read_survey, path, groups=asked)
    refused(message, read.read_questions, path, groups=asked)


def test_groups_are_keyed_by_attribute(tmp_path, extension):
    rows = [
        row("q1", "Other", attribute="RACE"),
        row("q1", "Other", [0.2, 0.2, 0.6], attribute="RELIG"),
        row("q1", "Democrat", attribute="POLPARTY"),
        row("q1", "College/some", attribute="EDUCATION"),
        row("q1", "Everyone", attribute=None),
    ]
    path = write(tmp_path / f"survey{extension}", rows)
    names = ("RACE/Other", "RELIG/Other", "POLPARTY/Democrat", "EDUCATION/College/some", "Everyone")
    assert read.group_names(path) == names
    survey = read.read_survey(path, groups=["Democrat", "RELIG/Other", "Everyone", "College/some"])
    assert survey.groups == ("POLPARTY/Democrat", "RELIG/Other", "Everyone", "EDUCATION/College/some")
    assert read_group(path, "RELIG/Other")["q1"].tolist() == [0.2, 0.2, 0.6]
    refused("'Other' fits several, say which: 'RACE/Other', 'RELIG/Other'", read_group, path, "Other")
    refused("nearest: 'POLPARTY/Democrat'", read.read_survey, path, groups=["Democrats"])


def test_aliases_join_two_spellings(jsonl):
    path = jsonl(
        row("q1", "Britain", [0.2, 0.2, 0.6]),
        row("q1", "Great Britain", [0.6, 0.2, 0.2]),
        row("q2", "Great Britain"),
        row("q2", "S. Korea"),
        row("q2", "Czech Rep."),
    )
    survey = read.read_survey(path)
    assert survey.groups == ("Great Britain", "South Korea", "Czechia")
    assert shares(survey)["Great Britain"]["q1"] == [0.2, 0.2, 0.6]
    assert reasons(survey) == [(2, Reason.DUPLICATE)]
    assert read.read_survey(path, groups=["Britain", "South Korea"]).groups == ("Great Britain", "South Korea")
    assert set(read_group(path, "Britain")) == {"q1", "q2"}
    refused("asked for twice", read.read_survey, path, groups=["Britain", "Great Britain"])
    # An alias may be asked for where only the name is there, and under an attribute.
    assert set(read_group(jsonl(row("q1", "Czechia")), "Czech Rep.")) == {"q1"}
    path = jsonl(row("q1", "Britain", attribute="COUNTRY"), row("q1", "Male", attribute="SEX"))
    for name in ("COUNTRY/Great Britain", "COUNTRY/Britain", "Great Britain", "Britain"):
        assert read.read_survey(path, groups=[name]).groups == ("COUNTRY/Great Britain",)


def test_other_groups_private_cells_may_be_anything(jsonl):
    path = jsonl(json.dumps(row("q1", "B")).replace("[0.5, 0.3, 0.2]", '[0.1, oops, "]", {}]'), row("q1", "A"))
    assert set(read_group(path, "A")) == {"q1"}
    assert read.read_survey(path, groups=["A"]).rejections == ()
    assert reasons(read.read_survey(path)) == [(1, Reason.BAD_DISTRIBUTION)]


def test_a_file_of_one_group_may_leave_the_column_out(tmp_path, extension):
    rows = [without(cells, "group") for cells in (row("q1"), row("q2"), row("q3", distribution=[1, 1, 1]))]
    path = write(tmp_path / f"mine{extension}", rows)
    assert list(read_group(path, "Nigeria")) == ["q1", "q2"]
    assert read.group_names(path) == ()
    refused("missing column group", read.read_survey, path)


def test_public_question_file(tmp_path, extension):
    rows = [row("q1", ordinal=[1, 2, 3]), row("q2", ordinal=None), row("q3", question="", ordinal=None)]
    path = write(tmp_path / f"questions{extension}", [without(cells, "group", "distribution") for cells in rows])
    questions = read.read_questions(path, groups=["whoever"])
    assert ids(questions) == ["q1", "q2"]
    assert questions[0].ordinal == (1.0, 2.0, 3.0)
    refused("missing column distribution", read_group, path, "A")


def test_dropped_refusals_shrink_the_question_for_everybody(jsonl):
    path = jsonl(
        row("q1", "A", [0.3, 0.1, 0.6], ordinal=[1, 2, 9]),
        row("q1", "B", [0.5, 0.5, 0.0], ordinal=[1, 2, 9]),
        row("q1", "C", [0.0, 0.0, 1.0], ordinal=[1, 2, 9]),
        row("q2", "A", [0.3, 0.7], options=["Yes", "DK/Refused"]),
        row("q3", "A", [0.3, 0.7], options=["Left", "Not sure"]),
    )
    survey = read.read_survey(path, refusals="drop")
    assert survey.questions == (
        Question("q1", "Text of q1?", ("Yes", "No"), (1.0, 2.0)),
        Question("q3", "Text of q3?", ("Left", "Not sure")),
    )
    # 0.3 : 0.1 = 3/4 : 1/4 without the refusals.
    without_them = pytest.approx([0.75, 0.25])
    assert shares(survey) == {"A": {"q1": without_them, "q3": [0.3, 0.7]}, "B": {"q1": [0.5, 0.5]}}
    assert reasons(survey) == [(3, Reason.ONLY_REFUSALS), (4, Reason.FEW_LEFT)]
    assert read.read_questions(path, refusals="drop") == survey.questions
    assert bits(read_group(path, "A", refusals="drop")) == bits(survey.answers["A"])
    assert len(read.read_survey(path).questions[0].options) == 3


def test_separate_refusals_are_told_beside_the_other_answers(jsonl):
    path = jsonl(
        row("q1", "A", [0.3, 0.1, 0.6]),
        row("q1", "B", [0.5, 0.49, 0.0]),
        row("q1", "C", [0.0, 0.0, 1.0]),
        row("q2", "A", [0.4, 0.6], options=["Yes", "No"], refusal_rate=0.25),
        row("q2", "B", [0.4, 0.6], options=["Yes", "No"], n=60, refusals=20),
        row("q2", "C", [0.4, 0.6], options=["Yes", "No"], n=60),
        row("q2", "D", [0.4, 0.6], options=["Yes", "No"], n=0, refusals=0),
        row("q2", "E", [0.4, 0.6], options=["Yes", "No"], refusal_rate=1.5),
    )
    survey = read.read_survey(path, refusals="separate")
    dropped = read.read_survey(path, refusals="drop")
    assert survey.questions == dropped.questions
    assert shares(survey)["A"] == shares(dropped)["A"]
    assert survey.refusal_rates == {"A": {"q1": 0.6, "q2": 0.25}, "B": {"q1": 0.0, "q2": 0.25}, "C": {}, "D": {}}
    assert reasons(survey) == [(3, Reason.ONLY_REFUSALS), (8, Reason.BAD_RATE)]
    # Who does not ask for rates is not refused for a bad one.
    assert not any(dropped.refusal_rates.values())
    assert reasons(dropped) == [(3, Reason.ONLY_REFUSALS)]


def test_cells_of_few_respondents_are_left_out(tmp_path, extension):
    counts = {"A": "30", "B": "29", "C": "", "D": "30.0", "E": "many", "F": "-3", "G": "nan", "H": "9" * 400}
    path = write(tmp_path / f"survey{extension}", [row("q1", group, n=count) for group, count in counts.items()])
    offset = 1 if extension == ".csv" else 0
    survey = read.read_survey(path, min_respondents=30)
    assert survey.groups == ("A", "C", "D", "G")
    assert survey.respondents == {"A": {"q1": 30}, "C": {}, "D": {"q1": 30}, "G": {}}
    assert reasons(survey) == [
        (2 + offset, Reason.FEW_RESPONDENTS),
        *((number + offset, Reason.BAD_COUNT) for number in (5, 6, 8)),
    ]
    refused("1 x fewer respondents than the minimum", read_group, path, "B", min_respondents=30)
    # Without a minimum a column n of another meaning does no harm.
    assert reasons(read.read_survey(path)) == []
    assert read.read_survey(path).respondents["B"] == {"q1": 29}


def test_a_group_without_a_usable_answer_is_left_out(jsonl):
    path = jsonl(
        row("q1", "A"), row("q2", "A"), row("q2", "B", [1, 1, 1]), row("q3", "B", n=4),
    )  # fmt: skip
    survey = read.read_survey(path, min_respondents=5)
    assert survey.groups == ("A",)
    assert ids(survey.questions) == ["q1", "q2"]
    assert sorted(reasons(survey)) == [(3, Reason.SUM), (4, Reason.FEW_RESPONDENTS)]
    assert int(read.summary(survey).to_numpy().sum()) == 4
    assert read.group_names(path) == ("A", "B")
    # A group that was asked for is not left out silently.
    refused("group 'B' has no usable answer", read.read_survey, path, groups=["A", "B"], min_respondents=5)


def test_options_off_the_scale_leave_it_only_if_they_are_dropped(jsonl):
    path = jsonl(
        row("q1", "A", ordinal=[1, 2, None]),
        row("q2", "A", ordinal=[5, 5, 6]),
        row("q3", "A", [0.5, 0.3, 0.2], options=["Less", "More", "Depends"], ordinal=[1, 2, None]),
    )
    assert [question.ordinal for question in read.read_questions(path)] == [None, (5.0, 5.0, 6.0), None]
    # Without the refusal q2 has two options in one place, which is no order.
    assert [question.ordinal for question in read.read_questions(path, refusals="drop")] == [(1.0, 2.0), None, None]


def test_several_groups_are_read_as_each_alone(jsonl):
    bad = (row("q2", "B", (9.0, 9.0, 9.0)), row("q3", "C", (0.0, 0.0, 0.0)), row("q3", ""))
    path = jsonl(row("q1", "A"), row("q1", "B", (0.1, 0.1, 0.8)), *bad, row("q2", "A"), row("q1", "Britain"))
    names = ("B", "A", "C", "Nobody", "Great Britain", "Britain")
    found, options = read.read_groups(path, names, answer_filter=read.AnswerFilter("drop"))
    assert options == {
        question.question_id: question.options for question in read.read_questions(path, refusals="drop")
    }
    assert tuple(found) == names
    for name, mine in found.items():
        if isinstance(mine, UserError):
            assert refused("survey", read_group, path, name, refusals="drop") == str(mine)
        else:
            assert bits(mine) == bits(read_group(path, name, refusals="drop"))
    assert [name for name, mine in found.items() if isinstance(mine, UserError)] == ["C", "Nobody"]
    assert "1 x distribution sums to zero; 1 x empty group" in str(found["C"])
    assert read.read_groups(path, (), answer_filter=read.AnswerFilter("drop"))[0] == {}  # a node that hosts none
