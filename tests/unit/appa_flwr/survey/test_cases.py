"""Files as institutes publish them, with the right values worked out by pandas (`tests/cases/expected.json`)."""

import json
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from surveys import ids, refused

from appa_flwr.core.errors import UserError
from appa_flwr.survey.sources import read_survey

CASES = Path(__file__).parents[3] / "cases"
EXPECTED = json.loads((CASES / "expected.json").read_text())
TEXTS = json.loads((CASES / "texts.json").read_text())
MESSAGES = json.loads((CASES / "messages.json").read_text())


def read(name, keys=None):
    return read_survey(CASES / name, **{key.removeprefix("data."): value for key, value in (keys or {}).items()})


@pytest.mark.parametrize("name", sorted(EXPECTED.keys() - {"long_answers.csv"}))
def test_the_right_values(name):
    expected = EXPECTED[name]
    survey = read(name, expected["keys"])
    by_name = {key: question for question in survey.questions for key in (question.question_id, question.text)}
    for text, wanted in expected.get("questions", {}).items():
        question = next(question for known, question in by_name.items() if known.endswith(text))
        assert sorted(question.options) == sorted(wanted["options"])
        for group, right in wanted["groups"].items():
            shares = dict(zip(question.options, survey.answers[group][question.question_id], strict=True))
            assert shares == pytest.approx(dict(zip(wanted["options"], right["shares"], strict=True)), abs=1e-3)
            if "n" in right:
                assert survey.respondents[group][question.question_id] == right["n"]
    assert sorted(survey.groups) == expected.get("groups", sorted(survey.groups))
    for text in expected.get("ordinal", []):
        assert by_name[text].ordinal == tuple(range(len(by_name[text].options)))


@pytest.mark.parametrize("name", MESSAGES)
def test_the_messages(name):
    case = MESSAGES[name]
    try:
        survey = read(name, case["keys"])
        said = " ".join(survey.about.notes)
        assert not case["must_fail"]
        assert name != "eurobarometer_inap.dta" or ids(survey.questions) == ["qa1a_1", "qa2"]
    except UserError as error:
        said = str(error)
    assert any(word in said.lower() for word in case["any_word"])


@pytest.mark.parametrize(
    ("name", "left_out", "named"),
    [
        ("pew.csv", "data.missing", ["ECON1", "SATIS", "98", "99", 'data.missing="98,99"', "data.missing=none"]),
        ("ess.csv", "data.weight", ["dweight", "pspwght", "pweight", "anweight", "data.weight=none"]),
        ("ess.csv", "data.missing", ["polintr", '"polintr=7,8,9"']),
        ("long_answers.csv", "", ["'Question'", "'Response'", "pivot"]),
    ],
)
def test_what_a_person_must_decide(name, left_out, named):
    keys = {key: value for key, value in EXPECTED[name]["keys"].items() if key != left_out}
    message = refused(name, read, name, keys)
    assert all(part in message for part in named)
    assert "ppltrst" not in message  # there 7, 8 and 9 are answers


def test_thousands_are_never_decimals():
    survey = read("n_thousands.jsonl")
    assert set(survey.respondents["North"].values()) == {1024.0}
    (cause,) = (note for note in survey.about.notes if note.startswith("left out, n: "))
    assert cause.endswith(": " + ", ".join(f"row {line} (South, {line // 2 - 1})" for line in (2, 4, 6, 8)))
    # 1'250, 1 300 and 12.5 people; 850 and 150 with their total.
    assert sorted(read("marked_counts.csv").respondents["North"].values()) == [1000.0, 2562.5]


def test_excel_and_encodings():
    assert read("excel_percent.xlsx").answers["North"].popitem()[1].tolist() == pytest.approx([0.4, 0.6], abs=0.1)
    refused("excel_dates.xlsx: cell C3 holds a date", read, "excel_dates.xlsx")
    survey = read("cp1252.csv")
    assert (survey.groups, survey.questions[0].options) == (("Österreich",), ("Ja, völlig", "Nein"))
    assert any("cp1252" in note for note in survey.about.notes)
    refused("ragged.csv: .*line 92 has 2 cells, the header 3", read, "ragged.csv", {"data.group-by": "country"})


def test_two_codes_of_one_label_are_one_option():
    survey = read("stata_two_codes_one_label.dta", {"data.group-by": "region"})
    assert survey.questions[0].options == ("A great deal", "Some", "Hardly any", "Other")
    assert any("'Other'" in note for note in survey.about.notes)


def _in_order(found, right):
    return found == {group: pytest.approx(numbers, abs=1e-5) for group, numbers in right.items()}


@pytest.mark.parametrize("case", TEXTS, ids=lambda case: " ".join(case["text"])[:60])
def test_texts(case, tmp_path):
    """Rows of `texts.json`: the lines of a file, how it is read, and what comes of it, worked out by hand."""
    file = tmp_path / case["file"]
    file.write_bytes("".join(f"{line}\n" for line in case["text"]).encode(case.get("encoding", "utf-8")))
    if "message" in case:
        assert str(file) in refused(case["message"], read_survey, file, **case.get("keys", {}))
        return
    survey = read_survey(file, **case.get("keys", {}))
    notes = " | ".join(survey.about.notes)
    found = {group: np.concatenate([*answers.values()]) for group, answers in survey.answers.items()}
    if right := case.get("shares"):
        assert _in_order(found, {group: [*_flat(numbers)] for group, numbers in right.items()})
    for group, people in case.get("n", {}).items():
        assert [*survey.respondents[group].values()] == people
    assert survey.groups == tuple(case.get("groups", survey.groups))
    assert ids(survey.questions) == case.get("ids", ids(survey.questions))
    options = [[*question.options] for question in survey.questions]
    assert options == case.get("options", options)
    assert survey.about.weight == case.get("weight", survey.about.weight)
    wanted = case.get("note", [])
    assert all(note in notes for note in ([wanted] if isinstance(wanted, str) else wanted))
    assert case.get("not", "nothing") not in notes


def _flat(numbers):
    """Shares of one question, or of several by their text."""
    return chain.from_iterable(numbers.values()) if isinstance(numbers, dict) else numbers
