import pytest

from appa_flwr.config import Config
from appa_flwr.config.sources import PRESETS, assemble, preset, read_words

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
