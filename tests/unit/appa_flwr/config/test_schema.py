from __future__ import annotations

import tomllib
from datetime import datetime
from pathlib import Path

import pytest
from flwr.common.config import flatten_dict

from appa_flwr.config import KEYS, SECTIONS, Config, assemble, split_names, to_toml_table
from appa_flwr.core.errors import UserError


@pytest.mark.parametrize(
    ("flat", "parts"),
    [
        ({"lerning-rate": 1e-3}, ['"lerning-rate"', '"sft.learning-rate"', "> 0"]),
        ({"ppo.learning_rate": 1e-3}, ['"ppo.learning_rate"', '"ppo.learning-rate"']),
        ({"ppo.temperature": 1.0}, ['unknown key "ppo.temperature"; there are rollout.temperature, appa.temperature']),
        ({"se\ned": 1}, [r'"se\ned"', '"seed"']),
        ({"ppo": 1}, ['"ppo" is a section', "ppo.learning-rate"]),
        ({"ppo.learning-rate": "fast"}, ["ppo.learning-rate", '"fast"', "number > 0"]),
        ({"ppo.learning-rate": True}, ["ppo.learning-rate", "true", "number"]),
        ({"seed": 1.0}, ["seed", "1.0", "integer"]),
        ({"ppo.kl-coefficient": float("nan")}, ["ppo.kl-coefficient", "finite number"]),
        ({"appa.alpha": float("nan")}, ["appa.alpha", ">= -inf"]),
        ({"eval.ceilings": 1}, ["eval.ceilings", "true or false"]),
        ({"rule": "aveage"}, ["rule", '"aveage"', "one of appa, average,"]),
        ({"task": "dqa"}, ["task", '"dqa"', "dpa, opa"]),
        ({"task": "opa", "metric": "js"}, ["metric", '"js"', "opa", "auto, auto-ordinal, borda"]),
        ({"federation.min-groups": 9}, ["federation.min-groups", "8"]),
        ({"groups": "A,B,A"}, ["groups", '"A"', "twice"]),
        ({"sft.batch-size": 70}, ["sft.batch-size", "passes of 32", "64 and 96"]),
        ({"ppo.num-mini-batches": 7}, ["ppo.num-mini-batches", "384"]),
        ({"rollout.answers-per-question": 7}, ["rollout.answers-per-question", "384"]),
        ({"rollout.answers-per-question": 1}, ["ppo.baseline", "rollout.answers-per-question"]),
        ({"pluralllm.unseen-groups": "A;B;A"}, ["pluralllm.unseen-groups", "A", "twice"]),
        ({"groups": "A;B;C", "pluralllm.unseen-groups": "D"}, ["pluralllm.unseen-groups", "D", "A, B, C"]),
        ({"groups": "A;B", "pluralllm.unseen-groups": "A;B"}, ["pluralllm.unseen-groups", "all groups"]),
        ({"pluralllm.architecture": "mean"}, ["pluralllm.architecture", "residual, attention"]),
        ({"run-name": "../escape"}, ["run-name"]),
        ({"run-name": "a\nb"}, [r'run-name = "a\nb"']),
        ({"lora.rank": 2**63}, ["lora.rank", "64 bits"]),
        ({"survey": ""}, ["survey", "not empty"]),
    ],
)
def test_bad_value_is_one_line_that_names_key_and_range(flat, parts):
    with pytest.raises(UserError) as caught:
        Config.load(flat)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_flat_and_toml_round_trip_every_key_with_its_type():
    given = {"groups": 'a"b; é\\c', "survey": "x\x7f\n", "ppo.learning-rate": 1, "appa.alpha": float("-inf")}
    flat = Config.load({**given, "sft.learning-rate": 1e-300}).flat()
    assert type(flat["ppo.learning-rate"]) is float  # an integer is taken for a number
    back = flatten_dict(tomllib.loads(to_toml_table(flat)))  # as Flower does it
    assert back == flat
    assert {k: type(v) for k, v in back.items()} == {k: type(v) for k, v in flat.items()}
    assert Config.load(back).flat() == flat


def test_every_key_and_section_has_a_one_line_doc():
    for doc in (*(key.doc for key in KEYS.values()), *SECTIONS.values()):
        assert doc
        assert not {"\n", "["} & set(doc)


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


@pytest.mark.parametrize("key", ["rule", "baseline-rule"])
def test_alpha_at_0_is_refused_as_another_name_of_the_average(key):
    with pytest.raises(UserError, match=f'appa.alpha = 0 makes {key} = "alpha" .* {key} = "average"'):
        Config.load({key: "alpha"})
    assert Config.load({key: "alpha", "appa.alpha": -1e-3}).appa.alpha == -1e-3


@pytest.mark.parametrize("strategy", ["fedavg", "fedprox", "fedadam", "fedyogi"])
def test_a_groups_own_optimizer_follows_the_strategy(strategy):
    def chosen(**keys):
        given = {f"pluralllm.{key.replace('_', '-')}": value for key, value in {"learning_rate": 0.0, **keys}.items()}
        settings = Config.load({"pluralllm.strategy": strategy, **given}).pluralllm
        return settings.local_optimizer, settings.local_learning_rate

    adam, sgd = ("adam", 0.003), ("sgd", 0.1)
    assert chosen() == (adam if strategy in ("fedavg", "fedprox") else sgd)
    assert chosen(learning_rate=0.5) == (chosen()[0], 0.5)


@pytest.mark.parametrize("preset", ["paper", "paper-oqa"])
def test_the_paper_s_presets_have_its_predictor(preset):
    settings = assemble(["preset=" + preset], folder=None).pluralllm
    assert (settings.architecture, settings.strategy) == ("attention", "fedavg")
    assert (settings.num_context_questions, settings.fresh_contexts) == (16, True)


def test_iterations():
    assert Config.load({"ppo.num-iterations": 7}).iterations(1000) == 7
    passes = {
        "ppo.num-iterations": 0,
        "rollout.batch-size": 96,
        "rollout.answers-per-question": 1,
        "ppo.baseline": "value",
    }
    # 5 passes over 192 questions in batches of 96: 960 / 96 = 10.
    assert Config.load(passes).iterations(192) == 10
    assert Config.load(passes).iterations(3) == 1


def test_a_run_without_a_name_gets_one_that_says_what_it_is():
    config = Config.load({"task": "opa", "rule": "min", "seed": 5, "run.output-dir": "/out"})
    with pytest.raises(UserError, match="run-name"):
        _ = config.run_folder
    named = config.named(datetime(2026, 1, 2, 3, 4, 5))
    assert named.run_folder == Path("/out/opa-min-seed5-20260102-030405")
    assert named.named(datetime(2027, 1, 1)) == named
