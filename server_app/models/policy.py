"""The models of PPO: policy, reference and value, by LoRA on one frozen base or by full fine-tuning.

Axis letters: C tokens that all rows begin with, J rollouts, T response tokens.
"""

from __future__ import annotations

import copy
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from appa_flwr.config import Config, split_names
from appa_flwr.core.seeds import child_seed
from server_app.engine.passes import Scorer, logprob_pass, value_pass
from server_app.models.one_product import holding, round_once

POLICY, VALUE = "default", "value"  # PEFT saves and loads the adapter "default" at the folder's top
SFT, BOTH = "sft", "both"
MERGED_BYTES = 4
ALPHA_PER_RANK = 2  # adapters are scaled by alpha / rank (SFT and PPO tables)


class PolicyModels(ABC):
    """Policy, reference and value behind one interface, so that PPO does not know which weights they share."""

    _policy: PreTrainedModel
    _head: nn.Linear
    _trained: Mapping[str, list[nn.Parameter]]

    def policy(self) -> PreTrainedModel:
        """The causal LM with the policy's weights in force."""
        return self._policy

    @abstractmethod
    def sampling(self) -> AbstractContextManager[PreTrainedModel]:
        """The policy in the form that samples fastest; no other pass may run within the block."""

    def policy_pass(
        self, prefix_C: Tensor, *, temperature: float, train: bool = False
    ) -> AbstractContextManager[Scorer]:
        """Log pi of the response tokens.

        Args:
            prefix_C: token ids that all rows of the pass begin with; computed once; may be empty.
            temperature: > 0.
            train: the caller calls `backward` on what it makes of each result before the next one, and leaves the
                block before the optimizer's step: the prefix gets its gradient then.
        """
        return logprob_pass(self.policy(), prefix_C, temperature=temperature, train=train)

    @abstractmethod
    def reference_pass(self, prefix_C: Tensor, *, temperature: float) -> AbstractContextManager[Scorer]:
        """Log pi_ref of the response tokens, without gradient."""

    @abstractmethod
    def value_pass(self, prefix_C: Tensor, *, train: bool = False) -> AbstractContextManager[Scorer]:
        """V before each response token; `train` as for `policy_pass`."""

    def policy_parameters(self) -> list[nn.Parameter]:
        """Parameters that the policy loss trains."""
        return self._trained[POLICY]

    def value_parameters(self) -> list[nn.Parameter]:
        """Parameters that the value loss trains."""
        return [*self._trained[VALUE], *self._head.parameters()]

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
        self._trained = {POLICY: list(self._policy.parameters()), VALUE: list(self._trunk.parameters())}

    def sampling(self) -> AbstractContextManager[PreTrainedModel]:
        """See base class."""
        return nullcontext(self._policy)

    def reference_pass(self, prefix_C: Tensor, *, temperature: float) -> AbstractContextManager[Scorer]:
        """See base class."""
        return logprob_pass(self._reference, prefix_C, temperature=temperature, train=False)

    def value_pass(self, prefix_C: Tensor, *, train: bool = False) -> AbstractContextManager[Scorer]:
        """See base class."""
        return value_pass(self._trunk, self._head, prefix_C, train=train)

    def save_policy(self, folder: Path) -> None:
        """See base class."""
        self._policy.save_pretrained(folder)


