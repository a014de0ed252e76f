from __future__ import annotations

import tomllib
from datetime import datetime
from pathlib import Path

import pytest
from flwr.common.config import flatten_dict

from appa_flwr.config import (
    KEYS,
    Config,
    assemble,
    parse_override,
    preset,
    preset_names,
    read_toml,
    split_names,
    to_toml,
    to_toml_table,
)
from appa_flwr.errors import UserError

# Copied by hand from the paper's three tables, for GLOBALQA and gemma-2-2b-it.
SFT_TABLE = {
    "model": "google/gemma-2-2b-it",  # Base models
    "policy.compute-dtype": "bfloat16",  # Precision BF16
    "data.test-fraction": 0.2,  # Train/valid split 80/20
    "policy.max-sequence-length": 500,
    "lora.rank": 16,
    "lora.alpha": 32,
    "lora.dropout": 0.05,
    "lora.sft-targets": "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj",
    "sft.batch-size": 8,
    "sft.gradient-accumulation-steps": 2,
    "sft.learning-rate": 0.000005,
    "sft.scheduler": "cosine",
    "sft.warmup-ratio": 0.1,
    "sft.weight-decay": 0.01,
    "sft.epochs": 1,
    "sft.steps": 0,  # so that the epochs count
}
PPO_TABLE = {
    "policy.quantization": "nf4",
    "policy.compute-dtype": "bfloat16",
    "policy.attention": "eager",
    "policy.tuning": "lora",
    "lora.rank": 16,
    "lora.alpha": 32,
    "lora.dropout": 0.05,
    "lora.policy-targets": "q_proj,k_proj,v_proj,o_proj",
    "lora.value-targets": "q_proj,k_proj,v_proj,o_proj",  # its score head is always trained
    "ppo.micro-batch-tokens": 4 * 500,  # Per-device train batch size, rows of max-sequence-length
    "rollout.batch-size": 96,  # Effective batch size
    "ppo.learning-rate": 0.00001,
    "ppo.value-learning-rate": 0.00001,
    "ppo.weight-decay": 0.0,
    "ppo.scheduler": "linear",
    "ppo.training-epochs": 5,
    "ppo.num-iterations": 0,  # so that the epochs count
    "ppo.epochs": 2,
    "ppo.num-mini-batches": 8,
    "eval.batch-size": 64,
    "rollout.response-length": 60,
    "rollout.temperature": 0.6,
    "ppo.kl-coefficient": 0.05,
    "ppo.clip-range": 0.2,
    "ppo.clip-range-value": 0.2,
    "ppo.value-coefficient": 0.2,
    "ppo.gamma": 1.0,
    "ppo.gae-lambda": 0.95,
    "ppo.whiten-rewards": True,
}
APPA_TABLE = {
    "appa.ema-decay": 0.8,
    "appa.temperature": 0.1,
    "appa.fairness-threshold": 0.99,
    "appa.alignment-weight": 0.85,
    "appa.min-mean": 0.000001,
    "appa.max-cov": 10.0,
}


def flattened(tables):
    """As Flower does it."""
    return flatten_dict(tables)


@pytest.mark.parametrize("table", [SFT_TABLE, PPO_TABLE, APPA_TABLE], ids=["sft", "ppo", "appa"])
def test_paper_preset_holds_the_numbers_of_the_papers_tables(table):
    values = Config.load(preset("paper")).flat()
    assert {key: values[key] for key in table} == table


def test_paper_preset_reproduces_the_derived_numbers_of_the_tables():
    config = Config.load(preset("paper"))
    # SFT table: effective batch size 16; PPO table: 24 accumulation steps of 4 make 96.
    assert config.sft.batch_size * config.sft.gradient_accumulation_steps == 16
    assert config.rollout.batch_size / (config.ppo.micro_batch_tokens / config.policy.max_sequence_length) == 24
    # Five passes over 2043 questions (80 % of GLOBALQA's 2554) in batches of 96: 10215 / 96 = 106.4, so 107.
    assert config.iterations(2043) == 107


