from __future__ import annotations

import pytest

from appa_flwr.config import Config
from appa_flwr.config.sources import PRESETS, assemble, preset, read_toml, read_words
from appa_flwr.core.errors import UserError

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


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("seed=3", ("seed", "3")),
        ("ppo.learning-rate = 1e-3", ("ppo.learning-rate", "1e-3")),
        ('groups="Nigeria,Egypt"', ("groups", "Nigeria,Egypt")),
        ("groups=Nigeria, Egypt", ("groups", "Nigeria, Egypt")),
        ("survey=data/a=b.jsonl", ("survey", "data/a=b.jsonl")),
        ("run-name=2026-01-01", ("run-name", "2026-01-01")),
        ("run-name=", ("run-name", "")),
        ("ppo={clip-range=1}", ("ppo", "{clip-range=1}")),
        ("seed=1\nppo.clip-range=0.5", ("seed", "1\nppo.clip-range=0.5")),
    ],
)
def test_override_is_the_text_behind_the_sign_without_quotes(text, expected):
    assert read_words([text]) == dict([expected])


@pytest.mark.parametrize(
    ("words", "part"),
    [(["seed=1", "a.toml"], "files first"), (["seed"], "key=value"), (["=3"], "key=value"), ([""], "key=value")],
)
def test_words_are_files_and_then_keys(words, part):
    with pytest.raises(UserError, match=rf"^[^\n]*{part}[^\n]*$"):
        read_words(words)


def test_later_sources_win_a_preset_those_it_starts_from_files_command_line(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('preset = "paper-oqa"\nseed = 1\n[ppo]\nepochs = 3\n')
    other = tmp_path / "other.toml"
    other.write_text("[ppo]\nepochs = 5\nnum-mini-batches = 3\n")
    config = assemble([str(other), str(file), "seed=2", "seed=4"], folder=tmp_path)
    assert (config.ppo.batch_size, config.ppo.temperature) == (96, 0.6)  # `paper`, where the default is 384 and 1
    assert config.sft.epochs == 4  # `paper-oqa`; `paper` says 1
    assert (config.ppo.epochs, config.ppo.num_mini_batches) == (
        3,
        3,
    )  # the last file, the only one; `paper` says 2 and 1
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
    plain = assemble(["model=org/name", LORA], folder=tmp_path)
    assert (plain.survey, plain.model) == ("generated", "org/name")
    assert plain.run.output_dir == str(tmp_path.resolve() / "runs")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("seed = ", "not valid TOML"),
        ("seed = " + "[" * 9999, "not valid TOML"),
        ("seed = " + "1" * 9999, "not valid TOML"),
        ("[ppo.more]\nseed = 1\n", '"ppo.more"'),
        ("[[ppo]]\nclip-range = 1\n", '"ppo" is a section'),
        ("[ppoo]\nclip-range = 1\n", '"ppoo.clip-range"; the nearest is "ppo.clip-range"'),
        ("[ppoo]\n", '"ppoo"'),
        ("[seed]\n", '"seed" must be true or false, a number or text, not a table'),
        ('[ppo]\npreset = "paper"\n', "must come before the first section"),
        ('"ppo.epochs" = 1\n[ppo]\nepochs = 2\n', '"ppo.epochs" is given twice'),
        ("[ppo]\nepochs = 1\n[ppo]\nclip-range = 1\n", "not valid TOML"),
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
    with pytest.raises(UserError, match=", ".join(PRESETS)):
        assemble(["preset=papr"], folder=tmp_path)


@pytest.mark.parametrize("key", ["survey", "model", "run.output-dir"])
def test_a_path_that_leads_nowhere_is_one_line(tmp_path, key):
    with pytest.raises(UserError, match=f'^{key} = "~nosuchuser/x"') as caught:
        assemble([f"{key}=~nosuchuser/x"], folder=tmp_path)
    assert "\n" not in str(caught.value)


def test_a_checkpoint_that_is_not_there_is_told_before_anything_starts(tmp_path):
    (tmp_path / "there.safetensors").touch()
    found = assemble(["pluralllm.checkpoint=there.safetensors"], folder=tmp_path)
    assert found.pluralllm.checkpoint == str(tmp_path / "there.safetensors")
    with pytest.raises(UserError, match=r"^pluralllm\.checkpoint = .*/none\.safetensors"):
        assemble(["pluralllm.checkpoint=none.safetensors"], folder=tmp_path)
    (tmp_path / "sft-model").mkdir()
    assert assemble(["sft.checkpoint=sft-model"], folder=tmp_path).sft.checkpoint == str(tmp_path / "sft-model")
    with pytest.raises(UserError, match=r"^sft\.checkpoint = .*/there\.safetensors"):
        assemble(["sft.checkpoint=there.safetensors"], folder=tmp_path)
