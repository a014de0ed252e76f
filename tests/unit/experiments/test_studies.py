"""Each study and benchmark as its command runs it, at a tiny size: it ends, and says what must hold."""

from __future__ import annotations

import families
import pandas as pd
import pytest
import report_runs
from whole_loop import InLine

from appa_flwr.analysis.aggregation import make
from appa_flwr.survey.generate import generate
from experiments import rules, study
from experiments.benchmarks import beside_trl, engine, scale
from experiments.pluralllm import report as tables


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_rules_end_below_the_best_and_a_lie_pays_where_weights_follow_it(monkeypatch, tmp_path):
    monkeypatch.setattr(rules, "DISAGREEMENT", (2.0,))
    tried = {"average": make("average"), "appa": make("appa"), "mix": make("mix", worst_share=1.0)}
    monkeypatch.setattr(study, "RULES", tried)
    given = {"visits": 600, "questions": 16, "groups": 4, "output": tmp_path}
    rules.main(seeds=2, **given)
    frame = pd.read_csv(tmp_path / "rules.csv")
    lowest, mean = (frame.pivot_table(index="seed", columns="rule", values=of) for of in ("min_as", "avg_as"))
    assert (lowest.drop(columns=rules.BEST).max(axis=1) <= lowest[rules.BEST] + 0.01).all()
    pair = lowest["mix"] - lowest["average"]
    assert pair.min() > 0.005 > 0.0 > (mean["mix"] - mean["average"]).max()
    of_rule = frame[frame["rule"] == "mix"][["fi", "avg_as", "min_as"]].mean()
    half = 12.7062 * pair.std() / 2**0.5  # of two pairs Student's t has one degree of freedom
    less = f"{pair.mean():+.3f} ({pair.mean() - half:+.3f} to {pair.mean() + half:+.3f})"
    row = cells((tmp_path / "rules.md").read_text().splitlines()[4])
    assert row[:5] + row[6:7] == ["2", "mix", *(f"{value:.3f}" for value in of_rule), less]
    assert (tmp_path / "rules.png").stat().st_size > 0

    rules.main(seeds=1, liars=True, **given)
    liar = pd.read_csv(tmp_path / "liars.csv").set_index(["rule", "lie"])["liar"]
    gain = {name: liar[name, "half"] - liar[name, rules.HONEST] for name in ("average", "mix")}
    assert gain["mix"] > 0.02 > 0.0 > gain["average"]  # half the reward is half the weight


def test_pluralllm_s_table_has_each_predictor_of_each_part(monkeypatch, capsys):
    recipe, small = tables.recipe, ("pluralllm.rounds=2",)
    monkeypatch.setattr(tables, "recipe", lambda *given: recipe(*small, *given))
    monkeypatch.setattr(tables, "TABLES", {"ours": (tables.DEFAULT, tables.TableRow("pooled", central=True))})
    monkeypatch.setattr(tables, "SIZES", (4,))
    tables.main("ours", datasets="generated", seeds="0")
    out = capsys.readouterr().out
    rows = [cells(line) for line in out.splitlines() if line.startswith("|")]
    names = [tables.DEFAULT.name, "pooled", "4 context questions", "uniform", "nearest-question", "mean-of-others"]
    assert [row[0] for row in rows] == ["", "---", *names] * 3
    assert float(rows[2][1][:5]) > float(rows[5][1][:5])  # the uniform answer's


def test_both_sides_of_ppo_get_the_same_work(monkeypatch, tmp_path):
    """With our engine in TRL's place too, which wants an environment of its own."""
    monkeypatch.setattr(beside_trl, "run_side", lambda python, side, work: pd.DataFrame(engine.ours(work)))
    case = {"vocabulary": 64, "prefix": 4, "shortest": 3, "longest": 9, "response_length": 20, "ends": True}
    monkeypatch.setattr(beside_trl, "CASES", {"tiny": case})
    beside_trl.ppo("python", updates=1, repeats=1, out=tmp_path)
    ours, theirs = (pd.read_json(tmp_path / "results.json").query("side == @side").iloc[0] for side in ("ours", "TRL"))
    assert ours["steps"] == theirs["steps"] == 2
    assert min(ours["policy"], ours["value"]) > 1e-6
    ratio = float(cells((tmp_path / "results.md").read_text().splitlines()[2])[3])
    assert ratio == pytest.approx(ours["total"] / theirs["total"], abs=6e-3)


def test_both_sides_of_sft_compute_one_loss(monkeypatch, tmp_path):
    monkeypatch.setattr(beside_trl, "ProcessPoolExecutor", InLine)
    monkeypatch.delenv(beside_trl.SURVEYS, raising=False)
    model = families.save("qwen3", tmp_path / "model", generate(num_questions=40, num_groups=3, seed=0).questions)
    keys = ("policy.max-sequence-length=2000", "policy.compute-dtype=float32", "policy.lora-rank=4", "sft.batch-size=2")
    beside_trl.sft_step("compact", updates=1, overrides=[f"model={model}", *keys], out=tmp_path)
    ours, theirs = pd.read_json(tmp_path / "results.json").set_index("side").loc[["ours", "TRL"], "loss"]
    assert 0 < ours == pytest.approx(theirs, abs=beside_trl.LOSS_GOAL)


def test_the_engine_s_phases_have_a_floor_and_a_run_its_wait(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(engine, "run_side", lambda python, side, work, **_: pd.DataFrame(engine.ours(work)))
    engine.main(real=True, scale="small", updates=1, out=tmp_path)
    assert (pd.read_json(tmp_path / "results.json")[["rollout", "reference", "update", "wall", "floor"]] > 0).all(
        axis=None
    )
    # Qwen3, hidden 32, one head of 32: q, k, v, o 4 x 32 x 32; gate, up, down 3 x 32 x 128; 4 layers. 10 shared tokens
    # once, 2 + 2 own ones, 10 answered; 3 forward passes and 2 epochs of 2 models there and back
    work = engine.Workload(prefix=10, shortest=2, longest=2, rollouts=2, response_length=5)
    floor = engine.matmul_flops(engine.Cell("a", "b", engine.small_qwen3(64, 32), work))
    assert floor == 2 * (4 * (4 * 1024 + 3 * 4096) * 24 * 11 + 64 * 32 * 10 * 6)
    capsys.readouterr()
    lines = [report_runs.line(number, planned=2, fell_back=None) for number in (1, 2)]
    engine.main(run=report_runs.write_run(tmp_path / "run", metrics=lines))
    assert capsys.readouterr().out == "waited 1.0 s for the federation in 8.0 s of iterations: 12.5%\n"


def test_a_simulation_s_growth_is_of_what_is_named(monkeypatch, tmp_path, capsys):
    def launch(config, **_):
        assert (config.data.num_groups, config.ppo.num_iterations) == (3, scale.ITERATIONS)
        phases = [{"phase": name, "seconds": 22.0, "peak_mib": 812.5} for name in ("pluralllm", "targets")]
        lines = [report_runs.line(number, planned=2, fell_back=None) for number in (1, 2)]
        report_runs.write_run(config.run_folder, config=config.flat(), metrics=lines, phases=phases)

    monkeypatch.setattr(scale, "launch", launch)
    scale.main(sizes="3", output=tmp_path)
    # 22 s of PluralLLM in two rounds, iterations of 4 s with half a second of waiting
    assert cells(capsys.readouterr().out.splitlines()[2]) == ["3", "11.0", "22.0", "0.5", "4.0", "812.5"]
