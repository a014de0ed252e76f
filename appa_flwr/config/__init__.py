"""The config of a run: all its keys, and checks across keys. Imported by both sides."""

import difflib
import operator
import re
from collections.abc import Mapping
from datetime import datetime
from functools import reduce
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import StringConstraints, ValidationError
from pydantic.fields import FieldInfo

from appa_flwr.config import sections
from appa_flwr.config.keys import Scalar as Scalar
from appa_flwr.config.keys import to_toml, valid
from appa_flwr.config.sections import Section, kebab, key, path_or
from appa_flwr.core.errors import UserError
from appa_flwr.core.text import clean

TASK_METRICS = {"dpa": ("js", "js-distance", "wasserstein", "cosine"), "opa": ("borda",)}
"""Task -> the reward metrics that can score its answers, the default first."""
AUTO_METRICS = {
    "auto": {task: metrics[0] for task, metrics in TASK_METRICS.items()},
    "auto-ordinal": {"dpa": "wasserstein", "opa": "borda"},
}
"""Automatic value of `metric` -> task -> the paper's metric, for nominal answers and for ordinal answers."""
GENERATED_SURVEY = "generated"
TINY_MODEL = "tiny"
SMOLLM2_MODEL = "smollm2"
SURVEY_WORDS = ("data.group-by", "data.weight", "data.missing")
"""Words of `appa survey` alone, for files with one row a respondent."""
THREADS = "APPA_THREADS"
"""Environment variable by which the launcher passes on the user's OMP_NUM_THREADS; empty if the user has set none."""

_WORD = "[A-Za-z_][A-Za-z0-9_]*"
OwnName = Annotated[str, StringConstraints(pattern=rf"^{_WORD}(\.{_WORD})*:{_WORD}$")]
"""MODULE:NAME in a user's code."""
RuleName = Literal["appa", "average", "min", "alpha", "mix", "appa-printed"] | OwnName
"""A built-in rule, or MODULE:NAME of a user's rule (`analysis.rule_choice.find`)."""
MetricName = Literal["auto", "auto-ordinal", "js", "js-distance", "wasserstein", "cosine", "borda"]


