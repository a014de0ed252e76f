"""The smallest predictor that a run can train, as config keys."""

SMALL_PREDICTOR = {
    "embedding.dim": 8,
    "pluralllm.hidden-dim": 8,
    "pluralllm.blocks": 1,
    "pluralllm.heads": 2,
    "pluralllm.num-context-questions": 4,
}
