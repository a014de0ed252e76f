"""Scoring groups that did not train: what reaches their context, what training may know, the JSON that comes out.

Axis letters: G groups, Q questions, K options.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import typer
from scipy.spatial.distance import jensenshannon
from surveys import row, write
from typer.testing import CliRunner

from appa_flwr.core.errors import UserError
from appa_flwr.survey.read import read_survey
from experiments.pluralllm import protocol, score
from experiments.pluralllm.measures import PredictorScores
from experiments.pluralllm.protocol import recipe, train
from pluralllm.encoders import hashed_ngrams

FIRST = ["js", "js_distance", "r", "r2", "order", "spearman"]
TRAINING, SCORED = ("A", "B", "C"), ("X", "Y")
OPTIONS = ("Yes", "No", "Rarely")
OLD = tuple(f"q{number}" for number in range(14))
# two of the first file's questions are in the second as well
NEW = ("new0", "new1", "new2", "q3", "q4")
SMALL = ("pluralllm.rounds=2", "pluralllm.hidden-dim=8", "pluralllm.rank=2", "pluralllm.blocks=1")


def answers_of(groups, question_ids, *, seed):
    """Rows of random answers, the groups' one after the other."""
    rng = np.random.default_rng(seed)
    return [
        row(question_id, group, rng.dirichlet(np.ones(3)), options=OPTIONS)
        for group in groups
        for question_id in question_ids
    ]


def changed(rows, group, question_ids):
    """The same rows, but that this group gives other answers to these questions."""
    return [
        {**one, "distribution": one["distribution"][::-1]}
        if one["group"] == group and one["question_id"] in question_ids
        else one
        for one in rows
    ]


FILE, HELD_OUT = answers_of((*TRAINING, *SCORED), OLD, seed=0), answers_of((*TRAINING, *SCORED), NEW, seed=1)


def problem_of(folder: Path, rows=FILE, held_out=None, context=None, *, seed=0):
    first = write(folder / "first.jsonl", rows)
    groups = (*TRAINING, *SCORED)
    found = {name: (None, None) for name in ("first", "second", "context")}
    for name, given, wanted in (("first", rows, groups), ("second", held_out, SCORED), ("context", context, SCORED)):
        if given is not None:
            path = write(folder / f"{name}.jsonl", given)
            found[name] = (path, read_survey(path, groups=wanted))
    return score.build_problem(
        (first, found["first"][1]),
        found["second"] if held_out is not None else None,
        found["context"] if context is not None else found["first"],
        training=TRAINING,
        scored=SCORED,
        texts_to_vectors=hashed_ngrams,
        dim=16,
        seed=seed,
    )


def asked(problem, data):
    """The questions that a group's answers are to."""
    return {problem.embedding.question_ids[question] for question in data.question_N}


