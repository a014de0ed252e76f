"""The typed, frozen run config: built once at the door from Flower's flat keys or from TOML.

Every key is declared once, in `Config`, with its default (the embedded run), range and one line of doc. The
table `[tool.flwr.app.config]` of pyproject.toml repeats the defaults; a contract test holds the two equal.
Keys are kebab-case and values flat scalars, because Flower's run config carries nothing else.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
import tomllib
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib import resources
from pathlib import Path
from typing import Literal, Self, get_args, get_origin, get_type_hints

import annotated_types
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from appa_flwr.errors import UserError

Scalar = bool | int | float | str

PRESET_KEY = "preset"
GENERATED_SURVEY = "generated"
HUB_SURVEY = "Anthropic/llm_global_opinions"
TINY_MODEL = "tiny"
PATH_KEYS = ("survey", "output-dir", "cache-dir", "pluralllm-checkpoint")
ATTENTION_PROJECTIONS = "q_proj,k_proj,v_proj,o_proj"
ALL_PROJECTIONS = f"{ATTENTION_PROJECTIONS},gate_proj,up_proj,down_proj"
TASK_METRICS = {"dpa": ("js", "js-distance", "wasserstein", "cosine"), "opa": ("borda",)}

_NEAREST_CUTOFF = 0.0  # always name some key: even a far one shows how keys look
_TYPE_NAMES = {bool: "true or false", int: "an integer", float: "a {}number", str: "text"}
_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def _kebab(name: str) -> str:
    return name.replace("_", "-")


class Config(BaseModel):
    """All settings of a run; attribute `learning_rate` is key `learning-rate`.

    Tables named in the descriptions are the paper's: SFT is `tab:sft-hparams`, PPO `tab:ppo-hparams`, APPA
    `tab:appa-hparams`. Build it with `Config.load`, which turns every problem into a one-line `UserError`.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        alias_generator=_kebab,
        allow_inf_nan=False,
        hide_input_in_errors=True,
    )

    # Run
    task: Literal["dpa", "opa"] = Field("dpa", description="what the policy answers: a distribution or a ranking")
    metric: Literal["auto", "js", "js-distance", "wasserstein", "cosine", "borda"] = Field(
        "auto", description="alignment reward; auto = js for dpa, borda for opa"
    )
    rule: Literal["appa", "average", "min", "alpha"] = Field("appa", description="how group rewards become one reward")
    seed: int = Field(0, ge=0, lt=2**31, description="the one seed every random stream is derived from")
    run_name: str = Field("", description="folder of the run inside output-dir; empty = task, rule, seed and time")
    output_dir: str = Field("runs", min_length=1, description="folder that holds the runs")
    min_groups: int = Field(2, ge=1, description="groups that must answer, else the iteration fails")
    reply_timeout: float = Field(600.0, gt=0, description="seconds the server waits for the groups' replies")
    join_timeout: float = Field(120.0, ge=0, description="seconds the server waits for the groups to join")
    ceilings: bool = Field(
        True, description="report the best shared answers; asks the groups for scores that reveal their targets"
    )
    checkpoint_every: int = Field(10, ge=0, description="PPO iterations from one checkpoint to the next; 0 = none")
    phases: Literal["all", "pluralllm"] = Field("all", description="pluralllm = only its pretraining and scores")
    resume: bool = Field(False, description="go on with the run that the run folder holds; appa run --resume sets it")
    test_fraction: float = Field(0.2, gt=0, lt=1, description="share of questions held out (SFT table: 80/20)")

    # Survey
    survey: str = Field(
        GENERATED_SURVEY, min_length=1, description=f"generated, the path of a file or folder, or {HUB_SURVEY} (hub)"
    )
    groups: str = Field("", description="names separated by commas (or by semicolons); empty = all")
    num_questions: int = Field(400, ge=2, description="questions of the generated survey")
    num_groups: int = Field(8, ge=2, description="groups of the generated survey")
    max_questions: int = Field(0, ge=0, description="use at most this many questions; 0 = all")
    refusals: Literal["keep", "drop", "separate"] = Field(
        "keep", description="refused answers: an option like others, removed, or removed with their rate told apart"
    )
    min_respondents: int = Field(0, ge=0, description="leave out answers of fewer people, where the survey tells")
    min_questions: int = Field(1, ge=1, description="leave out groups with fewer usable questions")
    strict: bool = Field(False, description="a rejected survey row is an error instead of being left out")

    # PluralLLM
    embedding: Literal["ngrams", "sentence-transformers", "causal-lm"] = Field(
        "ngrams", description="what makes vectors of the public texts: hashed n-grams, or a pretrained model"
    )
    embedding_model: str = Field("", description="folder or hub id of that model; empty for ngrams")
    embedding_dim: int = Field(128, ge=5, description="numbers in the embedding of a question-answer text")
    num_context_questions: int = Field(16, ge=1, description="answered questions the predictor is shown per target")
    context_resampling: Literal["once", "every-iteration"] = Field("once", description="when the context is drawn")
    pluralllm_draws: int = Field(1, ge=1, description="contexts a prediction is averaged over; their spread is kept")
    pluralllm_checkpoint: str = Field("", description="weights of an earlier run to use instead of pretraining")
    unseen_groups: str = Field("", description="names; they bring few-shot context only and never train the predictor")
    pluralllm_strategy: Literal["fedavg", "fedadam", "fedprox", "fedyogi", "fedadagrad"] = Field(
        "fedadam", description="server update in pretraining"
    )
    pluralllm_proximal_mu: float = Field(0.01, ge=0, description="pull of fedprox towards the server's weights")
    pluralllm_rounds: int = Field(60, ge=0, description="federated pretraining rounds")
    pluralllm_local_steps: int = Field(2, ge=1, description="optimizer steps of a group in one round")
    pluralllm_learning_rate: float = Field(0.1, gt=0, description="step size of a group's optimizer")
    pluralllm_server_learning_rate: float = Field(
        1e-2, gt=0, description="the server's step size, not of fedavg and fedprox"
    )
    pluralllm_optimizer: Literal["sgd", "adam"] = Field("sgd", description="a group's optimizer")
    pluralllm_hidden_dim: int = Field(64, ge=1, description="width of the predictor")
    pluralllm_blocks: int = Field(2, ge=1, description="attention blocks of the predictor")
    pluralllm_heads: int = Field(4, ge=1, description="attention heads of the predictor")
    pluralllm_fraction: float = Field(1.0, gt=0, le=1, description="share of nodes that train in a round")
    pluralllm_validate_every: int = Field(
        10,
        ge=0,
        description="rounds between scores on the training groups' held-out questions; the best is kept; 0 = last",
    )
    population_prior: bool = Field(
        False,
        description="the predictor knows the other groups' mean answer; nodes send sums of their training answers",
    )
    population_directions: int = Field(
        0,
        ge=0,
        le=8,
        description="ways in which groups differ that it knows too; in simulations only, see docs/pluralllm.md",
    )
    mean_of_others: bool = Field(
        True, description="score the mean of the other groups too; nodes send sums of their held-out answers"
    )
    population_min_groups: int = Field(
        3,
        ge=1,
        description="sums are made of answers to questions of so many groups; under 3 they can show one group's",
    )

    # Model
    model: str = Field(
        TINY_MODEL,
        min_length=1,
        description="tiny (built here), a model folder or a hub id such as Qwen/Qwen3-0.6B (SFT table)",
    )
    prompt_style: Literal["compact", "full"] = Field("compact", description="full = all instructions of the paper")
    base_steps: int = Field(600, ge=20, description="training steps that build the tiny model")
    cache_dir: str = Field(
        "", description="where built models and embeddings are kept; empty = the user's cache folder"
    )
    max_sequence_length: int = Field(500, ge=1, description="tokens of prompt and response together (SFT table)")
    attention: Literal["auto", "eager", "sdpa"] = Field(
        "auto", description="attention implementation (PPO table); auto = eager for Gemma-2, sdpa for others"
    )
    quantization: Literal["none", "nf4"] = Field(
        "none", description="of the frozen base; nf4 is double-quantised (PPO)"
    )
    compute_dtype: Literal["float32", "bfloat16"] = Field("float32", description="number format (SFT and PPO tables)")
    tuning: Literal["lora", "full"] = Field("full", description="train adapters on a frozen base, or all weights")
    lora_rank: int = Field(16, ge=1, description="rank r of the adapters (SFT and PPO tables)")
    lora_alpha: int = Field(32, ge=1, description="adapters are scaled by alpha / rank (SFT and PPO tables)")
    lora_dropout: float = Field(0.05, ge=0, lt=1, description="dropout in the adapters during SFT (SFT table)")
    sft_lora_targets: str = Field(ALL_PROJECTIONS, min_length=1, description="layers adapted in SFT (SFT table)")
    policy_lora_targets: str = Field(
        ATTENTION_PROJECTIONS, min_length=1, description="layers adapted in PPO (PPO table)"
    )
    value_lora_targets: str = Field(
        ATTENTION_PROJECTIONS,
        min_length=1,
        description="as above for the value model; its head trains in full (PPO)",
    )

    # Supervised fine-tuning
    sft_target: Literal["majority", "votes", "smoothed-votes", "mean"] = Field(
        "smoothed-votes",
        description="what SFT teaches: the winner (paper), vote shares, shares with one vote more an option, or mean",
    )
    sft_steps: int = Field(200, ge=0, description="optimizer steps; 0 = as many as sft-epochs takes")
    sft_epochs: int = Field(1, ge=1, description="passes over the training questions if sft-steps is 0 (SFT table)")
    sft_batch_size: int = Field(8, ge=1, description="answers per forward pass (SFT table)")
    sft_gradient_accumulation_steps: int = Field(2, ge=1, description="forward passes per step (SFT table)")
    sft_learning_rate: float = Field(1e-3, gt=0, description="AdamW step size (SFT table: 5e-6)")
    sft_scheduler: Literal["cosine", "linear", "constant"] = Field("cosine", description="decay (SFT table)")
    sft_warmup_ratio: float = Field(0.1, ge=0, le=1, description="share of steps with rising step size (SFT table)")
    sft_weight_decay: float = Field(0.01, ge=0, description="AdamW weight decay (SFT table)")

    # PPO
    num_iterations: int = Field(
        100, ge=0, description="PPO iterations; 0 = training-epochs x training questions / rollout-batch-size"
    )
    training_epochs: int = Field(5, ge=1, description="passes over the questions if num-iterations is 0 (PPO table)")
    rollout_batch_size: int = Field(96, ge=1, description="answers sampled per iteration (PPO table: 4 x 24)")
    micro_batch_tokens: int = Field(
        2048, ge=1, description="most tokens in one pass of PPO, padding counted, shared prompt tokens not"
    )
    shared_prefix: bool = Field(True, description="compute the tokens that all prompts begin with once a batch")
    gradient_checkpointing: bool = Field(
        False, description="PPO recomputes each layer in its backward pass: less memory, slower, and no shared prefix"
    )
    rollouts: Literal["own", "generate", "static", "vllm"] = Field(
        "own", description="sampling by our loop, Transformers' generate (static: with a compiled cache), or vLLM"
    )
    vllm_memory: float = Field(0.3, gt=0, lt=1, description="share of the GPU's memory that vLLM takes for rollouts")
    num_mini_batches: int = Field(4, ge=1, description="optimizer steps per PPO epoch (PPO table)")
    ppo_epochs: int = Field(2, ge=1, description="passes over a rollout batch (PPO table)")
    eval_batch_size: int = Field(64, ge=1, description="answers per forward pass in evaluation (PPO table)")
    response_length: int = Field(60, ge=1, description="most tokens of an answer (PPO table)")
    temperature: float = Field(1.0, gt=0, description="of sampling in rollouts (PPO table)")
    learning_rate: float = Field(2e-4, gt=0, description="policy's AdamW step size (PPO table: 1e-5)")
    value_learning_rate: float = Field(1e-3, gt=0, description="value model's AdamW step size (PPO table: 1e-5)")
    weight_decay: float = Field(0.0, ge=0, description="AdamW weight decay (PPO table)")
    scheduler: Literal["linear", "constant"] = Field("linear", description="step size over iterations (PPO table)")
    kl_coefficient: float = Field(0.05, ge=0, description="weight of the KL penalty to the SFT policy (PPO table)")
    clip_range: float = Field(0.2, gt=0, le=1, description="of the probability ratio (PPO table)")
    clip_range_value: float = Field(0.2, gt=0, description="of the change in value (PPO table)")
    value_coefficient: float = Field(0.2, ge=0, description="weight of the value loss (PPO table)")
    gamma: float = Field(1.0, ge=0, le=1, description="discount factor (PPO table)")
    gae_lambda: float = Field(0.95, ge=0, le=1, description="lambda of generalised advantages (PPO table)")
    whiten_rewards: bool = Field(True, description="rewards get mean 0 and std 1 per rollout batch (PPO table)")
    reward_clamp: float = Field(5.0, gt=0, description="whitened rewards are cut at plus and minus this")
    max_grad_norm: float = Field(1.0, gt=0, description="gradients are scaled down to this norm")

    # Aggregation
    ema_decay: float = Field(0.8, ge=0, lt=1, description="lambda of a group's reward history (APPA table)")
    softmax_temperature: float = Field(0.1, gt=0, description="T of the group weights (APPA table)")
    fairness_threshold: float = Field(
        0.99,
        ge=0,
        description="tau: from this fairness index on, the plain mean; above 1 = never (APPA table)",
    )
    alignment_weight: float = Field(
        0.85,
        ge=0,
        le=1,
        description="omega: share of alignment in the reward, the rest is format (APPA table)",
    )
    min_mean: float = Field(1e-6, ge=0, description="questions with a lower mean reward do not count (APPA table)")
    max_cov: float = Field(10.0, gt=0, description="cap of the coefficient of variation (APPA table)")
    alpha: float = Field(
        0.0,
        allow_inf_nan=True,
        description="exponent of rule alpha: -inf = min, 1 = average, inf = max; inf allowed",
    )

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
        known = len(names) or (self.num_groups if self.survey == GENERATED_SURVEY else None)
        if known is not None and self.min_groups > known:
            raise ValueError(f"min-groups = {self.min_groups} must be at most the number of groups, which is {known}")
        unseen = self.unseen_group_names
        if len(set(unseen)) != len(unseen):
            twice = next(name for name in unseen if unseen.count(name) > 1)
            raise ValueError(f'unseen-groups names "{twice}" twice; each group must be named once')
        for name in unseen if names else ():
            if name not in names:
                raise ValueError(f'unseen-groups names "{name}", which is not one of groups')
        if known is not None and len(unseen) >= known:
            raise ValueError("unseen-groups names all groups; at least one must train the predictor")
        if self.population_directions and not self.population_prior:
            raise ValueError("population-directions are part of the prior and need population-prior = true")
        if self.population_prior and known is not None and known - len(unseen) < self.population_min_groups:
            raise ValueError(
                f"population-prior needs population-min-groups = {self.population_min_groups} groups that train, and "
                f"there are {known - len(unseen)}"
            )
        if self.rollout_batch_size % self.num_mini_batches:
            raise ValueError(
                f"num-mini-batches = {self.num_mini_batches} must divide rollout-batch-size = {self.rollout_batch_size}"
            )
        if self.pluralllm_hidden_dim % self.pluralllm_heads:
            raise ValueError(
                f"pluralllm-heads = {self.pluralllm_heads} must divide "
                f"pluralllm-hidden-dim = {self.pluralllm_hidden_dim}"
            )
        if self.embedding != "ngrams" and not self.embedding_model:
            raise ValueError(f'embedding = "{self.embedding}" needs embedding-model, a model folder or a hub id')
        if self.embedding == "ngrams" and self.embedding_model:
            raise ValueError(
                f'embedding-model = "{self.embedding_model}" needs embedding = "sentence-transformers" or "causal-lm"'
            )
        if self.quantization == "nf4" and self.tuning == "full":
            raise ValueError('quantization = "nf4" freezes the base and needs tuning = "lora"')
        if self.rollouts == "vllm" and (self.tuning == "full" or self.compute_dtype == "float32"):
            raise ValueError(
                'rollouts = "vllm" loads each iteration\'s adapter, which needs tuning = "lora" and '
                'compute-dtype = "bfloat16"'
            )
        if math.isnan(self.alpha):
            raise ValueError("alpha = nan must be a number, inf or -inf")
        return self

    @classmethod
    def load(cls, flat: Mapping[str, Scalar]) -> Config:
        """Build the config from flat kebab-case keys; keys left out take their default.

        Args:
            flat: key -> bool, int, float or str. An int is taken for a float, a bool never for a number.

        Raises:
            UserError: unknown key, wrong type, out of range, or keys that contradict each other; one line.
        """
        for key in flat:
            if key not in KEYS:
                raise UserError(_unknown_key(key))
        try:
            return cls.model_validate(dict(flat))
        except ValidationError as error:
            raise UserError(_first_problem(error, flat)) from None

    def flat(self) -> dict[str, Scalar]:
        """All keys and values, ready for `Config.load`, TOML or Flower's run config."""
        return self.model_dump(by_alias=True)

    @property
    def group_names(self) -> tuple[str, ...]:
        """The groups asked for by name; empty = all that the survey has."""
        return split_names(self.groups)

    @property
    def unseen_group_names(self) -> tuple[str, ...]:
        """The groups that never train PluralLLM."""
        return split_names(self.unseen_groups)

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
        return Path(self.output_dir) / self.run_name

    def named(self, now: datetime) -> Config:
        """This config with a run-name: its own, or one made from task, rule, seed and `now`."""
        if self.run_name:
            return self
        made = f"{self.task}-{self.rule}-seed{self.seed}-{now:%Y%m%d-%H%M%S}"
        return Config.load({**self.flat(), "run-name": made})

    def iterations(self, num_train_questions: int) -> int:
        """PPO iterations: `num_iterations`, or what `training_epochs` passes over the questions take."""
        passes = math.ceil(self.training_epochs * num_train_questions / self.rollout_batch_size)
        return self.num_iterations or max(1, passes)


