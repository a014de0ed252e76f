"""The config keys of every section, each with its type, range, default (of the default run) and one line of doc.

`ppo.learning-rate` is `Config.ppo.learning_rate`. "SFT table", "PPO table" and "APPA table" are `tab:sft-hparams`,
`tab:ppo-hparams` and `tab:appa-hparams` of the paper. pyproject.toml repeats the defaults for Flower; a test checks
that both are equal.
"""

import math
import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo

Architecture = Literal["residual", "attention"]
NGRAMS, MINILM = "ngrams", "minilm"
SURVEY_QUESTIONS = "survey"
"""Value of `data.extra-questions`: the questions of the run's survey that none of the groups has answered."""
ATTENTION_PROJECTIONS = "q_proj,k_proj,v_proj,o_proj"
ALL_PROJECTIONS = f"{ATTENTION_PROJECTIONS},gate_proj,up_proj,down_proj"


def kebab(name: str) -> str:
    """Config key of an attribute."""
    return name.replace("_", "-")


def key(default: Any, doc: str, **bounds: Any) -> Any:
    """Make the field of a config key."""
    return Field(default, description=doc, **bounds)


class Section(BaseModel):
    """A frozen section of keys. Text is converted to a number for numeric keys, as needed on a command line."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_by_name=True,
        alias_generator=kebab,
        allow_inf_nan=False,
        coerce_numbers_to_str=True,
        validate_default=True,
    )


def path_or(*names: str, on_hub: bool = False) -> AfterValidator:
    """Validate a path, one of `names` or an empty text; with `on_hub`, only an existing path counts as a path.

    Paths are made absolute from the folder that is the context, since Flower runs elsewhere.
    """

    def checked(value: str, info: ValidationInfo) -> str:
        if info.context is None or value in ("", *names):
            return value
        try:
            path = str((info.context / Path(value).expanduser()).resolve())
        except (RuntimeError, OSError) as error:  # a home does not exist, or links form a circle
            raise ValueError(f"must be a path that can be followed ({error})") from None
        return value if on_hub and not os.path.exists(path) else path

    return AfterValidator(checked)


LocalPath = Annotated[str, path_or()]
"""A path, or empty."""


def _projections(value: str) -> str:
    """Validate names of layers, separated by commas."""
    if not {name.strip() for name in value.split(",")} <= {*ALL_PROJECTIONS.split(",")}:
        raise ValueError(f"must be names among {ALL_PROJECTIONS}")
    return value


Projections = Annotated[str, AfterValidator(_projections)]
"""Linear layers that LoRA adapts."""


def _step(value: float) -> float:
    """Validate the step of an answer's probabilities, which have two decimals and sum to 1."""
    if value not in (0.01, 0.02, 0.04, 0.05, 0.1, 0.2, 0.25, 0.5):
        raise ValueError("must be a multiple of 0.01 that divides 1, such as 0.01, 0.05 or 0.1")
    return value


class RunSection(Section):
    """[run]: the run's folder, its phases, and how long the server waits for the groups."""

    output_dir: LocalPath = key("runs", "folder of all runs; each run has a folder in it", min_length=1)
    phases: Literal["all", "pluralllm", "serve"] = key(
        "all", "all = SFT and PPO too; pluralllm = only the predictor; serve = score the answers of other trainers"
    )
    tracker: Literal["", "tensorboard", "wandb", "trackio"] = key(
        "", "shows each PPO iteration while the run goes on; its package must be installed; empty = no tracker"
    )
    resume: bool = key(False, "continue the run in the run's folder; `appa run --resume` sets this key")
    rules_at_once: int = key(
        0,
        "rules whose policies train at the same time; 0 = one a core for the tiny model, else one after another",
        ge=0,
    )
    min_groups: int = key(0, "fewest groups that must reply, or the run ends; 0 = half of them, rounded up", ge=0)
    reply_timeout: float = key(600.0, "seconds that the server waits for groups to join, and for each reply", gt=0)
    group_keys: LocalPath = key("", "TOML file, GROUP = public key of its node; empty = names are not checked")