def test_paper_preset_sets_every_key_of_the_tables_itself():
    # A preset that leaned on the embedded defaults would change with them.
    assert set(SFT_TABLE) | set(PPO_TABLE) | set(APPA_TABLE) <= set(preset("paper"))


def test_oqa_preset_differs_from_the_globalqa_one_only_where_the_paper_does():
    changed = {key for key, value in preset("paper-oqa").items() if preset("paper").get(key) != value}
    assert changed == {"metric", "groups", "sft.epochs"}
    assert set(preset("paper-oqa")) == set(preset("paper"))
    assert preset("paper-oqa")["sft.epochs"] == 4
    assert preset("paper-oqa")["metric"] == "wasserstein"


def test_preset_names_the_papers_eight_countries():
    assert len(Config.load(preset("paper")).group_names) == 8


@pytest.mark.parametrize("name", preset_names())
def test_presets_hold_declared_keys_only_so_that_flwr_run_takes_them(name):
    assert set(preset(name)) <= set(KEYS)


@pytest.mark.parametrize(
    ("flat", "parts"),
    [
        ({"lerning-rate": 1e-3}, ['"lerning-rate"', '"ppo.learning-rate"', "> 0"]),
        ({"ppo.learning_rate": 1e-3}, ['"ppo.learning_rate"', '"ppo.learning-rate"']),
        ({"learning-rate": 1e-3}, ['"learning-rate" is now "ppo.learning-rate"']),
        ({"ppo.temperature": 1.0}, ['"ppo.temperature"', "rollout.temperature"]),
        ({"pluralllm.lerning-rate": 1.0}, ['"pluralllm.lerning-rate"', '"pluralllm.learning-rate"']),
        ({"vllm-memory": 0.5}, ['"vllm-memory" is gone']),
        ({"ppo": 1}, ['"ppo" is a section', "ppo.learning-rate"]),
        ({"qqq": 1}, ['"qqq"', "nearest"]),
        ({"ppo.learning-rate": "fast"}, ["ppo.learning-rate", '"fast"', "number > 0"]),
        ({"ppo.learning-rate": 0}, ["ppo.learning-rate", "0", "number > 0"]),
        ({"ppo.learning-rate": True}, ["ppo.learning-rate", "true", "number"]),
        ({"seed": True}, ["seed", "true", "integer >= 0"]),
        ({"seed": 1.0}, ["seed", "1.0", "integer"]),
        ({"lora.rank": 0}, ["lora.rank", "integer >= 1"]),
        ({"ppo.gamma": 1.5}, ["ppo.gamma", ">= 0 and <= 1"]),
        ({"ppo.gamma": float("nan")}, ["ppo.gamma", "finite number"]),
        ({"appa.max-cov": float("inf")}, ["appa.max-cov", "finite number"]),
        ({"appa.alpha": float("nan")}, ["appa.alpha", ">= -inf"]),
        ({"ppo.whiten-rewards": 1}, ["ppo.whiten-rewards", "true or false"]),
        ({"task": "dqa"}, ["task", '"dqa"', "dpa, opa"]),
        ({"metric": "kl"}, ["metric", '"kl"', "js-distance"]),
        ({"metric": "borda"}, ["metric", '"borda"', "dpa", "wasserstein"]),
        ({"task": "opa", "metric": "js"}, ["metric", '"js"', "opa", "borda"]),
        ({"rule": "max"}, ["rule", '"max"', "appa, average, min, alpha"]),
        ({"federation.min-groups": 9}, ["federation.min-groups", "8"]),
        ({"groups": "A,B", "federation.min-groups": 3}, ["federation.min-groups", "2"]),
        ({"groups": "A,B,A"}, ["groups", '"A"', "twice"]),
        ({"ppo.num-mini-batches": 7}, ["ppo.num-mini-batches", "96"]),
        ({"pluralllm.heads": 5}, ["pluralllm.heads", "64"]),
        ({"pluralllm.unseen-groups": "A;B;A"}, ["pluralllm.unseen-groups", "A", "twice"]),
        ({"groups": "A;B;C", "pluralllm.unseen-groups": "D"}, ["pluralllm.unseen-groups", "D", "groups"]),
        ({"groups": "A;B", "pluralllm.unseen-groups": "A;B"}, ["pluralllm.unseen-groups", "all groups"]),
        (
            {"groups": "A;B;C", "pluralllm.unseen-groups": "C", "sums.population-prior": True},
            ["sums.population-prior", "sums.min-groups = 3", "there are 2"],
        ),
        ({"policy.quantization": "nf4"}, ["policy.quantization", "tuning", "lora"]),
        ({"run-name": "../escape"}, ["run-name"]),
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


def test_an_integer_is_taken_for_a_number_and_becomes_one():
    value = Config.load({"ppo.learning-rate": 1}).flat()["ppo.learning-rate"]
    assert (value, type(value)) == (1.0, float)


def test_infinite_alpha_is_allowed_and_survives_toml():
    text = to_toml_table(Config.load({"appa.alpha": float("-inf")}).flat())
    assert Config.load(flattened(tomllib.loads(text))).appa.alpha == float("-inf")


def test_flat_and_toml_round_trip_every_key_with_its_type():
    flat = Config.load({"groups": 'a"b; é\\c', "ppo.learning-rate": 1, "appa.min-mean": 1e-300}).flat()
    back = flattened(tomllib.loads(to_toml_table(flat)))
    assert back == flat
    assert {k: type(v) for k, v in back.items()} == {k: type(v) for k, v in flat.items()}
    assert Config.load(back).flat() == flat


def test_config_is_frozen():
    with pytest.raises(ValueError, match="frozen"):
        Config.load({}).seed = 1  # type: ignore[misc]


def test_every_key_has_a_one_line_doc():
    assert all(key.doc and "\n" not in key.doc for key in KEYS.values())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("seed=3", ("seed", 3)),
        ("ppo.learning-rate = 1e-3", ("ppo.learning-rate", 0.001)),
        ("data.strict=true", ("data.strict", True)),
        ("appa.alpha=-inf", ("appa.alpha", float("-inf"))),
        ('groups="Nigeria,Egypt"', ("groups", "Nigeria,Egypt")),
        ("groups=Nigeria, Egypt", ("groups", "Nigeria, Egypt")),
        ("survey=data/a=b.jsonl", ("survey", "data/a=b.jsonl")),
        ("run-name=42", ("run-name", "42")),
        ("run-name=2026-01-01", ("run-name", "2026-01-01")),
        ("run-name=", ("run-name", "")),
        ("seed=[1]", ("seed", "[1]")),
    ],
)
def test_override_is_a_toml_scalar_or_bare_text(text, expected):
    assert parse_override(text) == expected


