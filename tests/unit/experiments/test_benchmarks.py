"""The benchmarks: that both sides get the same work, and what the tables say."""

from __future__ import annotations

import gc
import json
import mmap
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import families
import pandas as pd
import pytest
import torch
from peft import LoraConfig, get_peft_model
from report_runs import line
from transformers import AutoModelForCausalLM

from appa_flwr.config import Config
from appa_flwr.core.errors import UserError
from appa_flwr.protocol import formats
from appa_flwr.survey.generate import generate
from experiments.benchmarks import beside_trl, engine, sides
from experiments.benchmarks.engine import Cell, matmul_parameters, published, save_random, small_qwen3
from experiments.benchmarks.sides import EOS_ID, PAD_ID, PeakMemory, Workload
from server_app.models.base import prepare

VOCABULARY = 64
SMALL = Workload(vocabulary=VOCABULARY, prefix=0, shortest=3, longest=18, rollouts=4, updates=0)


def updates(side, *totals, case="short", rollout=2.0, steps=2, added=100.0, policy=0.1, value=0.1):
    rows = [{"rollout": rollout, "reference": 3.0, "update": t - rollout - 3.0, "total": t} for t in totals]
    same = {"steps": steps, "added": added, "policy": policy, "value": value, "side": side, "case": case}
    return pd.DataFrame(rows).assign(**same)


@pytest.fixture
def model(tmp_path):
    save_random(small_qwen3(VOCABULARY, 32), tmp_path / "model")
    return str(tmp_path / "model")


@pytest.mark.parametrize(("prompt_length", "expected"), [(6, 10), (5, 11), (235, 21), (7, 25), (240, 16)])
def test_a_planned_answer_ends_at_the_next_multiple_of_16(prompt_length, expected):
    assert sides.planned_length(prompt_length) == expected


def test_prompts_share_their_prefix_and_nothing_else():
    work = Workload(vocabulary=50, prefix=5, shortest=2, longest=4, rollouts=6)
    assert [len(batch) for batch in work.batches] == [6, 6, 6]
    rows = [row for batch in work.batches for row in batch]
    assert len({tuple(row[:5]) for row in rows}) == 1
    assert {len(row) for row in rows} == {7, 8, 9}
    assert len({tuple(row) for row in rows}) == len(rows)
    assert min(map(min, rows)) > max(PAD_ID, EOS_ID)
    asked = replace(work, answers=3).batches[0]
    assert asked[0] == asked[1] == asked[2] != asked[3] == asked[4] == asked[5]


@pytest.mark.parametrize("prefix", [0, 20])
def test_our_answers_end_where_planned_and_the_engine_learns(model, prefix):
    # The small batch makes the engine shorten it as rows end; the check of the lengths is the recorder's own.
    work = replace(SMALL, model=model, prefix=prefix, rollouts=8, updates=1, response_length=40, ends=True)
    assert len(set(work.planned_lengths(1))) > 2
    (only,) = engine.ours(work)
    assert only["steps"] == 2
    assert min(only["policy"], only["value"]) > 1e-6
    assert min(only["rollout"], only["reference"], only["update"]) > 0
    assert only["rollout"] + only["reference"] + only["update"] == pytest.approx(only["total"])


def test_an_answer_that_does_not_end_is_cut_and_nothing_is_left_on_the_model(model):
    work = replace(SMALL, model=model, response_length=30)
    engine_, (prompts,) = engine.make_engine(work), work.batches
    with sides.keeping_to_plan(engine_.models.policy(), ends=False):
        planned = engine_.rollout(prompts).sequences
    assert planned.mask_JT.sum(1).tolist() == [30] * 4
    assert not torch.isin(planned.response_JT, torch.tensor([PAD_ID, EOS_ID])).any()
    free = engine_.rollout(prompts * 8).sequences.response_JT  # 960 tokens, about 15 of each id
    assert (free == EOS_ID).any()


def test_a_wrong_length_is_an_error(model, monkeypatch):
    monkeypatch.setattr(sides, "steer", lambda *_, **__: None)
    with pytest.raises(RuntimeError, match="other lengths than planned"):
        engine.ours(replace(SMALL, model=model, response_length=200))


def test_sides_that_did_other_work_are_not_compared():
    own = updates("ours", 10.0)
    beside_trl.check(pd.concat([own, updates("TRL", 50.0)]))
    for wrong in ({"steps": 48}, {"policy": 0.0}, {"value": 0.0}):
        with pytest.raises(RuntimeError):
            beside_trl.check(pd.concat([own, updates("TRL", 10.0, **wrong)]))


