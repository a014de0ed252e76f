"""The experiments on PluralLLM: what training may know, that it trains as a run does, what the tables say.

Axis letters: G groups, Q questions, K options, W = 1 + F: the mean of other groups and the F directions.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.spatial.distance import jensenshannon

from appa_flwr.errors import UserError
from appa_flwr.seeds import child_seed
from appa_flwr.survey.generate import generate
from experiments.benchmarks import pluralllm as benchmark
from experiments.pluralllm import protocol, report
from experiments.pluralllm.protocol import PARTS, Recipe, load_problem, measure, split_problem, survey_file, train
from pluralllm.data import GroupData
from pluralllm.embedding import embed_questions
from pluralllm.encoders import hashed_ngrams
from pluralllm.episodes import EpisodeConfig
from pluralllm.model import ModelConfig, PluralLLM
from pluralllm.training import local_update

NUM_QUESTIONS = 40
RECIPE = Recipe(rounds=2, num_context=4, min_groups=1, episodes=EpisodeConfig(num_context=4, num_targets=8))


@pytest.fixture(scope="module")
def problem():
    """Three groups train, two do not."""
    survey = generate(num_questions=NUM_QUESTIONS, num_groups=5, seed=0)
    embedding = embed_questions(survey.questions, dim=16)
    return split_problem(survey, embedding, seen=sorted(survey.groups)[:3], seed=0)


def forged(groups):
    """The same questions; whoever gave the first answer gives the second, and the reverse."""
    order = [1, 0, *range(2, groups[0].answer_NK.shape[1])]
    return tuple(GroupData(data.group, data.question_N, data.answer_NK[:, order]) for data in groups)


def weights(trained):
    return torch.nn.utils.parameters_to_vector(trained.model.parameters()).detach().numpy()


def held_out(problem):
    return np.unique(np.concatenate([data.question_N for data in problem.seen_test]))


def test_no_group_trains_on_a_question_that_another_holds_out(problem):
    train_rows, test_rows = (
        set(np.concatenate([data.question_N for data in parts]).tolist())
        for parts in (problem.seen_train + problem.unseen_train, problem.seen_test + problem.unseen_test)
    )
    assert train_rows
    assert test_rows
    assert not train_rows & test_rows
    assert not {data.group for data in problem.seen_train} & {data.group for data in problem.unseen_train}


def test_a_held_out_question_has_a_prior_only_where_the_protocol_says_so(problem):
    rows = held_out(problem)
    for prior, expected in (("training", False), ("all", True)):
        trained = train(problem, replace(RECIPE, prior=prior), seed=0)
        assert trained.unseen_prior[rows].any(axis=(1, 2)).tolist() == [expected] * len(rows)
        assert any(own[rows].any() for own in trained.seen_prior) is expected
        assert trained.unseen_prior[problem.seen_train[0].question_N].any(axis=(1, 2)).all()


@pytest.mark.parametrize(("prior", "strategy"), [("none", "central"), ("training", "fedadam")])
def test_neither_held_out_answers_nor_unseen_groups_reach_training(problem, prior, strategy):
    recipe = replace(RECIPE, prior=prior, strategy=strategy)
    found = train(problem, recipe, seed=0)
    parts = {name: forged(getattr(problem, name)) for name in ("seen_test", "unseen_train", "unseen_test")}
    again = train(replace(problem, **parts), recipe, seed=0)
    np.testing.assert_array_equal(weights(again), weights(found))
    if prior == "training":
        np.testing.assert_array_equal(again.seen_prior, found.seen_prior)
        np.testing.assert_array_equal(again.unseen_prior, found.unseen_prior)
    other = train(replace(problem, seen_train=forged(problem.seen_train)), recipe, seed=0)
    assert np.abs(weights(other) - weights(found)).max() > 1e-4  # what a leak would look like


def test_scores_are_those_of_scipy_for_the_cells_of_each_part(problem):
    # a model without training answers uniformly, without a prior
    recipe = replace(RECIPE, rounds=0)
    found = measure(problem, train(problem, recipe, seed=0), recipe, seed=0, sizes=(1, 4))
    parts = (problem.unseen_test, problem.unseen_train, problem.seen_test, problem.seen_train)
    for name, groups in zip(PARTS, parts, strict=True):
        distances = []
        for data in groups:
            for row, answer_K in zip(data.question_N, data.answer_NK, strict=True):
                size = problem.embedding.option_QK[row].sum()
                distances.append(jensenshannon(np.full(size, 1 / size), answer_K[:size]))
        for predictor in ("pluralllm", "uniform"):
            score = found.scores[name][predictor]
            assert score.num_cells == len(distances)
            assert score.js_distance_natural == pytest.approx(1 - np.mean(distances), abs=1e-5)
    assert set(found.by_context) == {"unseen/held-out", "unseen/training"}
    for name, by_size in found.by_context.items():
        assert by_size == pytest.approx([found.scores[name]["uniform"].js_distance_natural] * 2, abs=1e-5)


def test_scores_by_context_size_are_those_of_a_recipe_with_that_size(problem):
    recipe = replace(RECIPE, prior="training")
    trained = train(problem, recipe, seed=0)
    by_context = measure(problem, trained, recipe, seed=0, sizes=(1, 4, 8)).by_context
    for place, size in enumerate((1, 4, 8)):
        scores = measure(problem, trained, replace(recipe, num_context=size), seed=0).scores
        for part, by_size in by_context.items():
            assert by_size[place] == scores[part]["pluralllm"].js_distance_natural
    assert len(set(by_context["unseen/training"])) == 3


@pytest.mark.parametrize("strategy", ["fedavg", "fedadam"])
def test_one_group_alone_trains_as_plain_rounds_of_its_own_and_fedadam_steps_otherwise(problem, strategy):
    """Under plain averaging the federation of one group is its own training, round after round."""
    alone = replace(problem, seen_train=problem.seen_train[:1])
    found = train(alone, replace(RECIPE, strategy=strategy, local_steps=2), seed=0).model
    torch.manual_seed(child_seed(0, "pluralllm"))
    model = PluralLLM(ModelConfig(embedding_dim=problem.embedding.dim))
    alone_data = alone.seen_train[0]
    given = {"steps": 2, "learning_rate": RECIPE.local_learning_rate, "optimizer": "sgd", "episodes": RECIPE.episodes}
    for round_number in (1, 2):
        generator = torch.Generator().manual_seed(child_seed(0, "pluralllm", alone_data.group, round_number))
        local_update(model, alone_data, problem.embedding, generator=generator, **given)
    apart = max(float((found.state_dict()[name] - value).abs().max()) for name, value in model.state_dict().items())
    assert (apart < 1e-6) is (strategy == "fedavg")


@pytest.mark.parametrize("named", [None, "option", "variable"])
def test_a_survey_that_is_not_there_is_an_error_that_names_both_ways_to_say_where(named, tmp_path, monkeypatch):
    monkeypatch.delenv("APPA_SURVEYS", raising=False)
    folder = tmp_path if named == "option" else None
    if named == "variable":
        monkeypatch.setenv("APPA_SURVEYS", str(tmp_path))
    where = f" in {tmp_path}" if named else ""
    with pytest.raises(
        UserError, match=rf"^no globalqa\.jsonl{where}; .* --surveys DIR or by the variable APPA_SURVEYS$"
    ):
        load_problem("globalqa", seed=0, folder=folder)
    if named:
        (tmp_path / "globalqa.jsonl").touch()
        assert survey_file("globalqa", folder) == tmp_path / "globalqa.jsonl"


def test_the_rows_of_a_table_differ_in_what_it_is_about():
    recipe = Recipe(prior="training")

    def recipes(table):
        return [row.recipe for row in report.rows(table, recipe, hashed_ngrams, embedding="ngrams")]

    *trained, untrained = recipes(report.STRATEGIES)
    assert trained == [replace(recipe, strategy=name) for name in ("central", "fedavg", "fedadam")]
    assert untrained == replace(recipe, rounds=0)
    assert recipes(report.MIN_GROUPS) == [replace(recipe, min_groups=number) for number in (1, 2, 3)]
    assert [found.episodes.embedding_noise for found in recipes(report.NOISE)] == [0.3, 1.0]
    assert recipes(report.CONTEXT) == [recipe]
    both = report.rows(report.EMBEDDINGS, recipe, lambda texts: hashed_ngrams(texts), embedding="causal-lm")
    assert [row.name for row in both] == ["ngrams", "causal-lm"]
    assert both[0].texts_to_vectors is hashed_ngrams is not both[1].texts_to_vectors
    with pytest.raises(UserError, match="--embedding-model"):
        recipes(report.EMBEDDINGS)


def test_a_cell_gives_mean_and_range():
    assert report.cell([0.25, 0.5, 0.3]) == "0.3500 (0.2500 to 0.5000)"


@pytest.mark.parametrize(("table", "lines"), [("min-groups", 3 + 3), ("context-sizes", 7)])
def test_a_table_is_printed_whole(problem, monkeypatch, capsys, table, lines):
    monkeypatch.setattr(protocol, "load_problem", lambda *_, **__: problem)
    report.main([table, "--datasets", "gss", "--rounds", "1", "--seeds", "0", "--prior", "training"])
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(printed) == 2 + lines
    assert len({line.count("|") for line in printed}) == 1


def test_the_benchmark_measures_every_line_beside_its_goal(problem):
    lines = benchmark.measure(problem, Recipe(rounds=1), seed=0, repeats=3)
    assert [goal for _, goal in lines.values()] == [benchmark.PRETRAINING_GOAL, benchmark.TABLES_GOAL] * 2 + [
        benchmark.SCORING_GOAL
    ] * 2
    assert any(f"3 groups x {NUM_QUESTIONS} questions" in name for name in lines)
    assert len(benchmark.table(lines).splitlines()) == 2 + len(lines)
