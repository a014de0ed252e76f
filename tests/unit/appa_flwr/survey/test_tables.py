"""Tables of shares and counts, and what every source owes its reader."""

import re

import pytest
from surveys import ids, refused, row, write

from appa_flwr.survey.sources import read_survey

NO_NUMBER = "not a plain number, such as 1200, 12.5 or 12,5 %"


def left_out(survey):
    """Reason -> first row and group that it concerns."""
    causes = (note for note in survey.about.notes if note.startswith("left out, "))
    found = (re.match(r"left out, (.+?): row (\d+) \((?:(.*?), )?[^,]*?\)", cause).groups() for cause in causes)
    return {reason: (int(row), group) for reason, row, group in found}


@pytest.mark.parametrize("extension", [".csv", ".jsonl", ".parquet"])
def test_our_own_columns_in_every_format(tmp_path, extension):
    rows = [
        row("q1", "A", (0.5, 0.3, 0.2), n=100, ordinal=[1, 2, None]),
        row("q1", "B", (0.25, 0.25, 0.5), n=50, ordinal=[1, 2, None]),
        row("q2", "A", (0.0, 1.0, 0.0), n=7, ordinal=None),
    ]
    survey = read_survey(write(tmp_path / f"x{extension}", rows))
    assert (ids(survey.questions), survey.groups) == (["q1", "q2"], ("A", "B"))
    assert survey.questions[0].ordinal is None  # an option has no place
    assert survey.answers["A"]["q1"].tolist() == [0.5, 0.3, 0.2]
    assert survey.respondents["A"] == {"q1": 100.0, "q2": 7.0}
    dropped = read_survey(write(tmp_path / f"x{extension}", rows), refusals="drop", groups=["B"])
    assert dropped.answers["B"]["q1"].tolist() == [0.5, 0.5]
    assert dropped.questions[0].ordinal == (1.0, 2.0)
    assert ids(dropped.extra) == ["q2"]
    refused("refusal: ", read_survey, tmp_path / f"x{extension}", refusal="drop")


def test_single_bad_answers_are_left_out_with_their_row_and_reason(tmp_path):
    no_list, no_number = "distribution: not a list of numbers", f"n: {NO_NUMBER}"
    bad = [
        (row("q1", "A"), None),
        (row("q1", "A"), "question already answered by this group"),
        (row("q1", "B", (0.5, 0.5)), "distribution is not a list of numbers, one for each option"),
        (row("q1", "C", (0.5, 0.3, float("nan"))), "distribution is not a list of numbers, one for each option"),
        (row("q1", "D", (1.2, -0.2, 0.0)), "negative share in the distribution"),
        (row("q1", "E", (0.5, 0.3, 0.1)), "distribution is off one by more than 0.02"),
        (row("q1", "F", (0.0, 0.0, 0.0)), "nobody gave an answer that counts"),
        (row("q1", "G", options=["Yes", "No", "Maybe"]), "options differ from the question's first row"),
        (row("q1", "H", question="Other?"), "question text differs from the question's first row"),
        (row("q1", "I", n="many"), no_number),
        (row("q1", "J", n="12 %"), no_number),
        (row("q1", "K", n=-3), "n: negative"),
        (row("q1", "L", (True, 0, 0)), no_list),
        (row("q1", ""), "empty group"),
        (row("q1", "a;b"), "group's name with a semicolon, which stands between the names of several"),
        (row("q2", "A", (1.0,), options=["Yes"]), "not 2 to 30 options that are answers"),
        (row("q3", "A", options=["Yes", None]), "options: not a list of texts"),
        (row("q4", "A", (), options=[]), "not 2 to 30 options that are answers"),
        (row("q5", "A") | {"distribution": "0.5 0.5 0"}, "distribution: not a list"),
        (row("q6", "A", ordinal=[1, 2]), "ordinal: not one number, or null, for each option"),
        (row("q7", "A", (0.49, 0.3, 0.2)), None),
        (row("", "A"), None),  # its id is a hash of text and options
    ]
    survey = read_survey(write(tmp_path / "x.jsonl", [cells for cells, _ in bad]))
    first = {reason: number for number, (_, reason) in reversed([*enumerate(bad, start=1)]) if reason}
    assert {reason: number for reason, (number, _) in left_out(survey).items()} == first
    assert left_out(survey)["n: negative"] == (12, "K")
    assert survey.answers["A"]["q7"].sum() == pytest.approx(1.0, abs=1e-12)
    assert len(survey.answers["A"]) == 3


def test_globalopinionqa_with_text_or_objects(tmp_path):
    rows = [
        {"question": "Q?", "options": "['Yes', 'No', \"Don't know\"]", "source": "GAS",
         "selections": "defaultdict(<class 'list'>, {'Britain': [0.5, 0.4, 0.1], 'Peru': [nan, 0.5, 0.5]})"},
        {"question": "R?", "options": "['A', 'B']", "source": "WVS",
         "selections": "defaultdict(<class 'list'>, {'Great Britain': [1, 0], 'Britain': [0, 1]})"},
        {"question": "S?", "options": "['A', 'B']", "source": "WVS", "selections": "__import__('os').getcwd()"},
    ]  # fmt: skip
    survey = read_survey(write(tmp_path / "x.csv", rows))
    assert survey.groups == ("Great Britain",)
    assert [shares.tolist() for shares in survey.answers["Great Britain"].values()] == [[0.5, 0.4, 0.1], [1.0, 0.0]]
    assert left_out(survey) == {
        "distribution is not a list of numbers, one for each option": (2, "Peru"),
        "question already answered by this group": (3, "Great Britain"),
        "selections: not a dict of groups and lists": (4, None),
    }
