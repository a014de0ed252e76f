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


SHARES = [0.65, 0.2, 0.1, 0.05]
SPELLED = (  # labels, a full stop, words around it
    "A: 0.65, B: 0.20, C: 0.10, D: 0.05", "A: 0.65\nB: 0.20\nC: 0.10\nD: 0.05", "0.65,0.20,0.10,0.05.",
    "0.65,0.20,0.10,0.05\nSo 65% of 100 people", "Of 100 people:\n0.65,0.20,0.10,0.05",
)  # fmt: skip
DISTRIBUTIONS = [
    ("0.65,0.20,0.10,0.05", SHARES, 1),
    (" 0.65, 0.2 ,.10,0.05 \n", SHARES, 1),
    *((text, SHARES, 2 / 3) for text in SPELLED),
    ("1,0,0,0", [1, 0, 0, 0], 1),
    ("0.33,0.33,0.33,0.00", [1 / 3, 1 / 3, 1 / 3, 0], 1),  # .99: off by one unit of the last place
    ("0.30,0.30,0.30,0.08", [15 / 49, 15 / 49, 15 / 49, 4 / 49], 2 / 3),  # .98
    ("0.2,0.2,0.2,0.2", [0.25] * 4, 2 / 3),  # sums to .8
    ("2,1,1,0", [0.5, 0.25, 0.25, 0], 1 / 3),  # out of range and sum
    ("60%,20%,15%,5%", [0.6, 0.2, 0.15, 0.05], 0),  # not bare, not in range, not one
    ("5e-1,.5,0,0", [0.5, 0.5, 0, 0], 2 / 3),  # an exponent is no plain decimal
    ("0.5,0.5,0,-0", [0.5, 0.5, 0, 0], 2 / 3),
    ("1e308,1e308,1e308,1e308", [0.25] * 4, 0),
    ("5e-324,5e-324,0,0", [0.5, 0.5, 0, 0], 1 / 3),
    # too few, too many, no mass, and a single number that is in range and of sum one
    *((text, None, 2 / 3) for text in ("0.5,0.5", "0.2,0.2,0.2,0.2,0.2", "0,0,0,0", "nan,nan,inf,1")),
    ("-0.5,0.5,0.5,0.5", None, 1 / 3),  # not bare, not in range, sums to one
    *((text, None, 0) for text in ("1e999,0,0,0", "٠.٢٥,٠.٢٥,٠.٢٥,٠.٢٥", "I will not say", "", "v1.2.3 0.5x q4")),
]
RANKED = ("B,C,A,D", "Ranking: B > C > A > D", "A guess of mine:\nB,C,A,D", "B,C,A,D,B")
RANKINGS = [
    *((text, [2, 4, 3, 1], 1) for text in RANKED),
    ("B,C", None, 0.5),
    ("B,B,C,A", None, 0.75),
    ("A,X,B,US", None, 0.5),
    *((text, None, 0) for text in ("b,c,a,d", "BCAD", "0.1,0.2", "")),
]


@pytest.mark.parametrize(
    ("task", "text", "prediction", "score"),
    [*(("dpa", *case) for case in DISTRIBUTIONS), *(("opa", *case) for case in RANKINGS)],
)
def test_answers_as_models_write_them(task, text, prediction, score):
    with np.errstate(over="raise", invalid="raise"):  # nothing that a model writes makes numpy warn
        parsed = parse(task, text, 4)
    assert parsed.format_score == pytest.approx(score, abs=1e-15)
    assert (parsed.prediction is None) == (prediction is None)
    # of the rankings only those without any letter are completely unparseable, and they are those of score 0
    assert parsed.parsed == (prediction is not None if task == "dpa" else score > 0)
    if prediction is not None:
        assert parsed.prediction.dtype == np.float64
        np.testing.assert_allclose(parsed.prediction, prediction, rtol=1e-15, atol=1e-15)


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