class DataSection(Section):
    """[data]: which questions and answers of the survey are used."""

    test_fraction: float = key(0.2, "share of the questions that is held out (SFT table: 0.2)", gt=0, lt=1)
    extra_questions: Annotated[str, path_or(SURVEY_QUESTIONS)] = key(
        SURVEY_QUESTIONS,
        "unanswered questions, which the policy learns from predictions: survey = those in the survey; or a file with "
        "the columns question_id, question, options; empty = none",
    )
    num_questions: int = key(400, "answered questions of the generated survey", ge=2)
    num_groups: int = key(8, "groups of the generated survey", ge=2)
    disagreement: float = key(1.5, "how much the groups of the generated survey differ; 0 = not at all", ge=0)
    max_questions: int = key(0, "most questions to use, chosen at random; 0 = all", ge=0)
    refusals: Literal["keep", "drop"] = key("keep", 'refusals and "don\'t know": keep them as an option, or drop them')
    min_respondents: int = key(0, "drop answers that fewer people gave, where the survey counts people", ge=0)

    @property
    def extra_file(self) -> str:
        """The file of `extra_questions`; empty if it names no file."""
        return "" if self.extra_questions == SURVEY_QUESTIONS else self.extra_questions


class PluralLLMSection(Section):
    """[pluralllm]: the preference predictor, its text encoder and its pretraining."""

    architecture: Architecture = key(
        "residual", "residual = a mean and a closed-form residual for each group; attention = the paper's network"
    )
    encoder: Annotated[str, path_or(NGRAMS, MINILM, on_hub=True)] = key(
        NGRAMS,
        "text encoder: ngrams (hashed), minilm (from a package), or the folder or hub id of a sentence-transformers "
        "model or a causal language model",
        min_length=1,
    )
    num_context_questions: int = key(512, "most of a group's answers that a prediction uses as context", ge=1)
    checkpoint: LocalPath = key("", "weights of an earlier run, instead of pretraining; empty = pretrain")
    strategy: Literal["fedavg", "fedprox", "fedadam", "fedyogi"] = key(
        "fedavg", "Flower's strategy of pretraining; fedadam and fedyogi have an optimizer on the server"
    )
    rounds: int = key(16, "rounds of federated pretraining", ge=0)
    local_steps: int = key(24, "optimizer steps of each group in a round", ge=1, le=10_000)
    learning_rate: float = key(
        0.03, "learning rate in each group, of Adam; of SGD, under fedadam and fedyogi, where 0.1 works", gt=0
    )

    @property
    def fresh_contexts(self) -> bool:
        """True if each iteration draws new contexts, as for the attention network with its small contexts."""
        return self.architecture == "attention"


class PolicySection(Section):
    """[policy]: the language model, its prompts, number format and adapters."""

    prompt_style: Literal["auto", "compact", "counted", "full"] = key(
        "auto",
        "full = the paper's instructions; compact = question and options; counted = compact and the number of options; "
        "auto = compact for the generated survey, else counted",
    )
    max_sequence_length: int = key(
        500, "most tokens of prompt and answer; longer questions are left out (SFT table)", ge=1
    )
    compute_dtype: Literal["float32", "bfloat16"] = key("float32", "number format of the weights (SFT and PPO tables)")
    tuning: Literal["full", "lora", "qlora"] = key(
        "full", "full = train all weights; lora = train adapters on a frozen base; qlora = on a 4-bit base (PPO table)"
    )
    lora_rank: int = key(16, "rank of the adapters; their alpha is twice the rank (SFT and PPO tables)", ge=1)
    sft_lora_modules: Projections = key(ALL_PROJECTIONS, "layers with an adapter in SFT (SFT table)")
    ppo_lora_modules: Projections = key(ATTENTION_PROJECTIONS, "layers with an adapter in PPO (PPO table)")


