"""The models of PPO: policy, reference and value, by LoRA on one frozen base or by full fine-tuning.

Axis letters: J rollouts, T response tokens, V vocabulary, H hidden size.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import PreTrainedModel

from server_app.rollouts import Sequences

POLICY, VALUE = "default", "value"  # PEFT saves and loads the adapter "default" at the folder's top


def token_logprobs(logits_JTV: Tensor, token_JT: Tensor, *, temperature: float) -> Tensor:
    """Log-probability of given tokens under softmax(logits / temperature), by gather and logsumexp.

    Args:
        logits_JTV: raw logits of the positions before each token.
        token_JT: token ids.
        temperature: > 0.

    Returns:
        Shape (J, T), float32.
    """
    scaled_JTV = logits_JTV.float() / temperature
    return scaled_JTV.gather(-1, token_JT.unsqueeze(-1)).squeeze(-1) - scaled_JTV.logsumexp(-1)


def response_logprobs(model: nn.Module, sequences: Sequences, *, temperature: float) -> Tensor:
    """One forward pass with logits for the response positions only; (J, T), 0 outside the mask."""
    width = sequences.response_JT.shape[1]
    logits = model(**sequences.model_inputs(), use_cache=False, logits_to_keep=width).logits
    return token_logprobs(logits, sequences.response_JT, temperature=temperature) * sequences.mask_JT


def response_values(trunk: nn.Module, head: nn.Module, sequences: Sequences) -> Tensor:
    """V(s) before each response token: the head on the trunk's last hidden states; (J, T), 0 outside the mask."""
    width = sequences.response_JT.shape[1]
    hidden_JLH = trunk(**sequences.model_inputs(), use_cache=False).last_hidden_state
    value_JT: Tensor = head(hidden_JLH[:, -width:].float()).squeeze(-1)
    return value_JT * sequences.mask_JT


class PolicyModels(ABC):
    """Policy, reference and value behind one interface, so that PPO does not know which weights they share."""

    @abstractmethod
    def policy(self) -> PreTrainedModel:
        """The causal LM with the policy's weights in force."""

    @abstractmethod
    def policy_logprobs(self, sequences: Sequences, *, temperature: float) -> Tensor:
        """Log pi of the response tokens, (J, T), with gradient where enabled."""

    @abstractmethod
    def reference_logprobs(self, sequences: Sequences, *, temperature: float) -> Tensor:
        """Log pi_ref of the response tokens, (J, T), without gradient."""

    @abstractmethod
    def values(self, sequences: Sequences) -> Tensor:
        """V before each response token, (J, T), with gradient where enabled."""

    @abstractmethod
    def policy_parameters(self) -> list[nn.Parameter]:
        """What the policy loss trains."""

    @abstractmethod
    def value_parameters(self) -> list[nn.Parameter]:
        """What the value loss trains."""

    @abstractmethod
    def save_policy(self, folder: Path) -> None:
        """Write the policy as a folder that Transformers (full) or PEFT (LoRA) loads."""


def value_head(hidden_size: int, device: torch.device) -> nn.Linear:
    """A linear head that starts at value 0: before it has learned, the advantage is the return."""
    head = nn.Linear(hidden_size, 1, device=device)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


class FullModels(PolicyModels):
    """Full fine-tuning: the policy itself, a frozen copy as reference, a copy of the trunk for the value."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._reference = copy.deepcopy(model).eval().requires_grad_(False)
        self._trunk = copy.deepcopy(model.base_model).eval().requires_grad_(True)
        self._policy = model.eval().requires_grad_(True)
        self._head = value_head(model.config.hidden_size, model.device)

    def policy(self) -> PreTrainedModel:
        """See base class."""
        return self._policy

    def policy_logprobs(self, sequences: Sequences, *, temperature: float) -> Tensor:
        """See base class."""
        return response_logprobs(self._policy, sequences, temperature=temperature)

    def reference_logprobs(self, sequences: Sequences, *, temperature: float) -> Tensor:
        """See base class."""
        with torch.no_grad():
            return response_logprobs(self._reference, sequences, temperature=temperature)

    def values(self, sequences: Sequences) -> Tensor:
        """See base class."""
        return response_values(self._trunk, self._head, sequences)

    def policy_parameters(self) -> list[nn.Parameter]:
        """See base class."""
        return list(self._policy.parameters())

    def value_parameters(self) -> list[nn.Parameter]:
        """See base class."""
        return [*self._trunk.parameters(), *self._head.parameters()]

    def save_policy(self, folder: Path) -> None:
        """See base class."""
        self._policy.save_pretrained(folder)


class LoraModels(PolicyModels):
    """LoRA adapters "policy" and "value" on one frozen base; the reference is the base with adapters off.

    PEFT resets `requires_grad` whenever an adapter is switched, so every switch goes through `_switch`, which gives
    both adapters their gradient back.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        rank: int,
        alpha: int,
        policy_targets: list[str],
        value_targets: list[str],
    ) -> None:
        # Dropout stays off in PPO: old and new log-probabilities must come from the same function.
        policy = LoraConfig(r=rank, lora_alpha=alpha, target_modules=policy_targets, task_type="CAUSAL_LM")
        value = LoraConfig(r=rank, lora_alpha=alpha, target_modules=value_targets, task_type="CAUSAL_LM")
        self._peft: PeftModel = get_peft_model(model.eval(), policy, adapter_name=POLICY)
        self._peft.add_adapter(VALUE, value)
        self._base: PreTrainedModel = self._peft.get_base_model()
        self._head = value_head(model.config.hidden_size, model.device)
        self._lora = {
            name: [p for key, p in self._peft.named_parameters() if f".{name}." in key and "lora_" in key]
            for name in (POLICY, VALUE)
        }
        for parameter in (*self._lora[POLICY], *self._lora[VALUE]):
            parameter.data = parameter.data.float()  # in bfloat16 most steps at lr 1e-5 would round to nothing
        self._switch(POLICY)

    def _switch(self, adapter: str) -> None:
        self._peft.set_adapter(adapter)
        self._train_adapters()

    def _train_adapters(self) -> None:
        for parameter in (*self._lora[POLICY], *self._lora[VALUE]):
            parameter.requires_grad_(True)

    @contextmanager
    def _active(self, adapter: str) -> Iterator[None]:
        self._switch(adapter)
        try:
            yield
        finally:
            self._switch(POLICY)

    def policy(self) -> PreTrainedModel:
        """See base class."""
        return self._base

    def policy_logprobs(self, sequences: Sequences, *, temperature: float) -> Tensor:
        """See base class."""
        return response_logprobs(self._base, sequences, temperature=temperature)

    def reference_logprobs(self, sequences: Sequences, *, temperature: float) -> Tensor:
        """See base class."""
        try:
            with torch.no_grad(), self._peft.disable_adapter():
                return response_logprobs(self._base, sequences, temperature=temperature)
        finally:
            self._train_adapters()

    def values(self, sequences: Sequences) -> Tensor:
        """See base class."""
        with self._active(VALUE):
            return response_values(self._base.base_model, self._head, sequences)

    def policy_parameters(self) -> list[nn.Parameter]:
        """See base class."""
        return self._lora[POLICY]

    def value_parameters(self) -> list[nn.Parameter]:
        """See base class."""
        return [*self._lora[VALUE], *self._head.parameters()]

    def save_policy(self, folder: Path) -> None:
        """See base class."""
        self._peft.save_pretrained(folder, selected_adapters=[POLICY])
