"""The two architectures of PluralLLM by name."""

from __future__ import annotations

from pluralllm.attention import FewShotAttention
from pluralllm.model import ModelConfig, PluralLLM
from pluralllm.residual import SHARES, ExactResidual, Shares


def build(config: ModelConfig) -> PluralLLM:
    """A fresh network, its weights drawn from torch's generator; untrained it answers uniformly."""
    return ExactResidual(config) if config.architecture == "residual" else FewShotAttention(config)


def choices(config: ModelConfig) -> tuple[Shares | None, ...]:
    """Shares of views that validation chooses from beside the round; None alone where there are none."""
    if config.architecture != "residual":
        return (None,)
    return SHARES if config.rank else tuple(shares for shares in SHARES if not shares.features)
