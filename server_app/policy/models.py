"""The models of PPO: policy, reference and value, by LoRA on one frozen base or by full fine-tuning.

PPO uses `FullModels` and `LoraModels` alike, and does not know which weights they share.
"""

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel
from torch import nn
from transformers import PreTrainedModel

from appa_flwr.config import Config, split_names
from appa_flwr.core.seeds import child_seed
from server_app.policy.base import Base, load_model
from server_app.policy.lora_product import round_once

SFT, POLICY, VALUE = "sft", "policy", "value"  # adapter names in PEFT
SAVED = "default"  # name of the adapter that PEFT saves and loads at the top of the folder
ALPHA_PER_RANK = 2  # adapters are scaled by alpha / rank (SFT and PPO tables)


def lora_config(config: Config, targets: str, *, dropout: float = 0.0) -> LoraConfig:
    """Settings of an adapter on the layers named in `targets` (SFT and PPO tables)."""
    return LoraConfig(
        r=config.policy.lora_rank,
        lora_alpha=ALPHA_PER_RANK * config.policy.lora_rank,
        lora_dropout=dropout,
        target_modules=list(split_names(targets)),
        task_type="CAUSAL_LM",
    )


def value_head(hidden_size: int, device: torch.device) -> nn.Linear:
    """Linear head initialised to 0, so that at first the advantage equals the return."""
    head = nn.Linear(hidden_size, 1, device=device)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


class FullModels:
    """Full fine-tuning: the policy itself, a frozen copy as reference, a copy of the trunk for the value.

    Attributes:
        policy: the policy's causal LM; its own weights are active outside the blocks of `reference` and `value`.
        head: maps hidden states of the value trunk to V; None without a value model.
        policy_parameters: parameters that the policy loss trains.
        value_parameters: parameters that the value loss trains; empty without a value model.
    """

    def __init__(self, model: PreTrainedModel, *, value: bool = True) -> None:
        self._reference = copy.deepcopy(model).eval().requires_grad_(False)
        self._trunk = copy.deepcopy(model.base_model).eval().requires_grad_(True) if value else None
        self.policy = model.eval().requires_grad_(True)
        self.head = value_head(model.config.hidden_size, model.device) if value else None
        self.policy_parameters = list(self.policy.parameters())
        self.value_parameters = [p for part in (self._trunk, self.head) if part is not None for p in part.parameters()]

    def reference(self) -> AbstractContextManager[PreTrainedModel]:
        """Yield the causal LM that PPO started from; backward passes must run within the block."""
        return nullcontext(self._reference)

    def value(self) -> AbstractContextManager[nn.Module]:
        """Yield the value model's trunk, the input of `head`; backward passes must run within the block."""
        assert self._trunk is not None
        return nullcontext(self._trunk)

    def save_policy(self, folder: Path) -> None:
        """Write the policy as a folder that Transformers loads."""
        self.policy.save_pretrained(folder)


class LoraModels:
    """LoRA adapters for policy and value on one frozen base, over SFT's own adapter.

    The attributes are those of `FullModels`. The reference is the base with SFT's adapter alone. SFT's adapter stays
    separate and frozen: merged into weights of 16 bits or fewer, most of its update would be rounded away.

    PEFT resets `requires_grad` whenever adapters are switched. So every switch goes through `_switch`.
    """

    def __init__(self, model: PreTrainedModel, sft_adapter: Path, adapter: LoraConfig, *, value: bool = True) -> None:
        self._peft = PeftModel.from_pretrained(model.eval(), str(sft_adapter), adapter_name=SFT)
        self._peft.add_adapter(POLICY, adapter)
        if value:
            self._peft.add_adapter(VALUE, adapter)
        self._peft.eval()
        round_once(self._peft)
        self.policy = self._peft.get_base_model()
        self.head = value_head(model.config.hidden_size, model.device) if value else None
        self.policy_parameters, of_value, frozen = (self._of_adapter(name) for name in (POLICY, VALUE, SFT))
        self.value_parameters = [*of_value, *(self.head.parameters() if self.head is not None else ())]
        # Trained adapters are float32: in bfloat16 most steps at lr 1e-5 would round to 0. The frozen adapter has the
        # model's dtype, which saves a cast per layer.
        for dtype, parameters in ((torch.float32, self.policy_parameters + of_value), (model.dtype, frozen)):
            for parameter in parameters:
                parameter.data = parameter.data.to(dtype)
        self._switch(POLICY)

    def _of_adapter(self, name: str) -> list[nn.Parameter]:
        return [p for key, p in self._peft.named_parameters() if f".{name}." in key and "lora_" in key]

    def _switch(self, *adapters: str) -> None:
        self._peft.base_model.set_adapter([SFT, *adapters], inference_mode=True)
        for parameter in self.policy_parameters + self.value_parameters:
            parameter.requires_grad_(True)

    @contextmanager
    def reference(self) -> Iterator[PreTrainedModel]:
        """See `FullModels.reference`."""
        self._switch()
        try:
            yield self.policy
        finally:
            self._switch(POLICY)

    @contextmanager
    def value(self) -> Iterator[nn.Module]:
        """See `FullModels.value`."""
        self._switch(VALUE)
        try:
            yield self.policy.base_model
        finally:
            self._switch(POLICY)

    def save_policy(self, folder: Path) -> None:
        """Write a folder that PEFT loads: SFT's adapter and the policy's add up, concatenated along the rank."""
        self._peft.base_model.add_weighted_adapter([SFT, POLICY], [1.0, 1.0], SAVED, combination_type="cat")
        try:
            self._peft.save_pretrained(folder, selected_adapters=[SAVED], save_embedding_layers=False)
        finally:
            self._peft.delete_adapter(SAVED)


PolicyModels = FullModels | LoraModels


def load_policy(config: Config, base: Base, sft: Path) -> PolicyModels:
    """Load policy, reference and, with `ppo.baseline = "value"`, value model from SFT's folder.

    The folder has SFT's model, or SFT's adapter for `base`. Raises UserError as `load_model`.
    """
    full, value = config.policy.tuning == "full", config.ppo.baseline == "value"
    model = load_model(config, str(sft) if full else base.source, quantized=config.policy.tuning == "qlora")
    # New adapters draw from torch's global generator, whose state is different in a resumed run.
    torch.manual_seed(child_seed(config.seed, "adapters"))
    if full:
        return FullModels(model, value=value)
    # Dropout stays off in PPO: old and new log-probabilities must come from the same function.
    return LoraModels(model, sft, lora_config(config, config.policy.ppo_lora_modules), value=value)
