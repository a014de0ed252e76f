import json
from pathlib import Path

import pytest
import report_runs
from report_runs import line

from appa_flwr.errors import UserError
from appa_flwr.run.files import WEIGHTS_FILE, write_config
from experiments import compare

RUNS = {  # rule, seed -> Avg AS and Min AS of PPO
    ("average", 0): (0.90, 0.80),
    ("average", 1): (0.94, 0.82),
    ("min", 0): (0.85, 0.84),
    ("min", 1): (0.87, 0.84),
}
METRICS = ("js", "wasserstein")


def write_run(folder: Path, rule: str, seed: int) -> None:
    rows = []
    for metric in METRICS:
        off = 0.0 if metric == "js" else -0.5  # the other metric must not leak into the table
        for policy, avg, low, form in (
            ("base", 0.5, 0.4, 1.0),
            ("few-shot", 0.55, 0.5, 0.9),
            ("sft", 0.6, 0.5, 1.0),
            ("ppo-do", RUNS[rule, seed][0] - 0.2, 0.5, None),
            ("ppo", *RUNS[rule, seed], 0.75),
            ("uniform", 0.7 + seed / 10, 0.6, None),
            ("ceiling-average", 0.99, 0.9, None),
        ):
            truth = {"avg_as": avg - 0.1, "min_as": low - 0.1, "fi": 1.0, "per_group": {}, "skill": -avg}
            survey = truth if policy == "ppo" else None
            row = {"policy": policy, "metric": metric, "avg_as": avg + off, "min_as": low + off, "fi": 0.99}
            row |= {"fi_readable": 0.97, "readable": 0.25, "skill": 100 * avg}
            rows.append(row | {"format_score": form, "per_group": {}, "survey": survey})
    lines = [line(i, planned=4, fell_back=None if rule == "min" else i < 4) for i in (1, 2, 3, 4)]
    report_runs.write_run(folder, summary=rows, metrics=lines)
    (folder / "report.html").touch()


@pytest.fixture
def launched(monkeypatch):
    runs = []

    def launch(config, *, app_folder):
        runs.append((config.rule, config.seed, config.ppo.num_iterations, config.run.resume))
        write_run(config.run_folder, config.rule, config.seed)
        write_config(config.run_folder, config)
        (config.run_folder / WEIGHTS_FILE).touch()
        return config.run_folder

    monkeypatch.setattr(compare, "launch", launch)
    return runs


def run(output: Path, **changes):
    given = {"rules": ["average", "min"], "seeds": [0, 1], "overrides": ["ppo.num-iterations=7"]} | changes
    return compare.compare(**given, output=output, here=Path(__file__).parent).read_text()


def cells(text: str, policy: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {policy} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_every_rule_runs_with_every_seed_and_the_spread_is_the_sample_s(launched, tmp_path):
    text = run(tmp_path)
    assert sorted(launched) == sorted((rule, seed, 7, False) for rule, seed in RUNS)
    # mean of .90 and .94 is .92; each is .02 away, so the sample deviation is sqrt(2 * .0004 / 1) = .0283
    assert cells(text, "ppo, average")[1:4] == ["2", "0.920 ± 0.028", "0.810 ± 0.014"]
    assert cells(text, "ppo, min")[2:4] == ["0.860 ± 0.014", "0.840 ± 0.000"]
    assert cells(text, "ppo, average")[4:7] == ["92.0 ± 2.8", "0.990 ± 0.000", "0.970 ± 0.000"]  # skill and fairness
    assert cells(text, "ppo, average")[7] == "0.250 ± 0.000"  # readable
    assert cells(text, "ppo, average")[9:12] == ["0.820 ± 0.028", "0.710 ± 0.014", "-0.9 ± 0.0"]  # against the survey
    assert cells(text, "ppo, average")[12] == "0.750 ± 0.000"  # three of four iterations fell back
    assert cells(text, "ppo, min")[12] == "-"  # a rule without a threshold
    assert cells(text, "ppo-do, min")[2] == "0.660 ± 0.014"
    assert cells(text, "few-shot")[1:3] == ["2", "0.550 ± 0.000"]
    # what does not depend on the rule counts once a seed; .7 and .8
    assert cells(text, "uniform")[1:3] == ["2", "0.750 ± 0.071"]
    assert cells(text, "base")[1:3] == ["2", "0.500 ± 0.000"]
    assert cells(text, "uniform")[8] == "-"  # nobody wrote it, so it has no format
    # -.05 and -.07: a mean of -.06 with a standard error of .01, and Student's t of one degree of freedom is 12.706
    assert cells(text, "min - average")[1] == "-0.0600 (-0.1871 to +0.0671)"
    assert (tmp_path / "trade_off.png").stat().st_size > 0


def test_pluralllm_is_trained_once_a_seed_by_the_first_rule(launched, tmp_path):
    run(tmp_path)
    checkpoints = {
        (rule, seed): json.loads((tmp_path / f"{rule}-seed{seed}" / "config.json").read_text())["pluralllm.checkpoint"]
        for rule, seed in RUNS
    }
    first = {seed: str(tmp_path / f"average-seed{seed}" / "pluralllm.safetensors") for seed in (0, 1)}
    assert checkpoints == {("average", 0): "", ("average", 1): "", ("min", 0): first[0], ("min", 1): first[1]}


def test_one_seed_has_no_interval(launched, tmp_path):
    assert "min - average" not in run(tmp_path, seeds=[0])


def test_complete_runs_are_not_repeated_and_one_without_its_end_is_resumed(launched, tmp_path):
    first = run(tmp_path)
    launched.clear()
    assert run(tmp_path) == first
    assert launched == []
    (tmp_path / "min-seed1" / "report.html").unlink()
    with pytest.raises(UserError, match=r"num-iterations = 8"):
        run(tmp_path, overrides=["ppo.num-iterations=8"])
    assert launched == []
    run(tmp_path)
    assert launched == [("min", 1, 7, True)]


def test_a_complete_run_of_an_older_schema_is_not_compared(launched, tmp_path):
    run(tmp_path)
    config = json.loads((tmp_path / "min-seed1" / "config.json").read_text())
    del config["schema"]
    (tmp_path / "min-seed1" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"min-seed1: another version of appa-flwr wrote this run"):
        run(tmp_path)


def test_an_unknown_rule_is_refused_before_any_run(launched, tmp_path):
    with pytest.raises(UserError, match="averge"):
        run(tmp_path, rules=["min", "averge"])
    assert launched == []
