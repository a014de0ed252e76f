"""The smallest parts that a run can have, as config keys."""

from collections.abc import Mapping

SMALL_PREDICTOR = {
    "pluralllm.num-context-questions": 4,
    "pluralllm.local-steps": 2,
    "pluralllm.learning-rate": 3e-3,
}

VOTES = {"sft.target": "smoothed-votes", "data.extra-questions": ""}
"""What every owner allows, on the questions that were answered."""

VALUE_MODEL = {"ppo.baseline": "value", "ppo.answers-per-question": 1}

AS_OWNERS_ASK = {"pluralllm.local-steps": 16}
"""How a deployed node trains PluralLLM where there is no owner's policy."""

CHOSEN = {"sft.learning-rate": 1e-3}
"""Beside a model that is not the tiny one: its step size is chosen, so the config does not refuse it."""


def keys_of(changes: Mapping[str, object]) -> dict[str, object]:
    """Config keys by the names of arguments: `ppo.batch-size` for `ppo__batch_size`."""
    return {name.replace("__", ".").replace("_", "-"): value for name, value in changes.items()}
