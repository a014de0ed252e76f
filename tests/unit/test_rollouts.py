"""Sampling: what padding may not change, what belongs to an answer, and the log-probabilities that come along.

Axis letters: J rollouts, P prompt tokens, T response tokens.
"""

from __future__ import annotations

import pytest
import torch
from fakes import ARCHITECTURES, PAD_ID, PROMPTS, VOCABULARY, tiny_causal_lm

from server_app import rollouts
from server_app.policy import response_logprobs

CPU = torch.device("cpu")
STOPS = tuple(range(1, 12))  # a random model stops within a few tokens


@pytest.fixture(scope="module", params=ARCHITECTURES)
def model(request):
    return tiny_causal_lm(request.param)


def draw(model, prompts, *, temperature=1.0, seed=0, max_new_tokens=9, stop_ids=STOPS):
    generator = torch.Generator().manual_seed(seed) if temperature else None
    return rollouts.sample(
        model,
        prompts,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        stop_ids=stop_ids,
        pad_id=PAD_ID,
        generator=generator,
    )


def test_pad_prompts_by_hand():
    ids_JP, mask_JP = rollouts.pad_prompts([[7, 8, 9], [5]], pad_id=0, device=CPU)
    assert ids_JP.tolist() == [[7, 8, 9], [0, 0, 5]]
    assert mask_JP.tolist() == [[True, True, True], [False, False, True]]
    assert rollouts.positions(mask_JP).tolist() == [[0, 1, 2], [0, 0, 0]]


def test_greedy_answers_do_not_depend_on_padding(model):
    together = draw(model, PROMPTS, temperature=0.0, stop_ids=(1,))
    width = together.sequences.response_JT.shape[1]
    for j, prompt in enumerate(PROMPTS):
        alone = draw(model, [prompt], temperature=0.0, stop_ids=(1,))
        length = int(alone.sequences.mask_JT.sum())
        assert together.sequences.response_JT[j, :length].tolist() == alone.sequences.response_JT[0, :length].tolist()
        assert together.sequences.mask_JT[j].tolist() == [True] * length + [False] * (width - length)
        torch.testing.assert_close(together.logprob_JT[j, :length], alone.logprob_JT[0, :length], rtol=0, atol=1e-5)


def test_sampled_answers_do_not_depend_on_padding(model, monkeypatch):
    alone = draw(model, PROMPTS[:1], seed=5, stop_ids=(1,))
    pad_prompts = rollouts.pad_prompts

    def wider(prompts, *, pad_id, device):
        ids_JP, mask_JP = pad_prompts(prompts, pad_id=pad_id, device=device)
        return torch.nn.functional.pad(ids_JP, (4, 0), value=pad_id), torch.nn.functional.pad(mask_JP, (4, 0))

    monkeypatch.setattr(rollouts, "pad_prompts", wider)
    padded = draw(model, PROMPTS[:1], seed=5, stop_ids=(1,))
    assert padded.sequences.prompt_JP.shape[1] == len(PROMPTS[0]) + 4
    assert torch.equal(padded.sequences.response_JT, alone.sequences.response_JT)
    torch.testing.assert_close(padded.logprob_JT, alone.logprob_JT, rtol=0, atol=1e-5)
    other = draw(model, PROMPTS[:1], seed=6, stop_ids=(1,))
    assert not torch.equal(other.sequences.response_JT, alone.sequences.response_JT)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_log_probabilities_are_those_of_one_pass_without_cache(model, temperature):
    sampled = draw(model, PROMPTS * 2, temperature=temperature)
    every = torch.arange(len(PROMPTS) * 2)
    again_JT = response_logprobs(model, sampled.sequences.rows(every), temperature=temperature)
    torch.testing.assert_close(sampled.logprob_JT, again_JT.detach(), rtol=0, atol=1e-5)
    assert (sampled.logprob_JT[sampled.sequences.mask_JT] < 0).all()


