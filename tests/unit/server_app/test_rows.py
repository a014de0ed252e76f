"""Which rows a run's summary gets, in what order, and what the log says of them."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from fake_groups import federated, scoring_node
from fakes import catalogue_of, random_tables
from scipy.spatial.distance import jensenshannon

from appa_flwr.config import Config
from appa_flwr.protocol.rewards import metrics_of
from appa_flwr.run.records import CEILINGS, LOOK_UPS, SummaryRow
from server_app import rows
from server_app.inputs import PolicyInputs, RunInputs
from server_app.models import tiny
from server_app.models.base import Base
from server_app.models.tiny import TinyRecipe
from server_app.run_folder import RunFolder

GROUPS = ("A", "B", "C")
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
    groups = federated({g: scoring_node({group: TABLES[group]}) for g, group in enumerate(GROUPS)}, CATALOGUE)
    with RunFolder(config) as folder:
        run = RunInputs(config, folder, groups, CATALOGUE)
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
    ("run_sums", "may", "methods"),
    [
        ("plain", ("rewards",), ["uniform"]),
        ("plain", ("rewards", "answers"), ["uniform", *LOOK_UPS]),
        ("secure", ("rewards", "votes"), ["uniform", "mean-prediction"]),
        ("secure", ("rewards", "answers"), ["uniform", *LOOK_UPS]),
        ("plain", ("rewards", "predictions"), ["uniform", "mean-prediction", *CEILINGS]),
    ],
)
def test_there_are_the_rows_that_owners_allow_and_sums_hold(tmp_path, run_sums, may, methods):
    config = Config.load({"run.output-dir": str(tmp_path), "run-name": "r", "run.sums": run_sums})
    nodes = {g: scoring_node({group: TABLES[group]}, may=may) for g, group in enumerate(GROUPS)}
    groups = federated(nodes, CATALOGUE)
    groups.config = config
    groups.grid.simulated = run_sums == "secure"
    with RunFolder(config) as folder:
        found = rows.score_baselines(RunInputs(config, folder, groups, CATALOGUE), TEST_J, majority_QK=None, earlier=[])
    assert list(dict.fromkeys(row.method for row in found)) == methods
    (uniform, *_) = found
    assert uniform.avg_as == pytest.approx(np.mean([1 - np.mean([*_divergence(TABLES[name])]) for name in GROUPS]))


def _divergence(table_QK):
    """Of each held-out question's targets from the uniform answer, base 2."""
    for q in TEST_J:
        target_K = table_QK[q, CATALOGUE.option_QK[q]]
        yield float(jensenshannon(target_K, np.full(len(target_K), 1 / len(target_K)), 2) ** 2)


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
