"""The experiments on PluralLLM: what training may know, that it trains as a run does, what the tables say.

Axis letters: G groups, Q questions, K options, N answers of a group.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.spatial.distance import jensenshannon
from surveys import row, write

from appa_flwr.config.sections import PluralLLMSection
from appa_flwr.core.errors import UserError
from appa_flwr.core.seeds import child_seed
from appa_flwr.survey.generate import generate
from experiments.pluralllm import protocol
from experiments.pluralllm import report as tables
from experiments.pluralllm.measures import measure
from experiments.pluralllm.protocol import (
    PARTS,
    SEEN_COUNTRIES,
    SEEN_HELD_OUT,
    UNSEEN_COUNTRIES,
    UNSEEN_HELD_OUT,
    UNSEEN_TRAINING,
    Part,
    load_problem,
    recipe,
    report,
    split_problem,
    survey_file,
    train,
)
from pluralllm.architectures import build
from pluralllm.data import GroupData, OptionEmbedding
from pluralllm.embedding import embed_questions
from pluralllm.episodes import EpisodeConfig
from pluralllm.model import ModelConfig
from pluralllm.prediction import Targets, predict_targets
from pluralllm.training import local_update

NUM_QUESTIONS = 40
SMALL = ("pluralllm.rounds=2", "pluralllm.rank=2", "pluralllm.hidden-dim=8", "pluralllm.blocks=1")


@pytest.fixture(scope="module")
def survey():
    return generate(num_questions=NUM_QUESTIONS, num_groups=5, seed=0)


@pytest.fixture(scope="module")
def problem(survey):
    """Three groups train, two do not."""
    return split_problem(survey, embed_questions(survey.questions, dim=16), seen=sorted(survey.groups)[:3], seed=0)


def small(*given):
    return recipe(*SMALL, *given)


def forged(groups):
    """The same questions; whoever gave the first answer gives the second, and the reverse."""
    order = [1, 0, *range(2, groups[0].answer_NK.shape[1])]
    return tuple(GroupData(data.group, data.question_N, data.answer_NK[:, order]) for data in groups)


def weights(trained):
    return torch.cat([value.flatten() for value in trained.model.state_dict().values()]).numpy()


def distances_of(table_QK, data):
    """Of a group's answers, by SciPy."""
    pairs = zip(data.question_N, data.answer_NK, strict=True)
    return [jensenshannon(table_QK[question], answer_K.astype(float)) for question, answer_K in pairs]


def rows_of(groups):
    return set(np.concatenate([data.question_N for data in groups]).tolist())


def names(groups):
    return [data.group for data in groups]


def test_no_group_trains_on_or_shows_a_question_that_another_holds_out(problem):
    seen, unseen = ["Avaria", "Belmora", "Castria"], ["Dorvane", "Elmark"]
    assert names(problem.training) == names(problem.validation) == seen
    for name, part in problem.parts.items():
        assert names(part.context) == names(part.truth) == (seen if name == SEEN_HELD_OUT else unseen)
    trained, held_out = set(np.flatnonzero(problem.trained_Q)), set(np.flatnonzero(~problem.trained_Q))
    shown = [part.context for part in problem.parts.values()]
    assert rows_of(itertools.chain(problem.training, *shown)) == trained
    scored = [problem.parts[name].truth for name in (UNSEEN_HELD_OUT, SEEN_HELD_OUT)]
    assert rows_of(itertools.chain(problem.validation, *scored)) == held_out
    assert rows_of(problem.parts[UNSEEN_TRAINING].truth) <= trained
    assert len(trained) + len(held_out) == NUM_QUESTIONS


@pytest.mark.parametrize("central", [True, False])
def test_neither_held_out_answers_nor_unseen_groups_reach_training(problem, central):
    config = small("pluralllm.validate-every=0")
    found = train(problem, config, seed=0, central=central)
    parts = {name: Part(forged(part.context), forged(part.truth)) for name, part in problem.parts.items()}
    again = train(replace(problem, parts=parts, validation=forged(problem.validation)), config, seed=0, central=central)
    np.testing.assert_array_equal(weights(again), weights(found))
    assert found.round == 2
    other = train(replace(problem, training=forged(problem.training)), config, seed=0, central=central)
    assert np.abs(weights(other) - weights(found)).max() > 1e-4  # what a leak would look like


