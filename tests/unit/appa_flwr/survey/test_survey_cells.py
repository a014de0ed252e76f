from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from appa_flwr.survey.cells import (
    MAX_CELL_CHARS,
    MAX_TEXT_CHARS,
    CellError,
    Reason,
    as_list,
    as_name,
    as_text,
    is_refusal,
    parse_distribution,
    parse_options,
    parse_ordinal,
)


def reason_of(call, *args) -> Reason:
    with pytest.raises(CellError) as caught:
        call(*args)
    return caught.value.reason


@pytest.mark.parametrize(
    ("cell", "shares"),
    [
        ([0.25, 0.75], [0.25, 0.75]),
        ("[0.25, 0.75]", [0.25, 0.75]),
        ("(0.25, .75,)", [0.25, 0.75]),  # a Python literal that is no JSON
        ([1, 0], [1.0, 0.0]),
        ([0.49, 0.49], [0.5, 0.5]),  # sum 0.98 lies on the edge; 0.49/0.98 = 1/2
        ([0.51, 0.51], [0.5, 0.5]),  # and 1.02 on the other
        ([0.2525, 0.7575], [0.25, 0.75]),  # sum 1.01
    ],
)
def test_good_distributions_are_renormalised(cell, shares):
    np.testing.assert_allclose(parse_distribution(cell, 2), shares, rtol=1e-15)


BAD_DISTRIBUTIONS = {
    Reason.LENGTH: ([1.0], [0.2, 0.3, 0.5]),
    Reason.NOT_FINITE: (
        [math.nan, 1.0], "[NaN, 1.0]", "[nan, 1.0]", "[null, 1.0]", "[None, 1.0]", "[Infinity, 0.5]", "[-inf, 0.5]",
        "[" + "9" * 5000 + ", 0]",
    ),
    Reason.NEGATIVE: ([-0.1, 1.1],),
    Reason.ZERO: ([0.0, 0.0],),
    Reason.SUM: ([0.48, 0.49], [0.52, 0.51], [50, 50], [1e308, 1e308]),  # 0.97 and 1.03 are just too far off
    Reason.BAD_DISTRIBUTION: (
        [True, False], ["0.5", "0.5"], "[0.5 0.5]", "0.5, 0.5", '{"a": 0.5}', "[0.5, [0.5]]",
        "__import__('os').getcwd()", "[1/2, 1/2]", None, 0.5,
    ),
    Reason.TOO_LONG: ("[0.5, 0.5" + " " * MAX_CELL_CHARS + "]",),
}  # fmt: skip
BAD_OPTIONS = {
    Reason.FEW_OPTIONS: (["only one"], []),
    Reason.MANY_OPTIONS: (
        [str(number) for number in range(31)], str([f"option {number}" for number in range(5_000)]),
        json.dumps(["x"] * 10_000),
    ),
    Reason.EMPTY_TEXT: (["a", " "],),
    Reason.TOO_LONG: (["a", "x" * (MAX_TEXT_CHARS + 1)], str([f"option {number}" for number in range(10_000)])),
    Reason.NOT_UNICODE: (["a", "\ud800"],),
    Reason.BAD_OPTIONS: (
        ["a", None], ["a", True], ["a", ["b"]], "Yes|No", "['a', b'c']", "['a', r'b']", r"['a', '\x1']", "[,]",
        "__import__('os').listdir('.')", "open('x')",
        "['a' 'b', 'c']",  # two literals side by side are not one item
        "['a',,'b']", "['a' ; 'b']", "[1 2]", "[" * 90_000, "[" * 45_000 + "]" * 45_000,
        "[" + "-" * 90_000 + "1]", "['" + "\\'" * 45_000 + "]", "['a'" + " " * 90_000 + "b]",
        "[" + "1" * 90_000 + "x]", "[f" + "()" * 40_000 + "]",
        "['a', 0x" + "f" * 5_000 + "]",  # a number that Python reads and cannot write
    ),
}  # fmt: skip
BAD = [(parse_distribution, (cell, 2), reason) for reason, cells in BAD_DISTRIBUTIONS.items() for cell in cells]
BAD += [(parse_distribution, ([0.5, 0.5, 0.5], 3, (0, 1)), Reason.SUM)]  # as written, before anything is dropped
BAD += [(parse_options, (cell,), reason) for reason, cells in BAD_OPTIONS.items() for cell in cells]


