"""Sampling: what padding may not change, what belongs to an answer, and the log-probabilities that come along.

Axis letters: J rollouts, P prompt tokens, T response tokens.
"""

import pytest
import torch
from fakes import ARCHITECTURES, PREFIX, PROMPTS, ROUNDING, ppo_models, tiny_causal_lm

from appa_flwr.config.sections import PPOSection
from appa_flwr.core.errors import UserError
from server_app.checkpoint import restore, state_of
from server_app.policy import sample as sampling
from server_app.policy.logprobs import response_logprobs, shared_prefix
from server_app.policy.ppo import PPOEngine
from server_app.policy.sample import Decoding

STOPS = tuple(range(1, 12))  # a random model stops within a few tokens
LONG_PROMPTS = [PREFIX + prompt for prompt in PROMPTS]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def model(request):
    return tiny_causal_lm(request.param)


def draw(model, prompts, *, temperature=1.0, seed=0, max_new_tokens=9, stop_ids=STOPS):
    generator = torch.Generator().manual_seed(seed) if temperature else None
    decoding = Decoding(max_new_tokens, temperature, tuple(stop_ids))
    return sampling.sample(model, prompts, decoding, generator=generator)


def scores(model, rows, *, temperature):
    """One pass over whole rows, under no cache of rows: (J, T)."""
    with torch.no_grad(), shared_prefix(model.base_model, rows.prefix_C) as prefix:
        return response_logprobs(model, rows, temperature=temperature, prefix=prefix)


def assert_own_forward_agrees(model, prompts, sampled, *, temperature):
    """No padding, no cache, no batch, no shared prefix: the model's forward on each prompt and answer alone."""
    for j, prompt in enumerate(prompts):
        answer = sampled.sequences.response_JT[j][sampled.sequences.mask_JT[j]].tolist()
        with torch.no_grad():
            logits_LV = model(torch.tensor([[*prompt, *answer]]), use_cache=False).logits[0].double() / temperature
        for t, token in enumerate(answer):
            expected = torch.softmax(logits_LV[len(prompt) - 1 + t], 0)[token].log()
            assert float(sampled.logprob_JT[j, t]) == pytest.approx(float(expected), abs=2e-5)


@pytest.mark.parametrize(("prompts", "temperature"), [(PROMPTS, 0.6), (LONG_PROMPTS, 1.7)])
def test_log_probabilities_are_those_of_one_pass_without_cache(model, temperature, prompts):
    sampled = draw(model, prompts * 2, temperature=temperature)
    assert sampled.sequences.prefix_C.tolist() == (PREFIX if prompts is LONG_PROMPTS else [])
    again_JT = scores(model, sampled.sequences, temperature=temperature)
    torch.testing.assert_close(sampled.logprob_JT, again_JT, **ROUNDING)
    assert (sampled.logprob_JT[sampled.sequences.mask_JT] < 0).all()
    assert_own_forward_agrees(model, prompts * 2, sampled, temperature=temperature)


@pytest.mark.parametrize("prompts", [PROMPTS, LONG_PROMPTS], ids=["plain", "shared"])
def test_rows_that_have_ended_leave_the_batch_and_the_others_go_on_as_they_would(model, prompts, monkeypatch):
    stay, widths = draw(model, prompts * 4, temperature=0.0), {}
    found = {}
    for below in (0.0, 0.75, 2.0):
        monkeypatch.setattr(sampling, "COMPACT_BELOW", below)
        widths[below] = made = []
        hook = model.get_output_embeddings().register_forward_hook(lambda _, __, out, made=made: made.append(len(out)))
        found[below] = draw(model, prompts * 4, temperature=0.0)
        hook.remove()
    assert min(widths[0.0]) == 16
    assert min(widths[0.75]) < 12
    for other in found.values():
        assert torch.equal(other.sequences.response_JT, stay.sequences.response_JT)
        torch.testing.assert_close(other.logprob_JT, stay.logprob_JT, **ROUNDING)


def test_looking_seldom_for_rows_that_have_ended_changes_no_answer(model, monkeypatch):
    found = []
    for look_every in (1, 3):
        monkeypatch.setattr(sampling, "LOOK_EVERY", {"cpu": look_every})
        found.append(draw(model, LONG_PROMPTS * 4))
    often, seldom = found
    assert not often.sequences.mask_JT.all()  # rows did end
    assert torch.equal(often.sequences.mask_JT, seldom.sequences.mask_JT)
    assert torch.equal(often.sequences.response_JT, seldom.sequences.response_JT)
    torch.testing.assert_close(often.logprob_JT, seldom.logprob_JT, **ROUNDING)


@pytest.mark.parametrize("architecture", ["gemma2", "llama"])
def test_answers_up_to_the_end_of_a_window_are_right_and_beyond_it_refused(architecture):
    longest = max(map(len, LONG_PROMPTS)) + 9
    model = tiny_causal_lm(architecture, window=longest)
    model.config.max_position_embeddings = 1024 if architecture == "gemma2" else longest
    sampled = draw(model, LONG_PROMPTS, stop_ids=())
    assert sampled.sequences.mask_JT.all()
    assert_own_forward_agrees(model, LONG_PROMPTS, sampled, temperature=1.0)
    torch.testing.assert_close(scores(model, sampled.sequences, temperature=1.0), sampled.logprob_JT, **ROUNDING)
    with pytest.raises(UserError, match=f"has {longest + 1} tokens; the model reads {longest} at most"):
        draw(model, LONG_PROMPTS, max_new_tokens=10)


