"""All settings of a run, and what keys ask of each other."""

from __future__ import annotations

import math
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import StringConstraints, ValidationError, model_validator

from appa_flwr.config.keys import Key, Scalar, first_problem, keys_of, sections_of, to_toml, unknown_key
from appa_flwr.config.ranges import AUTO_METRICS, TASK_METRICS
from appa_flwr.config.sections import (
    APPASection,
    DataSection,
    EvaluationSection,
    PluralLLMSection,
    PolicySection,
    PPOSection,
    RunSection,
    Section,
    ServeSection,
    SFTSection,
    key,
)
from appa_flwr.core import own_code
from appa_flwr.core.errors import UserError

GENERATED_SURVEY = "generated"
HUB_SURVEY = "Anthropic/llm_global_opinions"
TINY_MODEL = "tiny"
SMOLLM2_MODEL = "smollm2"
THREADS = "APPA_THREADS"
"""Environment variable in which the launcher passes the user's own OMP_NUM_THREADS on; empty where there is none."""
TRAINING_EPOCHS = 5
"""Passes over the training questions where `ppo.num-iterations` is 0 (PPO table)."""

_MOST = 2**63 - 1  # of a whole number in TOML
_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

OwnName = Annotated[str, StringConstraints(pattern=rf"^{own_code.NAME}$")]
"""A module and what it holds: code of the user's own."""
RuleName = Literal["appa", "average", "min", "alpha", "mix"] | OwnName
"""A rule of ours, or the module and the class of another (`aggregation.find`)."""
MetricName = Literal["auto", "auto-ordinal", "js", "js-distance", "wasserstein", "cosine", "borda"] | OwnName
"""A metric of ours, or the module and the function of another (`rewards.find`)."""


class Config(Section):
    """All settings of a run. `load` turns every problem with them into a one-line `UserError`."""

    task: Literal["dpa", "opa"] = key("dpa", "what the policy answers: a distribution or a ranking")
    survey: str = key(
        GENERATED_SURVEY,
        f"generated, the path of a file or folder, {HUB_SURVEY} (hub), or a reader of your own, MODULE:FUNCTION or "
        "MODULE:FUNCTION:FILE",
        min_length=1,
    )
    groups: str = key("", "names separated by commas (or by semicolons); empty = all")
    model: str = key(
        TINY_MODEL,
        "tiny (built here), smollm2 (of a package), a model folder, a .gguf file or a hub id (SFT table)",
        min_length=1,
    )
    rule: RuleName = key("appa", "how group rewards become one reward; MODULE:CLASS is one of your own")
    baseline_rule: RuleName | Literal[""] = key(
        "average", "a second policy is trained by this rule, from the same SFT model, and compared; empty = none"
    )
    metric: MetricName = key(
        "auto",
        "alignment reward; auto = js for dpa, borda for opa; auto-ordinal = wasserstein for dpa, borda for opa; "
        "MODULE:FUNCTION is one of your own",
    )
    seed: int = key(0, "the one seed every random stream is derived from", ge=0, lt=2**31)
    run_name: str = key("", "name of the run's folder in run.output-dir; empty = task, rule, seed and time")
    run: RunSection = RunSection()
    data: DataSection = DataSection()
    pluralllm: PluralLLMSection = PluralLLMSection()
    policy: PolicySection = PolicySection()
    sft: SFTSection = SFTSection()
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
            flat: key -> value; text that reads as a number is one where the key wants a number.

        Raises:
            UserError: unknown key, wrong type, out of range, or keys that contradict each other; one line.
        """
        nested: dict[str, Any] = {}
        for name, value in flat.items():
            if name not in KEYS:
                raise UserError(unknown_key(name, KEYS))
            section, _, leaf = name.rpartition(".")
            (nested.setdefault(section, {}) if section else nested)[leaf] = value
        try:
            config = cls.model_validate(nested)
        except ValidationError as error:
            raise UserError(first_problem(error, flat, KEYS)) from None
        for name, value in config.flat().items():
            if isinstance(value, int) and abs(value) > _MOST:
                raise UserError(f"{name} = {value} is beyond the 64 bits that a whole number has in TOML")
        return config

    def flat(self) -> dict[str, Scalar]:
        """All keys and values, sections dotted, ready for `load`, TOML or Flower's run config."""
        pairs: dict[str, Scalar] = {}
        for name, value in self.model_dump(by_alias=True).items():
            pairs |= (
                {f"{name}.{leaf}": item for leaf, item in value.items()} if isinstance(value, dict) else {name: value}
            )
        return pairs

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
        name = f"{self.task}-{self.rule.replace(':', '-')}-seed{self.seed}-{now:%Y%m%d-%H%M%S}"
        return Config.load({**self.flat(), "run-name": name})

    def iterations(self, num_train_questions: int) -> int:
        """PPO iterations: `num_iterations`, or what five passes over the questions take."""
        questions = self.ppo.batch_size // self.ppo.answers_per_question
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
    if config.run_name and not _RUN_NAME.fullmatch(config.run_name):
        yield f'run-name = {to_toml(config.run_name)} must be letters, digits, ".", "_" and "-", starting with one'
    for name, groups in {"groups": config.group_names, "pluralllm.unseen-groups": config.unseen_group_names}.items():
        for group in groups:
            if groups.count(group) > 1:
                yield f"{name} names {to_toml(group)} twice; each group must be named once"
    for name, rule in {"rule": config.rule, "baseline-rule": config.baseline_rule}.items():
        if rule == "alpha" and config.appa.alpha == 0:
            yield (
                f'appa.alpha = 0 makes {name} = "alpha" the mean of the groups, which is {name} = "average"; give '
                "appa.alpha a number below 0, towards the minimum, or above 0, towards the maximum"
            )


