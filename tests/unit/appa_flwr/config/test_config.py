from __future__ import annotations

import tomllib
from datetime import datetime
from pathlib import Path

import pytest
from flwr.common.config import flatten_dict

from appa_flwr.config import KEYS, SECTIONS, Config, split_names
from appa_flwr.config.keys import to_toml_table
from appa_flwr.core.errors import UserError

GEMMA = {"model": "google/gemma-2-2b-it"}
BAD_KEYS = [
    ({"lerning-rate": 1e-3}, ['"lerning-rate"', '"sft.learning-rate"']),
    ({"ppo.learning_rate": 1e-3}, ['"ppo.learning_rate"', '"ppo.learning-rate"']),
    ({"run.temperature": 1.0}, ["ppo.temperature", "appa.temperature"]),
    ({"rollout.batch-size": 96}, ["sft.batch-size", "ppo.batch-size"]),
    ({"federation.min-groups": 2}, ['"run.min-groups"']),
    ({"embedding.encoder": "minilm"}, ['"pluralllm.encoder"']),
    ({"lora.rank": 8}, ['"lora.rank"', '"policy.lora-rank"']),
    ({"sead": 1}, ['"sead"', '"seed"']),
    ({"se\ned": 1}, [r'"se\ned"', '"seed"']),
    ({"": 1}, ['""']),
    ({"ppo": 1}, ['"ppo" is a section', "learning-rate"]),
    ({"ppo.learning-rate": "fast"}, ["ppo.learning-rate", '"fast"', "number"]),
    ({"ppo.learning-rate": True}, ["ppo.learning-rate", "true"]),
    ({"ppo.learning-rate": 0}, ["ppo.learning-rate", "greater than 0"]),
    ({"sft.learning-rate": float("nan")}, ["sft.learning-rate", "finite number"]),
    ({"appa.alpha": float("nan")}, ["appa.alpha", "-inf"]),
    ({"seed": 1.5}, ["seed", "1.5", "integer"]),
    ({"seed": "1e3"}, ["seed", '"1e3"', "integer"]),
    ({"seed": -1}, ["seed", "0"]),
    ({"run.resume": "perhaps"}, ["run.resume", "perhaps", "true or false"]),
    ({"run.output-dir": True}, ["run.output-dir", "true"]),
    ({"rule": "aveage"}, ["rule", '"aveage"', "appa, average,"]),
    ({"task": "dqa"}, ["task", '"dqa"', "dpa, opa"]),
    ({"task": "opa", "metric": "js"}, ["metric", '"js"', "opa", "auto, auto-ordinal, borda"]),
    ({"run.min-groups": 9}, ["run.min-groups", "8"]),
    ({"groups": "A,B,A"}, ["groups", '"A"', "twice"]),
    ({"ppo.num-mini-batches": 7}, ["ppo.num-mini-batches", "384"]),
    ({"ppo.answers-per-question": 7}, ["ppo.answers-per-question", "384"]),
    ({"ppo.answers-per-question": 1}, ["ppo.baseline", "ppo.answers-per-question"]),
    ({"pluralllm.unseen-groups": "A;B;A"}, ["pluralllm.unseen-groups", "A", "twice"]),
    ({"pluralllm.architecture": "mean"}, ["pluralllm.architecture", "residual, attention"]),
    ({"policy.compute-dtype": "bfloat16"}, ["policy.tuning", "policy.compute-dtype"]),
    ({"run-name": "../escape"}, ["run-name"]),
    ({"run-name": "a\nb"}, [r'run-name = "a\nb"']),
    ({"policy.lora-rank": 2**63}, ["policy.lora-rank", "64 bits"]),
    ({"survey": ""}, ["survey", "at least 1 character"]),
    ({"rule": "alpha"}, ["rule", "appa.alpha", '"average"']),
    ({"baseline-rule": "alpha"}, ["baseline-rule", "appa.alpha", '"average"']),
    (GEMMA, ["model", "preset=smollm2", "preset=paper", "policy.tuning"]),
    ({**GEMMA, "run.phases": "sft"}, ["model", "preset=paper"]),
    ({"model": "smollm2", "policy.lora-rank": 8}, ["model", "preset=paper"]),
]


