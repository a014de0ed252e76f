"""Which rows a run's summary gets, in what order, and what the log says of them."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from fakes import catalogue_of, federated, random_tables, scoring_node

from appa_flwr.config import Config
from appa_flwr.protocol import rewards
from appa_flwr.protocol.rewards import metrics_of
from appa_flwr.run.records import SummaryRow
from server_app import reading, rows
from server_app.inputs import PolicyInputs, RunInputs
from server_app.models import tiny
from server_app.models.base import Base
from server_app.models.tiny import TinyRecipe
from server_app.run_folder import RunFolder

GROUPS = ("A", "B")
CATALOGUE = catalogue_of([2, 3, 4, 2, 3], train=[True, True, True, False, False])
TABLES = random_tables(CATALOGUE.option_QK, GROUPS, seed=3)
TEST_J = np.array([3, 4])
EARLIER = SummaryRow(
    method="uniform", metric="js", fi=1.0, avg_as=0.5, min_as=0.4, per_group={}, format_score=None, survey=None
)


@pytest.fixture(scope="module")
def built():
    return tiny.build(TinyRecipe("dpa", steps=2, batch_size=4), CATALOGUE.questions)


def evaluated(built, tmp_path, name, **keys):
    """The run's summary and log after this model was evaluated, and what it was made of."""
    model, tokenizer = built
    config = Config.load({"run.output-dir": str(tmp_path), "run-name": "r", "rollout.response-length": 6, **keys})
    base = Base("", tokenizer, tokenizer.eos_token_id, (tokenizer.eos_token_id,))
    prompts = [base.prompt_ids(config, question) for question in CATALOGUE.questions]
    shares_QK = CATALOGUE.option_QK / CATALOGUE.option_QK.sum(1, keepdims=True)
    inputs = PolicyInputs(base, prompts, np.arange(3), TEST_J, shares_QK, shares_QK)
    federation = federated({g: scoring_node({group: TABLES[group]}) for g, group in enumerate(GROUPS)}, CATALOGUE)
    with RunFolder(config) as folder:
        scored = rows.evaluate(RunInputs(config, folder, federation, CATALOGUE), name, model, inputs, earlier=[EARLIER])
    written = json.loads((tmp_path / "r" / "summary.json").read_text())
    assert written[0]["method"] == "uniform"
    assert len(written) == 1 + len(scored.rows)
    assert len(scored.texts) == len(scored.reward_J) == len(TEST_J)  # of what the model wrote
    log = (tmp_path / "r" / "run.log").read_text()
    return {(row["method"], row["metric"]): row for row in written[1:]}, log, (model, base, config)


@pytest.mark.parametrize(
    ("name", "keys", "methods"),
    [
        ("base", {}, ["base", "few-shot", "base-do"]),
        ("ppo", {}, ["ppo", "ppo-do"]),
        ("base", {"task": "opa"}, ["base", "few-shot"]),  # a ranking is no choice
        ("sft", {"task": "opa"}, ["sft"]),
        ("base", {"eval.extra-rows": False}, ["base"]),
    ],
)
def test_each_model_is_also_read_otherwise_unless_that_is_switched_off(built, tmp_path, name, keys, methods):
    found, log, _ = evaluated(built, tmp_path, name, **keys)
    metrics = metrics_of(keys.get("task", "dpa"))
    assert list(found) == [(method, metric) for method in methods for metric in metrics]
    assert f"evaluate {name} {len(methods)}/{len(methods)}" in log
    assert f"evaluate {name} 1/1: batches of questions answered" in log
    assert ("few-shot, 3 answered questions first: Avg AS" in log) == ("few-shot" in methods)  # there are three only


def test_a_choice_is_scored_by_the_distribution_that_was_read(built, tmp_path):
    found, log, (model, base, config) = evaluated(built, tmp_path, "sft")
    chosen = reading.chosen_answers(model, base, config, question_J=TEST_J, catalogue=CATALOGUE)
    for group in GROUPS:
        reward_J = rewards.cosine(chosen.answers.prediction_JK, TABLES[group][TEST_J], CATALOGUE.option_QK[TEST_J])
        assert found["sft-do", "cosine"]["per_group"][group] == pytest.approx(reward_J.mean())
    assert f"sft-do, {chosen.mass:.0%} of the probability on letters: Avg AS" in log


def test_the_models_window_cuts_the_examples(built, tmp_path, monkeypatch):
    model, _ = built
    monkeypatch.setattr(model.config, "max_position_embeddings", 1)
    _, log, _ = evaluated(built, tmp_path, "base")
    assert "few-shot, 3 answered questions first (2 prompts have room for fewer): " in log


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, "Avg AS 0.500, Min AS 0.400, FI 1.0000"),  # written before readable answers were counted
        ({"readable": 1.0, "format_score": 0.9}, "Avg AS 0.500, Min AS 0.400, FI 1.0000, format 0.900"),
        (
            {"readable": 0.117, "fi_readable": 0.9, "format_score": 0.117},
            "Avg AS 0.500, Min AS 0.400, FI 1.0000, FI of the 12% readable answers 0.9000, format 0.117 "
            "(MOSTLY UNREADABLE)",
        ),
        (
            {"per_group": {"A": 0.4, "B": math.nan, "C": 0.6, "D": math.nan}},
            "Avg AS 0.500, Min AS 0.400, FI 1.0000, WITHOUT B, D",
        ),
    ],
)
def test_the_log_tells_fairness_of_what_could_be_read(changes, says):
    assert rows.in_words(EARLIER.model_copy(update=changes)) == says
