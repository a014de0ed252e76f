"""Every field of a run's records, and of what a notebook reads, comes out of a run with a value that says something."""

import asyncio
import math
from collections import defaultdict
from collections.abc import Mapping
from unittest.mock import patch

import pandas as pd
import pytest
from audit import asked_for
from fakes import failing
from nodes import SimulatedGrid, cross, simulated
from runs import Served, looped, read_every_answer, two
from small import SMALLEST, cases

from appa_flwr import load_run
from appa_flwr.analysis import ceilings
from appa_flwr.config import Config
from appa_flwr.protocol.queries import REWARDS
from appa_flwr.protocol.refusals import FAILED
from appa_flwr.report.page import missing
from appa_flwr.run import records, schema
from appa_flwr.run.pair_scores import SURVEY
from appa_flwr.survey import store
from pluralllm import residual
from pluralllm.prediction import GroupPredictor
from server_app import ppo_phase

FILES = [file for file in vars(schema).values() if isinstance(file, schema.JsonFile | schema.LineFile)]
KEYS = cases("keys")["records"]


def says_nothing(value: object) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value)) or not value


def note(value: object, seen: Mapping[str, list[object]]) -> None:
    """Note the values of all fields of records in `value`, by the class that defines the field."""
    if isinstance(value, records.Record):
        for name, inner in value:
            (owner,) = [of for of in type(value).__mro__ if name in vars(of).get("__annotations__", ())]
            seen[f"{owner.__name__}.{name}"].append(inner)
            note(inner, seen)
    elif isinstance(value, Mapping | tuple):
        for inner in value.values() if isinstance(value, Mapping) else value:
            note(inner, seen)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run's folder, in which rounds of two answers were served.

    The group of the second node gives no rewards, and its answers cannot be solved for.
    """
    root = tmp_path_factory.mktemp("runs")
    config = Config.load({**SMALLEST, **KEYS, "eval.ceilings": True, "run.output-dir": str(root), "run-name": "r"})
    grid = SimulatedGrid(simulated(config, 2))
    last = max(grid.nodes)
    answer = grid.nodes[last]
    grid.nodes[last] = lambda message: (
        failing(FAILED, "no")(message) if asked_for(cross(message)) == REWARDS else answer(message)
    )
    predicted = GroupPredictor.targets

    def targets(ours, data):
        with patch.object(residual, "JITTER", -1e6 if data.group == "Belmora" else residual.JITTER):
            return predicted(ours, data)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(GroupPredictor, "targets", targets)
        read_every_answer(patched)
        patched.setattr(ppo_phase, "KL_JUMP", -9e9)
        patched.setattr(ceilings, "MOST_SHARES", 20)  # of three held-out questions
        looped(config, grid)
    served = Served(config.run_folder, "mix")

    async def score() -> None:
        for number in (1, 2):
            await served.score(*two(number), number=number)
        await served.score(("3/0", "Q2", "0.20,0.30,0.50"), number=3)  # held out

    asyncio.run(score())
    return config.run_folder


def test_every_field_of_every_record_is_written_and_read_back(folder):
    seen = defaultdict[str, list[object]](list)
    for file in FILES:
        content = file.read(folder)
        assert content, file.name
        note(content, seen)
    kinds = [kind for kind in vars(records).values() if isinstance(kind, type) and issubclass(kind, records.Record)]
    fields = {f"{kind.__name__}.{name}" for kind in kinds for name in vars(kind).get("__annotations__", ())}
    assert fields - {"Record.model_config"} == {*seen}
    assert not [name for name, values in seen.items() if all(map(says_nothing, values))]


def test_every_field_of_an_opened_run_is_read(folder):
    run = load_run(folder)
    for name, value in vars(run).items():
        empty = value.empty if isinstance(value, pd.DataFrame) else not value
        assert empty == (name == "noise"), name  # no owner says that there is noise
    assert (
        {*run.summary["method"]}
        == {*run.scores["method"]}
        >= {"base", "sft", "ppo", "ppo by appa_flwr.analysis.rules:Average"}
    )
    assert run.by_mean.startswith("Belmora (")
    assert run.by_mean in dict(missing(run))["Predicted by the mean of all groups"]
    summary = run.summary.set_index(["method", "metric", "against"])
    means = run.scores.groupby(["method", "metric", "against", "group"])["reward"].mean().unstack()
    for at, row in summary.iterrows():
        for group in means.columns:
            assert row[f"group/{group}"] == pytest.approx(means.loc[at, group], nan_ok=True)
    assert SURVEY in run.summary["against"].values
    assert run.iterations["iteration"].tolist() == [1, 2]
    survey = store.read(folder / schema.SURVEY_FILE).answers
    other = load_run(folder / schema.rule_folder(KEYS["baseline-rules"]))
    assert other.iterations["weights/Avaria"].tolist() == [0.5, 0.5]  # of two groups that answer, by the mean
    first, again = (of.iterations.filter(like="rewards/").iloc[0].to_dict() for of in (run, other))
    assert first == pytest.approx(again, nan_ok=True)  # the same SFT model's first rollouts
    ours, theirs = run.policy(), other.policy()
    for example in run.examples[:3]:
        for method, policy in (("ppo", ours), ("ppo by appa_flwr.analysis.rules:Average", theirs)):
            assert example.answers[method].text == policy.ask(example.question, example.options).text
        own = {name: rows.get(example.question_id) for name, rows in survey.items()}
        known = {name: pytest.approx(own_K, abs=1e-4) for name, own_K in own.items() if own_K is not None}
        assert example.survey == known
        assert {*example.predictions} == {*own} - {*known}
    assert other.config.rule == KEYS["baseline-rules"]
    assert not other.predictor().predict({}).empty
    assert [line["round"].tolist() for line in run.served.values()] == [[1, 2, 3]]
    assert not run.intervals().empty
