"""The benchmarks: that both sides get the same work, and what the tables say."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from types import SimpleNamespace

import families
import pytest
import torch
import typer
from report_runs import line

from appa_flwr.config import Config
from appa_flwr.core.errors import UserError
from appa_flwr.protocol import formats
from appa_flwr.survey.generate import generate
from experiments.benchmarks import beside_trl, engine, others, sides
from experiments.benchmarks.engine import Prompts, draw_batches
from experiments.benchmarks.models import (
    PAPER_MODELS,
    SMOLLM2,
    matmul_parameters,
    published,
    save_random,
    small_qwen3,
)
from experiments.benchmarks.sides import EOS_ID, PAD_ID, Measured, PeakMemory, Update, Workload
from experiments.pluralllm.protocol import load_problem, recipe
from server_app.models.base import prepare

VOCABULARY = 64


def update(cpu=10.0, *, rollout=2.0, reference=3.0, steps=2):
    return Update(cpu, 2 * cpu, rollout, reference, optimizer_steps=steps)


def batches_of(rollouts, *, prefix=0, updates=0):
    prompts = Prompts(prefix, 3, 18)
    return draw_batches(prompts, vocabulary=VOCABULARY, rollouts=rollouts, updates=updates, seed=2)


def measured(*updates, added=100.0):
    return Measured(list(updates), 500.0, added, policy_change=0.1, value_change=0.1)


@pytest.fixture
def model(tmp_path):
    save_random(small_qwen3(vocabulary=VOCABULARY, hidden=32), tmp_path / "model", seed=0)
    return str(tmp_path / "model")


@pytest.mark.parametrize(("prompt_length", "expected"), [(6, 10), (5, 11), (235, 21), (7, 25), (240, 16)])
def test_a_planned_answer_ends_at_the_next_multiple_of_16(prompt_length, expected):
    assert sides.planned_length(prompt_length) == expected


def test_prompts_share_their_prefix_and_nothing_else():
    batches = draw_batches(Prompts(5, 2, 4), vocabulary=50, rollouts=6, updates=2, seed=1)
    assert [len(batch) for batch in batches] == [6, 6, 6]
    rows = [row for batch in batches for row in batch]
    assert len({tuple(row[:5]) for row in rows}) == 1
    assert {len(row) for row in rows} == {7, 8, 9}
    assert len({tuple(row) for row in rows}) == len(rows)
    assert min(map(min, rows)) > max(PAD_ID, EOS_ID)
    (asked,) = draw_batches(Prompts(5, 2, 4), vocabulary=50, rollouts=6, updates=0, seed=1, answers=3)
    assert asked[0] == asked[1] == asked[2] != asked[3] == asked[4] == asked[5]


@pytest.mark.parametrize("prefix", [0, 20])
def test_our_answers_end_where_planned_and_the_engine_learns(model, prefix):
    # The small batch makes the engine shorten it as rows end; the check of the lengths is `measure`'s own.
    batches = batches_of(8, prefix=prefix, updates=1)
    work = Workload(model, batches, response_length=40, ends=True)
    lengths = work.planned_lengths(1)
    assert len(set(lengths)) > 2
    found = engine.ours(work)
    (only,) = found.updates
    assert only.optimizer_steps == 2
    assert min(found.policy_change, found.value_change) > 1e-6
    assert min(only.rollout, only.reference, only.update) > 0


def test_an_answer_that_does_not_end_is_cut_and_nothing_is_left_on_the_model(model):
    batches = batches_of(4)
    engine_ = engine.make_engine(Workload(model, batches, response_length=30, ends=False))
    with engine.keeping_to_plan(engine_.models.policy(), ends=False):
        planned = engine_.rollout(batches[0]).sequences
    assert planned.mask_JT.sum(1).tolist() == [30] * 4
    assert not torch.isin(planned.response_JT, torch.tensor([PAD_ID, EOS_ID])).any()
    free = engine_.rollout(batches[0] * 8).sequences.response_JT  # 960 tokens, about 15 of each id
    assert (free == EOS_ID).any()


def test_a_wrong_length_is_an_error(model, monkeypatch):
    batches = batches_of(4)
    monkeypatch.setattr(sides, "steer", lambda *_, **__: None)
    with pytest.raises(RuntimeError, match="other lengths than planned"):
        engine.ours(Workload(model, batches, response_length=200, ends=False))


def test_what_is_no_forward_pass_belongs_to_the_update():
    assert update(10.0, rollout=2.0, reference=3.0).update == 5.0


def test_sides_that_did_other_work_are_not_compared():
    beside_trl.check({"ours": [measured(update())], "TRL": [measured(update(cpu=50.0))]})
    idle = [dataclasses.replace(measured(update()), **{name: 0.0}) for name in ("policy_change", "value_change")]
    for other in (measured(update(steps=48)), *idle):
        with pytest.raises(RuntimeError):
            beside_trl.check({"ours": [measured(update())], "TRL": [other]})


def test_the_table_gives_medians_and_their_ratio():
    own = [measured(update(6.0), update(9.0)), measured(update(8.0), added=300.0)]
    trl = [measured(update(16.0, rollout=4.0), added=800.0)] * 2
    lines = beside_trl.ppo_table({"short": {"ours": own, "TRL": trl}}).splitlines()
    cells, stages = ([cell.strip() for cell in lines[n].split("|")[1:-1]] for n in (2, 6))
    assert cells[:4] == ["short", "8.00 (6.00 to 9.00)", "16.00 (16.00 to 16.00)", "0.500"]
    assert cells[7:] == ["200 (100 to 300)", "800 (800 to 800)", "0.250"]
    assert stages == ["short", "2.00", "4.00", "3.00", "3.00", "3.00", "9.00"]


def test_another_trl_is_refused(model, tmp_path):
    work = Workload(model, batches_of(4), response_length=2, ends=False)
    with pytest.raises(UserError, match=r"needs trl==1\.12\.0, found"):
        engine.run_side(sys.executable, "sides.trl", work, scratch=tmp_path, environment={})


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
    trainer = SimpleNamespace(policy_model=policy, value_model=value, optimizer=SimpleNamespace(optimizer=optimizer))
    instruments = sides._Instruments(Workload("", [[[3]], [[3]]], 2, ends=False))
    instruments.instrument(trainer, loop)
    instruments.on_train_begin()
    for _ in range(2):
        with torch.no_grad():
            loop.batch_generation(policy, torch.tensor([[3]]))
            for model in (value, policy):
                loop.forward(model)
                loop.get_reward(model)
        loop.forward(policy)
        (policy(torch.ones(1)) + value(torch.ones(1))).backward()
        optimizer.step()
        instruments.on_step_end()
    found = instruments.recorder.measured()
    (counted,) = found.updates
    assert (counted.seconds, counted.rollout, counted.reference, counted.update) == (15.0, 1.0, 8.0, 6.0)
    assert counted.optimizer_steps == 1
    assert min(found.policy_change, found.value_change) > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="watches the GPU's memory where there is one")
def test_peak_memory_sees_what_came_and_went():
    memory = PeakMemory()
    memory.start()
    block = torch.ones(16 * 2**20)  # 64 MiB
    time.sleep(0.3)  # the watcher looks every few milliseconds
    del block
    assert 50 < memory.stop() < 1000


def test_the_matmul_floor_by_hand():
    # Qwen3, hidden 32, one head of 32: q, k, v, o 4 x 32 x 32; gate, up, down 3 x 32 x 128; 4 layers.
    config = small_qwen3(vocabulary=VOCABULARY, hidden=32)
    assert matmul_parameters(config) == (4 * (4 * 1024 + 3 * 4096), 64 * 32)
    cell = engine.Cell("a", "b", config, Prompts(10, 1, 3), rollouts=2, response_length=5)
    # 10 shared tokens once, 1 + 3 own ones, 10 answered; 3 forward passes and 2 epochs of 2 models there and back
    expected = 2 * (65_536 * 24 * 11 + 2_048 * 10 * 6)
    assert engine.matmul_flops(cell, [[7] * 11, [7] * 13]) == expected


@pytest.mark.parametrize(("name", "millions"), [("gemma-2-2b", 2614), ("Llama-3.2-3B", 3213), ("Qwen3-0.6B", 596)])
def test_the_papers_models_have_their_published_sizes(name, millions):
    config = published(name)
    layers, head = matmul_parameters(config)
    assert config.tie_word_embeddings
    assert (layers + head) / 1e6 == pytest.approx(millions, abs=1)


def test_the_papers_models_need_a_gpu_or_a_small_scale(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(engine, "measure", lambda *_, **__: [])
    with pytest.raises(UserError, match="--scale small"):
        engine.main(paper=True)


def test_smollm2_has_its_published_size():
    layers, head = matmul_parameters(published(SMOLLM2))
    assert (layers + head) / 1e6 == pytest.approx(134.5, abs=0.1)


def test_one_epoch_has_half_the_updates_products():
    cell = engine.smollm2_cells(small=True)[0]
    layers, head = matmul_parameters(cell.model)
    # 20 shared tokens once, 5 own ones, 6 answered; 3 forward passes, and 1 epoch of 2 models there and back
    assert engine.matmul_flops(cell, [[7] * 25]) == 2 * (layers * 31 * 7 + head * 6 * 4)


def test_two_answers_need_their_prompt_once_and_their_mean_no_value_model():
    cell = engine.smollm2_cells(small=True)[1]
    layers, head = matmul_parameters(cell.model)
    # 25 tokens asked, 2 times 6 answered; sampled, referred to, and there and back in 1 epoch
    assert engine.matmul_flops(cell, [[7] * 25] * 2) == 2 * (layers * 37 * 4 + head * 12 * 4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU's path")
def test_a_small_smollm2_goes_the_whole_way_on_two_threads():
    (result,) = engine.measure(engine.smollm2_cells(small=True)[1:2], updates=1, seed=0, threads=2)
    assert engine.table([result]).splitlines()[2].startswith("| SmolLM2-135M | 2 answers a question, bfloat16 |")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU's path")
def test_a_small_paper_model_goes_the_whole_way_in_its_own_process():
    cells = engine.paper_cells(small=True)
    assert {(cell.axis, cell.value) for cell in cells} == {
        (name, prefix) for name in PAPER_MODELS for prefix in (engine.SHARED, engine.PLAIN)
    }
    results = list(engine.measure(cells[:1], updates=1, seed=0))
    row = engine.table(results).splitlines()[2]
    assert row.startswith("| gemma-2-2b | shared prefix |")
    ((_, found, floor),) = results
    assert floor > 0
    assert len(found.updates) == 1


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
    twice = beside_trl.needed(held_out, len(held_out) + 1)
    assert len(twice) == len(held_out) + 1
    assert twice[-1] == held_out[0]


def test_both_sides_of_the_sft_step_compute_one_loss(sft_work):
    config, base, training, _ = sft_work
    own, trl = (beside_trl.measure_sft(side, base, config, training[:16], steps=1) for side in ("ours", "TRL"))
    assert [len(side.cpu) for side in (own, trl)] == [1, 1]
    assert min(*own.cpu, *trl.cpu) > 0
    assert own.loss == pytest.approx(trl.loss, abs=beside_trl.LOSS_GOAL)


def test_the_hand_over_is_held_against_the_base_stored_alike(sft_work):
    config, base, training, held_out = sft_work
    exact, half, packed, half_apart, packed_apart = others.hand_over(base, config, training, held_out)
    assert half.base == half_apart.base != exact.base
    assert packed.base == packed_apart.base != exact.base
    assert exact.gain > 0.1
    assert half_apart.gain == pytest.approx(exact.gain, rel=0.1)
    assert packed_apart.gain > 0


def test_the_sft_tables_hold_what_was_measured():
    own, trl = beside_trl.Side([1.0, 3.0], 900.0, 100.0, 1.5), beside_trl.Side([8.0], 800.0, 400.0, 1.5)
    step = beside_trl.sft_table(own, trl)
    assert "| CPU s a step | 2.0 | 8.0 | 0.25 | at most 0.25 |" in step
    assert "| MiB added | 100 | 400 | 0.25 | at most 0.25 |" in step
    assert "0.0e+00 apart" in step
    ways = [others.HandOver("exact", 2.0, 1.0), others.HandOver("merged", 2.5, 2.25)]
    assert "| merged | 2.5000 | 2.2500 | 0.2500 | 25% |" in others.hand_over_table(ways)


def test_sides_of_different_loss_are_an_error(sft_work, monkeypatch):
    losses = iter((1.5, 1.5001))

    class Here:
        def __init__(self, **_):
            self.loss = next(losses)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def submit(self, *_, **__):
            return self

        def result(self):
            return beside_trl.Side([1.0], 0.0, 1.0, self.loss)

    monkeypatch.setattr(beside_trl, "ProcessPoolExecutor", Here)
    with pytest.raises(RuntimeError, match="loss of one batch"):
        beside_trl.both_sides(None, None, None, steps=1)


def test_pluralllm_s_costs_are_of_what_is_named():
    problem = load_problem("generated", seed=0)
    rows = others.pluralllm_costs(problem, recipe("pluralllm.rounds=1"), seed=0, repeats=1)
    steps, tables, *scorings = (name for name, *_ in rows)
    assert steps == "pretraining, 2 steps of 6 groups"
    assert tables == f"target tables, 6 groups x {len(problem.embedding.option_QK)} questions"
    assert [name.split(", ")[1] for name in scorings] == ["js", "js + wasserstein"]
    assert all(float(took.split()[0]) >= 0 for _, took, _ in rows)


def test_a_command_is_there_for_each_benchmark():
    for app, names in ((beside_trl.app, {"ppo", "sft"}), (others.app, {"pluralllm", "floor", "scale", "hand-over"})):
        assert set(typer.main.get_command(app).commands) == names
