"""The first screen of a report: what was done, whether it worked, how sure that is, and the terms that follow."""

import json
import shlex

import pandas as pd
import pytest
import report_runs as made

from appa_flwr.report import frames, opening

SURE, UNSURE, WORSE = (0.03, 0.01, 0.05), (0.004, -0.018, 0.032), (-0.03, -0.05, -0.01)


def said(readable=1.0, held_out=None, **gains):
    """The verdict on a policy that gains so much over other methods: a difference and its interval."""
    at = {"method": "ppo", "metric": "js", "against": "survey", "measure": "Min AS"}
    rows = [(name.replace("_", "-"), *gain) for name, gain in gains.items()]
    intervals = pd.DataFrame(rows, columns=["less", "value", "low", "high"]).assign(**at)
    summary = pd.DataFrame([made.row("ppo", 0.8, 0.7, against="survey", readable=readable)])
    return opening.verdict(intervals, summary, "appa", held_out=held_out)


@pytest.mark.parametrize(
    ("gains", "begins"),
    [
        ({"uniform": SURE, "option_list": SURE}, "It worked: 98%"),
        ({"uniform": SURE, "option_list": SURE, "nearest_questions": UNSURE}, "It worked in part: 98%"),
        ({"uniform": WORSE, "option_list": UNSURE}, "It did not work: 98%"),
        ({"uniform": UNSURE, "sft": SURE}, "It is uncertain whether it worked: 98%"),
    ],
)
def test_it_worked_where_the_policy_is_surely_above_the_uniform_answer_and_the_best_look_up(gains, begins):
    assert said(readable=0.98, **gains).startswith(begins)


def test_a_policy_whose_answers_cannot_be_read_has_not_worked_whatever_it_scores():
    text = said(readable=0.07, uniform=SURE, option_list=SURE)
    assert text.startswith("It did not work: 7%")
    assert "better" not in text


def test_the_sentences_have_the_run_s_numbers_and_a_command_for_five_seeds(tmp_path):
    counts = {"training": 1117, "unanswered": 800, "held_out": 83, "unanswerable": 0, "too_long": 0}
    folder = made.write_run(tmp_path, config=made.CONFIG, summary=made.summary(), questions=counts)
    step = {"phase": "ppo", "step": 1, "of": 1, "message": "", "seconds_left": None}
    (folder / "progress.jsonl").write_text("".join(json.dumps(step | {"seconds": now}) + "\n" for now in (10.0, 90.0)))
    run = made.read(folder)
    first, second, third = opening.sentences(run, frames.of_run(run))
    for what in (
        "2 groups with invented answers",
        "rules appa, average",
        "317 questions",
        "800",
        "1 min 30 s",
    ):
        assert what in first
    assert "can be read" in second
    words = shlex.split(third.partition("sure: ")[2].replace(";", " ; "))
    assert words[:4] == ["printf", "%s\\n", "seeds = [0, 1, 2, 3, 4]", 'rules = ["average", "appa"]']
    assert words[4:11] == [">", "seeds.toml", ";", "python", "-m", "experiments.grid", "seeds.toml"]
    assert words[11:] == ["metric=js", "appa.fairness-threshold=0.99"]


def test_few_held_out_questions_allow_no_verdict():
    assert not said(uniform=SURE, option_list=SURE, held_out=30).startswith("30")
    assert said(uniform=SURE, option_list=SURE, held_out=29).startswith("29 held-out questions are too few")
