"""One PPO iteration: what the update may not depend on, and that it learns.

Axis letters: J rollouts, T response tokens.
"""

import math

import numpy as np
import pytest
import torch
from fakes import PREFIX, PROMPTS, ppo_models, scoring, tiny_causal_lm

from appa_flwr.config.sections import PPOSection
from server_app.checkpoint import restore, state_of
from server_app.policy import ppo as engine_module
from server_app.policy.limits import NotFinite
from server_app.policy.ppo import PPOEngine
from server_app.policy.sample import Rollout
from server_app.policy.sequences import Sequences

SETTINGS = PPOSection(
    learning_rate=1e-3,
    batch_size=12,
    num_mini_batches=2,
    warmup_steps=0,
    micro_batch_tokens=1000,
    epochs=2,
    baseline="value",
    response_length=6,
    temperature=0.9,
    answers_per_question=1,
)
STOPS = tuple(range(1, 12))
EPSILON = 1e-2
"""Adam's, large beside the models' gradients, which are cut to a norm of 1 or less.

The norms of the models and some positions are float32 whatever the weights are, so two ways to one gradient, or two
processors, differ in it by some 1e-7. At Adam's own 1e-8 a gradient that small takes a whole step either way; here two
steps differ by step size x difference / EPSILON, some 2e-8 for each of the four.
"""
BATCH = PROMPTS * 3
LONG_BATCH = [PREFIX + prompt for prompt in BATCH]


def make(tuning="full", dtype=torch.float64, **changes):
    # Double precision, and an Adam that does not turn a vanishing gradient's rounding error into a whole step.
    num_iterations = changes.pop("num_iterations", 10**6)  # so many that the step size stays as it is
    assert changes.keys() <= PPOSection.model_fields.keys()
    settings = SETTINGS.model_copy(update=changes)
    models = ppo_models(tuning, tiny_causal_lm().to(dtype), value=settings.baseline == "value")
    engine = PPOEngine(models, settings, num_iterations=num_iterations, stop_ids=STOPS, seed=7)
    for group in engine.optimizer.param_groups:
        group["eps"] = EPSILON
    return engine


def iterate(engine, score_J, times=1, prompts=BATCH):
    for _ in range(times):
        rollout = engine.rollout(prompts)
        stats = engine.update(rollout, engine.reference_pass(rollout.sequences), score_J)
    return stats


def weights(engine):
    parameters = engine.models.policy_parameters + engine.models.value_parameters
    return torch.cat([p.detach().flatten() for p in parameters])


def some_scores():
    return torch.rand(len(BATCH), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("tuning", "prompts"), [("full", LONG_BATCH), ("lora", BATCH)])
def test_the_update_does_not_depend_on_the_micro_batch_size(tuning, prompts):
    before = weights(make(tuning))
    found, logs = {}, {}
    every = 10**6
    for tokens in (30, every):
        engine = make(tuning, micro_batch_tokens=tokens)
        logs[tokens] = iterate(engine, some_scores(), times=2, prompts=prompts)
        found[tokens] = weights(engine)
    assert (found[every] - before).abs().max() > 1e-3  # it did learn something
    torch.testing.assert_close(found[30], found[every], rtol=0, atol=1e-5)
    assert logs[30] == pytest.approx(logs[every], abs=1e-5)


@pytest.mark.parametrize(
    ("scoring", "training"),
    [("response_logprobs", False), ("response_logprobs", True), ("response_values", True)],
    ids=["reference", "policy", "value"],
)
def test_a_pass_that_memory_does_not_hold_is_done_with_half_the_tokens(scoring, training, monkeypatch, caplog):
    """The second pass of its kind fails; a value's comes after the policy's gradients, which may not count twice."""
    small = make("lora", micro_batch_tokens=64)
    expected = iterate(small, some_scores(), prompts=LONG_BATCH)
    engine, calls, real = make("lora", micro_batch_tokens=128), [], getattr(engine_module, scoring)

    def full(*given, **keys):
        if torch.is_grad_enabled() == training:
            calls.append(engine.budget.size)
            if len(calls) == 2:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore")
        return real(*given, **keys)

    monkeypatch.setattr(engine_module, scoring, full)
    found = iterate(engine, some_scores(), prompts=LONG_BATCH)
    assert set(calls) == {128, 64}
    assert found == pytest.approx(expected, abs=1e-6)
    torch.testing.assert_close(weights(engine), weights(small), rtol=0, atol=1e-6)
    assert "passes have 64 tokens" in caplog.text