def test_a_round_is_judged_by_the_training_groups_validation_answers(problem, monkeypatch):
    """Without learned features there is nothing to choose but the round, and of one round nothing at all."""
    kept = []
    pretrain = protocol.pretrain
    monkeypatch.setattr(protocol, "pretrain", lambda *given, **more: kept.append(pretrain(*given, **more)) or kept[0])
    config = small("pluralllm.rounds=1", "pluralllm.rank=0", "pluralllm.num-context-questions=5")
    trained = train(problem, config, seed=3)
    distances = []
    for data, truth in zip(problem.training, problem.validation, strict=True):
        predicted = predict_targets(
            trained.model,
            data,
            problem.embedding,
            num_context=5,
            seed=child_seed(3, "context", 0),
            trained=problem.trained_Q,
        )
        distances += distances_of(predicted.probability_QK, truth)
    assert [found.validation for found in kept[0].rounds] == pytest.approx([np.mean(distances)], abs=1e-4)
    assert trained.round == 1


@pytest.mark.parametrize("architecture", ["residual", "attention"])
@pytest.mark.parametrize("strategy", ["fedavg", "fedadam"])
def test_one_group_alone_trains_as_plain_rounds_of_its_own_and_fedadam_steps_otherwise(
    problem, strategy, architecture, monkeypatch
):
    """Under plain averaging the federation of one group is its own training, round after round.

    By plain steps: Adam makes whole steps of gradients that are rounding alone.
    """
    monkeypatch.setattr(PluralLLMSection, "local_optimizer", "sgd")
    alone = replace(problem, training=problem.training[:1], validation=problem.validation[:1])
    given = (f"pluralllm.strategy={strategy}", "pluralllm.validate-every=0")
    config = small(*given, "pluralllm.learning-rate=0.1", f"pluralllm.architecture={architecture}")
    found = train(alone, config, seed=0).model
    torch.manual_seed(child_seed(0, "pluralllm"))
    model = build(ModelConfig(architecture, problem.embedding.dim, hidden_dim=8, num_blocks=1, rank=2))
    data = alone.training[0]
    # two rounds: the step size has risen to 1/5 and 2/5, and falls after the second only
    for round_number, learning_rate in ((1, 0.02), (2, 0.04)):
        local_update(
            model,
            data,
            problem.embedding,
            steps=2,
            learning_rate=learning_rate,
            optimizer="sgd",
            episodes=EpisodeConfig.of(config.pluralllm),
            generator=torch.Generator().manual_seed(child_seed(0, "pluralllm", data.group, round_number)),
        )
    apart = max(float((found.state_dict()[name] - value).abs().max()) for name, value in model.state_dict().items())
    assert (apart < 1e-6) is (strategy == "fedavg")


def test_scores_are_those_of_scipy_for_the_answers_of_each_part(problem):
    # a few-shot network without training answers uniformly
    config = small("pluralllm.rounds=0", "pluralllm.architecture=attention")
    found = report(problem, train(problem, config, seed=0), config, seed=0, sizes=(1, 4))
    assert tuple(found.scores) == tuple(found.by_context) == PARTS
    option_QK = problem.embedding.option_QK
    uniform_QK = option_QK / option_QK.sum(1, keepdims=True)
    for name, part in problem.parts.items():
        distances = [distance for data in part.truth for distance in distances_of(uniform_QK, data)]
        uniform = [found.scores[name][predictor] for predictor in ("pluralllm", "uniform")]
        for score in (*uniform, *found.by_context[name].values()):
            assert score.answers == len(distances)
            assert score.js_distance == pytest.approx(1 - np.mean(distances), abs=1e-5)
            assert (score.r, score.order, score.spread) == pytest.approx((0.0, 0.5, 0.0), abs=1e-6)


def test_the_mean_of_others_knows_the_seen_groups_answers_and_never_the_own(survey, problem):
    config = small("pluralllm.rounds=0")
    scores = report(problem, train(problem, config, seed=0), config, seed=0).scores
    ids, seen = problem.embedding.question_ids, names(problem.training)
    for name, part in problem.parts.items():
        distances = []
        for data in part.truth:
            others = [survey.answers[group] for group in seen if group != data.group]
            for question in data.question_N:
                own_K = survey.answers[data.group][ids[question]]
                given = [answers[ids[question]] for answers in others if ids[question] in answers]
                mean_K = np.mean(given, axis=0) if given else np.full(len(own_K), 1 / len(own_K))
                distances.append(jensenshannon(mean_K, own_K))
        assert scores[name]["mean-of-others"].js_distance == pytest.approx(1 - np.mean(distances), abs=1e-5)