@pytest.mark.parametrize(("call", "args", "reason"), BAD, ids=range(len(BAD)))
def test_bad_cells_name_their_reason(call, args, reason):
    assert reason_of(call, *args) is reason


@given(st.lists(st.floats(0, 1), min_size=2, max_size=30).filter(lambda values: sum(values) > 1e-3))
def test_reading_a_written_distribution_again_changes_no_bit(values):
    total = math.fsum(values)
    once = parse_distribution([value / total for value in values], len(values))
    assert parse_distribution(json.dumps(once.tolist()), len(values)).tobytes() == once.tobytes()
    assert once.min() >= 0.0
    assert abs(math.fsum(once) - 1.0) < 1e-9


@pytest.mark.parametrize(
    ("cell", "options"),
    [
        (["Yes", " No "], ("Yes", "No")),
        ('["Yes", "No"]', ("Yes", "No")),
        ("['Yes', 'No']", ("Yes", "No")),
        ("""['Don\\'t know', "isn't", 'tab\\there']""", ("Don't know", "isn't", "tab\there")),
        ("['50\\% or more', 'a,b]']", ("50\\% or more", "a,b]")),
        ([1, 2.5], ("1", "2.5")),
        (repr(["a'b", 'c"d', "new\nline", "\\", "ü, ]", "nan"]), ("a'b", 'c"d', "new\nline", "\\", "ü, ]", "nan")),
    ],
)
def test_options_come_as_lists_json_or_python_literals(cell, options):
    assert parse_options(cell) == options


@settings(deadline=None)
@given(st.text() | st.text(alphabet="[]()'\"\\, 0.1eE+-naifNone\n"))
@example("['a'")
def test_any_text_is_a_list_or_a_counted_reason(text):
    try:
        outcome = as_list(text, Reason.BAD_OPTIONS)
    except CellError as error:
        outcome = error.reason
    assert outcome is Reason.BAD_OPTIONS or isinstance(outcome, list)


def test_names_of_any_script_are_names_but_none_that_could_write_over_a_terminal_or_fill_it():
    for name in ("Côte d'Ivoire", "日本", "$100,000 or more", "New\u00a0Zealand", "x" * 500):
        assert as_name(f" {name} ", Reason.EMPTY_GROUP) == name
    assert reason_of(as_name, " ", Reason.EMPTY_GROUP) is Reason.EMPTY_GROUP
    for name in ("a\nb", "a\x1b[31mb", "a\x00b", "a\x7f", "a\x9bb", "a\u2028b", "a\u202eb", "x" * 501):
        assert as_text(name, Reason.EMPTY_ID) == name
        assert reason_of(as_name, name, Reason.EMPTY_ID) is Reason.BAD_NAME


def test_text_and_ordinal_cells():
    assert as_text("  Ja ", Reason.EMPTY_TEXT) == "Ja"
    assert as_text(12, Reason.EMPTY_ID) == "12"
    for cell in (None, "", "  ", math.nan, ["a"], True):
        assert reason_of(as_text, cell, Reason.EMPTY_ID) is Reason.EMPTY_ID
    assert parse_ordinal("[1, 2.5]", 2) == (1.0, 2.5)
    for cell in (None, "", "nan", "null", math.nan):
        assert parse_ordinal(cell, 2) is None
    for cell in ("[1]", [1, None], [1, "2"], "high to low"):
        assert reason_of(parse_ordinal, cell, 2) is Reason.BAD_ORDINAL


REFUSALS = (
    "DK/Refused", "Don't know", "Don’t know", "don't  KNOW.", "Refused", "Missing", "No answer", "Don't know/Refused",
    "No answer/refused", "Don't know or refused", "Don't know (VOL)", "Missing; Unknown", "Missing; Not available",
    "Other missing; Multiple answers Mail (EVS)",
)  # fmt: skip
ANSWERS = (
    "Not sure", "Don't know anyone (VOL)", "Some, don't know how long", "No, I do not know anyone",
    "I do not know examples concerned", "Other answer", "No", "Missing persons", "Refused entry", "Accepted/Refused",
    "", "/",
)  # fmt: skip


@pytest.mark.parametrize("option", [*REFUSALS, *ANSWERS])
def test_refusals_are_told_from_answers(option):
    assert is_refusal(option) == (option in REFUSALS)