def test_log_probabilities_against_a_pass_for_each_prefix():
    # no padding, no cache, no batch: the model sees prompt and answer so far and gives the next token's distribution
    model = tiny_causal_lm()
    sampled = draw(model, PROMPTS, temperature=0.6)
    for j, prompt in enumerate(PROMPTS):
        answer = sampled.sequences.response_JT[j][sampled.sequences.mask_JT[j]].tolist()
        for t, token in enumerate(answer):
            with torch.no_grad():
                logits_V = model(torch.tensor([prompt + answer[:t]])).logits[0, -1]
            expected = torch.softmax(logits_V.double() / 0.6, 0)[token].log()
            assert float(sampled.logprob_JT[j, t]) == pytest.approx(float(expected), abs=1e-5)


def test_the_stop_token_belongs_to_the_answer_and_nothing_after_it_counts(model):
    sampled = draw(model, PROMPTS * 8)
    stopped = 0
    for ids, mask, logprob in zip(
        sampled.sequences.response_JT.tolist(), sampled.sequences.mask_JT.tolist(), sampled.logprob_JT, strict=True
    ):
        length = next((t + 1 for t, token in enumerate(ids) if token in STOPS), len(ids))
        assert mask == [True] * length + [False] * (len(ids) - length)
        assert ids[length:] == [PAD_ID] * (len(ids) - length)
        assert not logprob[length:].any()
        stopped += length < len(ids)
    assert 0 < stopped < 32  # some ended early, some ran on: both were tested


def test_sampling_ends_once_every_row_has_stopped(model, monkeypatch):
    calls = []
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda *a, **k: calls.append(1) or forward(*a, **k))
    sampled = draw(model, PROMPTS, stop_ids=range(VOCABULARY), max_new_tokens=50)
    assert sampled.sequences.response_JT.shape == (4, 1)
    assert len(calls) == 1
    cut = draw(model, PROMPTS, stop_ids=(VOCABULARY,), max_new_tokens=5)  # a token that does not exist
    assert cut.sequences.mask_JT.shape == (4, 5)
    assert cut.sequences.mask_JT.all()


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_tokens_are_drawn_from_the_tempered_distribution(temperature):
    model, count = tiny_causal_lm(vocabulary=7), 4000
    with torch.no_grad():
        logits_V = model(torch.tensor([[3, 5]])).logits[0, -1].double()
    share_V = torch.softmax(logits_V / temperature, 0)
    tokens_J = draw(model, [[3, 5]] * count, temperature=temperature, max_new_tokens=1).sequences.response_JT[:, 0]
    found_V = torch.bincount(tokens_J, minlength=7) / count
    # five standard deviations of a share: 5 sqrt(p (1 - p) / n)
    assert ((found_V - share_V).abs() <= 5 * (share_V * (1 - share_V) / count).sqrt() + 1 / count).all()


def test_rows_are_cut_to_their_own_width_and_keep_their_log_probabilities(model):
    sampled = draw(model, PROMPTS * 4)
    all_rows = sampled.sequences.rows(torch.arange(16))
    full_JT = response_logprobs(model, all_rows, temperature=0.8).detach()
    lengths_J = sampled.sequences.mask_JT.sum(1)
    short = lengths_J.argsort()[:3]  # three short answers, in another order
    for index in (torch.tensor([1, 5, 13]), short.flip(0)):
        part = sampled.sequences.rows(index)
        width = int(lengths_J[index].max())
        longest_prompt = max(len(PROMPTS[j % 4]) for j in index.tolist())
        assert part.response_JT.shape == part.mask_JT.shape == (3, width)
        assert part.prompt_JP.shape == part.prompt_mask_JP.shape == (3, longest_prompt)
        part_JT = response_logprobs(model, part, temperature=0.8).detach()
        torch.testing.assert_close(part_JT, full_JT[index, :width], rtol=0, atol=1e-5)


def test_model_inputs_by_hand():
    sequences = rollouts.Sequences(
        torch.tensor([[0, 7], [8, 9]]),
        torch.tensor([[False, True], [True, True]]),
        torch.tensor([[4, 1, 0], [5, 6, 1]]),
        torch.tensor([[True, True, False], [True, True, True]]),
    )
    inputs = sequences.model_inputs()
    assert inputs["input_ids"].tolist() == [[0, 7, 4, 1], [8, 9, 5, 6]]
    assert inputs["attention_mask"].tolist() == [[0, 1, 1, 1], [1, 1, 1, 1]]
    assert inputs["position_ids"].tolist() == [[0, 0, 1, 2], [0, 1, 2, 3]]
