"""The flat keys of before there were sections, for the error that names what each is called now."""

_SAME_NAME = {
    "run": "output-dir cache-dir checkpoint-every phases resume",
    "federation": "min-groups reply-timeout join-timeout",
    "data": "test-fraction num-questions num-groups max-questions refusals min-respondents min-questions strict",
    "pluralllm": "num-context-questions context-resampling unseen-groups",
    "sums": "mean-of-others",
    "policy": "prompt-style base-steps max-sequence-length attention quantization compute-dtype tuning",
    "rollout": "response-length temperature",
    "ppo": (
        "num-iterations training-epochs num-mini-batches micro-batch-tokens shared-prefix gradient-checkpointing "
        "learning-rate value-learning-rate weight-decay scheduler kl-coefficient clip-range clip-range-value "
        "value-coefficient gamma gae-lambda whiten-rewards reward-clamp max-grad-norm"
    ),
    "appa": "ema-decay fairness-threshold alignment-weight min-mean max-cov alpha",
    "eval": "ceilings",
}
# What was section-name is section.name.
_PREFIXED = {
    "embedding": "model dim",
    "pluralllm": (
        "draws checkpoint strategy proximal-mu rounds local-steps learning-rate server-learning-rate optimizer "
        "hidden-dim blocks heads fraction validate-every"
    ),
    "lora": "rank alpha dropout",
    "sft": (
        "target steps epochs batch-size gradient-accumulation-steps learning-rate scheduler warmup-ratio weight-decay"
    ),
    "rollout": "batch-size",
    "ppo": "epochs",
    "eval": "batch-size",
}
_RENAMED = {
    "embedding": "embedding.encoder",
    "population-min-groups": "sums.min-groups",
    "sft-lora-targets": "lora.sft-targets",
    "policy-lora-targets": "lora.policy-targets",
    "value-lora-targets": "lora.value-targets",
    "rollouts": "rollout.sampler",
    "softmax-temperature": "appa.temperature",
}

MOVED = (
    {name: f"{section}.{name}" for section, names in _SAME_NAME.items() for name in names.split()}
    | {f"{section}-{name}": f"{section}.{name}" for section, names in _PREFIXED.items() for name in names.split()}
    | _RENAMED
)

_PRIOR = "the population prior was removed: the residual architecture needs no sums of training answers"
REMOVED = {
    "population-prior": _PRIOR,
    "population-directions": "the directions were removed: their totals tell every answer",
    "vllm-memory": "sampling by vLLM was removed",
}
