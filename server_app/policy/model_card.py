"""The README.md of the aligned policy: what it was made from, how it scores beside the baselines, how it is loaded."""

from __future__ import annotations

from collections.abc import Sequence

from huggingface_hub import ModelCardData

from appa_flwr.config import SMOLLM2_MODEL, TINY_MODEL, Config
from appa_flwr.core import markdown
from appa_flwr.run.records import SummaryRow

# What the hub calls a model that has a name of its own here; the tiny one is from no hub.
_HUB_IDS = {TINY_MODEL: None, SMOLLM2_MODEL: "HuggingFaceTB/SmolLM2-135M-Instruct"}
_LOADING = {
    "full": """from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("policy")
tokenizer = AutoTokenizer.from_pretrained("policy")""",
    "lora": """from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer

model = AutoPeftModelForCausalLM.from_pretrained("policy")  # finds the base that adapter_config.json names
tokenizer = AutoTokenizer.from_pretrained("policy")""",
    "qlora": """from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer, BitsAndBytesConfig

# it was trained and scored on its base in 4 bits; on the base as it is answers and scores differ
packed = BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype="DTYPE"
)
model = AutoPeftModelForCausalLM.from_pretrained("policy", quantization_config=packed)
tokenizer = AutoTokenizer.from_pretrained("policy")""",
}


def model_card(config: Config, rows: Sequence[SummaryRow], groups: Sequence[str], *, survey: str) -> str:
    """A model card in the hub's format, with the rows of summary.json on the training metric."""
    loading = _LOADING[config.policy.tuning].replace("DTYPE", config.policy.compute_dtype)
    front = ModelCardData(
        library_name="transformers" if config.policy.tuning == "full" else "peft",
        pipeline_tag="text-generation",
        base_model=_HUB_IDS.get(config.model, config.model),
        tags=["appa-flwr", "federated", "pluralistic-alignment", "ppo"],
        model_name=config.run_name or "policy",
    )
    scores = [
        [
            row.method,
            f"{row.avg_as:.3f}",
            f"{row.min_as:.3f}",
            "-" if row.skill is None else f"{row.skill:z.1f}",
            f"{row.fi:.4f}",
            "-" if row.fi_readable is None else f"{row.fi_readable:.4f}",
            "-" if row.format_score is None else f"{row.format_score:.3f}",
        ]
        for row in rows
        if row.metric == config.reward_metric
    ]
    return f"""---
{front.to_yaml()}
---

# A policy for {len(groups)} groups at once

Aligned by appa-flwr with PPO on rewards of {len(groups)} groups whose survey answers stayed with them, task
`{config.task}`, aggregation rule `{config.rule}`, seed {config.seed}, starting from `{config.model}`.

Groups: {", ".join(groups)}.

Survey: {survey or config.survey}.

## Scores on held-out questions

Metric `{config.reward_metric}` against each group's predicted answers; `uniform`, `majority` and the
look-ups (`option-list`, `nearest-questions`) need no model, `mean-prediction` asks the groups, and
the ceilings are the best that any single answer for all groups could reach. Skill is 100 for a
perfect answer and 0 for one as good as `uniform`. FI of answers that cannot be read is 1, so it is given over the
readable ones too.

{markdown.table(["method", "Avg AS", "Min AS", "skill", "FI", "FI (readable)", "format"], scores)}

## Loading

```python
{loading}
```

It answers prompts of the form it was trained on (`appa_flwr.protocol.formats.prompt`, style
`{config.prompt_style}`), and is not a general assistant. One answer for all
groups cannot be right for each of them: the ceilings say how far it could get.
"""
