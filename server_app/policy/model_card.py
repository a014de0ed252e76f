"""README.md of the aligned policy: its origin, its scores beside those of the baselines, and how to load it."""

import os
from collections.abc import Sequence
from pathlib import Path
from pprint import pformat

from huggingface_hub import ModelCardData

from appa_flwr.config import SMOLLM2_MODEL, TINY_MODEL, Config
from appa_flwr.core import markdown
from appa_flwr.core.text import listed
from appa_flwr.run.records import SummaryRow
from server_app.policy.base import TEMPLATE_KEYS, Base

# Hub ids of models that have a name of their own in the config; the tiny model is on no hub.
_HUB_IDS = {TINY_MODEL: None, SMOLLM2_MODEL: "HuggingFaceTB/SmolLM2-135M-Instruct"}
_PLAIN = 'tokenizer(prompt, return_tensors="pt")'
_CHAT = f"""tokenizer.apply_chat_template(
    [{{"role": "user", "content": prompt}}],
    return_dict=True,
    return_tensors="pt",
    add_generation_prompt=True,
    **{TEMPLATE_KEYS},
)"""
_PACKED = """
It was trained and scored on its base in 4 bits; on the base as it is answers and scores differ. So give
`quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
bnb_4bit_compute_dtype="DTYPE")` too.
"""


def model_card(
    config: Config, rows: Sequence[SummaryRow], groups: Sequence[str], base: Base, *, survey: str, prompt: str
) -> str:
    """A model card in the hub's format, with the rows of summary.json on the training metric.

    Args:
        config: config of the run.
        rows: rows of summary.json.
        groups: names of the groups.
        base: the model that the policy started from.
        survey: the survey's origin, as a sentence; empty = the config's.
        prompt: a prompt that the policy was scored on, for the example.
    """
    whole, packed = config.policy.tuning == "full", config.policy.tuning == "qlora"
    library, loader = ("transformers", "AutoModelForCausalLM") if whole else ("peft", "AutoPeftModelForCausalLM")
    hub_id = _HUB_IDS.get(config.model, None if os.path.exists(config.model) else config.model)
    front = ModelCardData(library_name=library, pipeline_tag="text-generation", base_model=hub_id, tags=["appa-flwr"])
    scores = [
        [
            row.method + (f", {row.sampled} questions" if row.sampled else ""),
            row.against,
            *("-" if score is None else f"{score:.4f}" for score in columns),
        ]
        for row in rows
        for columns in ((row.avg_as, row.min_as, row.fi, row.format_score),)
        if row.metric == config.reward_metric
    ]
    return f"""---
{front.to_yaml()}
---

# A policy for {len(groups)} groups at once

Aligned by appa-flwr with PPO on rewards of {len(groups)} groups whose survey answers stayed with them, task
`{config.task}`, aggregation rule `{config.rule}`, seed {config.seed}, starting from
`{hub_id or Path(config.model).name}`.

Groups: {listed(groups)}. Survey: {survey or config.survey}.

Scores on held-out questions, metric `{config.reward_metric}`, against the groups' survey answers and PluralLLM's
predictions of them. FI of answers that cannot be read is 1, so read it beside `format`.

{markdown.table(["method", "against", "Avg AS", "Min AS", "FI", "format"], scores)}

```python
from {library} import {loader}
from transformers import AutoTokenizer

model, tokenizer = {loader}.from_pretrained("policy"), AutoTokenizer.from_pretrained("policy")
prompt = {pformat(prompt, width=100)}
tokens = {_PLAIN if base.tokenizer.chat_template is None else _CHAT}.to(model.device)
ends = {[*base.stop_ids]}
row = model.generate(**tokens, max_new_tokens={config.ppo.response_length}, eos_token_id=ends, do_sample=False)[0]
print(tokenizer.decode(row[tokens["input_ids"].shape[1] :], skip_special_tokens=True))
```
{_PACKED.replace("DTYPE", config.policy.compute_dtype) if packed else ""}
It answers prompts of this form alone (`appa_flwr.protocol.formats.prompt`, style `{config.prompt_style}`).
"""
