"""Every config key changes what a run writes or sends: one row of tests/cases/keys.toml each."""

import importlib
import socket
from contextlib import closing

import families
import pytest
from small import CASES, cases
from wires import Stages, arrivals

from appa_flwr.config import KEYS, Config
from appa_flwr.launch.sites import make_node_key
from appa_flwr.survey.types import Question

TABLE = cases("keys")
ARRIVALS = cases("arrivals")
ROWS = [(key, case) for key, cases in TABLE["rows"].items() for case in cases]


@pytest.fixture(scope="module")
def stages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wires")
    make_node_key(folder / "node.key")
    key = (folder / "node.key.pub").read_text().strip()
    (folder / "keys.toml").write_text("".join(f'{name} = "{key}"\n' for name in ("Avaria", "Belmora", "Castria")))
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        places = {
            "survey": CASES / "surveys" / "survey.jsonl",
            "extra": CASES / "surveys" / "extra.jsonl",
            "model": families.save("qwen3", folder / "model", [Question("q", "Is it?", ("Yes", "No"))]),
            "keys": folder / "keys.toml",
            "elsewhere": folder / "elsewhere",
            "taken": taken.getsockname()[1],
            "checkpoint": folder / "evaluate base" / "pluralllm.safetensors",
        }
        stages = Stages(folder, places)
        stages.once({}, since="", until="evaluate base")
        yield stages


def test_every_key_has_a_row_or_a_reason():
    assert sorted([*TABLE["rows"], *TABLE["unseen"]]) == sorted(KEYS)


@pytest.mark.parametrize(("key", "case"), ROWS, ids=[f"{key}={case['value']}" for key, case in ROWS])
def test_a_key_changes_what_its_row_says(stages, key, case):
    since, until = TABLE["stages"][stage := case["stage"]]
    both, until = TABLE["with"].get(stage, {}) | case.get("with", {}), case.get("until", until)
    before = stages.once(both, since=since, until=until)
    after = stages.run({**both, key: case["value"]}, since=since, until=until)
    same = [seen for seen in case["seen"] if all(before[name] == after[name] for name in seen.split("|"))]
    assert not same, f"{key} = {case['value']} changes nothing in: {', '.join(same)}"
    assert all(before[name] == after[name] != "" for name in case.get("kept", ())), f"{key} changes {case['kept']}"
    assert "error" in "".join(case["seen"]) or not (before["error"] or after["error"]), after["error"]


@pytest.mark.parametrize("case", ARRIVALS["runs"], ids=["full", "adapters"])
def test_functions_pass_the_values_of_keys_on(stages, case):
    """In these runs each followed value is of one key alone."""
    keys = ARRIVALS["runs"][0]["keys"] | case["keys"]
    followed = {line.partition(":")[0].partition(" for ")[0] for line in case["arrivals"]}
    with arrivals({Config.load(keys).flat()[key]: key for key in followed}) as reached:
        assert not stages.run(keys)["error"]
    assert not (lost := {*case["arrivals"]} - reached), f"not passed on, or renamed: {lost}; new: {reached}"


@pytest.mark.parametrize("case", ARRIVALS["calls"], ids=lambda case: case["call"])
def test_a_function_passes_its_arguments_on(case):
    module, _, name = case["call"].partition(":")
    with arrivals({value: key for key, value in case["keys"].items()}) as reached:
        getattr(importlib.import_module(module), name)(**case["keys"])
    assert not (lost := {*case["arrivals"]} - reached), f"not passed on, or renamed: {lost}; new: {reached}"