@pytest.mark.parametrize("text", ["seed", "=3", ""])
def test_override_without_a_key_and_a_value_is_refused(text):
    with pytest.raises(UserError, match="key=value"):
        parse_override(text)


def test_later_sources_win_preset_file_command_line(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('preset = "paper"\nseed = 1\n[ppo]\nepochs = 3\n')
    config = assemble(file, ["seed=2", "seed=4"], folder=tmp_path)
    assert (config.lora.rank, config.policy.attention) == (16, "eager")  # paper, where the default is sdpa
    assert config.ppo.epochs == 3  # the file; the preset says 2
    assert config.seed == 4


def test_relative_paths_become_absolute_and_names_stay(tmp_path):
    (tmp_path / "weights").mkdir()
    config = assemble(None, ["survey=a/b.jsonl", "model=weights", "run.output-dir=out"], folder=tmp_path)
    assert config.survey == str(tmp_path.resolve() / "a" / "b.jsonl")
    assert config.model == str(tmp_path.resolve() / "weights")
    assert config.run.output_dir == str(tmp_path.resolve() / "out")
    plain = assemble(None, ["model=org/name"], folder=tmp_path)
    assert (plain.survey, plain.model, plain.run.cache_dir) == ("generated", "org/name", "")
    assert plain.run.output_dir == str(tmp_path.resolve() / "runs")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("seed = ", "not valid TOML"),
        ("[ppo.more]\nseed = 1\n", '"ppo.more"'),
        ('"ppo.epochs" = 1\n[ppo]\nepochs = 2\n', '"ppo.epochs" is given twice'),
        ("[ppo]\nepochs = 1\n[ppo]\ngamma = 1\n", "not valid TOML"),
        ("seed = [1]\n", '"seed"'),
        (None, "cannot be read"),
    ],
)
def test_bad_config_file_is_named(tmp_path, text, part):
    file = tmp_path / "mine.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UserError) as caught:
        read_toml(file)
    assert str(file) in str(caught.value)
    assert part in str(caught.value)


