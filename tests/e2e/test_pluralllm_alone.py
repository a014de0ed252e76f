"""The predictor by itself: `phases = "pluralllm"`, its checkpoint in another run, and groups that never train.

The groups' real ClientApp answers the real server in one process, as bytes.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from in_process import InProcessGrid
from small import SMALL_PREDICTOR, VOTES
from whole_loop import looped

from appa_flwr.config import Config
from appa_flwr.core.errors import UserError
from appa_flwr.protocol import wire
from appa_flwr.report.artifacts import read_run
from pluralllm.residual import SHARES, SHARES_KEY

SMALL = {
    "data.num-questions": 60,
    "data.num-groups": 4,
    **SMALL_PREDICTOR,
    **VOTES,
    "pluralllm.rounds": 3,
    "run.phases": "pluralllm",
}
GROUPS = ("Avaria", "Belmora", "Castria", "Dorvane")
UNSEEN = {"pluralllm.unseen-groups": "Castria"}
FILE = "pluralllm.safetensors"


def run(
    folder: Path, name: str, *, num_nodes: int = 4, reported: bool = False, **keys: object
) -> tuple[Config, InProcessGrid]:
    config = Config.load({**SMALL, "run.output-dir": str(folder), "run-name": name, **keys})
    return config, looped(config, num_nodes, reported=reported)


def weights(config: Config) -> dict[str, np.ndarray]:
    return safetensors.numpy.load_file(config.run_folder / FILE)


def card(config: Config) -> dict:
    return json.loads((config.run_folder / "pluralllm.json").read_text())


def progress(config: Config) -> list[dict]:
    return [json.loads(line) for line in (config.run_folder / "progress.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> tuple[Config, InProcessGrid]:
    return run(tmp_path_factory.mktemp("alone"), "first", reported=True, **UNSEEN)


@pytest.fixture(scope="module")
def together(tmp_path_factory) -> tuple[Config, InProcessGrid]:
    """The same with two groups on each of two nodes."""
    return run(tmp_path_factory.mktemp("together"), "together", num_nodes=2, **UNSEEN)


def test_the_predictor_alone_joins_trains_scores_and_ends(alone):
    config, grid = alone
    kinds = {wire.ROLL_CALL, wire.CATALOGUE, "train", "evaluate", wire.TARGETS}
    assert {reply.kind for reply in grid.replies} == kinds
    phases = list(dict.fromkeys(line["phase"] for line in progress(config)))
    assert phases == ["machine", "survey", "join", "pluralllm", "targets", "report"]
    assert (config.run_folder / "report.html").exists()
    assert not (config.run_folder / "policy").exists()
    found_card = card(config)
    found = read_run(config.run_folder)
    assert found.missing == ()
    assert found.pluralllm is not None
    assert len(found.pluralllm.losses) == 3
    parts = {f"{groups}/{questions}" for groups in ("seen", "unseen") for questions in ("training", "held-out")}
    assert found.pluralllm.scores.keys() == parts
    for part, scores in found.pluralllm.scores.items():
        others = {"mean-of-others", "pluralllm-shared"} if part.endswith("held-out") else set()
        assert scores.keys() == {"pluralllm", "uniform", "nearest-question"} | others
    assert 0.0 < found_card["validation"] < 0.833
    assert found_card["group_sums"]["held_out"] > 0
    assert found_card["survey"]["groups"].keys() == set(GROUPS) - {"Castria"}
    assert found_card["survey"]["unseen_groups"].keys() == {"Castria"}


def test_an_unseen_group_leaves_no_trace_in_the_weights(alone, tmp_path):
    config, grid = alone
    group_of = dict(zip(grid.contexts, GROUPS, strict=True))
    trained = [group_of[asked.message.metadata.dst_node_id] for asked in grid.requests if asked.kind == "train"]
    assert sorted(trained) == sorted(3 * ["Avaria", "Belmora", "Dorvane"])
    others, _ = run(tmp_path, "others", groups="Avaria,Belmora,Dorvane", num_nodes=3)
    everyone, _ = run(tmp_path, "everyone")
    found, without, with_it = map(weights, (config, others, everyone))
    assert all((found[key] == without[key]).all() for key in found)
    assert any((found[key] != with_it[key]).any() for key in found)
    # it has targets and scores all the same, which those who never met it cannot change
    assert "unseen/held-out" in card(config)["groups"]["Castria"]


def test_a_node_of_unseen_and_seen_groups_trains_for_the_seen_ones(alone, together):
    assert not any(reply.message.has_error() for reply in together[1].replies)
    one, other = weights(alone[0]), weights(together[0])
    # who shares a node may move the last bits, and Adam-like steps make these a little larger
    assert all(np.allclose(one[key], other[key], atol=2e-3) for key in one)


def test_unseen_groups_have_no_say_in_how_much_each_view_counts(alone, together):
    def validated(grid: InProcessGrid) -> int:
        replies = [reply.message.content for reply in grid.replies if reply.kind == "evaluate"]
        return sum(int(content.metric_records["metrics"]["num-examples"]) for content in replies)

    held_out = {
        group: sum(scores["uniform"]["answers"] for part, scores in parts.items() if "held-out" in part)
        for group, parts in card(alone[0])["groups"].items()
    }
    assert held_out.pop("Castria") > 0
    assert validated(alone[1]) == validated(together[1]) == sum(held_out.values())


@pytest.mark.parametrize(("architecture", "shares"), [("residual", SHARES), ("attention", ((),))])
def test_a_checkpoint_of_either_architecture_stands_for_pretraining(architecture, shares, alone, tmp_path):
    keys = {"pluralllm.architecture": architecture, **UNSEEN}
    first, before = alone if architecture == "residual" else run(tmp_path, "first", **keys)
    assert not any(reply.message.has_error() for reply in before.replies)
    assert card(first)["architecture"] == architecture
    assert tuple(weights(first).get(SHARES_KEY, np.zeros(0)).tolist()) in shares
    path = first.run_folder / FILE
    second, grid = run(tmp_path, "second", **{"pluralllm.checkpoint": str(path)}, **keys)
    assert "train" not in {reply.kind for reply in grid.replies}
    sums_before, sums_again = (
        [reply.message.content.metric_records["sums"] for reply in each.replies if reply.kind == wire.TARGETS]
        for each in (before, grid)
    )
    assert sums_before == sums_again
    # the run can be carried away and serve others in turn
    assert (second.run_folder / FILE).read_bytes() == path.read_bytes()
    assert card(second) == card(first)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"seed": 1}, "was trained on another table of 60 questions, and this run has 60"),
        (
            {"data.test-fraction": 0.4},
            r"trained on \d+ of this run's \d+ held-out questions.*use its seed = 0 and data.test-fraction = 0.2",
        ),
        ({"pluralllm.architecture": "attention"}, r"pluralllm\.architecture = residual, and this run has attention"),
        ({"pluralllm.unseen-groups": "Avaria"}, "group 'Avaria' has trained it"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_before_a_group_is_asked(alone, changes, says, tmp_path):
    path = alone[0].run_folder / FILE
    with pytest.raises(UserError, match=says):
        run(tmp_path, "refused", **{"pluralllm.checkpoint": str(path)}, **changes)
    assert "pluralllm.checkpoint" in (tmp_path / "refused" / "error.txt").read_text()
    assert '"join"' not in (tmp_path / "refused" / "progress.jsonl").read_text()


def test_a_misspelt_unseen_group_does_not_train_unnoticed(tmp_path):
    with pytest.raises(UserError, match='unseen-groups names "Avria", which has not joined; there are Avaria, Bel'):
        run(tmp_path, "misspelt", **{"pluralllm.unseen-groups": "Avria"})
