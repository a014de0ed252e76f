"""The config keys of every section, each with its type, range, default (of the default run) and one line of doc.

`ppo.learning-rate` is `Config.ppo.learning_rate`. "SFT table", "PPO table" and "APPA table" are `tab:sft-hparams`,
`tab:ppo-hparams` and `tab:appa-hparams` of the paper. pyproject.toml repeats the defaults for Flower; a test checks
that both are equal.
"""

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo

from appa_flwr.config import ranges

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


def absolute(path: str, folder: Path | None) -> str:
    """Make a path absolute from a folder, since Flower runs elsewhere; without a folder it is unchanged.

    Raises:
        ValueError: the path cannot be resolved, since a home does not exist or links form a circle.
    """
    try:
        return str((folder / Path(path).expanduser()).resolve()) if folder else path
    except (RuntimeError, OSError) as error:
        raise ValueError(f"must be a path that can be followed ({error})") from None


def path_or(*names: str, on_hub: bool = False) -> AfterValidator:
    """Validate a path, one of `names` or an empty text; with `on_hub`, only an existing path counts as a path."""

    def checked(value: str, info: ValidationInfo) -> str:
        path = absolute(value, info.context)
        return value if value in ("", *names) or (on_hub and not os.path.exists(path)) else path

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


class RunSection(Section):
    """[run]: where a run writes, how far it goes, and how the server waits for the groups."""

    output_dir: LocalPath = key("runs", "folder that holds the runs", min_length=1)
    phases: Literal["all", "pluralllm", "serve"] = key(
        "all", "where it ends: after PluralLLM; serve = it scores other trainers' answers until stopped"
    )
    resume: bool = key(False, "go on with the run that the run folder holds; appa run --resume sets it")
    min_groups: int = key(2, "groups that must answer, else the iteration fails", ge=1)
    reply_timeout: float = key(600.0, "seconds the server waits for the groups to join, and for their replies", gt=0)
    group_keys: LocalPath = key("", "TOML file at the server, group = its node's public key; empty = names unchecked")
    sums: Literal["plain", "secure"] = key(
        "plain", "what the server learns of groups: plain = each one's numbers, secure = their sums alone"
    )


class DataSection(Section):
    """[data]: which questions and answers of the survey count."""

    test_fraction: float = key(0.2, "share of questions held out (SFT table: 80/20)", gt=0, lt=1)
    extra_questions: Annotated[str, path_or(SURVEY_QUESTIONS)] = key(
        SURVEY_QUESTIONS,
        "questions without answers that the policy learns from predictions: survey = those of the survey that no group "
        "has answered, a file of more with the columns question_id, question, options, or empty = none",
    )
    num_questions: int = key(400, "questions of the generated survey that were asked", ge=2)
    num_groups: int = key(8, "groups of the generated survey", ge=2)
    disagreement: float = key(1.5, "of the generated survey: how far groups differ, 0 = not at all", ge=0)
    max_questions: int = key(0, "use at most this many questions; 0 = all", ge=0)
    refusals: Literal["keep", "drop"] = key("keep", "refused answers: an option like others, or removed")
    min_respondents: int = key(0, "leave out answers of fewer people, where the survey tells", ge=0)
    group_by: str = key("", "columns of a file with one row a respondent, separated by commas: each value is a group")
    weight: str = key("", "column of respondents' weights in such a file; empty = the only one named like it, or none")
    missing: str = key(
        "", 'codes that are no answers, as "98,99", "-5..-1" or "COLUMN=7,8,9;COLUMN=99"; none = all codes are answers'
    )

    @property
    def extra_file(self) -> str:
        """The file of `extra_questions`; empty if it names no file."""
        return "" if self.extra_questions == SURVEY_QUESTIONS else self.extra_questions


class PluralLLMSection(Section):
    """[pluralllm]: the preference predictor, its text encoder and its pretraining."""

    architecture: Architecture = key(
        "residual", "a mean with each group's residual in closed form, or the paper's few-shot attention"
    )
    encoder: Annotated[str, path_or(NGRAMS, MINILM, on_hub=True)] = key(
        NGRAMS,
        "what makes vectors of the public texts: ngrams (hashed), minilm (of a package), or folder or hub id of a "
        "sentence-transformers model or a causal language model",
        min_length=1,
    )
    num_context_questions: int = key(512, "most answered questions of a group that a prediction rests on", ge=1)
    checkpoint: LocalPath = key("", "weights of an earlier run to use instead of pretraining")
    unseen_groups: str = key("", "names; they bring few-shot context only and never train the predictor")
    rounds: int = key(16, "federated pretraining rounds", ge=0)
    local_steps: int = key(24, "optimizer steps of a group in one round", ge=1)
    learning_rate: float = key(0.03, "step size of a group's Adam", gt=0)

    @property
    def fresh_contexts(self) -> bool:
        """True if each iteration draws new contexts, as for the attention network with its small contexts."""
        return self.architecture == "attention"