class Config(Section):
    """All settings of a run. `load` turns every problem with them into a one-line `UserError`."""

    task: Literal["dpa", "opa"] = key("dpa", "dpa = answer with a distribution over the options, opa = with a ranking")
    survey: Annotated[str, path_or(GENERATED_SURVEY)] = key(
        GENERATED_SURVEY, "generated, or the path of a survey file or folder", min_length=1
    )
    groups: str = key("", "groups that take part, separated by commas or semicolons; empty = all in the survey")
    model: Annotated[str, path_or(TINY_MODEL, SMOLLM2_MODEL, on_hub=True)] = key(
        TINY_MODEL,
        "base model: tiny (built here), smollm2 (from a package), a folder, or a hub id (SFT table)",
        min_length=1,
    )
    rule: RuleName = key("appa", "rule that combines the groups' rewards; MODULE:NAME = a rule of your own")
    baseline_rules: str = key(
        "average", "rules to compare with, separated by commas; each trains a policy from the same SFT model"
    )
    metric: MetricName = key(
        "auto",
        "alignment score; auto = js for dpa, borda for opa; auto-ordinal = wasserstein for dpa, borda for opa",
    )
    seed: int = key(0, "seed of all random numbers", ge=0, lt=2**31)
    run_name: str = key("", "name of the run's folder in run.output-dir; empty = made of task, rule, seed and time")
    run: sections.RunSection = sections.RunSection()
    data: sections.DataSection = sections.DataSection()
    pluralllm: sections.PluralLLMSection = sections.PluralLLMSection()
    policy: sections.PolicySection = sections.PolicySection()
    sft: sections.SFTSection = sections.SFTSection()
    ppo: sections.PPOSection = sections.PPOSection()
    appa: sections.APPASection = sections.APPASection()
    eval: sections.EvaluationSection = sections.EvaluationSection()
    serve: sections.ServeSection = sections.ServeSection()

    @classmethod
    def load(cls, flat: Mapping[str, Scalar], *, folder: Path | None = None) -> "Config":
        """Build the config from flat keys, sections dotted; missing keys take their default.

        Text is converted to a number for numeric keys. Relative paths are made absolute from `folder`, if any.

        Raises:
            UserError: unknown key, wrong type, out of range, or keys that contradict each other; one line.
        """
        nested: dict[str, Any] = {section: {} for section in SECTIONS}
        for name, value in flat.items():
            if name not in KEYS:
                raise UserError(unknown_key(name))
            if isinstance(value, bool) and KEYS[name].annotation is not bool:  # in Python True is an int
                raise UserError(f"{name} = {to_toml(value)} must not be true or false; {_hint(name)}")
            section, _, leaf = name.rpartition(".")
            (nested[section] if section else nested)[leaf] = value
        try:
            config = cls.model_validate(nested, context=folder)
        except ValidationError as error:
            place = error.errors()[0]["loc"]
            name = str(place[0]) if place[0] in KEYS else f"{place[0]}.{place[1]}"
            shown = to_toml(flat.get(name, KEYS[name].default))
            must = error.errors()[0]["msg"].removeprefix("Value error, ")
            must = must.replace("Input should", "must").replace("String should", "must")
            listed = error.errors()[0]["type"] == "literal_error"  # the hint has the same list
            raise UserError(
                f"{name} = {shown} is not valid: it " + ("can be " if listed else f"{must}; ") + _hint(name)
            ) from None
        _check_keys(config)
        return config

    def flat(self) -> dict[str, Scalar]:
        """All keys and values, sections dotted, ready for `load`, TOML or Flower's run config."""
        values: Any = self.model_dump(by_alias=True)
        return {name: reduce(operator.getitem, name.split("."), values) for name in KEYS}

    @property
    def rules(self) -> tuple[str, ...]:
        """Rules of the run, each of which trains a policy: `rule`, then those of `baseline-rules`."""
        return tuple(dict.fromkeys((self.rule, *split_names(self.baseline_rules))))

    @property
    def group_names(self) -> tuple[str, ...]:
        """Names of the run's groups; empty = all groups of the survey."""
        return split_names(self.groups)

    @property
    def reward_metric(self) -> str:
        """`metric` with `auto` and `auto-ordinal` resolved for the task."""
        return AUTO_METRICS[self.metric][self.task] if self.metric in AUTO_METRICS else self.metric

    @property
    def prompt_style(self) -> str:
        """`policy.prompt_style` with `auto` resolved for the survey."""
        if self.policy.prompt_style != "auto":
            return self.policy.prompt_style
        return "compact" if self.survey == GENERATED_SURVEY else "counted"

    @property
    def run_folder(self) -> Path:
        """Folder to which the run writes.

        Raises:
            UserError: the run has no name yet; see `named`.
        """
        if not self.run_name:
            raise UserError("run-name is empty: a run needs a name before it has a folder")
        return Path(self.run.output_dir) / self.run_name

    def named(self, now: datetime) -> "Config":
        """This config with a run-name: its own, or one made from task, rule, seed and `now`."""
        if self.run_name:
            return self
        name = f"{self.task}-{self.rule.replace(':', '-')}-seed{self.seed}-{now:%Y%m%d-%H%M%S}"
        return Config.load({**self.flat(), "run-name": name})


def _fields(model: type[Section]) -> dict[str, FieldInfo]:
    return {str(field.alias): field for field in model.model_fields.values()}


SECTIONS: Mapping[str, type[Section]] = {
    name: type(field.default) for name, field in _fields(Config).items() if isinstance(field.default, Section)
}
KEYS: Mapping[str, FieldInfo] = {
    **{name: field for name, field in _fields(Config).items() if name not in SECTIONS},
    **{f"{name}.{leaf}": field for name, model in SECTIONS.items() for leaf, field in _fields(model).items()},
}


