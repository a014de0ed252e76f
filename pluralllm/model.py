"""Base of both architectures of PluralLLM: their sizes, and that they have a loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor, nn

from appa_flwr.config.sections import Architecture
from pluralllm.episodes import Episodes

EMBEDDING_DIM = 128  # features of an option
HIDDEN_DIM = 64  # width of the network
NUM_BLOCKS = 2  # of option mixing, and with "attention" of attention
NUM_HEADS = 4  # of "attention"; they divide the width
RANK = 16  # learned features by which "residual" compares questions


@dataclass(frozen=True)
class ModelConfig:
    """Architecture and sizes of the network.

    Attributes:
        architecture: "residual" (`pluralllm.residual`) or "attention" (`pluralllm.attention`).
        embedding_dim: E, features of an option.
        hidden_dim: D, a multiple of `num_heads`.
        num_blocks: blocks of option mixing, and with "attention" of attention, at least 1.
        num_heads: H, heads of "attention".
        rank: R, learned features in the kernel of "residual", at least 1.
    """

    architecture: Architecture = "residual"
    embedding_dim: int = EMBEDDING_DIM
    hidden_dim: int = HIDDEN_DIM
    num_blocks: int = NUM_BLOCKS
    num_heads: int = NUM_HEADS
    rank: int = RANK

    @classmethod
    def of(cls, architecture: Architecture) -> ModelConfig:
        """The sizes of all runs."""
        return cls(architecture, EMBEDDING_DIM, HIDDEN_DIM, NUM_BLOCKS, NUM_HEADS, RANK)


class PluralLLM(nn.Module, ABC):
    """A preference predictor, of either architecture; `pluralllm.architectures.build` makes one."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config

    @abstractmethod
    def loss(self, episodes: Episodes) -> Tensor:
        """Training loss on a batch of episodes: a scalar with gradient."""
