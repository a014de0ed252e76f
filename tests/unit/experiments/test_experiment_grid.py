"""The grid: which trials a file asks for and what they share, each run once, and tables whose numbers are known."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import report_runs

from appa_flwr.core.errors import UserError
from appa_flwr.core.files import lock
from appa_flwr.launch.checks import claim_run_folder
from appa_flwr.launch.endings import RunFailed
from appa_flwr.run import pair_scores
from appa_flwr.run.records import Iteration, SummaryRow
from appa_flwr.run.run_files import write_config
from experiments.grid import grid_results, pictures, plan, runner

HERE = Path(__file__).parent
EXPERIMENTS = Path(plan.__file__).parents[1]

TEXT = """
seeds = [0, 1]
baseline = "average"
[keys]
ppo.num-iterations = 7
[datasets.one]
data.num-questions = 40
[datasets.two]
data.num-questions = 50
[tasks.dpa]
task = "dpa"
[models.tiny]
policy.base-steps = 20
[models.other]
policy.base-steps = 30
[rules.average]
[rules.open]
rule = "appa"
appa.fairness-threshold = 2.0
[hours.all]
predictor = 0.5
[hours.tiny]
sft = 1
rule = 2
[scale.small]
ppo.num-iterations = 1
"""


@pytest.fixture
def grid_file(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr("appa_flwr.core.files.sync", lambda file: None)  # a disk takes a second for a run's files
    monkeypatch.setattr("appa_flwr.core.files.sync_folder", lambda folder: None)
    path = tmp_path / "grid.toml"
    path.write_text(TEXT)
    return path


def planned(path: Path, tmp_path: Path, **given):
    grid = plan.read_grid(path, **given)
    return grid, plan.trials(grid, tmp_path / "out", here=HERE)


def test_what_rules_share_is_made_once(grid_file, tmp_path):
    _, trials = planned(grid_file, tmp_path)
    assert [sum(trial.stage == stage for trial in trials) for stage in plan.STAGES] == [4, 8, 16]
    assert len({trial.name for trial in trials}) == 28
    for trial in trials:
        needed = {"predictor": None, "sft": "predictor", "rule": "sft"}[trial.stage]
        assert (trial.needs and trial.needs.stage) == needed
        if trial.needs:
            assert trials.index(trial.needs) < trials.index(trial)
            assert (trial.needs.dataset, trial.needs.seed) == (trial.dataset, trial.seed)
    rule = next(c for c in trials if (c.dataset, c.model, c.rule, c.seed) == ("two", "other", "open", 1))
    config = rule.config
    assert (config.rule, config.appa.fairness_threshold, config.seed) == ("appa", 2.0, 1)
    assert (config.data.num_questions, config.policy.base_steps, config.ppo.num_iterations) == (50, 30, 7)
    assert config.sft.checkpoint == str(rule.needs.folder / "sft-model")
    assert config.pluralllm.checkpoint == str(rule.needs.needs.folder / "pluralllm.safetensors")
    assert rule.needs.config.pluralllm.checkpoint == config.pluralllm.checkpoint
    assert [trial.config.run.phases for trial in (rule, rule.needs, rule.needs.needs)] == ["all", "sft", "pluralllm"]
    assert [trial.seed for trial in trials] == [0] * 14 + [1] * 14


def test_a_trial_s_name_changes_with_its_keys_with_what_it_needs_and_with_the_code(grid_file, tmp_path, monkeypatch):
    def names(**given):
        return {(c.stage, c.dataset, c.model, c.rule, c.seed): c.name for c in planned(grid_file, tmp_path, **given)[1]}

    first = names()
    assert names() == first
    grid_file.write_text(TEXT.replace("data.num-questions = 50", "data.num-questions = 60"))
    changed = names()
    assert {key[1] for key in first if first[key] != changed[key]} == {"two"}
    assert all(first[key] != changed[key] for key in first if key[1] == "two")
    grid_file.write_text(TEXT.replace("policy.base-steps = 30", "policy.base-steps = 31"))
    assert {key[2] for key, name in names().items() if name != first[key]} == {"other"}
    grid_file.write_text(TEXT)
    assert set(names(scale="small").values()).isdisjoint(first.values())
    monkeypatch.setattr(plan, "code_version", lambda: "another")
    assert set(names().values()).isdisjoint(first.values())


def test_names_cut_their_axes_and_leave_the_others(grid_file, tmp_path):
    _, trials = planned(grid_file, tmp_path, only=["two", "open"])
    rules = [(trial.dataset, trial.model, trial.rule, trial.seed) for trial in trials if trial.stage == "rule"]
    assert rules == [("two", m, "open", s) for s in (0, 1) for m in ("tiny", "other")]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[rules.open]", "[rule.open]", r"grid\.toml: unknown table 'rule': did you mean 'rules'"),
        ("[tasks.dpa]\ntask = ", "[keys2]\nx = ", r"unknown table 'keys2': did you mean 'keys'"),
        ("ppo.num-iterations = 7", "ppo.iterations = 7", r"\[keys\]: .*ppo\.iterations"),
        ("seeds = [0, 1]", "seeds = [0, 1.5]", r"grid\.toml: seeds\.1: .*integer"),
        ('baseline = "average"', 'baseline = "mean"', "unknown baseline 'mean': valid are average, open"),
        ("data.num-questions = 50", 'survey = "${NO_SUCH_THING}/x.jsonl"', "names 'NO_SUCH_THING', which is not set"),
        ("sft = 1", "stf = 1", r"hours\.tiny\.stf.*: .*'predictor', 'sft' or 'rule'"),
        ('task = "dpa"', 'task = "dpa"\nmetric = "borda"', r"trial one-predictor-s0|trial one-dpa-tiny-sft-s0: metric"),
        ("[keys]", "[keys", "cannot be read as a grid file"),
        ("[tasks.dpa]\ntask", "[keys.task]\nx", "tasks: Field required"),
    ],
)
def test_a_mistake_in_the_file_is_one_line(grid_file, tmp_path, old, new, message):
    grid_file.write_text(TEXT.replace(old, new, 1))
    with pytest.raises(UserError, match=message):
        planned(grid_file, tmp_path)


@pytest.mark.parametrize(
    ("given", "message"),
    [({"scale": "tiny"}, "unknown scale 'tiny'"), ({"only": ["opn"]}, "unknown name 'opn': did you mean 'open'")],
)
def test_unknown_names_and_scales_are_refused(grid_file, tmp_path, given, message):
    with pytest.raises(UserError, match=message):
        planned(grid_file, tmp_path, **given)


# What made-up runs score: method or rule -> reward of each group on each question, by seed.
QUESTIONS = [f"q{n}" for n in range(20)]
REWARDS = {"base": 0.4, "sft": 0.6, "uniform": 0.65, "option-list": 0.72, "average": 0.7, "open": 0.75}


def write_run(config) -> None:
    """As a run of the phases that the config asks for leaves its folder."""
    folder = config.run_folder
    folder.mkdir(parents=True, exist_ok=True)
    write_config(folder, config)
    step = {"phase": "report", "step": 1, "of": 1, "message": "", "seconds_left": None}
    (folder / "progress.jsonl").write_text(json.dumps(step) + "\n")
    if config.run.phases == "pluralllm":
        return
    as_rows = partial(pair_scores.as_rows, groups=("a", "b"), questions=QUESTIONS)
    rule = "open" if config.appa.fairness_threshold == 2.0 else config.rule
    values = {"ppo": REWARDS[rule]} if config.run.phases == "all" else {k: REWARDS[k] for k in ("base", "sft")}
    values |= {method: REWARDS[method] for method in ("uniform", "option-list")}
    rows, scores = [], []
    for method, value in values.items():
        # group b is .1 worse; one question more in one seed, and b has no survey answer to the last half
        reward_GQ = value + 0.02 * config.seed - np.array([[0.0], [0.1]]) * np.ones((2, 20))
        for against in (pair_scores.PREDICTIONS, pair_scores.SURVEY):
            if against == pair_scores.SURVEY:
                reward_GQ = reward_GQ - 0.1
                reward_GQ[1, 10:] = np.nan
            scores.append(as_rows(method, "js", against, reward_GQ))
        rows.append(report_runs.row(method, value - 0.05, value - 0.1))
    pair_scores.put(folder, pd.concat(scores))
    lines = [report_runs.line(i, planned=2, fell_back=None) for i in (1, 2)] if config.run.phases == "all" else []
    report_runs.write_run(folder, summary=rows, metrics=lines)


class Launcher:
    """Stands in for Flower: writes what a run leaves, or fails, or is killed."""

    def __init__(self) -> None:
        self.started: list[tuple[str, bool]] = []
        self.fails: set[str] = set()
        self.killed_at = 10**9

    def __call__(self, config) -> None:
        self.started.append((config.run_name, config.run.resume))
        claim_run_folder(config)
        if len(self.started) == self.killed_at:  # before its server has begun
            raise KeyboardInterrupt
        if any(part in config.run_name for part in self.fails):
            raise RunFailed("the disk is full\nand more")
        write_run(config)


def go(grid, trials, tmp_path, launcher):
    return runner.run_trials(grid, trials, tmp_path / "out", launch=launcher, say=lambda text: None)


def test_killed_and_started_again_no_trial_is_repeated(grid_file, tmp_path):
    grid, trials = planned(grid_file, tmp_path)
    launcher = Launcher()
    for killed_at in (3, 10):
        launcher.killed_at = killed_at
        with pytest.raises(KeyboardInterrupt):
            go(grid, trials, tmp_path, launcher)
    launcher.killed_at = 10**9
    outcome = go(grid, trials, tmp_path, launcher)
    assert outcome.done.keys() == {trial.name for trial in trials}
    assert not outcome.failed
    starts = [name for name, _ in launcher.started]
    resumed = [name for name, again in launcher.started if again]
    assert len(starts) == len(trials) + 2
    assert resumed == [starts[2], starts[9]]  # what was killed goes on
    assert go(grid, trials, tmp_path, launcher).done == outcome.done
    assert len(launcher.started) == len(starts)


def test_a_run_that_ended_before_its_mark_was_written_is_not_repeated(grid_file, tmp_path):
    grid, trials = planned(grid_file, tmp_path, only=["one", "tiny"])
    write_run(trials[0].config)
    launcher = Launcher()
    go(grid, trials, tmp_path, launcher)
    assert trials[0].name not in [name for name, _ in launcher.started]


def test_a_failed_trial_stops_only_those_that_need_it_and_is_tried_again(grid_file, tmp_path):
    grid, trials = planned(grid_file, tmp_path)
    launcher = Launcher()
    launcher.fails = {"one-dpa-tiny-sft-s0", "two-dpa-other-open-s1"}
    outcome = go(grid, trials, tmp_path, launcher)
    why = {name.rsplit("-", 1)[0]: reason.rsplit("-", 1)[0] for name, reason in outcome.failed.items()}
    assert why == {
        "one-dpa-tiny-sft-s0": "the disk is full",
        "one-dpa-tiny-average-s0": "needs one-dpa-tiny-sft-s0",
        "one-dpa-tiny-open-s0": "needs one-dpa-tiny-sft-s0",
        "two-dpa-other-open-s1": "the disk is full",
    }
    assert len(outcome.done) == len(trials) - 4
    launcher.fails, launcher.started = set(), []
    assert not go(grid, trials, tmp_path, launcher).failed
    assert len(launcher.started) == 4


def test_a_trial_that_another_process_runs_is_left_to_it(grid_file, tmp_path, monkeypatch):
    grid, trials = planned(grid_file, tmp_path, only=["one", "tiny", "average"])
    launcher, output = Launcher(), tmp_path / "out"
    (output / runner.LOCKS).mkdir(parents=True)
    held = lock(output / runner.LOCKS / trials[1].name)

    def pause(seconds):  # the other one ends while this one waits
        write_run(trials[1].config)
        runner.mark(output, trials[1]).write_text('{"seconds": 60}')
        held.release()

    monkeypatch.setattr(runner.time, "sleep", pause)
    outcome = go(grid, trials, tmp_path, launcher)
    assert outcome.done[trials[1].name] == 60
    assert trials[1].name not in [name for name, _ in launcher.started]
    assert outcome.done.keys() == {trial.name for trial in trials}


def test_hours_are_measured_where_they_can_be(grid_file, tmp_path):
    grid, trials = planned(grid_file, tmp_path)
    said = runner.hours(grid, trials, {})
    of = {trial.name: trial for trial in trials}
    assert {(of[name].stage, of[name].model, value) for name, value in said.items() if value == value} == {
        ("predictor", "", 0.5),
        ("sft", "tiny", 1),
        ("rule", "tiny", 2),
    }
    first = next(trial for trial in trials if (trial.stage, trial.model) == ("rule", "other"))
    measured = runner.hours(grid, trials, {first.name: 5400.0})
    assert {value for name, value in measured.items() if (of[name].stage, of[name].model) == ("rule", "other")} == {1.5}
    text = runner.plan_text(grid, trials, tmp_path / "out")
    # 4 predictors of half an hour, 4 SFT of one and 8 rules of two
    assert "28 trials (4 predictor, 8 sft, 16 rule), 0 done; left: 22.0 h and those of unknown time" in text


def test_the_tables_have_the_numbers_of_the_runs_and_the_paper_s_beside_those_of_its_models(grid_file, tmp_path):
    grid_file.write_text(TEXT.replace("datasets.one", "datasets.globalqa").replace("models.tiny", "models.gemma-2-2b"))
    grid, trials = planned(grid_file, tmp_path, only=["globalqa", "gemma-2-2b"])
    assert grid_results.write_results(grid, trials, tmp_path / "out") is None
    go(grid, trials, tmp_path, Launcher())
    path = grid_results.write_results(grid, trials, tmp_path / "out")
    frame = pd.read_csv(path.with_suffix(".csv"))

    def value(method, against, measure, less=None, column="value"):
        lines = frame[
            (frame["method"] == method) & (frame["against"] == against) & (frame["measure"] == measure)
            & (frame["less"].isna() if less is None else frame["less"] == less) & (frame["metric"] == "js")
        ]  # fmt: skip
        (found,) = lines[column]
        return found

    # groups have .7 and .6 in seed 0, .02 more in seed 1
    assert value("average", "predictions", "Avg AS") == pytest.approx(0.66)
    assert value("average", "predictions", "Min AS") == pytest.approx(0.61)
    assert value("sft", "survey", "Min AS") == pytest.approx(0.41)
    assert value("average", "predictions", "Avg AS", column="seeds") == 2
    assert value("average", "predictions", "Avg AS", column="low") == pytest.approx(0.65)
    assert value("average", "predictions", "Avg AS", column="high") == pytest.approx(0.67)
    # paired: .05 in every seed, question and group
    for end in ("value", "low", "high"):
        assert value("open", "predictions", "Min AS", less="average", column=end) == pytest.approx(0.05)
        assert value("open", "survey, common", "Min AS", less="uniform", column=end) == pytest.approx(0.10)
        assert value("open", "predictions", "Avg AS", less="option-list", column=end) == pytest.approx(0.03)
    assert value("average", "predictions", "format") == pytest.approx(0.95)
    text = path.read_text()
    assert "| open - average | js | predictions | **+0.050 (+0.050 to +0.050)** |" in text
    assert "[paper 0.839, -0.179]" in text  # ours .66; the paper's table has .839 for AVERAGE
    tex = path.with_suffix(".tex").read_text()
    assert "average & " in tex
    assert "0.660" in tex
    assert len(list((tmp_path / "out" / "plots").iterdir())) == 4  # two groups are too few for a spider plot
    scaled = dataclasses.replace(grid, last={"model": "tiny"})
    assert "paper" not in grid_results.write_results(scaled, trials, tmp_path / "out").read_text()


def test_the_paper_s_figures_are_those_of_its_tables():
    figures = grid_results._paper()
    assert len({key[:4] for key in figures}) == 60
    # from "tab:combined-value-ppo-base-sft" and "tab:combined-order-ppo-base-sft"
    assert figures["globalqa", "dpa", "llama-3.2-3b", "appa", "cosine", "Min AS"] == 0.885
    assert figures["oqa", "dpa", "Qwen3-0.6B-Instruct", "min", "wasserstein", "FI"] == 0.9926
    assert figures["oqa", "opa", "gemma-2-2b", "average", "borda", "Avg AS"] == 0.518
    assert figures["globalqa", "opa", "llama-3.2-3b", "base", "borda", "format"] == 0.771
    # the paper's own oddity: on GLOBALQA's distributions MIN has .0300 to .0302 more fairness than AVERAGE in 8 of 9
    gaps = [
        round(figures[key] - figures[(*key[:3], "average", *key[4:])], 4)
        for key in figures
        if key[:2] == ("globalqa", "dpa") and key[3] == "min" and key[5] == "FI"
    ]
    assert sum(0.03 <= gap <= 0.0302 for gap in gaps) == 8


@pytest.mark.parametrize(("name", "trials"), [("tiny.toml", 10), ("small.toml", 180), ("paper.toml", 50)])
def test_the_grids_that_come_with_it_can_be_planned(name, trials, tmp_path, monkeypatch):
    monkeypatch.setenv("APPA_SURVEYS", str(tmp_path))
    for scale in ("", "small") if name == "paper.toml" else ("",):
        grid = plan.read_grid(EXPERIMENTS / name, scale=scale)
        assert len(plan.trials(grid, tmp_path, here=HERE)) == trials


def test_pictures_show_the_runs():
    rows = {
        "sft": [row_of("sft", 0.90, 0.60)],
        "average": [row_of("ppo", 0.97, 0.70), row_of("ppo", 0.99, 0.74)],
    }
    (axes,) = report_runs.figure_of(pictures.trade_off, rows, metric="js", title="").axes
    lines = {line.get_label(): line.get_xydata() for line in axes.lines}
    assert lines["SFT"][:, 1].tolist() == [0.60, 0.60]
    (dot,) = [line.get_xydata() for line in axes.lines if line.get_marker() == "o"]
    assert dot[0] == pytest.approx([0.98, 0.72])
    runs = [tuple(iteration(i, value) for i in (1, 2)) for value in (0.4, 0.6)]
    picked = report_runs.figure_of(
        pictures.by_iteration, {"min": runs}, lambda line: line.fairness_index, axis="", title=""
    )
    (curve,) = picked.axes[0].lines
    assert curve.get_xydata() == pytest.approx(np.array([[1, 0.5], [2, 0.5]]))


def row_of(method, fi, min_as):
    return SummaryRow.model_validate({**report_runs.row(method, 0.8, min_as), "fi": fi})


def iteration(number, fairness):
    return Iteration.model_validate({**report_runs.line(number, planned=2, fell_back=None), "fairness_index": fairness})
