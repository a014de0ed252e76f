"""The smallest parts that a run can have, as config keys."""

from collections.abc import Mapping

SMALL_PREDICTOR = {
    "pluralllm.num-context-questions": 4,
    "pluralllm.local-steps": 2,
    "pluralllm.learning-rate": 3e-3,
}

VOTES = {"sft.target": "smoothed-votes", "data.extra-questions": ""}
"""What every owner allows, on the questions that were answered."""

SMALLEST = {
    "data.num-groups": 3,
    "run.min-groups": 3,
    **SMALL_PREDICTOR,
    "pluralllm.rounds": 2,
    **VOTES,
    "eval.ceilings": False,
    "baseline-rules": "",
    "sft.batch-size": 4,
    "ppo.num-iterations": 2,
    "ppo.batch-size": 8,
    "ppo.num-mini-batches": 2,
    "ppo.response-length": 24,
}
"""A run as small as all its parts can be; tests change what they are about."""

VALUE_MODEL = {"ppo.baseline": "value", "ppo.answers-per-question": 1}

AS_OWNERS_ASK = {"pluralllm.local-steps": 16}
"""How a deployed node trains PluralLLM where there is no owner's policy."""

CHOSEN = {"sft.learning-rate": 1e-3}
"""Beside a model that is not the tiny one: its step size is chosen, so the config does not refuse it."""


def keys_of(changes: Mapping[str, object]) -> dict[str, object]:
    """Config keys by the names of arguments: `ppo.batch-size` for `ppo__batch_size`."""
    return {name.replace("__", ".").replace("_", "-"): value for name, value in changes.items()}