@pytest.mark.parametrize(("score", "weight"), [(math.nan, 0.0), (0.0, math.inf)], ids=["loss", "weights"])
def test_the_iteration_that_makes_a_loss_or_the_policy_infinite_ends_the_run(score, weight, monkeypatch):
    engine = make("lora", epochs=1, num_mini_batches=1)

    def step():
        for parameter in engine.models.policy_parameters:
            parameter.data += weight

    monkeypatch.setattr(engine.optimizer, "step", step)
    with pytest.raises(NotFinite, match=r"ppo\.learning-rate"):
        iterate(engine, some_scores() + score)


def test_answers_to_one_question_share_its_prompt(monkeypatch):
    prompts = [prompt + 2 * PROMPTS[0] for prompt in PROMPTS for _ in range(3)]
    found = {}
    for shared in (True, False):
        engine, seen = make("lora", answers_per_question=3), []
        embedding = engine.models.policy.get_input_embeddings()
        hook = embedding.register_forward_hook(lambda _, __, out, seen=seen: seen.append(out.shape[:2].numel()))
        iterate(engine, some_scores(), times=2, prompts=prompts)
        hook.remove()
        found[shared] = weights(engine), sum(seen)
        monkeypatch.setattr(Sequences, "repeated", False)
    torch.testing.assert_close(found[True][0], found[False][0], rtol=0, atol=1e-5)
    assert found[True][1] < 0.85 * found[False][1]


def test_in_sixteen_bits_the_ratio_begins_at_one_and_the_sampler_s_numbers_are_kept():
    engine = make("lora", torch.bfloat16, num_mini_batches=1, epochs=1)
    rollout = engine.rollout(LONG_BATCH)
    reference = engine.reference_pass(rollout.sequences)
    with torch.no_grad(), scoring(engine.models, "policy", rollout.sequences.prefix_C, temperature=0.9) as score:
        torch.testing.assert_close(reference.policy_logprob_JT, score(rollout.sequences).float(), rtol=0, atol=0.02)
    kept = rollout.logprob_JT.clone()
    stats = engine.update(rollout, reference, some_scores())
    # The same pass before the only step, but for rounding, as its rows have another order; the sampler's would be 1e-5.
    assert stats["approximate_kl"] < 2e-6
    assert stats["clip_fraction"] == 0
    assert torch.equal(rollout.logprob_JT, kept)
    assert not torch.equal(reference.policy_logprob_JT, kept)


def test_with_the_question_s_other_answers_for_a_baseline_no_value_is_learned(monkeypatch):
    score_J = torch.tensor([1.0, 0.0, 0.0, 0.5, 0.5, 0.5, 0.2, 0.4, 0.9])
    keys = {"num_mini_batches": 1, "epochs": 1, "answers_per_question": 3, "kl_coefficient": 0.0}
    engine = make("lora", baseline="question", **keys)
    seen, loss = [], engine_module.losses.policy_loss

    def spy(logprob_JT, old_JT, advantage_JT, importance_JT, mask_JT, **rest):
        seen.extend(row[mask].tolist() for row, mask in zip(advantage_JT, mask_JT, strict=True))
        return loss(logprob_JT, old_JT, advantage_JT, importance_JT, mask_JT, **rest)

    monkeypatch.setattr(engine_module.losses, "policy_loss", spy)
    prompts = [prompt for prompt in PROMPTS[:3] for _ in range(3)]
    rollout = engine.rollout(prompts)
    stats = engine.update(rollout, engine.reference_pass(rollout.sequences), score_J)
    assert stats["value_loss"] == 0
    assert state_of(engine)["value"] == []
    assert all(len(set(row)) == 1 for row in seen)  # all tokens of an answer alike
    # 1 - 0, 0 - .5, 0 - .5; equal answers tell nothing; .2 - .65, .4 - .55, .9 - .3
    less_J = np.array([1.0, -0.5, -0.5, 0.0, 0.0, 0.0, -0.45, -0.15, 0.6])
    assert sorted(row[0] for row in seen) == pytest.approx(sorted(less_J / np.sqrt((less_J**2).sum() / 8)), abs=1e-3)