def test_unknown_preset_lists_the_known_ones(tmp_path):
    with pytest.raises(UserError, match="paper, paper-oqa"):
        assemble(None, ["preset=papr"], folder=tmp_path)


@pytest.mark.parametrize("key", ["survey", "model", "run.output-dir"])
def test_a_path_that_leads_nowhere_is_one_line(tmp_path, key):
    with pytest.raises(UserError, match=rf'^{key} = "~nosuchuser/x" is not a path that can be followed') as caught:
        assemble(None, [f"{key}=~nosuchuser/x"], folder=tmp_path)
    assert "\n" not in str(caught.value)


def test_a_checkpoint_that_is_not_there_is_told_before_anything_starts(tmp_path):
    (tmp_path / "there.safetensors").touch()
    found = assemble(None, ["pluralllm.checkpoint=there.safetensors"], folder=tmp_path)
    assert found.pluralllm.checkpoint == str(tmp_path / "there.safetensors")
    with pytest.raises(UserError, match=r'^pluralllm\.checkpoint = ".*/none\.safetensors": there is no such file'):
        assemble(None, ["pluralllm.checkpoint=none.safetensors"], folder=tmp_path)


def test_what_no_folder_can_be_called_may_still_be_a_name(tmp_path):
    assert assemble(None, ["model=" + "x" * 9000], folder=tmp_path).model == "x" * 9000


def test_split_names():
    assert split_names("a, b ,,c") == ("a", "b", "c")
    assert split_names("Korea, South; Egypt;") == ("Korea, South", "Egypt")
    assert split_names(" ") == ()


def test_metric_auto_follows_the_task():
    assert Config.load({}).reward_metric == "js"
    assert Config.load({"task": "opa"}).reward_metric == "borda"
    assert Config.load({"metric": "cosine"}).reward_metric == "cosine"


def test_iterations():
    assert Config.load({"ppo.num-iterations": 7}).iterations(1000) == 7
    # 5 passes over 192 questions in batches of 96: 960 / 96 = 10.
    assert Config.load({"ppo.num-iterations": 0}).iterations(192) == 10
    assert Config.load({"ppo.num-iterations": 0, "ppo.training-epochs": 1}).iterations(3) == 1


def test_a_run_without_a_name_gets_one_that_says_what_it_is():
    config = Config.load({"task": "opa", "rule": "min", "seed": 5, "run.output-dir": "/out"})
    with pytest.raises(UserError, match="run-name"):
        _ = config.run_folder
    named = config.named(datetime(2026, 1, 2, 3, 4, 5))
    assert named.run_folder == Path("/out/opa-min-seed5-20260102-030405")
    assert named.named(datetime(2027, 1, 1)) == named


def test_toml_escapes_what_json_does_not():
    assert tomllib.loads(f"a = {to_toml('x' + chr(127) + chr(10))}")["a"] == "x\x7f\n"
