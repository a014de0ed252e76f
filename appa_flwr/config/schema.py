"""The typed, frozen config of a run, built once at the door from Flower's flat keys or from TOML.

On top stand the keys that everyone sets; the rest lies in sections (`appa_flwr.config.sections`).
"""

from __future__ import annotations

import math
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, StringConstraints, ValidationError, model_validator

from appa_flwr.config.keys import Key, Scalar, first_problem, keys_of, sections_of, to_toml, unknown_key
from appa_flwr.config.ranges import AUTO_METRICS, TASK_METRICS
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
    ServeSection,
    SFTSection,
)
from appa_flwr.core import own_code
from appa_flwr.core.errors import UserError

GENERATED_SURVEY = "generated"
HUB_SURVEY = "Anthropic/llm_global_opinions"
TINY_MODEL = "tiny"
SMOLLM2_MODEL = "smollm2"
THREADS = "APPA_THREADS"
"""Environment variable in which the launcher passes the user's own OMP_NUM_THREADS on; empty where there is none."""
TRAINING_EPOCHS = 5  # of PPO, where ppo.num-iterations is 0 (PPO table)

_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


OwnName = Annotated[str, StringConstraints(pattern=rf"^{own_code.NAME}$")]
"""A module and what it holds: code of the user's own."""
RuleName = Literal["appa", "average", "min", "alpha", "mix"] | OwnName
"""A rule that is there, or the module and the class of another (`aggregation.find`)."""
MetricName = Literal["auto", "auto-ordinal", "js", "js-distance", "wasserstein", "cosine", "borda"] | OwnName
"""A metric, or the module and the function of another (`rewards.find`)."""


