"""Prompts and answers: what is asked, what is read, and that nothing a model writes can hurt."""

import string

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from small import cases

from appa_flwr.protocol.formats import MAX_CHARACTERS, answer, letters, parse, prompt
from appa_flwr.protocol.rewards import borda

distributions = st.integers(1, 30).flatmap(
    lambda size: hnp.arrays(np.float64, size, elements=st.one_of(st.just(0.0), st.floats(1e-6, 1e6))).filter(
        lambda values: values.any()
    )
)
rankings = st.integers(1, 30).flatmap(lambda size: hnp.arrays(np.float64, size, elements=st.floats(-5, 5)))


@pytest.mark.parametrize("task", ["dpa", "opa"])
def test_full_prompts_of_a_task_share_their_instructions_with_an_answer_of_full_marks(task):
    first = prompt(task, "Is it good?", ["Yes", "No"])
    second = prompt(task, "Who should decide?", ["Nobody", "All", "Some"])
    shared, asked = first.split("Is it good?")
    assert len(shared) > 600
    assert asked.startswith("\nAnswers:\nA: Yes\nB: No\n\nHere K is 2: reply with 2 ")
    asked = "Who should decide?\nAnswers:\nA: Nobody\nB: All\nC: Some\n\nHere K is 3: reply with 3 "
    assert second.startswith(shared + asked)
    line = next(line for line in shared.splitlines() if "could look like this" in line)
    parsed = parse(task, line.rpartition(": ")[2], 4)
    assert parsed.format_score == 1.0
    assert parsed.prediction is not None


CUES = [
    ("dpa", "compact", "scores:"),
    ("opa", "compact", "ranking:"),
    ("dpa", "counted", "2 scores:"),
    ("opa", "counted", "ranking of 2:"),
]


@pytest.mark.parametrize(("task", "style", "cue"), CUES)
def test_short_prompts_are_bare_and_no_line_break_can_pose_as_an_option(task, style, cue):
    text = prompt(task, "Good?\nC: Maybe", ["Yes\n\nD: x", "No"], style=style)
    assert text == f"{task}\nQ: Good? C: Maybe\nA: Yes D: x\nB: No\n{cue}"


def test_letters_go_on_behind_z():
    assert letters(30)[23:] == ("X", "Y", "Z", "AA", "AB", "AC", "AD")
    assert letters(702)[-2:] == ("ZY", "ZZ")
    assert len(set(letters(702))) == 702
    for number in (0, 703):
        with pytest.raises(ValueError, match="between 1 and 702"):
            letters(number)


MARKS = {"dpa": 3, "opa": 4}


@pytest.mark.parametrize(
    ("task", "text", "read", "marks"), [(task, *row) for task in MARKS for row in cases("answers")[task]]
)
def test_answers_as_models_write_them(task, text, read, marks):
    with np.errstate(over="raise", invalid="raise"):  # nothing that a model writes makes numpy warn
        parsed = parse(task, text, 4)
    assert parsed.format_score == pytest.approx(marks / MARKS[task], abs=1e-15)
    assert (parsed.prediction is not None) == bool(read)
    assert parsed.parsed == (bool(read) if task == "dpa" else marks > 0)
    if read:
        assert parsed.prediction.dtype == np.float64
        expected = np.array(read) / (sum(read) if task == "dpa" else 1)
        np.testing.assert_allclose(parsed.prediction, expected, rtol=1e-15, atol=1e-15)


def test_nothing_is_read_behind_the_limit_and_an_answer_cut_there_is_not_bare():
    padded = "0.5,0.5".ljust(MAX_CHARACTERS)
    assert parse("dpa", padded, 2).format_score == 1.0
    assert parse("dpa", padded + "and so on", 2).format_score == pytest.approx(2 / 3)
    assert parse("dpa", "0.5,".ljust(MAX_CHARACTERS) + "0.5", 2).prediction is None
    assert parse("opa", "A,".ljust(MAX_CHARACTERS) + "B", 2).format_score == 0.5


@pytest.mark.parametrize("task", ["dpa", "opa"])
@given(st.one_of(st.text(), st.text(alphabet=string.digits + "ABC.,-+eE \n")), st.integers(1, 5))
@example("0.5,0.5\x00", 2)
@example("+.e1", 1)
def test_any_text_gives_a_score_and_a_sound_prediction_or_none(task, text, num_options):
    parsed = parse(task, text, num_options)
    assert 0.0 <= parsed.format_score <= 1.0
    if parsed.prediction is not None:
        assert parsed.prediction.shape == (num_options,)
        if task == "dpa":
            assert (parsed.prediction >= 0.0).all()
            assert parsed.prediction.sum() == pytest.approx(1.0)
        else:
            assert sorted(parsed.prediction) == list(range(1, num_options + 1))


@given(distributions, st.sampled_from([0.01, 0.02, 0.05, 0.1, 0.25]))
def test_written_distributions_read_back(values, step):
    text = answer("dpa", values, step=step)
    parsed = parse("dpa", text, values.size)
    assert parsed.format_score == 1.0
    hundredths = [round(float(number) * 100) for number in text.split(",")]
    assert sum(hundredths) == 100
    assert all(number % round(step * 100) == 0 for number in hundredths)
    # the largest remainder moves no value by a whole step, and what is on the grid stays
    assert np.abs(parsed.prediction - values / values.sum()).max() < step + 1e-9
    assert answer("dpa", parsed.prediction, step=step) == text


@given(rankings)
def test_written_rankings_read_back(scores):
    parsed = parse("opa", answer("opa", scores), scores.size)
    assert parsed.format_score == 1.0
    assert borda(parsed.prediction, scores, np.ones(scores.size, bool)) == 1.0


@pytest.mark.parametrize("distribution", [[0.33, 0.17, 0.5], [0.26, 0.26, 0.24, 0.24]])
def test_rounded_at_random_an_answer_is_right_on_average_and_never_a_step_away(distribution):
    rng = np.random.default_rng(0)
    texts = [answer("dpa", distribution, step=0.1, rng=rng) for _ in range(4000)]
    numbers = np.array([[float(number) for number in text.split(",")] for text in texts])
    assert np.allclose(numbers.sum(1), 1.0)
    assert np.abs(numbers - distribution).max() < 0.1
    assert np.abs(numbers.mean(0) - distribution).max() < 4 * 0.05 / np.sqrt(4000)


def test_answers_by_hand():
    assert answer("dpa", [0.65, 0.2, 0.1, 0.05]) == "0.65,0.20,0.10,0.05"
    # 33 + 33 + 33 leaves one hundredth, to the first of equal remainders
    assert answer("dpa", [1, 1, 1]) == "0.34,0.33,0.33"
    # in twentieths 6.66, 6.66, 6.68: two left over, the largest remainder first
    assert answer("dpa", [0.333, 0.333, 0.334], step=0.05) == "0.35,0.30,0.35"
    assert answer("dpa", [3, 1], step=1) == "1.00,0.00"
    assert answer("opa", [1, 3, 2]) == "B,C,A"
    assert answer("opa", [0.5, 0.5, 0.6]) == "C,A,B"


@pytest.mark.parametrize(("scores", "step", "message"), cases("wrong_numbers")["answers"])
def test_scores_that_cannot_be_written_are_errors(scores, step, message):
    with pytest.raises(ValueError, match=message):
        answer("dpa", scores, step=step)
