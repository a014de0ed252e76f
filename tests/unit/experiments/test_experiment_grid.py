"""The grid: which trials a file asks for and what they share, each run once, and tables whose numbers are known."""

from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import report_runs

from appa_flwr.core.errors import UserError
from appa_flwr.core.files import lock
from appa_flwr.launch.terminal import RUN_FAILED, RunFailed
from appa_flwr.run import pair_scores
from appa_flwr.run.resume import claim
from appa_flwr.run.run_files import write_config
from experiments.grid import __main__ as command
from experiments.grid import grid_results, plan, runner
from server_app.ppo_phase import baseline_config

TEXT = """
seeds = [0, 1]
rules = ["average", "appa"]
keys = { ppo.num-iterations = 7 }
datasets = { globalqa = { data.num-questions = 40 }, two = { data.num-questions = 50 } }
tasks = { dpa = { task = "dpa" } }
models = { gemma-2-2b = { sft.steps = 20 }, other = { sft.steps = 30 } }
"""
ENDED = '{"phase": "report", "step": 1, "of": 1, "message": "", "seconds_left": null}\n'
# What made-up runs score: method or rule -> reward of each group on each question.
REWARDS = {"sft": 0.6, "uniform": 0.65, "option-list": 0.72, "average": 0.7, "appa": 0.75}


def write_run(config) -> None:
    folder = config.run_folder
    folder.mkdir(parents=True, exist_ok=True)
    write_config(folder, config)
    (folder / "progress.jsonl").write_text(ENDED)
    as_rows = partial(pair_scores.as_rows, groups=("a", "b"), questions=[f"q{n}" for n in range(20)])
    values = {"ppo": REWARDS[config.rule], **{name: REWARDS[name] for name in ("sft", "uniform", "option-list")}}
    rows, scores = [], []
    for method, value in values.items():
        # group b is .1 worse, all is .02 better in seed 1; the last half b has not answered, and a is better at
        reward_GQ = value + 0.02 * config.seed - np.array([[0.0], [0.1]]) * np.ones((2, 20))
        scores.append(as_rows(method, "js", pair_scores.PREDICTIONS, reward_GQ))
        reward_GQ = reward_GQ - 0.1
        reward_GQ[:, 10:] = [[0.9], [np.nan]]
        scores.append(as_rows(method, "js", pair_scores.SURVEY, reward_GQ))
        rows.append(report_runs.row(method, value - 0.05, value - 0.1))
    pair_scores.put(folder, pd.concat(scores))
    report_runs.write_run(folder, summary=rows)
    for rule in config.rules[1:]:
        write_run(baseline_config(config, rule, folder / rule))


