"""The grid's plan, runs and numbers, and each study at a tiny size."""

from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import report_runs
from fakes import catalogue_of
from small import cases

from appa_flwr.analysis.intervals import bootstrap
from appa_flwr.analysis.rule_choice import make
from appa_flwr.core.errors import UserError
from appa_flwr.core.files import lock
from appa_flwr.launch.terminal import RUN_FAILED, RunFailed
from appa_flwr.protocol.rewards import js
from appa_flwr.run import pair_scores
from appa_flwr.run.resume import claim
from appa_flwr.run.schema import write_config
from appa_flwr.survey.generate import generate
from appa_flwr.survey.split import split_questions
from experiments import liars, limits, predictor, rules, run_cost, scale
from experiments.grid import __main__ as command
from experiments.grid import grid_results, plan
from pluralllm.data import GroupData
from server_app.ppo_phase import baseline_config

TEXT = """
seeds = [0, 1]
rules = ["average", "appa"]
keys = { ppo.num-iterations = 7 }
datasets = { globalqa = { data.num-questions = 40 } }
tasks = { dpa = { task = "dpa" } }
models = { gemma-2-2b = { sft.steps = 20 }, other = { sft.steps = 30 } }
"""
# What made-up runs score: method or rule -> reward of each group on each question.
REWARDS = {"sft": 0.6, "uniform": 0.65, "average": 0.7, "appa": 0.75}


def write_run(config) -> None:
    folder = config.run_folder
    folder.mkdir(parents=True, exist_ok=True)
    write_config(folder, config)
    report_runs.progressed(folder, "report")
    as_rows = partial(pair_scores.as_rows, groups=("a", "b"), questions=[f"q{n}" for n in range(20)])
    values = {"ppo": REWARDS[config.rule], **{name: REWARDS[name] for name in ("sft", "uniform")}}
    scores = []
    for method, value in values.items():
        # group b is .1 worse, all is .02 better in seed 1; the last half b has not answered, and a is better at
        reward_GQ = value + 0.02 * config.seed - np.array([[0.0], [0.1]]) * np.ones((2, 20))
        scores.append(as_rows(method, "js", pair_scores.PREDICTIONS, reward_GQ))
        reward_GQ = reward_GQ - 0.1
        reward_GQ[:, 10:] = [[0.9], [np.nan]]
        scores.append(as_rows(method, "js", pair_scores.SURVEY, reward_GQ))
    pair_scores.put(folder, pd.concat(scores))
    rules = {rule: {"parameters": {"margin": "0.25"}} for rule in config.rules}
    summary = [report_runs.row(name, at - 0.05, at - 0.1) for name, at in values.items()]
    report_runs.write_run(folder, summary=summary, rules=rules)
    for rule in config.rules[1:]:
        write_run(baseline_config(config, rule, folder / rule))


def planned(folder, text=TEXT, **given):
    (folder / "grid.toml").write_text(text)
    return plan.trials(plan.read_grid(folder / "grid.toml", **given), folder / "out", here=folder)