class SFTSection(Section):
    """[sft]: supervised fine-tuning."""

    target: Literal["majority", "votes", "smoothed-votes", "mean", "predicted-mean"] = key(
        "predicted-mean",
        "what SFT teaches: the winner of the vote (paper), shares of votes, shares with one more vote for each option, "
        "the mean of the groups' answers, or the mean of their predictions",
    )
    answer_step: Annotated[float, AfterValidator(_step)] = key(
        0.1, "step of probabilities in SFT's answers; a coarse one helps small models"
    )
    steps: int = key(300, "optimizer steps; 0 = sft.epochs passes", ge=0)
    epochs: int = key(1, "passes over the training questions, if sft.steps is 0 (SFT table)", ge=1)
    batch_size: int = key(64, "answers in an optimizer step (SFT table: 16)", ge=1)
    learning_rate: float = key(2e-3, "learning rate of AdamW (SFT table: 5e-6)", gt=0)


class PPOSection(Section):
    """[ppo]: rollouts, and the update of the policy and the value model."""

    num_iterations: int = key(
        30, "PPO iterations; 0 = five passes over the training questions (PPO table)", ge=0, le=10_000
    )
    batch_size: int = key(384, "answers sampled in an iteration (PPO table: 96)", ge=1)
    answers_per_question: int = key(8, "answers sampled for each question", ge=1)
    response_length: int = key(60, "most tokens of an answer (PPO table)", ge=1)
    temperature: float = key(1.0, "temperature of sampling (PPO table: 0.6)", gt=0)
    num_mini_batches: int = key(4, "optimizer steps in an epoch (PPO table: 8)", ge=1)
    epochs: int = key(1, "passes over an iteration's answers (PPO table: 2)", ge=1)
    micro_batch_tokens: int = key(2048, "most tokens in a pass, with padding; halved when memory runs out", ge=1)
    learning_rate: float = key(6e-4, "learning rate of AdamW (PPO table: 1e-5)", gt=0)
    warmup_steps: int = key(0, "optimizer steps over which the learning rate rises (PPO table: none)", ge=0)
    kl_coefficient: float = key(0.05, "weight of the KL penalty to the SFT policy (PPO table)", ge=0)
    clip_range: float = key(0.2, "clip range of the probability ratio and of the value (PPO table)", gt=0, le=1)
    baseline: Literal["value", "question"] = key(
        "question", "value = a value model; question = the mean reward of the question's other answers (RLOO)"
    )


# Parameters that are fields of the rules, too.
EmaDecay = Annotated[float, Field(ge=0, lt=1)]
Temperature = Annotated[float, Field(gt=0)]
FairnessThreshold = Annotated[float, Field(ge=0)]
Alpha = Annotated[float, Field(ge=-math.inf, allow_inf_nan=True)]  # `ge` keeps nan out
WorstShare = Annotated[float, Field(ge=0, le=1)]


class APPASection(Section):
    """[appa]: parameters of the aggregation rules and of the reward."""

    ema_decay: EmaDecay = key(0.8, "lambda: decay of the groups' reward history (APPA table)")
    temperature: Temperature = key(0.02, "T: temperature of the groups' weights (APPA table: 0.1)")
    fairness_threshold: FairnessThreshold = key(
        1.1, "tau: from this Fairness Index on, take the mean; above 1 = never (APPA table: 0.99)"
    )
    alignment_weight: float = key(
        0.85, "omega: share of the alignment in the reward; the rest is the format (APPA table)", ge=0, le=1
    )
    alpha: Alpha = key(0.0, "alpha of rule alpha: -inf = minimum, 0 = mean, inf = maximum")
    worst_share: WorstShare = key(0.3, "share of the weight that rule mix gives to groups with low rewards")


APPA_DEFAULTS = APPASection()


class EvaluationSection(Section):
    """[eval]: scores on held-out questions."""

    ceilings: bool = key(True, "compute the best shared answers, for which the groups send their predictions")
    every: int = key(0, "iterations of PPO between two scores of the policy on held-out questions; 0 = none", ge=0)


class ServeSection(Section):
    """[serve]: the service that scores the answers of other trainers (`appa serve`)."""

    host: str = key("127.0.0.1", "address that the service listens on", min_length=1)
    port: int = key(9200, "port of the service; 0 = a free port, which the log names", ge=0, le=65535)