def keys_in(section: str) -> tuple[str, ...]:
    """Keys of a section; those of "" are the keys outside sections."""
    return tuple(name for name in KEYS if name.rpartition(".")[0] == section)


def unknown_key(name: str) -> str:
    """Message about an unknown key: keys of the same name in other sections, or else the nearest key."""
    shown = to_toml(name)  # escaped, so on one line
    if name in SURVEY_WORDS:
        return f"{name} is a word of `appa survey` alone: convert the file by it, then run with survey=FILE.jsonl"
    if name in SECTIONS:
        return f"{shown} is a section, not a key; its keys are {', '.join(keys_in(name))}"
    wanted = name.replace("_", "-")
    section, _, leaf = wanted.rpartition(".")
    near = [wanted] if wanted in KEYS else [key for key in KEYS if key.rpartition(".")[2] == leaf]
    if not near:  # even a distant key shows what keys look like
        near = difflib.get_close_matches(wanted, (section in SECTIONS and keys_in(section)) or KEYS, n=1, cutoff=0.0)
    return f"unknown key {shown}; the nearest is " + ", or ".join(f"{to_toml(key)}, {_hint(key)}" for key in near)


def _hint(name: str) -> str:
    return f"{valid(KEYS[name])}, default {to_toml(KEYS[name].default)}"


def _check_keys(config: Config) -> None:
    """Check conditions on several keys; messages name the key to change."""
    policy, ppo = config.policy, config.ppo
    if config.reward_metric not in TASK_METRICS[config.task]:
        fitting = ", ".join((*AUTO_METRICS, *TASK_METRICS[config.task]))
        raise UserError(f'metric = "{config.metric}" does not fit task = "{config.task}"; metric can be: {fitting}')
    if not re.fullmatch("([A-Za-z0-9][A-Za-z0-9._-]*)?", config.run_name):
        name = to_toml(config.run_name)
        raise UserError(
            f'run-name = {name} must be letters, digits, ".", "_" and "-", and begin with a letter or digit'
        )
    for group in config.group_names:
        if config.group_names.count(group) > 1:
            raise UserError(f"groups names {to_toml(group)} twice; each group must be named once")
    if "alpha" in config.rules and config.appa.alpha == 0:
        raise UserError(
            'rule = "alpha" needs an appa.alpha below 0, towards the minimum, or above 0, towards the maximum; '
            '0 is the rule "average"'
        )
    for name in ("num_mini_batches", "answers_per_question"):
        if ppo.batch_size % (size := getattr(ppo, name)):
            raise UserError(f"ppo.{kebab(name)} = {size} must divide ppo.batch-size = {ppo.batch_size}")
    if ppo.baseline == "question" and ppo.answers_per_question == 1:
        raise UserError('ppo.baseline = "question" needs ppo.answers-per-question of 2 or more')
    if policy.compute_dtype == "bfloat16" and policy.tuning == "full":
        raise UserError('policy.tuning = "full" needs policy.compute-dtype = "float32": 16 bits lose most steps')
    trains = config.run.phases == "all" and config.model != TINY_MODEL
    steps = {"sft.learning-rate": config.sft.learning_rate, "ppo.learning-rate": config.ppo.learning_rate}
    if trains and policy.tuning == "full" and all(KEYS[name].default == rate for name, rate in steps.items()):
        rates = " and ".join(f"{name} = {rate}" for name, rate in steps.items())
        raise UserError(
            f"model = {to_toml(config.model)} would be ruined by the tiny model's {rates}; start from preset=smollm2, "
            "preset=paper or preset=paper-oqa, or set policy.tuning or a step size"
        )


def split_names(text: str) -> tuple[str, ...]:
    """Split names at semicolons if there is one, else at commas; names are normalised, empty ones dropped.

    With semicolons, names can contain commas.
    """
    separator = ";" if ";" in text else ","
    return tuple(name for part in text.split(separator) if (name := clean(part)))