def _in_groups(config: Config, groups: Sequence[str] = ()) -> Iterator[str]:
    """Without `groups`, what the config alone can tell: names that may be wrong are not yet counted."""
    known = bool(groups)
    groups = groups or config.group_names
    for name in config.unseen_group_names if groups else ():
        if name not in groups:
            there = ", ".join(groups)
            yield f"pluralllm.unseen-groups names {to_toml(name)}, which is not in this run; it has: {there}"
    count = len(groups) or (config.data.num_groups if config.survey == GENERATED_SURVEY else None)
    if count is None:
        return
    if config.run.min_groups > count and (known or not groups):
        yield f"run.min-groups = {config.run.min_groups} must be at most the number of groups, which is {count}"
    if len(config.unseen_group_names) >= count:
        yield "pluralllm.unseen-groups names all groups; at least one must train the predictor"


def _in_sizes(config: Config) -> Iterator[str]:
    ppo, sft = config.ppo, config.sft
    if rest := sft.batch_size % sft.pass_size:
        below = sft.batch_size - rest
        yield (
            f"sft.batch-size = {sft.batch_size} is taught in passes of {sft.pass_size} answers, so it must be a "
            f"multiple of that; the nearest are {below} and {below + sft.pass_size}"
        )
    for name, size in {
        "num-mini-batches": ppo.num_mini_batches,
        "answers-per-question": ppo.answers_per_question,
    }.items():
        if ppo.batch_size % size:
            yield f"ppo.{name} = {size} must divide ppo.batch-size = {ppo.batch_size}"
    if ppo.baseline == "question" and ppo.answers_per_question == 1:
        yield 'ppo.baseline = "question" needs ppo.answers-per-question of 2 or more'


def _in_models(config: Config) -> Iterator[str]:
    policy = config.policy
    if policy.compute_dtype == "bfloat16" and policy.tuning == "full":
        yield 'policy.tuning = "full" needs policy.compute-dtype = "float32": weights of 16 bits lose most steps'
    trains = config.run.phases in ("all", "sft") and config.model != TINY_MODEL
    steps = {"sft.learning-rate": config.sft.learning_rate, "ppo.learning-rate": config.ppo.learning_rate}
    if trains and policy.tuning == "full" and all(KEYS[name].default == rate for name, rate in steps.items()):
        rates = " and ".join(f"{name} = {rate}" for name, rate in steps.items())
        yield (
            f"model = {to_toml(config.model)} would be trained in full by the step sizes of the tiny model, {rates}, "
            "which ruin a pretrained one; start from preset=smollm2, preset=paper or preset=paper-oqa, or set "
            "policy.tuning or a step size"
        )


def split_names(text: str) -> tuple[str, ...]:
    """Names separated by semicolons where there is one, else by commas; stripped, empty ones dropped.

    Semicolons let a name contain a comma.
    """
    separator = ";" if ";" in text else ","
    return tuple(name for part in text.split(separator) if (name := part.strip()))
