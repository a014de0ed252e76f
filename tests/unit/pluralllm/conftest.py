"""A public table of random features, a group's answers to part of it, and a network of either architecture."""

import numpy as np
import pytest
import torch
from fakes import catalogue_of

from appa_flwr.protocol.queries import Catalogue
from pluralllm import data as sizes
from pluralllm.attention import FewShotAttention
from pluralllm.data import GroupData
from pluralllm.residual import ExactResidual

Q, K, ANSWERED = 30, 4, 20


@pytest.fixture
def table() -> Catalogue:
    """Questions of 2 to 4 options, which share their question's text; the first 25 train."""
    rng = np.random.default_rng(0)
    option_QK = np.arange(K) < rng.integers(2, K + 1, size=(Q, 1))
    value_QKE = (rng.normal(size=(Q, K, sizes.EMBEDDING_DIM)) * option_QK[..., None]).astype(np.float32)
    value_QKE[..., sizes.QUESTION_PART] = value_QKE[:, :1, sizes.QUESTION_PART] * option_QK[..., None]
    return catalogue_of(option_QK.sum(1), train=np.arange(Q) < 25, embedding_QKE=value_QKE)


@pytest.fixture
def data(table: Catalogue) -> GroupData:
    rng = np.random.default_rng(1)
    rows = np.sort(rng.permutation(Q)[:ANSWERED]).astype(np.int64)
    weight_NK = (0.05 + rng.random((ANSWERED, K))) * table.option_QK[rows]
    return GroupData("Here", rows, (weight_NK / weight_NK.sum(1, keepdims=True)).astype(np.float32))


@pytest.fixture
def residual() -> ExactResidual:
    torch.manual_seed(2)
    network = ExactResidual()
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            noise = 0.3 * torch.randn(parameter.shape)
            parameter.copy_(parameter + 0.1 * noise if name.startswith("log_") else noise)
    return network.eval()


@pytest.fixture
def attention() -> FewShotAttention:
    """Every weight is random and large enough for the answers to be far from uniform."""
    torch.manual_seed(1)
    network = FewShotAttention()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape))
    return network.eval()
