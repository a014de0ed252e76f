"""From the folder that SFT wrote to the models of PPO, and from the policy's folder to one that answers."""

from __future__ import annotations

import warnings
from pathlib import Path

from peft import PeftModel
from transformers import PreTrainedModel

from appa_flwr.config import Config
from appa_flwr.run.run_files import read
from server_app.policy.base import Base, load_model, prepare
from server_app.policy.models import PolicyModels, ppo_models

ADAPTER = "adapter_config.json"


def load_policy(config: Config, base: Base, sft: Path) -> PolicyModels:
    """Policy, reference and value model as PPO begins: on SFT's model, or on the base with SFT's adapter.

    Raises:
        UserError: see `load_model`.
    """
    if config.policy.tuning == "full":
        return ppo_models(config, load_model(config, str(sft), quantized=False))
    model = load_model(config, base.source, quantized=config.policy.tuning == "qlora")
    return ppo_models(config, model, sft_adapter=sft)


def opened(source: str) -> tuple[Base, PreTrainedModel]:
    """A policy's folder, an adapter added to its base, or any model's folder or name on the hub, in float32.

    Raises:
        UserError: it cannot be loaded, or the base model that its adapter names is no longer there.
    """
    adapter = Path(source) / ADAPTER
    whole = str((read(adapter, dict[str, object]) or {}).get("base_model_name_or_path") or source)
    config = Config.load({"run.phases": "serve", "model": whole})  # a run that trains nothing, so with any step size
    base = prepare(config, [])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # Transformers' about PEFT
        model = load_model(config, base.source, quantized=False)
        if adapter.exists():
            model = PeftModel.from_pretrained(model, source).merge_and_unload()
        return base, model
