"""The two architectures of PluralLLM by name."""

from __future__ import annotations

from pluralllm.attention import FewShotAttention
from pluralllm.model import ModelConfig, PluralLLM
from pluralllm.residual import FEATURE_SHARES, ExactResidual


def build(config: ModelConfig) -> PluralLLM:
    """A fresh network, its weights drawn from torch's generator; untrained it answers uniformly."""
    return ExactResidual(config) if config.architecture == "residual" else FewShotAttention(config)


def choices(config: ModelConfig) -> tuple[float, ...]:
    """Weights of learned features that validation chooses from beside the round; 0 alone where there are none."""
    return FEATURE_SHARES if config.architecture == "residual" and config.rank else (0.0,)