def test_trials_share_their_predictor_and_are_named_by_all_that_decides_their_numbers(tmp_path, monkeypatch):
    def changed(old="", new=""):
        names = {(one.model, one.seed): one.name for one in planned(tmp_path, TEXT.replace(old, new))}
        return {model for model, seed in names if names[model, seed] != first[model, seed]}

    # PluralLLM is trained once for a dataset and seed; each trial trains a policy by every rule.
    trials = planned(tmp_path)
    first = {(one.model, one.seed): one.name for one in trials}
    assert [one.needs and one.needs.name for one in trials] == [None, trials[0].name, None, trials[2].name]
    config = trials[3].config
    assert (config.rules, config.seed) == (("appa", "average"), 1)
    assert (config.data.num_questions, config.sft.steps, config.ppo.num_iterations) == (40, 30, 7)
    assert config.pluralllm.checkpoint == str(trials[2].folder / "pluralllm.safetensors")
    apart = planned(tmp_path, TEXT.replace("other = { sft", "other = { pluralllm.rounds = 3, sft"))
    assert not any(one.needs for one in apart)

    assert changed() == set()
    assert changed("sft.steps = 30", "sft.steps = 31") == {"other"}
    assert changed("sft.steps = 20", "sft.steps = 21") == {"gemma-2-2b", "other"}  # which takes its PluralLLM
    with monkeypatch.context() as patched:
        patched.setattr(plan, "code_version", lambda: "another")
        assert changed() == {"gemma-2-2b", "other"}
    for old, new, says in cases("wrong_inputs")["grids"]["rows"]:
        with pytest.raises(UserError, match=rf"grid\.toml: {says}"):
            planned(tmp_path, TEXT.replace(old, new))
    assert {one.config.rules for one in planned(tmp_path, TEXT.replace('"average", ', ""))} == {("appa",)}
    without = TEXT.replace('rules = ["average", "appa"]', "")
    chosen = planned(tmp_path, without, last={"rule": "mix", "baseline-rules": "min"})
    assert {one.config.rules for one in chosen} == {("mix", "min")}
    assert {one.config.rules for one in planned(tmp_path, without)} == {("appa", "average")}
    assert {one.config.ppo.num_iterations for one in planned(tmp_path, last={"ppo.num-iterations": 9})} == {9}
    monkeypatch.setenv("APPA_SURVEYS", str(tmp_path))
    for file in Path(plan.__file__).parents[1].glob("*.toml"):
        assert plan.trials(plan.read_grid(file), tmp_path / "out", here=tmp_path), file


