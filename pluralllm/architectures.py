"""The two architectures of PluralLLM by name."""

from __future__ import annotations

from pluralllm.attention import FewShotAttention
from pluralllm.model import ModelConfig, PluralLLM
from pluralllm.residual import FEATURE_SHARES, ExactResidual


def build(config: ModelConfig) -> PluralLLM:
    """A fresh network, its weights drawn from torch's generator; untrained it answers uniformly."""
    return ExactResidual(config) if config.architecture == "residual" else FewShotAttention(config)


def choices(config: ModelConfig) -> tuple[float, ...]:
    """What validation chooses from beside the round: how much learned features count; 0 alone where there are none."""
    return FEATURE_SHARES if config.architecture == "residual" and config.rank else (0.0,)
