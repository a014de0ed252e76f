"""Load saved models: PPO's models from SFT's folder, and a policy from its own folder."""

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
    """Load policy, reference and value model for PPO: from SFT's model, or from the base with SFT's adapter.

    Raises:
        UserError: see `load_model`.
    """
    if config.policy.tuning == "full":
        return ppo_models(config, load_model(config, str(sft), quantized=False))
    model = load_model(config, base.source, quantized=config.policy.tuning == "qlora")
    return ppo_models(config, model, sft_adapter=sft)


def opened(source: str) -> tuple[Base, PreTrainedModel]:
    """Load the folder or hub id of a Qwen3, Llama or Gemma-2 in float32; an adapter is merged into its base.

    Raises:
        UserError: the model, or the base model that its adapter names, cannot be loaded.
    """
    adapter = Path(source) / ADAPTER
    whole = str((read(adapter, dict[str, object]) or {}).get("base_model_name_or_path") or source)
    # Without training no step size is checked. The length of each prompt is checked when it is answered.
    config = Config.load({"run.phases": "serve", "model": whole, "policy.max-sequence-length": 1})
    base = prepare(config, [])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # from Transformers, about PEFT
        model = load_model(config, base.source, quantized=False)
        if adapter.exists():
            model = PeftModel.from_pretrained(model, source).merge_and_unload()
        return base, model
