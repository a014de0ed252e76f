"""The first screen of a report: what was done, whether it worked, how sure that is, and the terms that follow."""

import json
import re
import shlex

import pandas as pd
import pytest
import report_runs as made
from markupsafe import escape

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
        ({"uniform": SURE, "option_list": SURE}, "It worked. For the worst"),
        ({"uniform": SURE, "option_list": SURE, "nearest_questions": UNSURE}, "It worked in part. For the worst"),
        ({"uniform": WORSE, "option_list": UNSURE}, "It did not work. For"),
        ({"uniform": UNSURE, "sft": SURE}, "It is uncertain whether it worked. For"),
    ],
)
def test_it_worked_where_the_policy_is_surely_above_the_uniform_answer_and_the_best_look_up(gains, begins):
    assert said(readable=0.98, **gains).startswith(begins)


def test_the_verdict_has_the_look_up_that_leaves_ppo_the_least_and_the_other_rule():
    gains = {"uniform": SURE, "option_list": SURE, "nearest_questions": UNSURE, "sft": SURE, "ppo by average": WORSE}
    text = said(**gains)
    assert f"{opening.BETTER} Uniform answer (+0.030, +0.010 to +0.050)" in text
    assert f"{opening.UNCLEAR} Look-up, 3 nearest (+0.004" in text
    assert f"{opening.BETTER} SFT (+0.030" in text
    assert f"{opening.WORSE} PPO by average (-0.030" in text
    assert "same options" not in text


def test_an_update_that_threw_the_policy_back_is_told_in_numbers():
    rewards, kls, jumped = (0.93, 0.95, 0.8, 0.9, 0.94), (0.0, 0.5, 2.5, 3.75, 1.0), (False, False, True, True, False)
    frame = pd.DataFrame({"iteration": range(1, 6), "group_reward": rewards, "kl": kls, "kl_jumped": jumped})
    assert re.findall(r"\d+\.?\d*", opening.fall(frame)) == ["3", "2.5", "0.930", "0.800", "0.940"]
    assert opening.fall(frame.assign(kl_jumped=False)) == opening.fall(frame[:0]) == opening.fall(pd.DataFrame()) == ""


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
    assert "a (0.800; after SFT 0.770) worst and b (0.920; after SFT 0.850) best" in third
    words = ["python", "-m", "experiments.grid", "experiments/seeds.toml", "metric=js", "appa.fairness-threshold=0.99"]
    assert shlex.split(opening.five_seeds(run.config)) == words
    own = run.config.model_copy(update={"rule": "mine:Rule"})
    words = ["PYTHONPATH=CLONE/", *words[:3], "CLONE/experiments/seeds.toml", "rule=mine:Rule", *words[4:]]
    assert shlex.split(opening.five_seeds(own)) == words


def test_few_held_out_questions_allow_no_verdict():
    assert not said(uniform=SURE, option_list=SURE, held_out=30).startswith("30")
    assert said(uniform=SURE, option_list=SURE, held_out=29).startswith("29 held-out questions are too few")


def test_a_deployed_run_s_answers_stayed_home_and_no_command_repeats_it(tmp_path):
    keys = {"survey": "questions.jsonl", "run.group-keys": "keys.toml", "groups": "Kenya;Peru"}
    config = made.CONFIG | keys
    run = made.read(tmp_path, config=config, summary=made.summary())
    first, _, third = opening.sentences(run, frames.of_run(run))
    assert "questions.jsonl" not in first
    assert third.endswith(".")
    assert opening.five_seeds(run.config) == ""


def test_the_glossary_has_the_terms_of_the_page_alone(tmp_path):
    page = made.page_of(made.scored_run(tmp_path))
    terms = [term for term, meaning in opening.GLOSSARY.items() if f"<dt>{term}</dt><dd>{escape(meaning)}" in page]
    assert terms == [term for term in opening.GLOSSARY if term not in ("PluralLLM", "KL")]
    page = made.page_of(made.write_run(tmp_path / "p", config=made.CONFIG, pluralllm=made.predictor_card()))
    assert "<dt>PluralLLM</dt><dd>the network" in page
    assert "<dt>Ceiling</dt>" not in page