def test_the_table_gives_medians_and_their_ratio():
    trl = updates("TRL", 16.0, 16.0, rollout=4.0, added=800.0)
    own = [updates("ours", 6.0, 9.0), updates("ours", 8.0, added=400.0), updates("ours", 8.0, added=200.0)]
    table = beside_trl.compared(pd.concat([trl, *own]), ["total", "added", "rollout"])
    head, _, cells = ([cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines())
    assert head[:4] == ["case", "total, ours", "total, TRL", "total, ratio"]
    assert cells == ["short", "8.0", "16.0", "0.5", "150.0", "800.0", "0.19", "2.0", "4.0", "0.5"]


@pytest.mark.long
def test_another_trl_is_refused(model):
    with pytest.raises(UserError, match=r"needs trl==1\.12\.0, found"):
        engine.run_side(sys.executable, "sides.trl", replace(SMALL, model=model))


def test_the_functions_of_trl_s_loop_are_timed_by_what_they_do(monkeypatch):
    """Generating takes 1 s, a pass 2 s and a score 4 s, that of a reward model included, by a clock that they move."""
    clock = [0.0]
    monkeypatch.setattr(sides, "now", lambda: clock[0])

    def taking(seconds, found=None):
        def call(*_, **__):
            clock[0] += seconds
            return found

        return call

    policy, value = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    policy.generate = taking(0.0)
    answered = torch.tensor([[3, 5, 5, PAD_ID]]), None
    loop = SimpleNamespace(batch_generation=taking(1.0, answered), forward=taking(2.0), get_reward=taking(4.0))
    optimizer = torch.optim.SGD([*policy.parameters(), *value.parameters()], lr=0.1)
    trainer = SimpleNamespace(policy_model=policy, value_model=value)
    recorder = sides.instrument(trainer, loop, Workload(rollouts=1, response_length=2))
    recorder.on_train_begin()
    for _ in range(2):
        with torch.no_grad():
            loop.batch_generation(policy, torch.tensor([[3]]))
            for model in (value, policy):
                loop.forward(model)
                loop.get_reward(model)
        loop.forward(policy)
        (policy(torch.ones(1)) + value(torch.ones(1))).backward()
        optimizer.step()
        recorder.on_step_end()
    (counted,) = recorder.measured()
    assert [counted[name] for name in ("total", "rollout", "reference", "update", "steps")] == [15.0, 1.0, 8.0, 6.0, 1]
    assert min(counted["policy"], counted["value"]) > 0


def test_trl_s_answers_end_where_planned(model):
    """By the same hooks as ours; prompts are padded on the left, and a new one starts counting again."""
    work = replace(SMALL, model=model, ends=True)
    policy = get_peft_model(AutoModelForCausalLM.from_pretrained(model), LoraConfig(target_modules=["q_proj"]))
    loop = SimpleNamespace(batch_generation=None, forward=None, get_reward=None)
    sides.instrument(SimpleNamespace(policy_model=policy, value_model=policy), loop, work)
    (prompts,) = work.batches
    longest = max(map(len, prompts))
    query_JL = torch.tensor([[PAD_ID] * (longest - len(prompt)) + prompt for prompt in prompts])
    for _ in range(2):
        found = policy.generate(
            input_ids=query_JL, attention_mask=query_JL != PAD_ID, max_new_tokens=60, do_sample=True, top_k=0
        )
        assert (found[:, longest:] != PAD_ID).sum(1).tolist() == work.planned_lengths(0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="watches the GPU's memory where there is one")
def test_peak_memory_sees_what_came_and_went():
    gc.collect()  # what others left behind is not to be freed while it watches
    memory = PeakMemory()
    memory.start()
    with mmap.mmap(-1, 256 * 2**20) as block:  # the heap has pages that are resident already
        block.write(bytes(len(block)))
        time.sleep(0.3)  # the watcher looks every few milliseconds
    assert 200 < memory.stop() < 1000


def test_the_matmul_floor_by_hand():
    # Qwen3, hidden 32, one head of 32: q, k, v, o 4 x 32 x 32; gate, up, down 3 x 32 x 128; 4 layers.
    config = small_qwen3(VOCABULARY, 32)
    assert matmul_parameters(config) == (4 * (4 * 1024 + 3 * 4096), 64 * 32)
    work = Workload(prefix=10, shortest=2, longest=2, rollouts=2, response_length=5)
    # 10 shared tokens once, 2 + 2 own ones, 10 answered; 3 forward passes and 2 epochs of 2 models there and back
    assert engine.matmul_flops(Cell("a", "b", config, work)) == 2 * (65_536 * 24 * 11 + 2_048 * 10 * 6)


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        # 20 shared tokens once, 5 own ones, 6 answered; 3 forward passes, and 1 epoch of 2 models there and back
        (1, lambda layers, head: layers * 31 * 7 + head * 6 * 4),
        # 25 tokens asked, 2 times 6 answered; sampled, referred to, and there and back in 1 epoch
        (2, lambda layers, head: layers * 37 * 4 + head * 12 * 4),
    ],
)
def test_one_epoch_has_half_the_updates_products_and_a_question_s_mean_no_value_model(answers, expected):
    cell = engine.scaled_down(engine.smollm2_cells()[answers - 1])
    work = replace(cell.work, shortest=5, longest=5, rollouts=answers)
    assert engine.matmul_flops(cell._replace(work=work)) == 2 * expected(*matmul_parameters(cell.model))