def test_what_the_sampler_rarely_draws_counts_at_most_twice():
    """Tokens with half the sampler's probability count half, and beyond twice it twice."""
    engine = make("lora", torch.bfloat16, num_mini_batches=1, epochs=1)
    rollout = engine.rollout(LONG_BATCH)
    reference = engine.reference_pass(rollout.sequences)
    for shift, weight in ((0.5, 0.5), (1.0, 1.0), (2.0, 2.0), (8.0, 2.0)):
        sampled = Rollout(rollout.sequences, reference.policy_logprob_JT - math.log(shift))
        targets = engine._targets(sampled, reference, some_scores())
        expected_JT = torch.full_like(targets.importance_JT, weight)
        torch.testing.assert_close(targets.importance_JT, expected_JT, rtol=1e-5, atol=0)


def test_the_first_gradient_against_one_row_at_a_time(steps, monkeypatch):
    # At the first step the ratio is 1 and the value head 0, so: policy gradient = -sum A grad log pi / N, and the
    # value's gradient = -c sum R grad V / N, over the N tokens of the one mini-batch. Rows without padding.
    monkeypatch.setattr(engine_module, "MAX_GRAD_NORM", 1e9)
    engine = make(learning_rate=0.0, num_mini_batches=1, epochs=1, micro_batch_tokens=40)
    rollout = engine.rollout(BATCH)
    engine.update(rollout, engine.reference_pass(rollout.sequences), some_scores())

    score_J = engine_module.losses.whiten_scores(some_scores())
    lengths = rollout.sequences.mask_JT.sum(1).tolist()
    # values and KL to the reference are 0, so with gamma 1 the advantage of token t of n is lambda^(n - 1 - t) x score
    returns = [[float(score_J[j]) * 0.95 ** (n - 1 - t) for t in range(n)] for j, n in enumerate(lengths)]
    flat = torch.tensor([r for row in returns for r in row], dtype=torch.float64)
    mean, deviation, count = flat.mean(), flat.std(), len(flat)
    models = engine.models
    for j in range(len(BATCH)):
        row = rollout.sequences.rows(torch.tensor([j]))
        return_T = torch.tensor(returns[j], dtype=torch.float64)
        with scoring(models, "policy", row.prefix_C, temperature=SETTINGS.temperature) as logprobs:
            (-((return_T - mean) / deviation * logprobs(row)[0]).sum() / count).backward()
        with scoring(models, "value", row.prefix_C, temperature=1.0) as values:
            (-engine_module.losses.VALUE_COEFFICIENT * (return_T * values(row)[0]).sum() / count).backward()
    ((_, taken),) = steps
    for found, parameters in zip(taken, (models.policy_parameters, models.value_parameters), strict=True):
        for gradient, parameter in zip(found, parameters, strict=True):
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-6)
    assert max(float(g.abs().max()) for g in taken[0]) > 1e-3


def test_mini_batches_of_as_many_tokens_have_the_whole_s_gradient_for_their_mean(steps, monkeypatch):
    monkeypatch.setattr(engine_module, "MAX_GRAD_NORM", 1e9)
    for number in (1, 2):
        iterate(make(learning_rate=0.0, num_mini_batches=number, epochs=1, response_length=1), some_scores())
    whole, *halves = [torch.cat([g.flatten() for model in gradients for g in model]) for _, gradients in steps]
    torch.testing.assert_close((halves[0] + halves[1]) / 2, whole, rtol=1e-5, atol=1e-7)
    assert whole.abs().max() > 1e-3


