"""Which rows a run's summary gets, in what order, and what the log says of them."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from fakes import catalogue_of, federated, random_tables, scoring_node

from appa_flwr.config import Config
from appa_flwr.protocol.rewards import metrics_of
from appa_flwr.run.records import SummaryRow
from server_app import rows
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


@pytest.mark.parametrize("task", ["dpa", "opa"])
def test_a_model_has_a_row_a_metric_behind_the_earlier_ones(built, tmp_path, task):
    model, tokenizer = built
    config = Config.load({"run.output-dir": str(tmp_path), "run-name": "r", "ppo.response-length": 6, "task": task})
    base = Base("", tokenizer, tokenizer.eos_token_id, (tokenizer.eos_token_id,))
    prompts = [base.prompt_ids(config, question) for question in CATALOGUE.questions]
    shares_QK = CATALOGUE.option_QK / CATALOGUE.option_QK.sum(1, keepdims=True)
    inputs = PolicyInputs(base, prompts, np.arange(3), TEST_J, shares_QK, shares_QK)
    federation = federated({g: scoring_node({group: TABLES[group]}) for g, group in enumerate(GROUPS)}, CATALOGUE)
    with RunFolder(config) as folder:
        run = RunInputs(config, folder, federation, CATALOGUE)
        scored = rows.evaluate(run, "ppo", model, inputs, earlier=[EARLIER])
    written = json.loads((tmp_path / "r" / "summary.json").read_text())
    expected = [("uniform", "js"), *(("ppo", metric) for metric in metrics_of(task))]
    assert [(row["method"], row["metric"]) for row in written] == expected
    assert [row.metric for row in scored.rows] == list(metrics_of(task))
    assert len(scored.texts) == len(scored.reward_J) == len(TEST_J)
    log = (tmp_path / "r" / "run.log").read_text()
    assert "evaluate ppo 1/1: batches of questions answered" in log
    assert f"evaluate ppo 1/1: {rows.in_words(scored.rows[0])}" in log


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
