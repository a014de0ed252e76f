"""The smallest predictor that a run can train, as config keys."""

SMALL_PREDICTOR = {
    "embedding.dim": 8,
    "pluralllm.hidden-dim": 8,
    "pluralllm.blocks": 1,
    "pluralllm.num-context-questions": 4,
}

AS_OWNERS_ASK = {"pluralllm.strategy": "fedavg", "pluralllm.local-steps": 16}
"""How a deployed node trains PluralLLM where there is no owner's policy."""