@pytest.fixture
def steps(monkeypatch):
    """The step sizes and gradients of the policy and the value model at every step of the optimizer."""
    taken = []
    step = torch.optim.AdamW.step

    def recorded(self):
        gradients = [[p.grad.clone() for p in group["params"]] for group in self.param_groups]
        taken.append(([group["lr"] for group in self.param_groups], gradients))
        return step(self)

    monkeypatch.setattr(torch.optim.AdamW, "step", recorded)
    return taken


@pytest.mark.parametrize(("epochs", "mini_batches", "count"), [(2, 3, 6), (2, 50, 24)])
def test_optimizer_steps_are_epochs_times_mini_batches_and_their_gradients_cut(
    steps, epochs, mini_batches, count, monkeypatch
):
    monkeypatch.setattr(engine_module, "MAX_GRAD_NORM", 1e-3)
    engine, rows = make(epochs=epochs, num_mini_batches=mini_batches), []
    gradients = engine._gradients
    monkeypatch.setattr(engine, "_gradients", lambda *given: rows.extend(given[2].tolist()) or gradients(*given))
    iterate(engine, some_scores())
    assert len(steps) == count  # 12 rollouts give at most 12 mini-batches
    every = list(range(len(BATCH)))
    orders = [rows[start : start + len(BATCH)] for start in range(0, len(rows), len(BATCH))]
    assert all(sorted(order) == every != order for order in orders)
    assert len(set(map(tuple, orders))) == epochs  # each epoch shuffles anew
    norms = [float(torch.cat([g.flatten() for g in gradients]).norm()) for gradients in steps[0][1]]
    assert norms == pytest.approx([1e-3, 1e-3], rel=1e-2)


@pytest.mark.parametrize(
    ("warmup", "shares"),
    [
        # two steps in each of four iterations, with 1 - i / 4
        (0, [1, 1, 3 / 4, 3 / 4, 1 / 2, 1 / 2, 1 / 4, 1 / 4]),
        (3, [1 / 4, 2 / 4, 3 / 4 * 3 / 4, 3 / 4, 1 / 2, 1 / 2, 1 / 4, 1 / 4]),
    ],
)
def test_the_step_sizes_rise_over_the_warm_up_and_fall_over_the_iterations(steps, warmup, shares):
    engine = make(num_iterations=4, epochs=1, num_mini_batches=2, warmup_steps=warmup)
    iterate(engine, some_scores(), times=2)
    resumed = make(num_iterations=4, epochs=1, num_mini_batches=2, warmup_steps=warmup)
    restore(resumed, state_of(engine))
    iterate(resumed, some_scores(), times=2)
    assert [rates for rates, _ in steps] == [pytest.approx([1e-3 * share] * 2) for share in shares]


def test_what_an_update_reports():
    engine = make(dtype=torch.float32)
    with torch.no_grad():
        for parameter in engine.models.policy_parameters:
            parameter.add_(0.02)
    rollout = engine.rollout(BATCH)
    reference = engine.reference_pass(rollout.sequences)
    stats = engine.update(rollout, reference, some_scores())
    assert reference.policy_logprob_JT is None  # in 32 bits sampling's own numbers serve
    real = [mask.bool() for mask in rollout.sequences.mask_JT]
    new = [row[mask].tolist() for row, mask in zip(rollout.logprob_JT, real, strict=True)]
    old = [row[mask].tolist() for row, mask in zip(reference.reference_logprob_JT, real, strict=True)]
    tokens = sum(map(len, new))
    assert stats["response_length"] == pytest.approx(tokens / len(BATCH))
    assert stats["kl"] == pytest.approx((sum(map(sum, new)) - sum(map(sum, old))) / len(BATCH), abs=1e-4)
    assert abs(stats["kl"]) > 1e-3
    assert stats["entropy"] == pytest.approx(-sum(map(sum, new)) / tokens, abs=1e-5)
    assert 0.0 <= stats["clip_fraction"] <= 1.0
    assert min(stats["value_loss"], stats["approximate_kl"]) > 0.0


def test_a_state_of_another_device_is_refused():
    engine = make("lora")
    with pytest.raises(ValueError, match=r"cuda device.* has cpu; resume on a cuda"):
        restore(engine, state_of(engine) | {"device": "cuda"})
