"""PluralLLM's sizes as the run config names them: one place for both sides, since their weights must fit."""

from __future__ import annotations

from appa_flwr.config import Config
from pluralllm.episodes import EpisodeConfig
from pluralllm.model import ModelConfig


def model_config(config: Config) -> ModelConfig:
    """The network's sizes."""
    return ModelConfig(
        config.embedding.dim,
        config.pluralllm.hidden_dim,
        config.pluralllm.blocks,
        config.pluralllm.heads,
        config.sums.population_prior,
    )


def episode_config(config: Config) -> EpisodeConfig:
    """The shape of a training step's episodes."""
    return EpisodeConfig(num_context=config.pluralllm.num_context_questions)
