"""Base of both architectures of PluralLLM: their sizes, and that they have a loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor, nn

from appa_flwr.config.sections import HEADS, Architecture, EmbeddingSection, PluralLLMSection
from pluralllm.episodes import Episodes


@dataclass(frozen=True)
class ModelConfig:
    """Architecture and sizes of the network.

    Attributes:
        architecture: "residual" (`pluralllm.residual`) or "attention" (`pluralllm.attention`).
        embedding_dim: E, features of an option.
        hidden_dim: D, a multiple of `num_heads`.
        num_blocks: blocks of option mixing, and with "attention" of attention, at least 1.
        num_heads: H, heads of "attention".
        rank: R, learned features in the kernel of "residual"; 0 for none.
    """

    architecture: Architecture = "residual"
    embedding_dim: int = 128
    hidden_dim: int = 64
    num_blocks: int = 2
    num_heads: int = HEADS
    rank: int = 0

    @classmethod
    def of(cls, embedding: EmbeddingSection, pluralllm: PluralLLMSection) -> ModelConfig:
        """The sizes a run is configured to have: both sides build from them, since their weights must fit."""
        keys = pluralllm
        return cls(keys.architecture, embedding.dim, keys.hidden_dim, keys.blocks, rank=keys.rank)


class PluralLLM(nn.Module, ABC):
    """A preference predictor, of either architecture; `pluralllm.architectures.build` makes one."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config

    @abstractmethod
    def loss(self, episodes: Episodes) -> Tensor:
        """Training loss on a batch of episodes: a scalar with gradient."""
