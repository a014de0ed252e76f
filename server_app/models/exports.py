"""From the folder that SFT wrote to the models of PPO, and from these to the folder that a user loads."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path

import transformers
from peft import PeftModel
from transformers import PreTrainedModel

from appa_flwr.config import Config
from appa_flwr.run.run_files import read
from server_app.models.base import Base, load_model, prepare
from server_app.models.policy import PolicyModels, ppo_models

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


def save(config: Config, models: PolicyModels, base: Base, folder: Path) -> None:
    """Write the policy as `lora.export` says: a model that Transformers loads, or an adapter that PEFT loads.

    Both hold the base's weights as they are without quantisation. A whole model is written in float32: in 16 bits most
    of what the adapters add would be rounded away.
    """
    if config.policy.tuning == "full" or config.lora.export == "adapter":
        models.save_policy(folder)
    else:
        with tempfile.TemporaryDirectory(prefix="appa-adapter-") as adapter:
            models.save_policy(Path(adapter))
            model = merged(config, base, Path(adapter))
        model.generation_config.eos_token_id = list(base.stop_ids)
        model.save_pretrained(folder)
    base.tokenizer.save_pretrained(folder)


def merged(config: Config, base: Base, adapter: Path) -> PreTrainedModel:
    """The base with an adapter added to its weights, in float32."""
    exact = Config.load({**config.flat(), "policy.compute-dtype": "float32"})
    model = load_model(exact, base.source, quantized=False)
    return PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()


def opened(config: Config, source: str) -> tuple[Base, PreTrainedModel]:
    """What `save` wrote, or any model's folder or name on the hub, in float32.

    Raises:
        UserError: it cannot be loaded, or the base model that its adapter names is no longer there.
    """
    adapter = Path(source) / ADAPTER
    whole = str((read(adapter, dict[str, object]) or {}).get("base_model_name_or_path") or source)
    config = Config.load({**config.flat(), "model": whole, "policy.compute-dtype": "float32"})
    base = prepare(config, [])
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # Transformers' about PEFT
        if adapter.exists():
            return base, merged(config, base, Path(source))
        return base, load_model(config, base.source, quantized=False)