@pytest.mark.parametrize(("flat", "parts"), BAD_KEYS)
def test_a_wrong_key_or_value_is_one_line_that_names_it_and_what_is_right(flat, parts):
    with pytest.raises(UserError) as caught:
        Config.load(flat)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    "keys",
    [
        {"policy.tuning": "lora"},
        {"ppo.learning-rate": 1e-5},
        {"sft.learning-rate": 1e-5},
        {"run.phases": "serve"},
    ],
)
def test_whoever_sets_tuning_or_a_step_size_has_chosen(keys):
    assert Config.load({**GEMMA, **keys}).flat().items() >= keys.items()


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("ppo.learning-rate", "1e-5", 1e-5),
        ("ppo.learning-rate", "1", 1.0),
        ("seed", "42", 42),
        ("appa.alpha", "-inf", float("-inf")),
        ("run.resume", "true", True),
        ("run-name", 42, "42"),
        ("groups", "1,2", "1,2"),
    ],
)
def test_text_is_what_its_key_wants(key, text, value):
    read = Config.load({key: text}).flat()[key]
    assert (read, type(read)) == (value, type(value))


def test_flat_and_toml_round_trip_every_key_with_its_type():
    given = {"groups": 'a"b; é\\c', "survey": "x\x7f\n", "ppo.learning-rate": 1, "appa.alpha": float("-inf")}
    flat = Config.load({**given, "ppo.kl-coefficient": 1e-300}).flat()
    assert type(flat["ppo.learning-rate"]) is float  # an integer is taken for a number
    back = flatten_dict(tomllib.loads(to_toml_table(flat)))  # as Flower does it
    assert back == flat
    assert {k: type(v) for k, v in back.items()} == {k: type(v) for k, v in flat.items()}
    assert Config.load(back).flat() == flat


def test_there_are_few_keys_and_each_has_a_one_line_doc():
    assert len(KEYS) <= 74
    assert len(SECTIONS) <= 9
    for doc in (*(field.description for field in KEYS.values()), *(section.__doc__ for section in SECTIONS.values())):
        assert doc
        assert "\n" not in doc


def test_split_names():
    assert split_names("a, b ,,c") == ("a", "b", "c")
    assert split_names("Korea, South; Egypt;") == ("Korea, South", "Egypt")
    assert split_names(" ") == ()


def test_metric_auto_follows_the_task():
    assert Config.load({}).reward_metric == "js"
    assert Config.load({"task": "opa"}).reward_metric == "borda"
    assert Config.load({"metric": "cosine"}).reward_metric == "cosine"
    assert Config.load({"metric": "auto-ordinal"}).reward_metric == "wasserstein"
    assert Config.load({"metric": "auto-ordinal", "task": "opa"}).reward_metric == "borda"


@pytest.mark.parametrize("strategy", ["fedavg", "fedprox", "fedadam", "fedyogi"])
def test_a_groups_own_optimizer_follows_the_strategy(strategy):
    def chosen(rate):
        settings = Config.load({"pluralllm.strategy": strategy, "pluralllm.learning-rate": rate}).pluralllm
        return settings.local_optimizer, settings.local_learning_rate

    adam, sgd = ("adam", 0.003), ("sgd", 0.1)
    assert chosen(0.0) == (adam if strategy in ("fedavg", "fedprox") else sgd)
    assert chosen(0.5) == (chosen(0.0)[0], 0.5)


def test_a_run_without_a_name_gets_one_that_says_what_it_is():
    config = Config.load({"task": "opa", "rule": "min", "seed": 5, "run.output-dir": "/out"})
    with pytest.raises(UserError, match="run-name"):
        _ = config.run_folder
    named = config.named(datetime(2026, 1, 2, 3, 4, 5))
    assert named.run_folder == Path("/out/opa-min-seed5-20260102-030405")
    assert named.named(datetime(2027, 1, 1)) == named
