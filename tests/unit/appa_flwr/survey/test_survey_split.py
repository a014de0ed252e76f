import pytest
from surveys import refused

from appa_flwr.survey.split import split_questions
from appa_flwr.survey.types import Question


def questions(texts):
    return tuple(Question(f"q{index}", text, ("yes", "no")) for index, text in enumerate(texts))


def test_a_text_asked_twice_is_on_one_side():
    texts = [f"Rule {number} should stay?" for number in range(200)]
    again = [f"  rule\t{number}  SHOULD stay?\n" for number in range(200)]
    held_out = [int(name[1:]) for name in split_questions(questions(texts + again)).test]
    assert 0 < len(held_out) == 2 * len({number % 200 for number in held_out}) < 400


@pytest.mark.parametrize(
    ("fraction", "held_out"),
    [
        (0.2, "ad"),
        (0.5, "abcdf"),
        (0.01, "a"),  # none lies under it: the lowest moves
        (0.9, "abcdf"),  # all lie under it: the highest stays
    ],
)
def test_the_split_of_a_text_stays_what_it_was(fraction, held_out):
    # `printf '0\ntext a' | sha256sum` and so on begin with
    # a: 0cc4, b: 717a, c: 4d54, d: 0e42, e: c0b6, f: 4187, which are
    # 0.050, 0.443, 0.302, 0.056, 0.753 and 0.256 of the range.
    asked = tuple(Question(letter, f"Text {letter}", ("yes", "no")) for letter in "abcdef")
    assert "".join(split_questions(asked, test_fraction=fraction, seed=0).test) == held_out


def test_bad_input():
    refused("at least two different question texts; the survey has 1", split_questions, questions(["same", "Same "]))
    refused("the survey has 0", split_questions, ())
