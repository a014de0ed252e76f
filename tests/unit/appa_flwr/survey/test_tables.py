"""Tables of shares and counts, and what every source owes its reader."""

import re

import pytest
from surveys import ids, refused, row, write

from appa_flwr.survey.sources import read_survey

TIDY = "question,group,option,{}\n"
NO_NUMBER = "not a plain number, such as 1200, 12.5 or 12,5 %"


def tidy(path, measure, *lines):
    path.write_text(TIDY.format(measure) + "".join(f"{line}\n" for line in lines))
    return path


def only(survey, group):
    (shares,) = survey.answers[group].values()
    return shares.tolist()


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


@pytest.mark.parametrize(
    ("measure", "yes", "no", "share"),
    [
        ("share", "25 %", "75%", 0.25),
        ("percent", "12,5 %", "87.5", 0.125),
        ("count", "1'000", "3’000", 0.25),
        ("count", "1 000", "3,000", 0.25),
        ("count", "1.000.000", "3.000.000", 0.25),
        ("count", "2,5", "7,500", 0.25),  # the first says that the comma is a decimal one
    ],
)
def test_numbers_as_offices_write_them(tmp_path, measure, yes, no, share):
    survey = read_survey(tidy(tmp_path / "x.csv", measure, f'Q?,A,Yes,"{yes}"', f'Q?,A,No,"{no}"'))
    assert only(survey, "A") == pytest.approx([share, 1 - share])


@pytest.mark.parametrize(
    ("measure", "cell", "reason"),
    [
        ("count", "1.000", NO_NUMBER),  # one thousand, or one
        ("count", "50 %", NO_NUMBER),
        ("count", "-3", "negative"),
        ("count", "", "empty"),
        ("percent", "n/a", NO_NUMBER),
        ("share", "inf", NO_NUMBER),
    ],
)
def test_a_number_that_may_be_wrong_costs_its_group(tmp_path, measure, cell, reason):
    good = {"count": "1", "share": "0.5", "percent": "50"}[measure]
    lines = [f"Q?,A,Yes,{cell}", f"Q?,A,No,{good}", f"Q?,B,Yes,{good}", f"Q?,B,No,{good}"]
    survey = read_survey(tidy(tmp_path / "x.csv", measure, *lines))
    assert (survey.groups, left_out(survey)) == (("B",), {f"{measure}: {reason}": (2, "A")})


def test_a_wrong_number_costs_an_answer_and_not_the_order_of_options(tmp_path):
    lines = ["Q?,A,Yes,many", "Q?,A,No,1", "Q?,B,No,1", "Q?,B,Yes,3"]
    survey = read_survey(tidy(tmp_path / "x.csv", "count", *lines))
    assert (survey.groups, survey.questions[0].options, only(survey, "B")) == (("B",), ("Yes", "No"), [0.75, 0.25])
    assert not any("without a row" in note for note in survey.about.notes)


def test_spellings_of_an_option_are_added_up_and_two_numbers_of_one_spelling_cost_the_answer(tmp_path):
    lines = ["Q?,A,yes,1", "Q?,A,No,2", "Q?,B,Yes,2", "Q?,B,yes,3", "Q?,B,No,5", "Q?,C,Yes,2", "Q?,C,Yes,3"]
    survey = read_survey(tidy(tmp_path / "x.csv", "count", *lines))
    assert only(survey, "B") == [0.5, 0.5]
    assert left_out(survey) == {"an option twice in a question's rows of one group": (7, "C")}


@pytest.mark.parametrize(
    ("measure", "rows", "options"),
    [
        ("count", {"Yes": "33", "No": "11", "Base": "99"}, "Yes|No|Base"),
        ("percent", {"Yes": (75, 75), "No": (25, 25), "Summe": (100, 100)}, "Yes|No"),
        ("count", {"Yes": "33", "No": "11", "Base": "44", "Total": "44"}, "Yes|No"),
        ("share", {"Some": (0.25, 0.25), "None of it": (0.25, 0.25), "All": (0.5, 0.5)}, "Some|None of it|All"),
        (
            "count",
            {"Top 2 box": (200, 190), "Very": (60, 40), "Quite": (140, 150), "Not": (200, 230)},
            "Very|Quite|Not",
        ),
        ("count", {"Pleased": (200, 190), "Very": (60, 40), "Quite": (140, 150), "Not": (205, 230)}, "Very|Quite|Not"),
        ("count", {"Yes": "35", "No": "12", "Maybe": "23"}, "Yes|No|Maybe"),  # 3 = 1 + 2, 5 = 2 + 3 by accident
    ],
)
def test_totals_and_nets_are_no_options_and_a_group_called_so_is_said(tmp_path, measure, rows, options):
    lines = (
        f"Q?,{group},{name},{number[k]}" for k, group in enumerate(("A", "Total")) for name, number in rows.items()
    )
    survey = read_survey(tidy(tmp_path / "x.csv", measure, *lines))
    options = options.split("|")
    assert [*survey.questions[0].options] == options
    assert any("sums of others" in note for note in survey.about.notes) == (len(options) < len(rows))
    assert survey.groups == ("A", "Total")
    assert "counts as a group, whatever its name: Total" in survey.about.notes
    if measure == "count":
        assert [*survey.respondents["A"].values()] == [sum(int(rows[name][0]) for name in options)]


