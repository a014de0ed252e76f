from __future__ import annotations

import pytest
from flwr.common.config import parse_config_args

from appa_flwr.config import KEYS, Config, assemble, parse_override, preset, sources
from appa_flwr.config.sources import preset_names, read_toml
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
    "sft.batch-size": 8,  # Effective batch size 16
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


@pytest.mark.parametrize("table", [SFT_TABLE, PPO_TABLE, APPA_TABLE], ids=["sft", "ppo", "appa"])
def test_paper_preset_holds_the_numbers_of_the_papers_tables(table):
    given = preset("paper")
    # Set by the preset itself: one that leaned on the embedded defaults would change with them.
    assert {key: given[key] for key in table} == table
    assert Config.load(given).flat().items() >= table.items()


def test_paper_preset_makes_the_papers_iterations_over_its_eight_countries():
    config = Config.load(preset("paper"))
    # Five passes over 2043 questions (80 % of GLOBALQA's 2554) in batches of 96: 10215 / 96 = 106.4, so 107.
    assert config.iterations(2043) == 107
    assert len(config.group_names) == 8


def test_oqa_preset_differs_from_the_globalqa_one_only_where_the_paper_does():
    paper, oqa = preset("paper"), preset("paper-oqa")
    assert set(oqa) == set(paper)
    changed = {key: value for key, value in oqa.items() if paper[key] != value}
    assert changed == {"metric": "wasserstein", "groups": "", "sft.epochs": 4}


@pytest.mark.parametrize("name", preset_names())
def test_flwr_run_takes_a_preset_s_file_as_it_is(name):
    # Flower refuses a run whose keys are not among those of pyproject.toml.
    given = parse_config_args([str(sources._PRESETS / f"{name}.toml")])
    assert given == preset(name)
    assert set(given) <= set(KEYS)
    Config.load(given)


def test_flwr_run_keeps_a_section_s_keys_in_one_string_only():
    # README tells it: of two strings, the later one's table replaces the whole section.
    assert parse_config_args(["ppo.epochs=3 ppo.gamma=0.5"]) == {"ppo.epochs": 3, "ppo.gamma": 0.5}
    assert parse_config_args(["ppo.epochs=3", "ppo.gamma=0.5"]) == {"ppo.gamma": 0.5}


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
        ("ppo={gamma=1}", ("ppo", "{gamma=1}")),
        ("seed=1\nppo.gamma=0.5", ("seed", "1\nppo.gamma=0.5")),
        ("seed=" + "[" * 9999, ("seed", "[" * 9999)),
        ("seed=" + "1" * 9999, ("seed", "1" * 9999)),
    ],
)
def test_override_is_a_toml_scalar_or_bare_text(text, expected):
    assert parse_override(text) == expected


@pytest.mark.parametrize("text", ["se\ned", "=3", ""])
def test_override_without_a_key_and_a_value_is_refused_in_one_line(text):
    with pytest.raises(UserError, match=r"^[^\n]*key=value[^\n]*$"):
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
    (tmp_path / "packed.gguf").touch()
    assert assemble(None, ["model=packed.gguf"], folder=tmp_path).model == str(tmp_path.resolve() / "packed.gguf")
    config = assemble(None, ["survey=a/b.jsonl", "model=weights", "run.output-dir=out"], folder=tmp_path)
    paths = [tmp_path.resolve() / name for name in ("a/b.jsonl", "weights", "out")]
    assert [config.survey, config.model, config.run.output_dir] == [str(path) for path in paths]
    assert assemble(None, ["model=" + "x" * 9000], folder=tmp_path).model == "x" * 9000  # no folder's name
    (tmp_path / "smollm2").mkdir()  # where somebody has unpacked it, say
    assert assemble(None, ["model=smollm2"], folder=tmp_path).model == "smollm2"
    plain = assemble(None, ["model=org/name"], folder=tmp_path)
    assert (plain.survey, plain.model, plain.run.cache_dir) == ("generated", "org/name", "")
    assert plain.run.output_dir == str(tmp_path.resolve() / "runs")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("seed = ", "not valid TOML"),
        ("seed = " + "[" * 9999, "not valid TOML"),
        ("seed = " + "1" * 9999, "not valid TOML"),
        ("[ppo.more]\nseed = 1\n", "[ppo.more] is too deep"),
        ("[[ppo]]\ngamma = 1\n", '"ppo" is a section'),
        ("learning-rate = 1\n", 'is now "ppo.learning-rate"'),
        ("[ppoo]\nclip-range = 1\n", '"ppoo.clip-range"; the nearest is "ppo.clip-range"'),
        ("[ppoo]\n", '"ppoo"'),
        ("[seed]\n", '"seed" must be true or false, a number or text, not a table'),
        ('[ppo]\npreset = "paper"\n', "must come before the first section"),
        ('"ppo.epochs" = 1\n[ppo]\nepochs = 2\n', '"ppo.epochs" is given twice'),
        ("[ppo]\nepochs = 1\n[ppo]\ngamma = 1\n", "not valid TOML"),
        ("seed = [1]\n", '"seed" must be true or false, a number or text, not an array'),
        ("seed = 2026-01-01\n", '"seed" must be true or false, a number or text, not a date'),
    ],
)
def test_bad_config_file_is_named(tmp_path, text, part):
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(UserError) as caught:
        read_toml(file)
    assert str(caught.value).startswith(f"{file}: ")
    assert "\n" not in str(caught.value)
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
