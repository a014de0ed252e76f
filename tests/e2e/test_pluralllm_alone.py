"""The predictor by itself: `phases = "pluralllm"`, and its checkpoint in another run.

The groups' real ClientApp answers the real server in one process, as bytes.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from audit import asked_for
from nodes import InProcessGrid
from runs import looped
from small import SMALLEST

from appa_flwr.config import Config
from appa_flwr.protocol import messages, queries
from appa_flwr.report.page import missing
from appa_flwr.run.read import read_run
from appa_flwr.run.schema import PROGRESS
from pluralllm.residual import SHARES, SHARES_KEY
from server_app.questions import run_survey

FILE = "pluralllm.safetensors"


def run(folder: Path, name: str, *, reported: bool = False, **keys: object) -> tuple[Config, InProcessGrid]:
    places = {"run.phases": "pluralllm", "run.output-dir": str(folder), "run-name": name}
    config = Config.load(SMALLEST | places | keys)
    return config, looped(config, 3, reported=reported)


def weights(config: Config) -> dict[str, np.ndarray]:
    return safetensors.numpy.load_file(config.run_folder / FILE)


def card(config: Config) -> dict:
    return json.loads((config.run_folder / "pluralllm.json").read_text())


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> tuple[Config, InProcessGrid]:
    return run(tmp_path_factory.mktemp("alone"), "first", reported=True)


def test_the_predictor_alone_joins_trains_scores_and_ends(alone):
    config, grid = alone
    setup = (messages.HELLO, messages.CATALOGUE, messages.TARGETS)
    assert set(map(asked_for, grid.requests)) == {*setup, queries.UPDATE, queries.VALIDATION, queries.SCORES}
    phases = list(dict.fromkeys(line.phase for line in PROGRESS.read(config.run_folder)))
    assert phases == ["machine", "survey", "join", "pluralllm", "targets", "report"]
    assert (config.run_folder / "report.html").exists()
    assert not (config.run_folder / "policy").exists()
    found_card, found = card(config), read_run(config.run_folder)
    assert [*missing(found)] == []
    assert len(found.pluralllm.losses) == config.pluralllm.rounds
    assert found.pluralllm.scores.keys() == {"pluralllm", "uniform", "nearest-question"}
    assert found_card["survey"]["groups"].keys() == found_card["groups"].keys() == set(run_survey(config).groups)


@pytest.mark.parametrize(("architecture", "shares"), [("residual", SHARES), ("attention", ((),))])
def test_a_checkpoint_of_either_architecture_stands_for_pretraining(architecture, shares, alone, tmp_path):
    keys = {"pluralllm.architecture": architecture}
    first, before = alone if architecture == "residual" else run(tmp_path, "first", **keys)
    assert not any(reply.message.has_error() for reply in before.replies)
    assert card(first)["training"]["pluralllm.architecture"] == architecture
    assert tuple(weights(first).get(SHARES_KEY, np.zeros(0)).tolist()) in shares
    path = first.run_folder / FILE
    second, grid = run(tmp_path, "second", **{"pluralllm.checkpoint": str(path)}, **keys)
    kinds = set(map(asked_for, grid.requests))
    assert queries.UPDATE not in kinds
    assert queries.SCORES in kinds  # they are those of the first run, for the cards are the same
    # the run can be carried away and serve others in turn
    assert (second.run_folder / FILE).read_bytes() == path.read_bytes()
    assert card(second) == card(first)