def split_names(text: str) -> tuple[str, ...]:
    """Names separated by semicolons where there is one, else by commas; stripped, empty ones dropped.

    Semicolons let a name contain a comma.
    """
    separator = ";" if ";" in text else ","
    return tuple(name for part in text.split(separator) if (name := part.strip()))


@dataclass(frozen=True)
class Key:
    """One config key as a user sees it.

    Attributes:
        name: kebab-case.
        kind: bool, int, float or str; choices are str.
        choices: allowed texts, empty where any is.
        bounds: such as (">= 0", "< 1"); empty where none.
        infinite: inf and -inf are allowed.
        default: value of the embedded default run.
        doc: one line.
    """

    name: str
    kind: type[bool] | type[int] | type[float] | type[str]
    choices: tuple[str, ...]
    bounds: tuple[str, ...]
    infinite: bool
    default: Scalar
    doc: str

    @property
    def valid(self) -> str:
        """The valid values in words, such as "a number > 0 and <= 1"."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        finite = "finite " if self.kind is float and not self.infinite else ""
        return " ".join((_TYPE_NAMES[self.kind].format(finite), " and ".join(self.bounds))).strip()


def _keys() -> dict[str, Key]:
    symbols = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    hints = get_type_hints(Config)
    found = {}
    for name, info in Config.model_fields.items():
        hint = hints[name]
        choices = tuple(str(c) for c in get_args(hint)) if get_origin(hint) is Literal else ()
        bounds = []
        for rule in info.metadata:
            bounds += [f"{symbol} {getattr(rule, side)}" for side, symbol in symbols.items() if hasattr(rule, side)]
            if isinstance(rule, annotated_types.MinLen):
                bounds.append("that is not empty")
        key = _kebab(name)
        found[key] = Key(
            name=key,
            kind=str if choices else hint,
            choices=choices,
            bounds=tuple(bounds),
            infinite=any(getattr(rule, "allow_inf_nan", False) for rule in info.metadata),
            default=info.default,
            doc=info.description or "",
        )
    return found


KEYS: Mapping[str, Key] = types.MappingProxyType(_keys())


def _unknown_key(key: str) -> str:
    nearest = KEYS[difflib.get_close_matches(_kebab(key), KEYS, n=1, cutoff=_NEAREST_CUTOFF)[0]]
    return f'unknown key "{key}"; the nearest is "{nearest.name}", {nearest.valid}, {_default(nearest)}'


def _default(key: Key) -> str:
    return f"default {to_toml(key.default)}"


def _first_problem(error: ValidationError, flat: Mapping[str, Scalar]) -> str:
    problem = error.errors()[0]
    if not problem["loc"]:
        return str(problem["ctx"]["error"])
    key = KEYS[str(problem["loc"][0])]
    shown = _shown(flat[key.name])
    return f"{key.name} = {shown} is not valid: it must be {key.valid} ({_default(key)})"


def _shown(value: object) -> str:
    return to_toml(value) if isinstance(value, Scalar) else type(value).__name__


def to_toml(value: Scalar) -> str:
    """A scalar as TOML text; a float keeps its point or exponent so that it reads back as a float."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # A JSON string is a TOML basic string, but for DEL, which TOML wants escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)