class PolicySection(Section):
    """[policy]: the language model, its prompts, number format and adapters."""

    prompt_style: Literal["auto", "compact", "counted", "full"] = key(
        "auto",
        "full = all instructions of the paper; counted = compact, with the number of options; auto = compact for the "
        "generated survey, counted for others",
    )
    max_sequence_length: int = key(500, "tokens of prompt and response together (SFT table)", ge=1)
    compute_dtype: Literal["float32", "bfloat16"] = key("float32", "number format (SFT and PPO tables)")
    tuning: Literal["full", "lora", "qlora"] = key(
        "full", "train all weights, or adapters on a frozen base, which is in 4-bit nf4 with qlora (PPO table)"
    )
    lora_rank: int = key(16, "rank r of the adapters, which are scaled by 2 (SFT and PPO tables)", ge=1)
    sft_targets: Projections = key(ALL_PROJECTIONS, "layers adapted in SFT (SFT table)")
    ppo_targets: Projections = key(ATTENTION_PROJECTIONS, "layers adapted in PPO, of both models (PPO table)")


class SFTSection(Section):
    """[sft]: supervised fine-tuning."""

    target: Literal["majority", "votes", "smoothed-votes", "mean", "predicted-mean"] = key(
        "predicted-mean",
        "what SFT teaches: the winner (paper), vote shares, shares with one vote more an option, or the mean of the "
        "groups' answers or predictions",
    )
    answer_step: float = key(0.1, "grid of probabilities; a coarse one helps small models sum to one", ge=0.01, le=0.5)
    steps: int = key(500, "optimizer steps; 0 = as many as sft.epochs takes", ge=0)
    epochs: int = key(1, "passes over the training questions if sft.steps is 0 (SFT table)", ge=1)
    batch_size: int = key(64, "answers an optimizer step, in equal passes of at most 32 (SFT table: 16)", ge=1)
    learning_rate: float = key(2e-3, "AdamW step size (SFT table: 5e-6)", gt=0)


class PPOSection(Section):
    """[ppo]: the rollouts, and the update of policy and value model."""

    num_iterations: int = key(30, "PPO iterations; 0 = five passes over the training questions (PPO table)", ge=0)
    batch_size: int = key(384, "answers sampled per iteration (PPO table: 4 x 24)", ge=1)
    answers_per_question: int = key(8, "answers sampled to each question of an iteration", ge=1)
    response_length: int = key(60, "most tokens of an answer (PPO table)", ge=1)
    temperature: float = key(1.0, "of sampling in rollouts (PPO table: 0.6)", gt=0)
    num_mini_batches: int = key(4, "optimizer steps per PPO epoch (PPO table: 8)", ge=1)
    epochs: int = key(1, "passes over a rollout batch (PPO table: 2)", ge=1)
    micro_batch_tokens: int = key(2048, "most tokens a pass, padded, prompts shared; halved if memory ends", ge=1)
    learning_rate: float = key(6e-4, "AdamW step size of policy and value model (PPO table: 1e-5)", gt=0)
    kl_coefficient: float = key(0.05, "weight of the KL penalty to the SFT policy (PPO table)", ge=0)
    clip_range: float = key(0.2, "of the probability ratio, and of the change in value (PPO table)", gt=0, le=1)
    baseline: Literal["value", "question"] = key(
        "question", "a reward's measure: a value model's forecast, or the mean of the question's other answers (RLOO)"
    )


class APPASection(Section):
    """[appa]: parameters of the aggregation rules and of the reward they aggregate."""

    ema_decay: ranges.EmaDecay = key(ranges.EMA_DECAY, "lambda of a group's reward history (APPA table)")
    temperature: ranges.Temperature = key(ranges.TEMPERATURE, "T of the group weights (APPA table: 0.1)")
    fairness_threshold: ranges.FairnessThreshold = key(
        ranges.FAIRNESS_THRESHOLD, "tau: from this fairness index on, the mean; above 1 = never (APPA table: 0.99)"
    )
    alignment_weight: ranges.AlignmentWeight = key(
        ranges.ALIGNMENT_WEIGHT, "omega: share of alignment in the reward, the rest is format (APPA table)"
    )
    alpha: ranges.Alpha = key(0.0, "of rule alpha: -inf is the minimum, inf the maximum; 0, the mean, is rule average")
    worst_share: ranges.WorstShare = key(
        ranges.WORST_SHARE, "of rule mix: share of weight for groups that fell behind, the rest is equal"
    )


class EvaluationSection(Section):
    """[eval]: scores on held-out questions."""

    ceilings: bool = key(True, "find the best shared answers; the groups are asked for scores that tell their targets")


class ServeSection(Section):
    """[serve]: the service that scores other trainers' answers, with run.phases = "serve"."""

    host: str = key("127.0.0.1", "address that it listens on; loopback by default", min_length=1)
    port: int = key(9200, "its port; 0 = a free one, which the log names", ge=0, le=65535)