class LoraModels(PolicyModels):
    """LoRA adapters for policy and value on one frozen base, over SFT's own adapter where there is one.

    The reference is the base with SFT's adapter alone. That adapter stays apart and frozen: added to weights of 16 bits
    or fewer, most of what SFT learned would be rounded away.

    PEFT resets `requires_grad` whenever adapters are switched, so every switch goes through `_switch`, which gives
    policy and value their gradient back.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        rank: int,
        policy_targets: list[str],
        value_targets: list[str],
        sft_adapter: Path | None = None,
    ) -> None:
        # Dropout stays off in PPO: old and new log-probabilities must come from the same function.
        alpha = ALPHA_PER_RANK * rank
        policy = LoraConfig(r=rank, lora_alpha=alpha, target_modules=policy_targets, task_type="CAUSAL_LM")
        value = LoraConfig(r=rank, lora_alpha=alpha, target_modules=value_targets, task_type="CAUSAL_LM")
        self._peft: PeftModel
        if sft_adapter is None:
            self._peft = get_peft_model(model.eval(), policy, adapter_name=POLICY)
        else:
            self._peft = PeftModel.from_pretrained(model.eval(), str(sft_adapter), adapter_name=SFT)
            self._peft.add_adapter(POLICY, policy)
        self._peft.add_adapter(VALUE, value)
        self._peft.eval()
        if model.dtype.itemsize < torch.float32.itemsize:
            round_once(self._peft)
        self._start = [] if sft_adapter is None else [SFT]
        self._policy = self._peft.get_base_model()
        self._head = value_head(model.config.hidden_size, model.device)
        self._trained = {
            name: [p for key, p in self._peft.named_parameters() if f".{name}." in key and "lora_" in key]
            for name in (*self._start, POLICY, VALUE)
        }
        for name, parameters in self._trained.items():
            for parameter in parameters:
                # What learns is float32: in bfloat16 most steps at lr 1e-5 would round to nothing. What is frozen is
                # in the model's own format, which saves a cast a layer.
                parameter.data = parameter.data.to(model.dtype if name == SFT else torch.float32)
        self._switch(POLICY)

    def _switch(self, adapter: str) -> None:
        self._peft.base_model.set_adapter([*self._start, adapter], inference_mode=True)
        self._train_adapters()

    def _train_adapters(self) -> None:
        for name, parameters in self._trained.items():
            for parameter in parameters:
                parameter.requires_grad_(name != SFT)

    @contextmanager
    def sampling(self) -> Iterator[PreTrainedModel]:
        """The base with its adapters added to its weights, if they are plain numbers of 32 bits or more.

        In fewer bits the sum would be another policy than the one that learns. Afterwards the weights are put back from
        a copy, since a subtraction would not restore the reference bit for bit.
        """
        active = [*self._start, POLICY]
        adapted = [
            m for m in self._policy.modules() if isinstance(m, LoraLayer) and not m.lora_A.keys().isdisjoint(active)
        ]
        weights = [layer.get_base_layer().weight for layer in adapted]
        if not all(w.is_floating_point() and w.element_size() >= MERGED_BYTES for w in weights):
            with holding(self._peft):
                yield self._policy
            return
        kept = [weight.detach().clone() for weight in weights]
        try:
            with torch.no_grad():
                for layer, weight in zip(adapted, weights, strict=True):
                    for name in filter(layer.lora_A.keys().__contains__, active):
                        weight += layer.get_delta_weight(name)
            with self._peft.disable_adapter():
                yield self._policy
        finally:
            for weight, original in zip(weights, kept, strict=True):
                weight.data.copy_(original)
            self._train_adapters()

    @contextmanager
    def reference_pass(self, prefix_C: Tensor, *, temperature: float) -> Iterator[Scorer]:
        """See base class."""
        if self._start:
            self._peft.base_model.set_adapter(self._start, inference_mode=True)
        off = nullcontext() if self._start else self._peft.disable_adapter()
        try:
            with off, logprob_pass(self._policy, prefix_C, temperature=temperature) as scorer:
                yield scorer
        finally:
            self._switch(POLICY)

    @contextmanager
    def value_pass(self, prefix_C: Tensor, *, train: bool = False) -> Iterator[Scorer]:
        """See base class."""
        self._switch(VALUE)
        try:
            with value_pass(self._policy.base_model, self._head, prefix_C, train=train) as scorer:
                yield scorer
        finally:
            self._switch(POLICY)

    def save_policy(self, folder: Path) -> None:
        """Write one adapter, which is SFT's and the policy's in one: side by side, their product is their sum."""
        if not self._start:
            self._peft.save_pretrained(folder, selected_adapters=[POLICY], save_embedding_layers=False)
            return
        both = [SFT, POLICY]
        self._peft.base_model.add_weighted_adapter(both, [1.0] * len(both), BOTH, combination_type="cat")
        try:
            with tempfile.TemporaryDirectory(prefix="appa-policy-") as beside:
                self._peft.save_pretrained(
                    beside, selected_adapters=[BOTH], save_embedding_layers=False
                )  # into a folder of its name
                shutil.copytree(Path(beside) / BOTH, folder, dirs_exist_ok=True)
        finally:
            self._peft.delete_adapter(BOTH)
            self._switch(POLICY)


def ppo_models(config: Config, model: PreTrainedModel, *, sft_adapter: Path | None = None) -> PolicyModels:
    """Policy, reference and value model on the SFT model, or on its base and SFT's adapter folder."""
    # New adapters draw from the one global generator, which stands elsewhere in a resumed run.
    torch.manual_seed(child_seed(config.seed, "adapters"))
    if config.policy.tuning == "full":
        return FullModels(model)
    return LoraModels(
        model,
        rank=config.policy.lora_rank,
        policy_targets=list(split_names(config.policy.ppo_targets)),
        value_targets=list(split_names(config.policy.ppo_targets)),
        sft_adapter=sft_adapter,
    )