def test_scores_by_context_size_are_those_of_a_run_with_that_size(problem):
    config = small()
    trained = train(problem, config, seed=0)
    by_context = report(problem, trained, config, seed=0, sizes=(2, 4, 8)).by_context
    ours = small("pluralllm.num-context-questions=4")
    scores = report(problem, trained, ours, seed=0).scores
    assert {part: by_size[4] for part, by_size in by_context.items()} == {
        part: found["pluralllm"] for part, found in scores.items()
    }
    assert len({score.js for score in by_context[UNSEEN_TRAINING].values()}) == 3


def wide(rows):
    """Two columns and one of padding."""
    return np.array([[*given, 0.0] for given in rows])


def test_measures_by_hand():
    """Two groups, three questions; the last has one option, and one answer is missing."""
    option_QK = wide([[1, 1], [1, 1], [1, 0]]) > 0
    table = OptionEmbedding(("a", "b", "c"), np.zeros((3, 3, 5), np.float32), option_QK)
    truth = [
        GroupData("A", np.array([0, 1, 2]), wide([[1.0, 0.0], [0.5, 0.5], [1.0, 0.0]]).astype(np.float32)),
        GroupData("B", np.array([0, 2]), wide([[0.0, 1.0], [1.0, 0.0]]).astype(np.float32)),
    ]
    deviation_QK = np.full((3, 3), 0.2)
    predicted = [
        Targets(wide([[0.5, 0.5], [0.5, 0.5], [1.0, 0.0]]), np.array([0.3, 0.1, 0.9]), deviation_QK),
        Targets(wide([[0.25, 0.75], [0.9, 0.1], [1.0, 0.0]]), np.array([0.2, 0.8, 0.0]), deviation_QK),
    ]
    found = measure(predicted, truth, table)
    assert found.answers == 3
    # divergence of (1/2, 1/2) from (1, 0): 0.3113; of (1/4, 3/4) from (0, 1), with m = (1/8, 7/8):
    # 1/2 [1/4 log2 2 + 3/4 log2 6/7] + 1/2 log2 8/7 = 0.0416 + 0.0963 = 0.1379
    assert found.js == pytest.approx(1 - (0.3113 + 0.0 + 0.1379) / 3, abs=1e-4)
    natural = [math.sqrt(divergence * math.log(2)) for divergence in (0.3113, 0.0, 0.1379)]
    assert found.js_distance == pytest.approx(1 - sum(natural) / 3, abs=1e-4)
    # only question a has both groups: true deviations +-1/2, predicted +-1/8
    assert (found.r, found.order, found.spread) == pytest.approx((1.0, 1.0, 0.25))
    assert found.r2 == pytest.approx(1 - 0.375**2 / 0.5**2)
    # stated 0.3, 0.1, 0.2 beside errors 0.46, 0, 0.31
    assert found.spearman == pytest.approx(1.0)
    # 1.645 x 0.2 = 0.329 to either side of the root. A's a: root 0.707, shares from 0.14 to 1, so 1 is within and 0 is
    # not; its b: both halves are within; B's a: from 0.03 to 0.69 without 0, and from 0.29 to 1 with 1
    assert found.coverage == pytest.approx((1 + 2 + 1) / 6)
    # 2.8 x 0.329 = 0.92 reaches both ends from every root
    widest = measure(predicted, truth, table, scale=2.8)
    assert (widest.coverage, widest.scaled) == (found.coverage, 1.0)
    assert measure(predicted, truth, table, scale=1.0).scaled == pytest.approx(found.coverage)
    certain = [replace(targets, spread_Q=np.zeros(3), deviation_QK=None) for targets in predicted]
    nothing = measure(certain, truth, table)
    assert math.isnan(nothing.spearman)
    assert math.isnan(nothing.coverage)