@pytest.mark.parametrize(
    ("name", "millions"),
    [("gemma-2-2b", 2614), ("Llama-3.2-3B", 3213), ("Qwen3-0.6B", 596), (engine.SMOLLM2, 134.5)],
)
def test_models_have_their_published_sizes(name, millions):
    config = published(name)
    assert config.tie_word_embeddings
    assert sum(matmul_parameters(config)) / 1e6 == pytest.approx(millions, abs=1)


def test_the_papers_models_need_a_gpu_or_a_small_scale(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(engine, "measure", lambda *_, **__: pytest.fail("measured"))
    with pytest.raises(UserError, match="--scale small"):
        engine.main(paper=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU's path")
@pytest.mark.long
@pytest.mark.parametrize(("option", "cells", "threads"), [("real", "smollm2_cells", 2), ("paper", "paper_cells", 1)])
def test_a_small_model_goes_the_whole_way_in_its_own_process(monkeypatch, tmp_path, capsys, option, cells, threads):
    cell = getattr(engine, cells)()[1]
    monkeypatch.setattr(engine, cells, lambda: [cell])
    engine.main(**{option: True}, scale="small", updates=1, threads=threads, out=tmp_path)
    assert f"| {cell.varied} | {cell.to} |" in capsys.readouterr().out
    (row,) = json.loads((tmp_path / "results.json").read_text())
    assert min(row[name] for name in ("floor", "total", "wall")) > 0


def test_the_wait_for_the_federation_is_summed_over_iterations(tmp_path):
    # an iteration has 1 s of rollouts, 0.5 s of waiting, 0.25 s of the reference pass and 2.25 s of the update
    lines = [json.dumps(line(number, planned=2, fell_back=None)) for number in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert engine.federation_wait(tmp_path) == (1.0, 8.0)
    (tmp_path / "metrics.jsonl").write_text("")
    for nothing in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(UserError, match=r"metrics\.jsonl is not there, or holds no iteration yet"):
            engine.federation_wait(nothing)


@pytest.fixture(scope="module")
def sft_work(tmp_path_factory):
    """A tiny chat model on the generated survey: config, base, training rows and held-out rows."""
    survey = generate(num_questions=40, num_groups=3, seed=0)
    folder = families.save("qwen3", tmp_path_factory.mktemp("sft") / "model", survey.questions)
    given = {
        "model": str(folder),
        "policy.prompt-style": "full",
        "policy.max-sequence-length": 2000,
        "policy.compute-dtype": "float32",
        "lora.rank": 4,
        "sft.batch-size": 4,
        "sft.steps": 8,
        "sft.learning-rate": 1e-2,
    }
    config = Config.load({**beside_trl.KEYS, **given})
    base = prepare(config, ())
    return config, base, *beside_trl.rows_of(survey, base, config)


def test_sft_s_rows_hold_a_vote_a_question_and_share_none(sft_work):
    _, base, training, held_out = sft_work
    assert len(training) + len(held_out) == 40
    assert not {tuple(prompt) for prompt, _ in training} & {tuple(prompt) for prompt, _ in held_out}
    for _, answer in (*training, *held_out):
        assert sorted(formats.parse("dpa", answer, answer.count(",") + 1).prediction)[-2:] == [0.0, 1.0]
        assert beside_trl.completion(base, answer)[-1] == base.end_id


@pytest.mark.long
def test_both_sides_of_the_sft_step_compute_one_loss(sft_work):
    config, base, training, _ = sft_work
    steps = pd.concat(beside_trl.measure_sft(side, base, config, training[:16], updates=1) for side in ("ours", "TRL"))
    assert len(steps) == 2
    assert steps["total"].min() > 0
    assert beside_trl.loss_apart(steps) <= beside_trl.LOSS_GOAL
    with pytest.raises(RuntimeError, match="loss of one batch"):
        beside_trl.loss_apart(steps.assign(loss=[1.5, 1.5001]))


def test_rows_of_sft_are_taken_again_where_there_are_too_few(sft_work, monkeypatch):
    config, base, *_ = sft_work
    monkeypatch.setattr(beside_trl, "prepare", lambda *_: base)
    monkeypatch.delenv(beside_trl.SURVEYS, raising=False)
    keys = [f"model={config.model}", "sft.batch-size=200", "sft.gradient-accumulation-steps=1"]
    given, _, rows, _ = beside_trl.prepared("compact", None, keys, steps=2)
    assert given.sft.steps == 2
    assert given.policy.prompt_style == "compact"
    assert len(rows) == 400
    again = rows.index(rows[0], 1)
    assert rows[again:] == rows[: 400 - again]