def test_a_code_of_no_answer_in_tables(tmp_path):
    path = tidy(tmp_path / "y.csv", "percent", "Q?,A,1,40", "Q?,A,2,40", "Q?,A,9,20")
    refused('data.missing="[0-9a-f]{12}=9"', read_survey, path)
    survey = read_survey(path, missing="9,98")
    assert only(survey, "A") == [0.5, 0.5]
    assert "data.missing lists codes that no answer has: 98" in survey.about.notes


def test_what_cannot_be_read_is_one_line(tmp_path):
    def case(name, text, message):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        assert str(path) in refused(message, read_survey, path)

    case("a.jsonl", '{"question_id": 1}\n{"x": \n', "line 2 is not JSON")
    case("b.jsonl", "[1]\n", "line 1 is not a JSON object")
    case("c.csv", "question_id,question,options,distribution\n1,Q,\"['a','b']\",\"[.5,.5]\"\n", "has no column group")
    case("e.csv", "question,group,option,count,count\nQ,A,Yes,1,2\n", "name of an earlier one, numbered: count.2")
    case("f.parquet", "PAR1 no", "not a readable .parquet file")
    case("g.xlsx", "no", "not a readable .xlsx file")
    case("h.sav", "no", "not a readable .sav file")
    case("k.csv", b"question,group,option,count\nQ\x81,A,Yes,1\n", "line 2 is neither UTF-8 nor cp1252")
    refused("refusal: ", read_survey, tmp_path / "c.csv", refusal="drop")
    utf_16 = "question;group;option;count\nQ?;Ägypten;Yes;1\nQ?;Ägypten;No;3\n".encode("utf-16")
    (tmp_path / "x.csv").write_bytes(utf_16)
    assert only(read_survey(tmp_path / "x.csv"), "Ägypten") == [0.25, 0.75]


@pytest.mark.parametrize(
    ("columns", "lines", "people", "kept"),
    [
        ("percent,count", ("A,Yes,66.7,2", "A,No,33.3,1", "B,Yes,50,200", "B,No,50,200"), ([3.0], [400.0]), "B"),
        ("percent,count", ('A,Yes,"66,7",1.024', 'A,No,"33,3",<5', "B,Yes,50,200", "B,No,50,200"), ([], [400.0]), "AB"),
        # As dplyr's count() writes.
        ("percent,n", ("A,Yes,90,90", "A,No,10,10", "B,Yes,10,10", "B,No,90,90"), ([100.0], [100.0]), "AB"),
        ("percent,n", ("A,Yes,66.7,3", "A,No,33.3,3", "B,Yes,50,400", "B,No,50,400"), ([3.0], [400.0]), "B"),
        ("percent,n", ("A,Yes,60,40", "A,No,40,39", "B,Yes,50,400", "B,No,50,400"), ([39.0], [400.0]), "B"),
        ("Count", ("A,Yes,30", "A,No,10", "B,Yes,400", "B,No,0"), ([40.0], [400.0]), "B"),
    ],
)
def test_numbers_of_people_are_read(tmp_path, columns, lines, people, kept):
    path = tidy(tmp_path / "x.csv", columns, *(f"Q?,{line}" for line in lines))
    known = read_survey(path).respondents
    assert ([*known["A"].values()], [*known["B"].values()]) == people
    assert "".join(read_survey(path, min_respondents=50).groups) == kept


def test_totals_that_are_no_sums_and_options_without_a_row_are_said(tmp_path):
    lines = (
        "Q?,A,Yes,400",
        "Q?,A,No,500",
        "Q?,A,Total,900",
        "Q?,B,Yes,300",
        "Q?,B,Total,1000",
        "R?,A,10,1",
        "R?,A,2,1",
    )
    survey = read_survey(tidy(tmp_path / "x.csv", "count", *lines))
    assert "counts as an option, whatever its name: 'Total'" in survey.about.notes
    assert "options without a row count as 0: 'No' of B" in survey.about.notes
    assert survey.questions[1].options == ("2", "10")  # numbers stand in their order
