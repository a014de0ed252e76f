"""The two architectures of PluralLLM by name."""

from __future__ import annotations

from appa_flwr.config.sections import Architecture
from pluralllm.attention import FewShotAttention
from pluralllm.model import ModelConfig, PluralLLM
from pluralllm.residual import SHARES, ExactResidual, Shares


def build(config: ModelConfig) -> PluralLLM:
    """A fresh network, its weights drawn from torch's generator; untrained it answers uniformly."""
    return ExactResidual(config) if config.architecture == "residual" else FewShotAttention(config)


def choices(architecture: Architecture) -> tuple[Shares | None, ...]:
    """Shares of views that validation chooses from; None alone where there are none."""
    return SHARES if architecture == "residual" else (None,)
