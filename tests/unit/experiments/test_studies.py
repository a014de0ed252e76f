"""Each study and benchmark as its command runs it, at a tiny size: it ends, and says what must hold."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from public_questions import public_questions
from torch import nn

from appa_flwr.analysis.rules import make
from appa_flwr.core.errors import UserError
from experiments import beside_trl, predictor, rules
from pluralllm.data import GroupData


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_rules_end_below_the_best_and_a_lie_pays_where_weights_follow_it(monkeypatch, tmp_path):
    monkeypatch.setattr(rules, "DISAGREEMENT", (2.0,))
    tried = {"average": make("average"), "appa": make("appa"), "mix": make("mix", worst_share=1.0)}
    monkeypatch.setattr(rules, "RULES", tried)
    monkeypatch.setattr(rules, "QUESTIONS", 16)
    monkeypatch.setattr(rules, "GROUPS", 4)
    rules.main(seeds=2, output=tmp_path)
    frame = pd.read_csv(tmp_path / "rules.csv")
    lowest, mean = (frame.pivot_table(index="seed", columns="rule", values=of) for of in ("min_as", "avg_as"))
    assert (lowest.drop(columns=rules.BEST).max(axis=1) <= lowest[rules.BEST] + 0.01).all()
    pair = lowest["mix"] - lowest["average"]
    assert pair.min() > 0.005 > 0.0 > (mean["mix"] - mean["average"]).max()
    half = 12.7062 * pair.std() / 2**0.5  # of two pairs Student's t has one degree of freedom
    less = f"{pair.mean():+.3f} ({pair.mean() - half:+.3f} to {pair.mean() + half:+.3f})"
    means = [f"{scores['mix'].mean():.3f} ± {scores['mix'].std():.3f}" for scores in (mean, lowest)]
    row = cells((tmp_path / "rules.md").read_text().splitlines()[4])
    assert row[:4] + row[5:] == ["2", "mix", *means, less]

    rules.main(seeds=1, liars=True, output=tmp_path)
    liar = pd.read_csv(tmp_path / "liars.csv").set_index(["rule", "lie"])["liar"]
    gain = {name: liar[name, "half"] - liar[name, rules.HONEST] for name in ("average", "mix")}
    assert gain["mix"] > 0.02 > 0.0 > gain["average"]  # half the reward is half the weight


def test_pluralllm_s_table_has_each_predictor_of_each_part(monkeypatch, capsys):
    monkeypatch.setattr(predictor, "SETTINGS", ("pluralllm.rounds=2",))
    monkeypatch.setattr(predictor, "SIZES", (4,))
    monkeypatch.setattr(predictor, "ROWS", {"residual": ()})
    predictor.main("generated", seeds=1)
    rows = [cells(line) for line in capsys.readouterr().out.splitlines() if line.startswith("|")][2:]
    names = ["residual", "4 context questions", "uniform", "nearest-question", "mean-of-others"]
    assert [row[:2] for row in rows] == [[part, name] for part in ("seen", "unseen") for name in names]
    assert float(rows[0][2][:5]) > float(rows[2][2][:5])  # the uniform answer's
    with pytest.raises(UserError, match="did you mean 'gss'"):
        predictor.main("gs")


def test_the_mean_of_the_others_by_hand():
    """The group itself does not count; a question that no other group has answered gets the uniform answer."""
    table = public_questions(np.zeros((2, 2, 5)), np.ones((2, 2), np.bool_))
    first, second = (np.array([[share, 1.0 - share]] * 2, np.float32) for share in (1.0, 0.25))
    groups = (GroupData("A", np.arange(2), first), GroupData("B", np.arange(1), second[:1]))
    part = predictor.Part(groups, groups)
    means = predictor.baselines(predictor.Problem(table, {predictor.SEEN: part}), part)["mean-of-others"]
    assert [mean_QK.tolist() for mean_QK in means] == [[[0.25, 0.75], [0.5, 0.5]], [[1.0, 0.0], [1.0, 0.0]]]


@pytest.fixture
def in_this_process(monkeypatch):
    """Sides run here, our PPO in the place of TRL's too, which wants an environment of its own; their numbers."""
    measured = []

    def run_side(python, side, work, **more):
        side = beside_trl.our_ppo if side is beside_trl.trl_ppo else side
        measured.append({**side(work, **more), "MiB added": 1.0})  # this process held more before
        return measured[-1]

    monkeypatch.setattr(beside_trl, "run_side", run_side)
    return measured


def test_both_sides_of_ppo_get_the_same_work(monkeypatch, in_this_process, capsys):
    case = beside_trl.Workload(vocabulary=64, prefix=4, shortest=3, longest=9, rollouts=8, ends=True)
    monkeypatch.setattr(beside_trl, "CASES", {"tiny": case})
    beside_trl.main("python")
    ours, trl = in_this_process
    assert ours["steps"] == trl["steps"] == 2 * beside_trl.PPO_EPOCHS  # one update warms up
    assert ours["CPU s"] > 0
    ratio = float(capsys.readouterr().out.splitlines()[0].split()[-1])
    assert ratio == pytest.approx(ours["CPU s"] / trl["CPU s"], abs=6e-3)


def test_both_sides_of_sft_compute_one_loss(monkeypatch, in_this_process):
    case = beside_trl.Workload(vocabulary=64, prefix=20, rollouts=4)
    monkeypatch.setattr(beside_trl, "CASES", {"sft": case})
    beside_trl.main()
    ours, trl = in_this_process
    assert (
        0 < ours["loss"] == pytest.approx(trl["loss"], abs=1e-4)
    )  # apart by dropout in an adapter that hardly learned
    assert ours["steps"] == trl["steps"] == 2


def test_sides_that_did_other_work_are_not_compared(monkeypatch):
    numbers = {"CPU s": 1.0, "MiB added": 1.0}
    monkeypatch.setattr(
        beside_trl, "run_side", lambda python, side, work: {**numbers, "steps": 2 if side is beside_trl.trl_ppo else 4}
    )
    monkeypatch.setattr(beside_trl, "CASES", {"tiny": beside_trl.Workload(vocabulary=64)})
    with pytest.raises(RuntimeError, match="tiny"):
        beside_trl.main("python")


@pytest.mark.parametrize("ends", [False, True])
def test_an_answer_that_ends_has_10_to_25_tokens(ends):
    head = nn.Linear(1, 8)
    with beside_trl.answer_lengths(SimpleNamespace(get_output_embeddings=lambda: head), ends=ends):
        ends_TJ = torch.stack([head(torch.zeros(64, 1)).argmax(1) == beside_trl.EOS_ID for _ in range(60)])
    assert ends_TJ.any(0).tolist() == [ends] * 64
    length_J = ends_TJ.int().argmax(0) + 1
    if ends:
        assert 10 <= length_J.min() < length_J.max() <= 25
