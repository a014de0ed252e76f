"""A model of this machine, asked as a run asks its own policy: greedily, and with its own chat template.

No axis letters: there are no arrays here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from appa_flwr.config import Config
from server_app.models import base, exports
from server_app.ppo.rollouts import Decoding, sample

ADAPTER, BATCH = "adapter_config.json", 16


@torch.inference_mode()
def answers(source: str, prompts: Sequence[str], *, answer_tokens: int) -> Iterator[str]:
    """The model's answer to each prompt; `source` is a folder, perhaps of an adapter, or a name on the hub.

    Raises:
        UserError: it cannot be loaded.
    """
    adapter = Path(source) / ADAPTER
    whole = json.loads(adapter.read_text())["base_model_name_or_path"] if adapter.exists() else source
    config = Config.load({"model": whole, "policy.compute-dtype": "float32"})
    found = base.prepare(config, [])
    if adapter.exists():
        model = exports.merged(config, found, Path(source))
    else:
        model = base.load_model(config, found.source, quantized=False)
    decoding = Decoding.fitting(
        model, max_new_tokens=answer_tokens, temperature=0.0, stop_ids=found.stop_ids, pad_id=found.pad_id
    )
    for start in range(0, len(prompts), BATCH):
        ids = [found.ids(found.asked(text)) for text in prompts[start : start + BATCH]]
        decoded = sample(model, ids, decoding).sequences
        yield from found.texts(decoded.response_JT, decoded.mask_JT)