def to_toml_table(flat: Mapping[str, Scalar]) -> str:
    """Flat keys as a TOML document, one line a key."""
    return "".join(f"{key} = {to_toml(value)}\n" for key, value in flat.items())


def preset_names() -> tuple[str, ...]:
    """Names that `preset = ...` accepts."""
    files = resources.files("appa_flwr.presets").iterdir()
    return tuple(sorted(f.name.removesuffix(".toml") for f in files if f.name.endswith(".toml")))


def preset(name: str) -> dict[str, Scalar]:
    """The keys of a preset.

    Raises:
        UserError: there is none of that name.
    """
    if name not in preset_names():
        raise UserError(f'preset = "{name}" does not exist; presets: {", ".join(preset_names())}')
    text = (resources.files("appa_flwr.presets") / f"{name}.toml").read_text(encoding="utf-8")
    return _checked_table(tomllib.loads(text), source=f"{name}.toml")


def read_toml(path: Path) -> dict[str, Scalar]:
    """Flat keys from a TOML file (which may name a `preset`).

    Raises:
        UserError: no such file, no valid TOML, or a value that is not a scalar.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as a config file ({error})") from None
    try:
        return _checked_table(tomllib.loads(text), source=str(path))
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}: not valid TOML: {error}") from None


def _checked_table(table: Mapping[str, object], *, source: str) -> dict[str, Scalar]:
    flat: dict[str, Scalar] = {}
    for key, value in table.items():
        if not isinstance(value, Scalar):
            raise UserError(f'{source}: "{key}" must be true or false, a number or text, not a {type(value).__name__}')
        flat[key] = value
    return flat


def parse_override(text: str) -> tuple[str, Scalar]:
    """`key=value` from the command line; the value is a TOML scalar, or bare text.

    Raises:
        UserError: no "=" in it.
    """
    key, equals, raw = text.partition("=")
    key, raw = key.strip(), raw.strip()
    if not equals or not key:
        raise UserError(f'"{text}" is not key=value, as in -c seed=1')
    try:
        value = tomllib.loads(f"value = {raw}")["value"]
    except (tomllib.TOMLDecodeError, KeyError):
        value = raw
    wants_text = key == PRESET_KEY or (key in KEYS and KEYS[key].kind is str)
    if not isinstance(value, Scalar) or (wants_text and not isinstance(value, str)):
        value = raw  # a run called 42, a date, a list: the characters as they were typed
    return key, value


def assemble(file: Path | None, overrides: Sequence[str], *, folder: Path | None) -> Config:
    """The config of a run: defaults, then the preset, then the file, then the overrides.

    Args:
        file: a TOML file of keys, or None.
        overrides: `key=value` texts; later ones win. `preset=NAME` is allowed here and in the file.
        folder: relative paths are made absolute from here, since Flower runs elsewhere; None leaves them as they are.

    Raises:
        UserError: as for `read_toml`, `preset`, `parse_override` and `Config.load`.
    """
    given: dict[str, Scalar] = {}
    if file is not None:
        given |= read_toml(file)
    given |= dict(parse_override(text) for text in overrides)
    name = given.pop(PRESET_KEY, None)
    base = preset(str(name)) if name is not None else {}
    config = Config.load({**base, **given})
    if folder is None:
        return config
    flat = config.flat()
    for key in PATH_KEYS:
        if flat[key] not in ("", GENERATED_SURVEY, HUB_SURVEY) or key == "output-dir":
            flat[key] = str(_absolute(key, str(flat[key]), folder))
    if (weights := str(flat["pluralllm-checkpoint"])) and not os.path.isfile(weights):
        raise UserError(
            f'pluralllm-checkpoint = "{weights}": there is no such file; give the pluralllm.safetensors of a run'
        )
    for key in ("model", "embedding-model"):  # a folder, or a name
        if flat[key] not in ("", TINY_MODEL) and os.path.isdir(path := _absolute(key, str(flat[key]), folder)):
            flat[key] = str(path)
    return Config.load(flat)


def _absolute(key: str, path: str, folder: Path) -> Path:
    try:
        return (folder / Path(path).expanduser()).resolve()
    except (RuntimeError, OSError) as error:  # a home that does not exist, links in a circle
        raise UserError(f'{key} = "{path}" is not a path that can be followed ({error})') from None