def test_a_token_without_probability_is_never_drawn():
    logprob_AV = torch.tensor([[0.0, 0.5, 0.5, 0.0], [0.0, 0.0, 0.0, 1.0]]).log()
    least, largest = (torch.full((2,), number, dtype=torch.float64) for number in (0.0, 1.0 - 2.0**-53))
    assert sampling._draw(logprob_AV, least).tolist() == [[1], [3]]
    assert sampling._draw(logprob_AV, largest).tolist() == [[2], [3]]
    # shares that do not sum to one, as rounding leaves them
    assert sampling._draw(logprob_AV - 1e-4, largest).tolist() == [[2], [3]]
    assert int(sampling._draw(logprob_AV * torch.nan, largest).max()) < 4  # a broken policy is told by its losses


def test_the_stop_token_belongs_to_the_answer_and_nothing_after_it_counts(model):
    sampled = draw(model, PROMPTS * 8)
    stopped = 0
    for ids, mask, logprob in zip(
        sampled.sequences.response_JT.tolist(), sampled.sequences.mask_JT.tolist(), sampled.logprob_JT, strict=True
    ):
        length = next((t + 1 for t, token in enumerate(ids) if token in STOPS), len(ids))
        assert mask == [True] * length + [False] * (len(ids) - length)
        assert ids[length:] == [0] * (len(ids) - length)
        assert not logprob[length:].any()
        stopped += length < len(ids)
    assert 0 < stopped < 32  # some ended early, some ran on: both were tested


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_tokens_are_drawn_from_the_tempered_distribution(temperature):
    model, count = tiny_causal_lm(vocabulary=7), 4000
    with torch.no_grad():
        logits_V = model(torch.tensor([[3, 5]])).logits[0, -1].double()
    share_V = torch.softmax(logits_V / temperature, 0)
    sampled = draw(model, [[3, 5]] * count, temperature=temperature, max_new_tokens=1)
    found_V = torch.bincount(sampled.sequences.response_JT[:, 0], minlength=7) / count
    # five standard deviations of a share: 5 sqrt(p (1 - p) / n)
    assert ((found_V - share_V).abs() <= 5 * (share_V * (1 - share_V) / count).sqrt() + 1 / count).all()


def test_a_seed_fixes_the_answers_and_leaves_the_global_generator_alone(model):
    state = torch.get_rng_state()
    first, again, other = (draw(model, PROMPTS, seed=seed) for seed in (5, 5, 6))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first.sequences.response_JT, again.sequences.response_JT)
    assert not torch.equal(first.logprob_JT, other.logprob_JT)


def without_memory(monkeypatch, *, token, more_than):
    """Logits of more rows than these are out of memory from this token on; the sizes of all batches of logits."""
    real, sizes = sampling.logits, []

    def full(head, hidden_AH):
        sizes.append(len(hidden_AH))
        if len(hidden_AH) > more_than and sizes[-token:] == [len(hidden_AH)] * token:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(head, hidden_AH)

    monkeypatch.setattr(sampling, "logits", full)
    return sizes


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("token", [1, 2, 4])
def test_answers_that_memory_does_not_hold_are_sampled_in_halves(model, monkeypatch, caplog, token, temperature):
    """More rows than two fail at this token; neither that nor the size of the passes changes the random numbers."""
    monkeypatch.setattr(sampling, "COMPACT_BELOW", 0.0)  # so that rows stay in the batch
    whole = draw(model, LONG_PROMPTS, temperature=temperature)
    without_memory(monkeypatch, token=token, more_than=2)
    halves = draw(model, LONG_PROMPTS, temperature=temperature)
    assert "passes have 2 answers" in caplog.text
    assert torch.equal(halves.sequences.response_JT, whole.sequences.response_JT)
    torch.testing.assert_close(halves.logprob_JT, whole.logprob_JT, **ROUNDING)


def test_an_engine_s_rollouts_run_out_of_memory_once_and_a_restored_one_s_never(monkeypatch):
    settings = PPOSection(batch_size=4, num_mini_batches=1, answers_per_question=1, response_length=9)

    def make(seed):
        return PPOEngine(ppo_models("lora", tiny_causal_lm()), settings, num_iterations=3, stop_ids=STOPS, seed=seed)

    sizes, engine = without_memory(monkeypatch, token=1, more_than=2), make(seed=3)
    engine.rollout(LONG_PROMPTS)
    assert sizes.count(4) == 1
    state = state_of(engine)
    second = engine.rollout(LONG_PROMPTS)
    other = make(seed=4)
    restore(other, state)
    assert torch.equal(other.rollout(LONG_PROMPTS).sequences.response_JT, second.sequences.response_JT)
    assert sizes.count(4) == 1