def command(*arguments):
    """What `python -m experiments.pluralllm.score` prints."""
    app = typer.Typer()
    app.command()(score.main)
    keys = [part for key in SMALL for part in ("-c", key)]
    given = ("--train-groups", "A;B;C", "--score-groups", "X,Y", "--seeds", "0,1", "--sizes", "2,4", *keys)
    result = CliRunner().invoke(app, [*given, *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def scored(*arguments):
    """The object that `--json` gives, less the times."""
    found = json.loads(command(*arguments, "--json"))
    return {name: value for name, value in found.items() if not name.endswith("cpu_seconds")}


@pytest.fixture
def tables(tmp_path, monkeypatch):
    """Problem, tables and score of a run on these rows, its files made anew."""
    kept, predict_targets = [], protocol.predict_targets

    def recorded(*given, **more):
        kept.append(predict_targets(*given, **more))
        return kept[-1]

    monkeypatch.setattr(protocol, "predict_targets", recorded)
    config = recipe(*SMALL)

    def made(rows, held_out=None):
        kept.clear()
        problem = problem_of(tmp_path, rows, held_out)
        found = protocol.report(problem, train(problem, config, seed=0), config, seed=0)
        assert len(kept) == len(SCORED)
        return problem, [targets.probability_QK for targets in kept], found.scores["scored"]["pluralllm"]

    return made


def test_without_a_second_file_the_questions_to_score_are_in_nobodys_training_or_context(tmp_path):
    problem = problem_of(tmp_path)
    part = problem.parts["scored"]
    held_out = asked(problem, part.truth[0])
    assert 0 < len(held_out) < 7
    trained = {problem.embedding.question_ids[question] for question in np.flatnonzero(problem.trained_Q)}
    assert trained == set(OLD) - held_out
    assert all(asked(problem, data) == trained for data in (*problem.training, *part.context))
    assert all(asked(problem, data) == held_out for data in (*problem.validation, *part.truth))
    assert [data.group for data in problem.training] == list(TRAINING)
    assert [data.group for data in part.context] == [data.group for data in part.truth] == list(SCORED)


def test_with_a_second_file_its_answers_are_scored_and_the_first_ones_are_context(tmp_path):
    problem = problem_of(tmp_path, held_out=HELD_OUT)
    part = problem.parts["scored"]
    chosen_by = asked(problem, problem.validation[0])
    assert 0 < len(chosen_by) < 5
    given = {(one["group"], one["question_id"]): one["distribution"] for one in (*FILE, *HELD_OUT)}
    for group, context, truth in zip(SCORED, part.context, part.truth, strict=True):
        assert asked(problem, context) == set(OLD)
        assert asked(problem, truth) == set(NEW)
        for question, answer_K in zip(truth.question_N, truth.answer_NK, strict=True):
            np.testing.assert_allclose(answer_K, given[group, problem.embedding.question_ids[question]], atol=1e-6)
    assert all(asked(problem, data) == set(OLD) - chosen_by for data in problem.training)
    trained = [problem.embedding.question_ids[question] for question in np.flatnonzero(problem.trained_Q)]
    assert set(trained) == set(OLD) - chosen_by


def test_context_can_come_from_a_file_of_its_own(tmp_path):
    others = answers_of(SCORED, OLD[:6], seed=2)
    context = problem_of(tmp_path, held_out=HELD_OUT, context=others).parts["scored"].context
    given = {(one["group"], one["question_id"]): one["distribution"] for one in others}
    for data in context:
        assert len(data) == 6
        for question, answer_K in zip(OLD[:6], data.answer_NK, strict=True):
            np.testing.assert_allclose(answer_K, given[data.group, question], atol=1e-6)


def test_a_scored_groups_held_out_answers_reach_no_prediction(tables):
    """Without a second file; a prediction from other context would show what a leak looks like."""
    problem, before, score_before = tables(FILE)
    held_out = asked(problem, problem.parts["scored"].truth[0])
    _, after, score_after = tables(changed(FILE, "X", held_out))
    np.testing.assert_array_equal(after, before)
    assert score_after.js != score_before.js
    _, other, _ = tables(changed(FILE, "X", set(OLD) - held_out))
    assert np.abs(other[0] - before[0]).max() > 1e-3
    np.testing.assert_array_equal(other[1], before[1])


def test_a_question_that_is_in_context_and_scored_is_predicted_without_its_own_answer(tables):
    """Both "q3" and "q4" are in both files."""
    problem, before, _ = tables(FILE, HELD_OUT)
    _, after, _ = tables(changed(FILE, "X", {"q3"}), HELD_OUT)
    for question, was, now in zip(problem.embedding.question_ids, before[0], after[0], strict=True):
        if question == "q3":
            np.testing.assert_allclose(now, was, atol=1e-6)
        else:
            assert np.abs(now - was).max() > 1e-5, question


def test_the_json_begins_with_the_measures_that_others_rely_on(tmp_path):
    first, second = write(tmp_path / "first.jsonl", FILE), write(tmp_path / "second.jsonl", HELD_OUT)
    found = scored("--survey", first, "--held-out", second)
    assert list(found)[:6] == FIRST
    assert all(isinstance(found[name], float) for name in FIRST)
    assert found["answers"] == len(SCORED) * len(NEW)
    assert set(found["by_context_size"]) == {"2", "4"}
    assert list(found["by_context_size"]["4"])[:6] == FIRST
    assert set(found["baselines"]) == {"uniform", "nearest-question", "mean-of-others"}
    assert set(found["rounds_kept"]) == set(found["seeds"]) == {"0", "1"}
    for name in ("js", "r"):
        assert found[name] == pytest.approx(np.mean([one[name] for one in found["seeds"].values()]))
    truth = [one["distribution"] for one in HELD_OUT if one["group"] in SCORED]
    uniform = 1 - np.mean([jensenshannon(np.full(3, 1 / 3), answer_K) for answer_K in truth])
    assert found["baselines"]["uniform"]["js_distance"] == pytest.approx(uniform, abs=1e-5)


def test_a_training_groups_answers_in_the_second_file_are_never_read(tmp_path):
    """They may as well be nonsense; those of a scored group may not."""
    first = write(tmp_path / "first.jsonl", FILE)

    def found(name, rows):
        second = write(tmp_path / f"{name}.jsonl", rows)
        return scored("--survey", first, "--held-out", second, "--seeds", "0", "-c", "pluralllm.rounds=1")

    expected = found("as given", HELD_OUT)
    nonsense = [{**one, "distribution": ["?"]} if one["group"] in TRAINING else one for one in HELD_OUT]
    assert found("nonsense", [*nonsense, *answers_of(TRAINING, ["asked of them alone"], seed=3)]) == expected
    assert found("scored", changed(HELD_OUT, "X", NEW))["js"] != expected["js"]


def test_all_groups_that_are_not_scored_train_when_asked_for(tmp_path):
    given = ("--survey", write(tmp_path / "first.jsonl", FILE), "--seeds", "0", "-c", "pluralllm.rounds=1")
    expected = scored(*given)
    assert scored(*given, "--train-groups", "all") == expected
    assert scored(*given, "--train-groups", "A") != expected


def test_the_table_has_a_line_for_the_model_its_baselines_and_each_context_size(tmp_path):
    survey = write(tmp_path / "first.jsonl", FILE)
    lines = command("--survey", survey, "--seeds", "0", "-c", "pluralllm.rounds=1").splitlines()
    assert [text.strip() for text in lines[0].split("|")[2:-1]] == FIRST
    names = {line.split("|")[1].strip() for line in lines[2:]}
    assert names == {"pluralllm", "uniform", "nearest-question", "mean-of-others"} | {
        f"{size} context questions" for size in (2, 4)
    }


def test_questions_of_several_files_are_merged_by_id_and_must_agree(tmp_path):
    files = {
        "one": [row("a"), row("b")],
        "two": [row("c"), row("b")],
        "three": [row("a", question="Something else?")],
        "four": [row("b", options=("Yes", "No", "Never"))],
    }
    paths = [write(tmp_path / f"{name}.jsonl", rows) for name, rows in files.items()]
    one, two, three, four = ((path, read_survey(path)) for path in paths)
    assert [question.question_id for question in score.merged_questions([one, two])] == ["a", "b", "c"]
    for other, name in ((three, "'a'"), (four, "'b'")):
        with pytest.raises(UserError, match=rf"{other[0].name}: question {name} has another .*one\.jsonl"):
            score.merged_questions([one, other])


def test_means_over_seeds_and_what_json_cannot_say():
    nothing = float("nan")
    seeds = [
        PredictorScores(0.5, 0.25, 0.1, 0.0, 0.5, nothing, 1.0, 0.9, 0.9, 10),
        PredictorScores(0.75, 0.5, 0.3, 0.5, 1.0, 0.2, 2.0, 0.8, 0.9, 20),
    ]
    found = score.mean(seeds)
    assert list(found)[:6] == FIRST
    assert set(found) == set(asdict(seeds[0]))
    assert (found["js"], found["r"], found["answers"]) == pytest.approx((0.625, 0.2, 15.0))
    written = json.loads(json.dumps(score.finite({"means": found, 3: nothing}), allow_nan=False))
    assert written["3"] is None
    assert written["means"]["spread"] == 1.5
