"""The few-shot attention of PluralLLM: what must not change its predictions, and what must.

Axis letters: B episodes, C context questions, M target questions, K options, E embedding.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from pluralllm.attention import FewShotAttention
from pluralllm.network import Questions
from pluralllm.residual import ExactResidual
from pluralllm.training import build

B, C, M, K, E = 3, 5, 4, 4, 6
TOLERANCE = {"atol": 2e-6, "rtol": 0.0}


@pytest.fixture
def untrained() -> FewShotAttention:
    return FewShotAttention(E, 16, num_blocks=2, num_heads=2).eval()


@pytest.fixture
def model(untrained: FewShotAttention) -> FewShotAttention:
    """Every weight is random and large enough for the answers to be far from uniform."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in untrained.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape))
    return untrained


@pytest.fixture
def batch() -> dict[str, Tensor]:
    """Questions of 2 to 4 options."""
    generator = torch.Generator().manual_seed(2)

    def options(questions: int) -> Tensor:
        size = torch.randint(2, K + 1, (B, questions, 1), generator=generator)
        return torch.arange(K) < size

    context_options, target_options = options(C), options(M)
    logits = torch.randn(B, C, K, generator=generator).masked_fill(~context_options, -torch.inf)
    return {
        "context_embedding": torch.randn(B, C, K, E, generator=generator) * context_options[..., None],
        "context_answer": logits.softmax(-1),
        "context_options": context_options,
        "target_embedding": torch.randn(B, M, K, E, generator=generator) * target_options[..., None],
        "target_options": target_options,
    }


def predicted(model: FewShotAttention, batch: dict[str, Any]) -> Tensor:
    context, target = (
        Questions(**{name.removeprefix(part): value for name, value in batch.items() if name.startswith(part)})
        for part in ("context_", "target_")
    )
    return model(context, target)


@torch.no_grad()
def probability(model: FewShotAttention, batch: dict[str, Any]) -> Tensor:
    return predicted(model, batch).exp()


def test_predictions_are_distributions_over_the_real_options(model, batch):
    found = probability(model, batch)
    torch.testing.assert_close(found.sum(-1), torch.ones(B, M))
    assert (found[~batch["target_options"]] == 0).all()
    uniform = batch["target_options"] / batch["target_options"].sum(-1, keepdim=True)
    assert (found - uniform).abs().max() > 0.1, "the invariances below would hold for a constant answer too"


def test_permuting_options_permutes_predictions(model, batch):
    generator = torch.Generator().manual_seed(3)
    # a permutation of its own for every question; padding then lies anywhere, not only at the end
    target_order = torch.rand(B, M, K, generator=generator).argsort(-1)
    context_order = torch.rand(B, C, K, generator=generator).argsort(-1)

    def permute(value: Tensor, order: Tensor) -> Tensor:
        if value.dim() > order.dim():
            order = order[..., None].expand_as(value)
        return value.gather(2, order)

    permuted = {
        name: permute(value, target_order if name.startswith("target") else context_order)
        for name, value in batch.items()
    }
    expected = permute(probability(model, batch), target_order)
    torch.testing.assert_close(probability(model, permuted), expected, **TOLERANCE)


def test_permuting_the_context_leaves_predictions(model, batch):
    order = torch.randperm(C, generator=torch.Generator().manual_seed(4))
    permuted = {name: value[:, order] if name.startswith("context") else value for name, value in batch.items()}
    torch.testing.assert_close(probability(model, permuted), probability(model, batch), **TOLERANCE)


def test_the_context_matters_and_which_answer_belongs_to_which_question(model, batch):
    options = torch.ones(B, C, K, dtype=torch.bool)
    full = batch | {"context_options": options, "context_answer": batch["context_answer"] * 0.9 + 0.1 / K}
    swapped = full | {"context_answer": full["context_answer"].roll(1, dims=1)}
    assert (probability(model, full) - probability(model, swapped)).abs().max() > 1e-2


def test_padding_is_exact_whatever_lies_on_it(model, batch):
    nan, options = float("nan"), batch["context_options"]
    known = batch["context_embedding"].masked_fill(~options[..., None], nan)
    padded = {
        # NaN on the padding of existing questions, two more option columns, one absent context question ...
        "context_embedding": pad(known, (0, 0, 0, 2, 0, 1), value=nan),
        "context_answer": pad(batch["context_answer"].masked_fill(~options, nan), (0, 2, 0, 1), value=nan),
        "context_options": pad(options, (0, 2, 0, 1), value=False),
        # ... and two target questions without options
        "target_embedding": pad(batch["target_embedding"], (0, 0, 0, 2, 0, 2), value=nan),
        "target_options": pad(batch["target_options"], (0, 2, 0, 2), value=False),
    }
    found = probability(model, padded)
    torch.testing.assert_close(found[:, :M, :K], probability(model, batch), **TOLERANCE)
    assert (found[:, M:] == 0).all()


def test_empty_context_predicts_one_prior(model, batch):
    none = {name: value[:, :0] if name.startswith("context") else value for name, value in batch.items()}
    absent = batch | {"context_options": torch.zeros_like(batch["context_options"])}
    prior = probability(model, none)
    assert prior.isfinite().all()
    torch.testing.assert_close(probability(model, absent), prior, **TOLERANCE)


def test_each_target_and_each_episode_is_predicted_as_if_alone(model, batch):
    together = probability(model, batch)
    for episode, target in itertools.product(range(B), range(M)):
        alone = {name: value[episode : episode + 1] for name, value in batch.items()}
        alone |= {name: value[:, target : target + 1] for name, value in alone.items() if name.startswith("target")}
        torch.testing.assert_close(probability(model, alone)[0, 0], together[episode, target], **TOLERANCE)


def test_gradients_are_finite_with_padding(model, batch):
    options = batch["target_options"].clone()
    options[:, -1] = False
    found = predicted(model, batch | {"target_options": options})
    found.masked_fill(~options, 0.0).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_an_untrained_network_answers_uniformly(untrained, batch):
    options = batch["target_options"]
    torch.testing.assert_close(probability(untrained, batch), options / options.sum(-1, keepdim=True))


@pytest.mark.parametrize(("architecture", "expected"), [("residual", ExactResidual), ("attention", FewShotAttention)])
def test_a_network_is_built_by_the_name_of_its_architecture_and_drawn_by_torchs_seed(architecture, expected):
    def weights(seed: int) -> Tensor:
        torch.manual_seed(seed)
        model = build(architecture)
        assert type(model) is expected
        return torch.nn.utils.parameters_to_vector(model.parameters())

    assert torch.equal(weights(0), weights(0))
    assert not torch.equal(weights(0), weights(1))