def test_a_grid_is_planned_run_once_however_often_it_is_killed_and_told_with_its_numbers(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("appa_flwr.core.files.sync", lambda file: None)  # a disk takes a second for a run's files
    monkeypatch.setattr("appa_flwr.core.files.sync_folder", lambda folder: None)
    file, out, started = tmp_path / "grid.toml", tmp_path / "out", list[tuple[str, bool]]()
    killed_at, fails = 0, ()

    def launch(config, **_):  # in Flower's place
        started.append((config.run_name, config.run.resume))
        claim(config).release()
        if len(started) == killed_at:  # before its server has begun
            raise KeyboardInterrupt
        if config.run_name.startswith(fails):
            raise RunFailed("the disk is full\nand more")
        write_run(config)

    monkeypatch.setattr(command, "launch", launch)

    def planned(text=TEXT, **given):
        file.write_text(text)
        return plan.trials(plan.read_grid(file, **given), out, here=tmp_path)

    def names(trials):
        return {(c.dataset, c.model, c.seed): c.name for c in trials}

    # PluralLLM is trained once for a dataset and seed; each trial trains a policy by every rule.
    trials = planned()
    assert [trial.needs is None for trial in trials] == [True, False] * 4
    for trial in filter(lambda one: one.needs, trials):
        assert trials.index(trial.needs) < trials.index(trial)
        assert (trial.needs.dataset, trial.needs.seed) == (trial.dataset, trial.seed)
    (last,) = (c for c in trials if (c.dataset, c.model, c.seed) == ("two", "other", 1))
    config, first_trial = last.config, last.needs
    assert (config.rules, config.seed) == (("appa", "average"), 1)
    assert (config.data.num_questions, config.sft.steps, config.ppo.num_iterations) == (50, 30, 7)
    assert config.pluralllm.checkpoint == str(first_trial.folder / "pluralllm.safetensors")

    # A model with other keys of PluralLLM trains its own.
    apart = planned(TEXT.replace("other = { sft.steps = 30 }", "other = { sft.steps = 30, pluralllm.rounds = 3 }"))
    assert all(trial.needs is None for trial in apart)

    # A trial's name changes with its keys, with what it needs and with the code; a mistake is one line.
    first = names(trials)
    assert len(set(first.values())) == 8
    changed = names(planned(TEXT.replace("num-questions = 50", "num-questions = 60")))
    assert {key for key in first if first[key] != changed[key]} == {key for key in first if key[0] == "two"}
    changed = names(planned(TEXT.replace("sft.steps = 20", "sft.steps = 21")))
    assert set(changed.values()).isdisjoint(first.values())  # the others take their PluralLLM
    with monkeypatch.context() as patched:
        patched.setattr(plan, "code_version", lambda: "another")
        assert set(names(planned()).values()).isdisjoint(first.values())
    with pytest.raises(UserError, match=r"grid\.toml: unknown table 'rule': did you mean 'rules'"):
        planned(TEXT.replace("rules", "rule"))
    with pytest.raises(UserError, match=r"grid\.toml: unknown table 'last'"):
        planned(TEXT + "\n[last]\n")
    with pytest.raises(UserError, match=r"grid\.toml: trial two-dpa-gemma-2-2b-s0: "):
        planned(TEXT.replace("num-questions = 50", "num-questions = -1"))
    with pytest.raises(UserError, match=r"grid\.toml: seeds\.0: "):
        planned(TEXT.replace("[0, 1]", '["0"]'))
    assert {c.config.rules for c in planned(TEXT.replace('"average", ', ""))} == {("appa",)}
    assert {c.config.ppo.num_iterations for c in planned(last={"ppo.num-iterations": 9})} == {9}
    command.main(file, output=out, dry_run=True)
    assert capsys.readouterr().out.splitlines() == [f"{trial.name}: to do" for trial in trials]

    # Killed twice, it goes on with what it was in; a failed trial stops only those that need it, and is tried again.
    write_run(trials[0].config)
    for killed_at in (1, 4):  # noqa: B007 `launch` reads it
        with pytest.raises(KeyboardInterrupt):
            command.main(file, output=out)
    fails = ("globalqa-dpa-gemma-2-2b-s1",)
    held = lock(out / runner.LOCKS / first_trial.name)  # another process runs it, and ends while this one waits

    def pause(seconds):
        write_run(first_trial.config)
        held.release()

    monkeypatch.setattr(runner.time, "sleep", pause)
    with monkeypatch.context() as patched:
        patched.setattr(grid_results.pictures, "trade_off", lambda *_, **__: b"")  # it takes long to draw
        with pytest.raises(SystemExit, match=f"^{RUN_FAILED}$"):
            command.main(file, output=out)
    failed = dict(line.split(": ", 2)[1:] for line in capsys.readouterr().err.splitlines())
    failing = first["globalqa", "gemma-2-2b", 1]
    assert failed == {failing: "the disk is full", first["globalqa", "other", 1]: f"needs {failing}"}
    fails = ()
    command.main(file, output=out, dry_run=True)
    assert sum(line.endswith(": to do") for line in capsys.readouterr().out.splitlines()) == 2
    command.main(file, output=out)
    starts, resumed = [n for n, _ in started], [n for n, again in started if again]
    assert set(starts) == {trial.name for trial in trials} - {trials[0].name, first_trial.name}
    assert (len(starts), resumed[:2]) == (6 + 2 + 1, [starts[0], starts[3]])

    # Groups have .7 and .6 by `average` in seed 0, .02 more in seed 1; differences are alike in all questions.
    frame = pd.read_csv(out / "results.csv").query("dataset == 'globalqa' and model == 'gemma-2-2b' and metric == 'js'")
    found = frame.fillna({"less": ""}).set_index(["method", "less", "against", "measure"])[["value", "low", "high"]]
    expected = {
        ("average", "", "predictions", "Avg AS"): (0.66, 0.65, 0.67),
        ("sft", "", "survey", "Min AS"): (0.41, 0.40, 0.42),
        ("appa", "average", "predictions", "Min AS"): (0.05, 0.05, 0.05),
        ("appa", "uniform", "predictions", "Min AS"): (0.10, 0.10, 0.10),
        ("appa", "option-list", "predictions", "Avg AS"): (0.03, 0.03, 0.03),
    }
    for at, numbers in expected.items():
        assert tuple(found.loc[at]) == pytest.approx(numbers), at
    text = (out / "results.md").read_text()
    assert "| appa | average | js | predictions | **+0.050 (+0.050 to +0.050)** |" in text.replace("\xa0", " ")
    assert "| Seeds | paper, Avg AS | paper, FI |" in text
    assert "| 2 | 0.839 | 0.9" in text  # AVERAGE, with FI to four decimals
    paper = frame.set_index(["method", "against", "measure"])["paper"]
    assert paper["average", "predictions", "Avg AS"].max() == 0.839  # AVERAGE in the paper's table
    assert len(list((out / "plots").iterdir())) == 4

    monkeypatch.setenv("APPA_SURVEYS", str(tmp_path))
    for name, count in {"tiny": 2, "default": 5, "blocs": 10, "paper": 12}.items():
        file = Path(plan.__file__).parents[1] / f"{name}.toml"
        assert len(plan.trials(plan.read_grid(file), out, here=tmp_path)) == count