def test_a_killed_grid_goes_on_and_ends_with_its_numbers(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("appa_flwr.core.files.sync", lambda file: None)  # a disk takes a second for a run's files
    monkeypatch.setattr("appa_flwr.core.files.sync_folder", lambda folder: None)
    trials, out, started = planned(tmp_path), tmp_path / "out", list[tuple[str, bool]]()
    names = [one.name for one in trials]
    failing = [names[2]]

    def launch(config, **_):  # in Flower's place
        started.append((config.run_name, config.run.resume))
        claim(config).release()
        if len(started) == 1:  # before its server has begun
            raise KeyboardInterrupt
        if config.run_name in failing:
            raise RunFailed("the disk is full\nand more")
        write_run(config)

    monkeypatch.setattr(command, "launch", launch)
    with pytest.raises(KeyboardInterrupt):
        command.main(tmp_path / "grid.toml", output=out)
    assert str(out) in capsys.readouterr().err  # where it continues
    # It goes on with what it was in; a failed trial stops only those that need it, and is tried again.
    with monkeypatch.context() as patched:
        patched.setattr(grid_results.pictures, "trade_off", lambda *_, **__: b"")  # it takes long to draw
        with pytest.raises(SystemExit, match=f"^{RUN_FAILED}$"):
            command.main(tmp_path / "grid.toml", output=out)
    failed = [line.split(": ", 2)[1:] for line in capsys.readouterr().err.splitlines()]
    assert failed == [[names[2], "the disk is full"], [names[3], f"needs {names[2]}"]]
    failing.clear()
    held = lock(out / command.LOCKS / names[3])  # another process runs it, and ends while this one waits
    monkeypatch.setattr(command.time, "sleep", lambda seconds: write_run(trials[3].config) or held.release())
    command.main(tmp_path / "grid.toml", output=out)
    resumed = [False, True, False, False, True]
    assert started == list(zip([names[0], *names[:3], names[2]], resumed, strict=True))

    # Groups have .7 and .6 by `average` in seed 0, .02 more in seed 1; differences are alike in all questions.
    frame = pd.read_csv(out / "results.csv").query("model == 'gemma-2-2b' and metric == 'js'")
    found = frame.fillna({"less": ""}).set_index(["method", "less", "against", "measure"])[["value", "low", "high"]]
    for at, numbers in {
        ("average", "", "predictions", "Avg AS"): (0.66, 0.65, 0.67),
        ("sft", "", "survey", "Min AS"): (0.41, 0.40, 0.42),
        ("appa", "average", "predictions", "Min AS"): (0.05, 0.05, 0.05),
        ("appa", "uniform", "predictions", "Min AS"): (0.10, 0.10, 0.10),
    }.items():
        assert tuple(found.loc[at]) == pytest.approx(numbers), at
    page = (out / "results.md").read_text()
    assert "| 2 | 0.839 | 0.9" in page  # AVERAGE in the paper's table
    lines = [line for line in page.splitlines() if line.endswith("| margin = 0.25 |")]
    assert len(lines) == 2 * 2  # models and rules
    assert "0.610\xa0±0.014 (0.600\xa0to\xa00.620)" in page  # .6, .62: sd .02 / sqrt(2)
    assert "**+0.050" in page  # a difference has a sign, and is bold where the interval excludes 0
    assert len(list((out / "plots").iterdir())) == 4


def test_rules_end_below_the_best_and_a_lie_pays_where_weights_follow_it(monkeypatch, tmp_path):
    tried = {"average": make("average"), "mix": make("mix", worst_share=1.0)}
    for name, value in {"DISAGREEMENT": (2.0,), "RULES": tried, "QUESTIONS": 16, "GROUPS": 4}.items():
        monkeypatch.setattr(rules, name, value)
    rules.main(seeds=2, output=tmp_path)
    frame = pd.read_csv(tmp_path / "rules.csv")
    lowest = frame.pivot_table(index="seed", columns="rule", values="min_as")
    assert (lowest.drop(columns=rules.BEST).max(axis=1) <= lowest[rules.BEST] + 0.01).all()
    ends = [[rules.ends(2.0, rule, seed)[1] for rule in ("mix", "average")] for seed in (0, 1)]
    found = bootstrap(ends)["Min AS"].uncorrected()
    spread = f"{(lowest['mix'] - lowest['average']).mean():+.3f} ({found.low:+.3f} to {found.high:+.3f})"
    assert spread in (tmp_path / "rules.md").read_text()
    rules.main(seeds=1, liars=True, output=tmp_path)
    liar = pd.read_csv(tmp_path / "liars.csv").set_index(["rule", "lie"])["liar"]
    gain = {name: liar[name, "half"] - liar[name, rules.HONEST] for name in tried}
    assert gain["mix"] > 0.02 > 0.0 > gain["average"]  # half the reward is half the weight


def test_pluralllm_s_table_has_each_predictor_of_each_part(monkeypatch, capsys):
    for name, value in {"SETTINGS": ("pluralllm.rounds=2",), "SIZES": (4,), "ROWS": {"residual": ()}}.items():
        monkeypatch.setattr(predictor, name, value)
    predictor.main("generated", seeds=1)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")][2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    names = ["residual", "4 context questions", "uniform", "nearest-question", "mean-of-others"]
    assert [row[:2] for row in rows] == [[part, name] for part in ("seen", "unseen") for name in names]
    assert float(rows[0][2][:5]) > float(rows[2][2][:5])  # the uniform answer's


def test_what_limits_a_policy_lies_below_the_best_shared_answers(monkeypatch, capsys):
    small = ("preset=smollm2", "pluralllm.rounds=2", "data.num-questions=60", "data.num-groups=3")
    for name, value in {"RUN": small, "ENCODERS": ("ngrams",), "REAL": {"generated": "generated"}}.items():
        monkeypatch.setattr(limits, name, value)
    limits.main(seeds=1)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")][2:]
    rows = {
        cells[1].strip(): [float(cell.split()[0]) for cell in cells[2:4]] for cells in (x.split("|") for x in lines)
    }
    best = [rows.pop(f"best shared answer, {objective}") for objective in ("average", "min")]
    assert rows.pop("own prediction, ngrams") != rows["mean prediction, ngrams"]  # each group is scored by its own
    assert [*rows] == ["uniform", "option-list", "nearest-questions", "mean prediction, ngrams"]
    assert best[0][0] == pytest.approx(max(avg_as for avg_as, _ in [*rows.values(), *best]), abs=1e-3)
    assert best[1][1] == pytest.approx(max(min_as for _, min_as in [*rows.values(), *best]), abs=1e-3)
    survey = generate(num_questions=60, num_groups=3, seed=0)
    test = set(split_questions(survey.questions, seed=0).test)
    held_out = [[row for key, row in mine.items() if key in test] for mine in survey.answers.values()]
    scores = [np.mean([js(np.ones(len(row)), row, np.ones(len(row), bool)) for row in mine]) for mine in held_out]
    assert rows["uniform"] == pytest.approx([np.mean(scores), min(scores)], abs=6e-4)


def test_the_mean_of_the_others_by_hand():
    table = catalogue_of([2, 2])
    first, second = (np.array([[share, 1.0 - share]] * 2, np.float32) for share in (1.0, 0.25))
    groups = (GroupData("A", np.arange(2), first), GroupData("B", np.arange(1), second[:1]))
    part = predictor.Part(groups, groups)
    means = predictor.baselines(predictor.Problem(table, {predictor.SEEN: part}), part)["mean-of-others"]
    assert [mean_QK.tolist() for mean_QK in means] == [[[0.25, 0.75], [0.5, 0.5]], [[1.0, 0.0], [1.0, 0.0]]]


def test_long_lies_move_pluralllm_less_by_robust_steps_than_by_a_wide_bound(monkeypatch, tmp_path):
    step_GP = np.array([(3, 0), (-3, 0), (0, 4), (0, -4), (0, 100.0)])
    for robust in (liars.geometric_median, liars.CentredClipping()):
        assert np.linalg.norm(robust(step_GP, "ABCDE")[0]) < 2  # the mean is 20 long
    monkeypatch.setattr(liars, "ROUNDS", 1)
    monkeypatch.setattr(liars, "generate", partial(generate, num_questions=40))
    monkeypatch.setattr(liars, "LIES", {"generated": (liars.HONEST, liars.FLIPPED_LONG)})
    few = {name: (*liars.ROWS[name][:2], ("pluralllm.local-steps=2",)) for name in ("FedAvg", "FedAvg, bound 10")}
    monkeypatch.setattr(liars, "ROWS", few)
    liars.main(seeds=1, output=tmp_path)
    table = pd.read_csv(tmp_path / "pluralllm_liars.csv").set_index(["lie", "aggregation"])["others"]
    honest, lying = table[liars.HONEST], table[liars.FLIPPED_LONG]
    assert honest["FedAvg"] == honest["FedAvg, bound 10"]  # no honest step is cut
    assert lying["FedAvg"] != lying["FedAvg, bound 10"] != honest["FedAvg"]


def test_each_part_of_a_run_is_measured(tmp_path):
    scale.prepare(tmp_path, scale.QUESTIONS[0])
    for part in (*scale.NODE, scale.GREETING, scale.ROUND, scale.REWARDS, scale.SCORES):
        found = scale.do(tmp_path, part, 3)
        assert found["CPU s"] > 0
        assert all(found[way] > 0 for way in ("bytes to", "bytes from") if part != scale.SCORES), part


def test_the_cost_of_a_run_counts_processes_that_nobody_waits_for(tmp_path, capsys, monkeypatch):
    """A checkout whose run leaves a process behind that computes for half a second, and returns at once."""
    (package := tmp_path / "busy" / "appa_flwr" / "launch").mkdir(parents=True)
    busy = "import time; end = time.process_time() + 0.5\nwhile time.process_time() < end: pass"
    main = f"import subprocess, sys, time\ndef main():\n    subprocess.Popen([sys.executable, '-c', {busy!r}])\n"
    (package / "cli.py").write_text(main + "    time.sleep(2)\n    return int('seed=3' not in sys.argv)\n")
    cpu, seconds = run_cost.cost(tmp_path / "busy", ["seed=3"])
    assert cpu > 0.5
    assert seconds > 2.0
    with pytest.raises(UserError, match="exit code 1"):
        run_cost.cost(tmp_path / "busy", [])
    monkeypatch.setattr(run_cost, "cost", lambda checkout, keys: (3.0, 7.0) if checkout.name == "busy" else (6.0, 8.0))
    run_cost.main(beside=tmp_path / "busy", times=2)
    assert capsys.readouterr().out.count("| busy | ") == 2