class Config(Section):
    """All settings of a run. `appa_flwr.config.load` turns every problem with them into a one-line `UserError`."""

    task: Literal["dpa", "opa"] = Field("dpa", description="what the policy answers: a distribution or a ranking")
    survey: str = Field(
        GENERATED_SURVEY,
        min_length=1,
        description=f"generated, the path of a file or folder, {HUB_SURVEY} (hub), or a reader of your own, "
        "MODULE:FUNCTION or MODULE:FUNCTION:FILE",
    )
    groups: str = Field("", description="names separated by commas (or by semicolons); empty = all")
    model: str = Field(
        TINY_MODEL,
        min_length=1,
        description="tiny (built here), smollm2 (of a package), a model folder, a .gguf file or a hub id (SFT table)",
    )
    rule: RuleName = Field("appa", description="how group rewards become one reward; MODULE:CLASS is one of your own")
    baseline_rule: RuleName | Literal[""] = Field(
        "average",
        description="a second policy is trained by this rule, from the same SFT model, and compared; empty = none",
    )
    metric: MetricName = Field(
        "auto",
        description="alignment reward; auto = js for dpa, borda for opa; auto-ordinal = wasserstein for dpa, borda for "
        "opa; MODULE:FUNCTION is one of your own",
    )
    seed: int = Field(0, ge=0, lt=2**31, description="the one seed every random stream is derived from")
    run_name: str = Field(
        "", description="name of the run's folder in run.output-dir; empty = task, rule, seed and time"
    )
    run: RunSection = RunSection()
    federation: FederationSection = FederationSection()
    data: DataSection = DataSection()
    embedding: EmbeddingSection = EmbeddingSection()
    pluralllm: PluralLLMSection = PluralLLMSection()
    policy: PolicySection = PolicySection()
    lora: LoRASection = LoRASection()
    sft: SFTSection = SFTSection()
    rollout: RolloutSection = RolloutSection()
    ppo: PPOSection = PPOSection()
    appa: APPASection = APPASection()
    eval: EvaluationSection = EvaluationSection()
    serve: ServeSection = ServeSection()

    @model_validator(mode="after")
    def _agree(self) -> Self:
        """Check what no single key can tell; messages name the key to change."""
        for problem in chain(_in_names(self), _in_groups(self), _in_sizes(self), _in_models(self)):
            raise ValueError(problem)
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
            config = cls.model_validate(nested)
        except ValidationError as error:
            raise UserError(first_problem(error, flat, KEYS)) from None
        for key, value in flat.items():
            if isinstance(value, int) and abs(value) >= 2**63:
                raise UserError(f"{key} = {value} is beyond the 64 bits that a whole number has in TOML")
        return config

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
        """`metric` with `auto` and `auto-ordinal` resolved for the task."""
        return AUTO_METRICS[self.metric][self.task] if self.metric in AUTO_METRICS else self.metric

    @property
    def run_folder(self) -> Path:
        """Folder of everything this run writes.

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
        made = f"{self.task}-{self.rule.replace(':', '-')}-seed{self.seed}-{now:%Y%m%d-%H%M%S}"
        return Config.load({**self.flat(), "run-name": made})

    def iterations(self, num_train_questions: int) -> int:
        """PPO iterations: `num_iterations`, or what `TRAINING_EPOCHS` passes over the questions take."""
        questions = self.rollout.batch_size // self.rollout.answers_per_question
        passes = math.ceil(TRAINING_EPOCHS * num_train_questions / questions)
        return self.ppo.num_iterations or max(1, passes)


KEYS: Mapping[str, Key] = types.MappingProxyType(keys_of(Config))
SECTIONS: Mapping[str, str] = types.MappingProxyType(sections_of(Config))


def keys_in(section: str) -> tuple[Key, ...]:
    """The keys of a section; of "", those on top."""
    return tuple(key for key in KEYS.values() if key.section == section)


def check_groups(config: Config, groups: Sequence[str]) -> None:
    """Check that the keys about groups fit those that take part in a run.

    Raises:
        UserError: there are too few of them, or too few that train the predictor.
    """
    for problem in _in_groups(config, groups):
        raise UserError(problem)


def _in_names(config: Config) -> Iterator[str]:
    if ":" not in config.metric and config.reward_metric not in TASK_METRICS[config.task]:
        fitting = ", ".join((*AUTO_METRICS, *TASK_METRICS[config.task]))
        yield f'metric = "{config.metric}" does not fit task = "{config.task}"; metric can be: {fitting}'
    for key, rule in {"rule": config.rule, "baseline-rule": config.baseline_rule}.items():
        if rule == "alpha" and config.appa.alpha == 0:
            yield (
                f'appa.alpha = 0 makes {key} = "alpha" the mean of the groups, which is {key} = "average"; give '
                "appa.alpha a number below 0, towards the minimum, or above 0, towards the maximum"
            )
    if config.run_name and not _RUN_NAME.fullmatch(config.run_name):
        yield f'run-name = {to_toml(config.run_name)} must be letters, digits, ".", "_" and "-", starting with one'
    for key, names in {"groups": config.group_names, "pluralllm.unseen-groups": config.unseen_group_names}.items():
        for name in names:
            if names.count(name) > 1:
                yield f"{key} names {to_toml(name)} twice; each group must be named once"


def _in_groups(config: Config, groups: Sequence[str] = ()) -> Iterator[str]:
    """Without `groups`, what the config alone can tell: names that may be wrong are not yet counted."""
    known = bool(groups)
    groups = groups or config.group_names
    for name in config.unseen_group_names if groups else ():
        if name not in groups:
            where = f"which is not in this run; it has: {', '.join(groups)}"
            yield f"pluralllm.unseen-groups names {to_toml(name)}, {where}"
    count = len(groups) or (config.data.num_groups if config.survey == GENERATED_SURVEY else None)
    if count is None:
        return
    if config.federation.min_groups > count and (known or not groups):
        yield (
            f"federation.min-groups = {config.federation.min_groups} must be at most the number of groups, which is "
            f"{count}"
        )
    training = count - len(config.unseen_group_names)
    if training < 1:
        yield "pluralllm.unseen-groups names all groups; at least one must train the predictor"


def _in_sizes(config: Config) -> Iterator[str]:
    rollout, ppo, sft = config.rollout, config.ppo, config.sft
    if rest := sft.batch_size % sft.pass_size:
        below = sft.batch_size - rest
        yield (
            f"sft.batch-size = {sft.batch_size} is taught in passes of {sft.pass_size} answers, so it must be a "
            f"multiple of that; the nearest are {below} and {below + sft.pass_size}"
        )
    if rollout.batch_size % ppo.num_mini_batches:
        yield f"ppo.num-mini-batches = {ppo.num_mini_batches} must divide rollout.batch-size = {rollout.batch_size}"
    if rollout.batch_size % rollout.answers_per_question:
        yield (
            f"rollout.answers-per-question = {rollout.answers_per_question} must divide rollout.batch-size = "
            f"{rollout.batch_size}"
        )
    if ppo.baseline == "question" and rollout.answers_per_question == 1:
        yield 'ppo.baseline = "question" needs rollout.answers-per-question of 2 or more'


def _in_models(config: Config) -> Iterator[str]:
    if config.policy.compute_dtype == "bfloat16" and config.policy.tuning == "full":
        yield 'policy.tuning = "full" needs policy.compute-dtype = "float32": weights of 16 bits lose most steps'


def split_names(text: str) -> tuple[str, ...]:
    """Names separated by semicolons where there is one, else by commas; stripped, empty ones dropped.

    Semicolons let a name contain a comma.
    """
    separator = ";" if ";" in text else ","
    return tuple(name for part in text.split(separator) if (name := part.strip()))
