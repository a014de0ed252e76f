"""Estimates for the policy's prompts: hand-worked means, and that no answer estimates itself.

Axis letters: Q questions, K options, J those that are asked for.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from fakes import catalogue_of
from scipy.spatial.distance import jensenshannon

from appa_flwr.config import Config
from appa_flwr.protocol import formats
from appa_flwr.survey.types import Question
from pluralllm.prediction import Targets
from pluralllm.residual import Shares
from server_app import estimates
from server_app.federation.catalogue import embedded
from server_app.predictor.pretraining import initial_weights
from server_app.predictor.weights import network

YES_NO, SCALE = ("Yes", "No"), ("Low", "Middle", "High")
TEXTS = ("Is tea good?", "Is coffee good?", "Is rain bad?", "How is tea?", "How is rain?", "Is wine good?")
OPTIONS = (YES_NO, YES_NO, YES_NO, SCALE, SCALE, YES_NO)
TRAIN = np.array([True, True, True, True, False, False])
ANSWERS = np.array([[0.2, 0.8, 0], [0.4, 0.6, 0], [0.9, 0.1, 0], [0.1, 0.2, 0.7], [1, 0, 0], [1, 0, 0]])
CONFIG = Config.load({"embedding.dim": 16, "sft.answer-step": 0.01})


def asked_catalogue(questions=None):
    """The questions with real features."""
    questions = questions or tuple(Question(f"Q{q}", TEXTS[q], options) for q, options in enumerate(OPTIONS))
    return embedded(CONFIG, questions, TRAIN, np.zeros(len(TRAIN), dtype=bool))


def drawn_network():
    """A network that expects something else of each question and group."""
    model = network(CONFIG, initial_weights(CONFIG))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.2 * torch.randn(weight.shape, generator=generator))
    return model


def shares_of(record):
    return formats.parse("dpa", record.estimate, len(record.options)).prediction


def on_a_line():
    """The questions with one feature an option, the question's place on a line."""
    drawn = catalogue_of([len(options) for options in OPTIONS], train=TRAIN.tolist())
    questions = tuple(Question(f"Q{q}", TEXTS[q], options) for q, options in enumerate(OPTIONS))
    place_Q = np.array([0.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    embedding_QKE = (place_Q[:, None, None] * drawn.option_QK[..., None]).astype(np.float32)
    return replace(drawn, questions=questions, embedding_QKE=embedding_QKE)


def test_the_mean_of_look_ups_and_prediction(monkeypatch):
    catalogue, model, seen = on_a_line(), drawn_network(), []

    def predicted(network, data, table, *, rows, **_):
        seen.append((network.shares, data.question_N.tolist(), rows.tolist()))
        answer_QK = np.array([[0.884, 0.116, 0.0]] * 3 + [[0.612, 0.301, 0.087]] * 2 + [[0.884, 0.116, 0.0]])
        return Targets(answer_QK[rows], np.zeros(len(rows)))

    monkeypatch.setattr(estimates, "predict_targets", predicted)
    before = model.shares
    found = estimates.estimates(CONFIG, 2 * ANSWERS, catalogue, model)
    # the least weight, a half: least squares on Q0 to Q3 give .239 / 1.154
    # Q5: both look-ups have the mean of .2, .4, .9, which is .5; (.5 + .884) / 2 = .692
    # Q0: without its own .2 they have (.4 + .9) / 2 = .65; (.65 + .884) / 2 = .767
    # Q4: the only other of three options has (.1, .2, .7); with the prediction that is .356, .2505, .3935
    # Q3: alone, it has uniform look-ups; (1/3 + .612) / 2 = .473, .317, .210
    assert [found[q].estimate for q in (5, 0, 4, 3)] == ["0.69,0.31", "0.77,0.23", "0.36,0.25,0.39", "0.47,0.32,0.21"]
    # what was trained on is predicted without the network, and the network is left as it was
    trained = [0, 1, 2, 3]
    assert seen == [(before, trained, [4, 5]), (Shares(features=0.0, plain=1.0), trained, trained)]
    assert model.shares == before
    assert [one.share is not None for one in found] == TRAIN.tolist()
    assert found[3].share == (0.2, 0.4, 1.4)


@pytest.mark.parametrize(("weight", "counted"), [(0.75, 0.75), (1.5, 1.0)])
def test_a_prediction_counts_as_it_would_have_on_training_questions(monkeypatch, weight, counted):
    # Look-ups have .65, .55, .3 and a third each for the training questions, .5 for Q5; these predictions are such that
    # with the weight all answers are right.
    looked_up = np.array([[0.65, 0.35, 0], [0.55, 0.45, 0], [0.3, 0.7, 0], [1 / 3, 1 / 3, 1 / 3]])
    answer_QK = np.zeros((6, 3))
    answer_QK[:4] = looked_up + (ANSWERS[:4] - looked_up) / weight
    answer_QK[4:] = [[0.5, 0.3, 0.2], [0.9, 0.1, 0.0]]
    monkeypatch.setattr(
        estimates, "predict_targets", lambda *_, rows, **__: Targets(answer_QK[rows], np.zeros(len(rows)))
    )
    found = estimates.estimates(CONFIG, ANSWERS, on_a_line(), drawn_network())
    np.testing.assert_allclose(shares_of(found[5])[0], 0.5 + 0.4 * counted, atol=0.0051)


def votes_of(*groups):
    """Votes (G, Q, K): each group's share of the first of two options, of every question."""
    return np.stack([np.tile([[share, 1.0 - share]], (4, 1)) for share in groups])


def by_rule(rule, votes_GQK):
    questions = tuple(Question(f"Q{q}", f"Is {thing} good?", YES_NO) for q, thing in enumerate(("tea", "rain", "ink")))
    questions += (Question("Q3", "Is wine good?", YES_NO),)
    train_Q = np.array([True, True, True, False])
    config = Config.load({**CONFIG.flat(), "rule": rule})
    catalogue = embedded(config, questions, train_Q, ~train_Q)
    model = network(config, initial_weights(config))
    mean_QK = np.full((4, 2), 0.5)  # another than that of the votes
    found = estimates.Estimator(catalogue, mean_QK, votes_GQK, model).by_rule(config)
    return [shares_of(one)[0] for one in found]


def test_estimates_follow_the_rule():
    shares = (*[0.2] * 7, 0.9)
    average, worst = (by_rule(rule, votes_of(*shares)) for rule in ("average", "min"))
    grid = np.linspace(0.01, 0.99, 99)
    score = [[1 - jensenshannon([x, 1 - x], [share, 1 - share], base=2) ** 2 for share in shares] for x in grid]
    np.testing.assert_allclose(average, grid[np.mean(score, axis=1).argmax()], atol=0.06)
    np.testing.assert_allclose(worst, grid[np.min(score, axis=1).argmax()], atol=0.03)
    assert min(worst) > max(average) + 0.2
    np.testing.assert_allclose(by_rule("min", None), 0.5, atol=0.02)  # no votes are known, but their mean


@pytest.mark.parametrize("q", range(len(TEXTS)))
def test_no_answer_estimates_itself(monkeypatch, q):
    monkeypatch.setattr(estimates, "_weight", lambda *_: 0.7)  # one number, to which each answer counts a little
    catalogue, model = asked_catalogue(), drawn_network()
    changed = ANSWERS.copy()
    changed[q, : len(OPTIONS[q])] = changed[q, : len(OPTIONS[q])][::-1] + 0.3
    found, other = (estimates.estimates(CONFIG, answers, catalogue, model) for answers in (ANSWERS, changed))
    np.testing.assert_allclose(shares_of(found[q]), shares_of(other[q]), atol=0.0101)  # a step, where rounding turns
    # of a training question others learn, of a held-out one nobody
    assert ([one.estimate for one in found] == [one.estimate for one in other]) == (not TRAIN[q])


@pytest.mark.parametrize("architecture", ["residual", "attention"])
def test_any_question_is_estimated_as_those_of_the_run_were(architecture):
    config = Config.load({**CONFIG.flat(), "pluralllm.architecture": architecture})
    model = network(config, initial_weights(config))
    known = estimates.estimates(config, ANSWERS, asked_catalogue(), model)
    for one in known:
        question = Question("new", one.question, one.options)
        assert estimates.asked(config, known, question, model) == one.estimate
    last = Question("new", TEXTS[-1], OPTIONS[-1])
    assert estimates.asked(config, known[:-1], last, model) == known[-1].estimate
    unlike = estimates.asked(config, known, Question("new", "Which?", (*"abcde",)), model)
    assert len(unlike.split(",")) == 5


def test_rankings_are_estimated_too():
    config = Config.load({**CONFIG.flat(), "task": "opa"})
    found = estimates.estimates(
        config, np.array([[1.0, 2.0, 0.0]] * 3 + [[3.0, 2.0, 1.0]] * 3), asked_catalogue(), drawn_network()
    )
    assert found[5].estimate in ("A,B", "B,A")
    assert sorted(found[4].estimate.split(",")) == ["A", "B", "C"]


@pytest.mark.parametrize("task", ["dpa", "opa"])
def test_random_rows_are_answered_as_they_are_estimated(task):
    questions = [Question("a", "Good?", YES_NO), Question("b", "How?", SCALE), Question("c", "Which?", ("v", *"wxyz"))]
    config = Config.load({"task": task, "sft.answer-step": 0.05})
    rows = list(estimates.random_rows(config, questions, 300, np.random.default_rng(1)))
    assert len(rows) == 300
    assert {question.question_id for question, _ in rows} == {"a", "b", "c"}
    assert all(formats.parse(task, text, len(question.options)).format_score == 1.0 for question, text in rows)
    assert len({text for question, text in rows if question.question_id == "c"}) > 50
