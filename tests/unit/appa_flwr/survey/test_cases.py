"""Files as institutes publish them, with the right values worked out by pandas (`tests/cases/expected.json`)."""

import pytest
from small import CASES, cases
from surveys import ids, refused

from appa_flwr.core.errors import UserError
from appa_flwr.survey.sources import read_survey

EXPECTED, MESSAGES = cases("expected"), cases("messages")


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


@pytest.mark.parametrize(("name", "left_out", "named"), cases("wrong_inputs")["decisions"]["rows"])
def test_what_a_person_must_decide(name, left_out, named):
    keys = {key: value for key, value in EXPECTED[name]["keys"].items() if key != left_out}
    message = refused(name, read, name, keys)
    assert all(part in message for part in named)
    assert "ppltrst" not in message  # there 7, 8 and 9 are answers
