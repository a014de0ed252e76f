"""The few-shot attention of PluralLLM: what must not change its predictions, and what must.

Axis letters: B episodes, C context questions, M target questions, K options, E embedding.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from pluralllm.attention import FewShotAttention
from pluralllm.network import Questions

B, C, M, K, E = 3, 5, 4, 4, 16
TOLERANCE = {"atol": 2e-6, "rtol": 0.0}


def drawn(number: int, *, seed: int) -> Questions:
    """Questions of 2 to 4 options."""
    generator = torch.Generator().manual_seed(seed)
    options = torch.arange(K) < torch.randint(2, K + 1, (B, number, 1), generator=generator)
    logits = torch.randn(B, number, K, generator=generator).masked_fill(~options, -torch.inf)
    embedding = torch.randn(B, number, K, E, generator=generator) * options[..., None]
    return Questions(embedding, options, logits.softmax(-1))


CONTEXT, TARGET = drawn(C, seed=2), drawn(M, seed=3)._replace(answer=None)


@torch.no_grad()
def probability(model: FewShotAttention, context: Questions = CONTEXT, target: Questions = TARGET) -> Tensor:
    return model(context, target).exp()


def permuted(questions: Questions, order: Tensor) -> Questions:
    return questions.map(
        lambda value: value.gather(2, order[..., None].expand_as(value) if value.dim() > order.dim() else order)
    )


def test_permuting_options_permutes_predictions(attention):
    """By a permutation of its own for every question; padding then lies anywhere, not only at the end."""
    generator = torch.Generator().manual_seed(3)
    target_order, context_order = (torch.rand(B, number, K, generator=generator).argsort(-1) for number in (M, C))
    found = probability(attention, permuted(CONTEXT, context_order), permuted(TARGET, target_order))
    torch.testing.assert_close(found, probability(attention).gather(2, target_order), **TOLERANCE)


def test_the_context_matters_and_which_answer_belongs_to_which_question(attention):
    full = CONTEXT._replace(options=torch.ones(B, C, K, dtype=torch.bool), answer=CONTEXT.answer * 0.9 + 0.1 / K)
    swapped = full._replace(answer=full.answer.roll(1, dims=1))
    assert (probability(attention, full) - probability(attention, swapped)).abs().max() > 1e-3


def test_padding_is_exact_whatever_lies_on_it(attention):
    """NaN on padding, two option columns more, one absent context question, and two targets without options."""

    def padded(questions: Questions, more: int) -> Questions:
        nan, options = float("nan"), questions.options
        embedding = pad(questions.embedding.masked_fill(~options[..., None], nan), (0, 0, 0, 2, 0, more), value=nan)
        answer = questions.answer
        if answer is not None:
            answer = pad(answer.masked_fill(~options, nan), (0, 2, 0, more), value=nan)
        return Questions(embedding, pad(options, (0, 2, 0, more), value=False), answer)

    found = probability(attention, padded(CONTEXT, 1), padded(TARGET, 2))
    torch.testing.assert_close(found[:, :M, :K], probability(attention), **TOLERANCE)
    assert (found[:, M:] == 0).all()


def test_gradients_are_finite_with_padding(attention):
    options = TARGET.options.clone()
    options[:, -1] = False
    attention(CONTEXT, TARGET._replace(options=options)).masked_fill(~options, 0.0).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in attention.parameters())


def test_an_untrained_network_answers_uniformly():
    options = TARGET.options
    torch.testing.assert_close(probability(FewShotAttention()), options / options.sum(-1, keepdim=True))