@pytest.mark.parametrize("named", [None, "option", "variable"])
def test_a_survey_that_is_not_there_is_an_error_that_names_both_ways_to_say_where(named, tmp_path, monkeypatch):
    monkeypatch.delenv("APPA_SURVEYS", raising=False)
    folder = tmp_path if named == "option" else None
    if named == "variable":
        monkeypatch.setenv("APPA_SURVEYS", str(tmp_path))
    where = f" in {tmp_path}" if named else ""
    with pytest.raises(UserError, match=rf"^no globalqa\.jsonl{where}; .* --surveys DIR .* APPA_SURVEYS$"):
        load_problem("globalqa", seed=0, folder=folder)
    if named:
        (tmp_path / "globalqa.jsonl").touch()
        assert survey_file("globalqa", folder) == tmp_path / "globalqa.jsonl"


def written(path, groups):
    """A survey of eight questions; group g answers the first 8 - g % 4 of them."""
    return write(path, [row(f"q{q}", name) for g, name in enumerate(groups) for q in range(8 - g % 4)])


def test_globalqa_trains_the_papers_countries_and_then_those_with_the_most_answers(tmp_path):
    # Aland answers 8 questions, Burma 7, Chad 6, Doria 5
    written(tmp_path / "globalqa.jsonl", ("Aland", "Burma", "Chad", "Doria", *SEEN_COUNTRIES, *UNSEEN_COUNTRIES))

    def seen_of(num_training):
        problem = load_problem("globalqa", seed=0, folder=tmp_path, dim=16, num_training=num_training)
        assert set(names(problem.parts[UNSEEN_HELD_OUT].truth)) == set(UNSEEN_COUNTRIES)
        return names(problem.training)

    assert seen_of(None) == list(SEEN_COUNTRIES)
    assert seen_of(2) == list(SEEN_COUNTRIES[:2])
    assert seen_of(10) == [*SEEN_COUNTRIES, "Aland", "Burma"]


def test_each_group_of_opinionqa_is_left_out_by_one_of_three_seeds(tmp_path):
    groups = [f"g{g}" for g in range(8)]
    written(tmp_path / "opinionqa.jsonl", groups)
    problems = [load_problem("opinionqa", seed=seed, folder=tmp_path, dim=16) for seed in (0, 1, 2)]
    left_out = [names(problem.parts[UNSEEN_HELD_OUT].truth) for problem in problems]
    assert sorted(itertools.chain(*left_out)) == groups
    for problem, unseen in zip(problems, left_out, strict=True):
        assert sorted([*names(problem.training), *unseen]) == groups


@pytest.mark.parametrize("table", tables.TABLES)
def test_no_two_rows_of_a_table_are_the_same_and_every_one_can_be_run(table):
    rows = tables.TABLES[table]
    keys = {(str(recipe(*row.keys).flat()), row.embedding, row.central, row.num_training) for row in rows}
    assert len(keys) == len({row.name for row in rows}) == len(rows)
    assert all(("attention" in row.name) == (recipe(*row.keys).pluralllm.architecture == "attention") for row in rows)


def test_a_cell_gives_mean_and_range_and_nothing_where_a_value_is_missing():
    assert tables.spread_text([0.25, 0.5, 0.3]) == "0.350 (0.250 to 0.500)"
    assert tables.spread_text([0.25, float("nan")]) == ""


# for each part the rows asked for, the two context sizes of the first, and three of what costs nothing
@pytest.mark.parametrize(("rows", "lines"), [(0, 2 + 2 + 3), (1, 1 + 2 + 3)])
def test_a_table_is_printed_whole(problem, monkeypatch, capsys, rows, lines):
    monkeypatch.setitem(tables.TABLES, "ours", (tables.DEFAULT, tables.TableRow("pooled", central=True)))
    monkeypatch.setattr(tables, "SIZES", (1, 4))
    monkeypatch.setattr(tables, "load_problem", lambda *_, **__: problem)
    monkeypatch.setattr(tables, "recipe", lambda *given: small(*given, "pluralllm.rounds=1"))
    tables.main("ours", datasets="generated", seeds="0", rows=rows)
    out = capsys.readouterr().out
    printed = [line for line in out.splitlines() if line.startswith("|")]
    assert len(printed) == len(PARTS) * (2 + lines)
    assert len({line.count("|") for line in printed}) == 1
    assert [line for line in out.splitlines() if line.startswith("###")] == [f"### generated, {part}" for part in PARTS]
    assert out.count("rounds kept [1]") == (rows or 2)


def test_an_unknown_table_is_refused_with_the_known_ones():
    with pytest.raises(UserError, match="countries"):
        tables.main("strategies")
