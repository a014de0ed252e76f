"""Keys and their values, and the sources that they come from."""

import tomllib
from datetime import datetime
from pathlib import Path

import pytest
from flwr.common.config import flatten_dict
from small import CASES

from appa_flwr.config import KEYS, SECTIONS, Config
from appa_flwr.config.keys import to_toml_table, valid
from appa_flwr.config.sources import PRESETS, assemble, preset, read_toml, read_words
from appa_flwr.core.errors import UserError

GEMMA = {"model": "google/gemma-2-2b-it"}


@pytest.mark.parametrize(
    "keys",
    [{"policy.tuning": "lora"}, {"ppo.learning-rate": 1e-5}, {"sft.learning-rate": 1e-5}, {"run.phases": "serve"}],
)
def test_whoever_sets_tuning_or_a_step_size_has_chosen(keys):
    assert Config.load({**GEMMA, **keys}).flat().items() >= keys.items()


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("ppo.learning-rate", "1", 1.0),
        ("seed", "42", 42),
        ("run.resume", "true", True),
        ("run-name", 42, "42"),
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


def test_each_key_and_section_has_a_one_line_doc():
    assert valid(KEYS["run.tracker"]).split(", ") == ['""', "tensorboard", "wandb", "trackio"]
    for doc in (*(field.description for field in KEYS.values()), *(section.__doc__ for section in SECTIONS.values())):
        assert doc
        assert "\n" not in doc


def test_a_run_without_a_name_gets_one_that_says_what_it_is():
    config = Config.load({"task": "opa", "rule": "min", "seed": 5, "run.output-dir": "/out"})
    with pytest.raises(UserError, match="run-name"):
        _ = config.run_folder
    named = config.named(datetime(2026, 1, 2, 3, 4, 5))
    assert named.run_folder == Path("/out/opa-min-seed5-20260102-030405")
    assert named.named(datetime(2027, 1, 1)) == named


def test_toml_of_windows(tmp_path):
    (tmp_path / "x.toml").write_bytes('task = "opa"\r\n'.encode("utf-16"))
    assert read_toml(tmp_path / "x.toml") == {"task": "opa"}
    assert read_toml(CASES / "bom.toml")["data.num-questions"] == 60


LORA = "policy.tuning=lora"


def test_the_other_presets_of_the_paper_differ_from_it_only_where_they_say():
    paper = preset("paper")
    assert len(Config.load(paper).group_names) == 8
    others = {name: preset(name) for name in PRESETS if name.startswith("paper-")}
    assert all(set(other) == set(paper) for other in others.values())
    assert {name: {k: v for k, v in other.items() if paper[k] != v} for name, other in others.items()} == {
        "paper-oqa": {"metric": "auto-ordinal", "groups": "", "sft.epochs": 4},
    }


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("task", ["dpa", "opa"])
def test_every_preset_runs_both_tasks_by_the_papers_metric(name, task):
    # Section "Reward Metrics": JS for GLOBALQA, Wasserstein for OQA, Borda for rankings.
    expected = "borda" if task == "opa" else "wasserstein" if name == "paper-oqa" else "js"
    assert assemble([f"preset={name}", f"task={task}"], folder=None).reward_metric == expected


def test_a_word_is_the_text_behind_the_first_sign_without_quotes():
    expected = {"groups": "Nigeria, Egypt", "survey": "data/a=b.jsonl", "run-name": "", "seed": "1\nppo.epochs=5"}
    assert read_words(['groups="Nigeria, Egypt"', *(f"{key}={expected[key]}" for key in expected)]) == expected


def test_later_sources_win_a_preset_those_it_starts_from_files_command_line(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('preset = "paper-oqa"\nseed = 1\n[ppo]\nepochs = 3\n')
    other = tmp_path / "other.toml"
    other.write_text("[ppo]\nepochs = 5\nnum-mini-batches = 3\n")
    config = assemble([str(other), str(file), "seed=2", "seed=4"], folder=tmp_path)
    assert (config.ppo.batch_size, config.ppo.temperature) == (96, 0.6)  # `paper`, where the default is 384 and 1
    assert config.sft.epochs == 4  # `paper-oqa`; `paper` says 1
    # the last file, the only one that has it; `paper` says 2 and 1
    assert (config.ppo.epochs, config.ppo.num_mini_batches) == (3, 3)
    assert config.seed == 4


def test_relative_paths_become_absolute_and_names_stay(tmp_path):
    (tmp_path / "weights").mkdir()
    (tmp_path / "packed.gguf").touch()
    assert assemble(["model=packed.gguf", LORA], folder=tmp_path).model == str(tmp_path.resolve() / "packed.gguf")
    config = assemble(["survey=a/b.jsonl", "model=weights", "run.output-dir=out", LORA], folder=tmp_path)
    paths = [tmp_path.resolve() / name for name in ("a/b.jsonl", "weights", "out")]
    assert [config.survey, config.model, config.run.output_dir] == [str(path) for path in paths]
    assert assemble(["model=" + "x" * 9000, LORA], folder=tmp_path).model == "x" * 9000  # no folder's name
    (tmp_path / "smollm2").mkdir()  # where somebody has unpacked it, say
    assert assemble(["model=smollm2", LORA], folder=tmp_path).model == "smollm2"
    (tmp_path / "there.safetensors").touch()
    config = assemble(["pluralllm.checkpoint=there.safetensors"], folder=tmp_path)
    assert config.pluralllm.checkpoint == str(tmp_path.resolve() / "there.safetensors")
    plain = assemble(["model=org/name", LORA], folder=tmp_path)
    assert (plain.survey, plain.model) == ("generated", "org/name")
    assert plain.run.output_dir == str(tmp_path.resolve() / "runs")
