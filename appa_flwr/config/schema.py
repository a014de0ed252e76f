"""The typed, frozen config of a run, built once at the door from Flower's flat keys or from TOML.

On top stand the keys that everyone sets; the rest lies in sections (`appa_flwr.config.sections`).
"""

from __future__ import annotations

import math
import re
import types
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from appa_flwr.config.keys import Key, Scalar, first_problem, keys_of, unknown_key
from appa_flwr.config.sections import (
    APPASection,
    DataSection,
    EmbeddingSection,
    EvaluationSection,
    FederationSection,
    LoRASection,
    PluralLLMSection,
    PolicySection,
    PPOSection,
    RolloutSection,
    RunSection,
    Section,
    SFTSection,
    SumsSection,
)
from appa_flwr.errors import UserError

GENERATED_SURVEY = "generated"
HUB_SURVEY = "Anthropic/llm_global_opinions"
TINY_MODEL = "tiny"
TASK_METRICS = {"dpa": ("js", "js-distance", "wasserstein", "cosine"), "opa": ("borda",)}

_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class Config(Section):
    """All settings of a run. `appa_flwr.config.load` turns every problem with them into a one-line `UserError`."""

    task: Literal["dpa", "opa"] = Field("dpa", description="what the policy answers: a distribution or a ranking")
    survey: str = Field(
        GENERATED_SURVEY, min_length=1, description=f"generated, the path of a file or folder, or {HUB_SURVEY} (hub)"
    )
    groups: str = Field("", description="names separated by commas (or by semicolons); empty = all")
    model: str = Field(
        TINY_MODEL,
        min_length=1,
        description="tiny (built here), a model folder or a hub id such as Qwen/Qwen3-0.6B (SFT table)",
    )
    rule: Literal["appa", "average", "min", "alpha"] = Field("appa", description="how group rewards become one reward")
    metric: Literal["auto", "js", "js-distance", "wasserstein", "cosine", "borda"] = Field(
        "auto", description="alignment reward; auto = js for dpa, borda for opa"
    )
    seed: int = Field(0, ge=0, lt=2**31, description="the one seed every random stream is derived from")
    run_name: str = Field("", description="folder of the run inside output-dir; empty = task, rule, seed and time")
    run: RunSection = RunSection()
    federation: FederationSection = FederationSection()
    data: DataSection = DataSection()
    embedding: EmbeddingSection = EmbeddingSection()
    pluralllm: PluralLLMSection = PluralLLMSection()
    sums: SumsSection = SumsSection()
    policy: PolicySection = PolicySection()
    lora: LoRASection = LoRASection()
    sft: SFTSection = SFTSection()
    rollout: RolloutSection = RolloutSection()
    ppo: PPOSection = PPOSection()
    appa: APPASection = APPASection()
    eval: EvaluationSection = EvaluationSection()

    @model_validator(mode="after")
    def _agree(self) -> Self:
        """Check what no single key can tell; messages name the key to change."""
        if self.metric != "auto" and self.metric not in TASK_METRICS[self.task]:
            fitting = ", ".join(("auto", *TASK_METRICS[self.task]))
            raise ValueError(f'metric = "{self.metric}" does not fit task = "{self.task}"; metric can be: {fitting}')
        if self.run_name and not _RUN_NAME.fullmatch(self.run_name):
            raise ValueError(
                f'run-name = "{self.run_name}" must be letters, digits, ".", "_" and "-", starting with one'
            )
        names = self.group_names
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f'groups names "{twice}" twice; each group must be named once')
        known = len(names) or (self.data.num_groups if self.survey == GENERATED_SURVEY else None)
        if known is not None and self.federation.min_groups > known:
            raise ValueError(
                f"federation.min-groups = {self.federation.min_groups} must be at most the number of groups, which is "
                f"{known}"
            )
        unseen = self.unseen_group_names
        if len(set(unseen)) != len(unseen):
            twice = next(name for name in unseen if unseen.count(name) > 1)
            raise ValueError(f'pluralllm.unseen-groups names "{twice}" twice; each group must be named once')
        for name in unseen if names else ():
            if name not in names:
                raise ValueError(f'pluralllm.unseen-groups names "{name}", which is not one of groups')
        if known is not None and len(unseen) >= known:
            raise ValueError("pluralllm.unseen-groups names all groups; at least one must train the predictor")
        if self.sums.population_prior and known is not None and known - len(unseen) < self.sums.min_groups:
            raise ValueError(
                f"sums.population-prior needs sums.min-groups = {self.sums.min_groups} groups that train, and "
                f"there are {known - len(unseen)}"
            )
        if self.rollout.batch_size % self.ppo.num_mini_batches:
            raise ValueError(
                f"ppo.num-mini-batches = {self.ppo.num_mini_batches} must divide "
                f"rollout.batch-size = {self.rollout.batch_size}"
            )
        if self.pluralllm.hidden_dim % self.pluralllm.heads:
            raise ValueError(
                f"pluralllm.heads = {self.pluralllm.heads} must divide "
                f"pluralllm.hidden-dim = {self.pluralllm.hidden_dim}"
            )
        if self.embedding.encoder != "ngrams" and not self.embedding.model:
            raise ValueError(
                f'embedding.encoder = "{self.embedding.encoder}" needs embedding.model, a model folder or a hub id'
            )
        if self.embedding.encoder == "ngrams" and self.embedding.model:
            raise ValueError(
                f'embedding.model = "{self.embedding.model}" needs embedding.encoder = "sentence-transformers" or '
                '"causal-lm"'
            )
        if self.policy.quantization == "nf4" and self.policy.tuning == "full":
            raise ValueError('policy.quantization = "nf4" freezes the base and needs policy.tuning = "lora"')
        return self

    @classmethod
    def load(cls, flat: Mapping[str, Scalar]) -> Config:
        """Build the config from flat keys, sections dotted; keys left out take their default.

        Args:
            flat: key -> bool, int, float or str. An int is taken for a float, a bool never for a number.

        Raises:
            UserError: unknown key, wrong type, out of range, or keys that contradict each other; one line.
        """
        nested: dict[str, Any] = {}
        for key, value in flat.items():
            if key not in KEYS:
                raise UserError(unknown_key(key, KEYS))
            section, _, leaf = key.rpartition(".")
            (nested.setdefault(section, {}) if section else nested)[leaf] = value
        try:
            return cls.model_validate(nested)
        except ValidationError as error:
            raise UserError(first_problem(error, flat, KEYS)) from None

    def flat(self) -> dict[str, Scalar]:
        """All keys and values, sections dotted, ready for `load`, TOML or Flower's run config."""
        found: dict[str, Scalar] = {}
        for key, value in self.model_dump(by_alias=True).items():
            found |= (
                {f"{key}.{name}": item for name, item in value.items()} if isinstance(value, dict) else {key: value}
            )
        return found

    @property
    def group_names(self) -> tuple[str, ...]:
        """The groups asked for by name; empty = all that the survey has."""
        return split_names(self.groups)

    @property
    def unseen_group_names(self) -> tuple[str, ...]:
        """The groups that never train PluralLLM."""
        return split_names(self.pluralllm.unseen_groups)

    @property
    def reward_metric(self) -> str:
        """`metric` with `auto` resolved for the task."""
        return TASK_METRICS[self.task][0] if self.metric == "auto" else self.metric

    @property
    def run_folder(self) -> Path:
        """Where everything of this run is written.

        Raises:
            UserError: the run has no name yet; see `named`.
        """
        if not self.run_name:
            raise UserError("run-name is empty: a run needs a name before it has a folder")
        return Path(self.run.output_dir) / self.run_name

    def named(self, now: datetime) -> Config:
        """This config with a run-name: its own, or one made from task, rule, seed and `now`."""
        if self.run_name:
            return self
        made = f"{self.task}-{self.rule}-seed{self.seed}-{now:%Y%m%d-%H%M%S}"
        return Config.load({**self.flat(), "run-name": made})

    def iterations(self, num_train_questions: int) -> int:
        """PPO iterations: `num_iterations`, or what `training_epochs` passes over the questions take."""
        passes = math.ceil(self.ppo.training_epochs * num_train_questions / self.rollout.batch_size)
        return self.ppo.num_iterations or max(1, passes)


KEYS: Mapping[str, Key] = types.MappingProxyType(keys_of(Config))


def split_names(text: str) -> tuple[str, ...]:
    """Names separated by semicolons where there is one, else by commas; stripped, empty ones dropped.

    Semicolons let a name contain a comma.
    """
    separator = ";" if ";" in text else ","
    return tuple(name for part in text.split(separator) if (name := part.strip()))
