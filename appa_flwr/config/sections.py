"""The config keys of every section, each with its default (the embedded run), range and one line of doc.

`ppo.learning-rate` is `Config.ppo.learning_rate`. What the paper's tables set says so: SFT is `tab:sft-hparams`, PPO
`tab:ppo-hparams`, APPA `tab:appa-hparams`. pyproject.toml repeats the defaults for Flower; a contract test holds
the two equal.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from appa_flwr.config import ranges

Architecture = Literal["residual", "attention"]
LocalOptimizer = Literal["sgd", "adam"]
NGRAMS, MINILM = "ngrams", "minilm"
SURVEY_QUESTIONS = "survey"
# strategies without a server optimizer, so clients use Adam
AVERAGING = ("fedavg", "fedprox")
SFT_PASS = 32  # answers of a forward pass of SFT, at most

ATTENTION_PROJECTIONS = "q_proj,k_proj,v_proj,o_proj"
ALL_PROJECTIONS = f"{ATTENTION_PROJECTIONS},gate_proj,up_proj,down_proj"


def kebab(name: str) -> str:
    """The key of an attribute."""
    return name.replace("_", "-")


class Section(BaseModel):
    """Keys that belong together; frozen, and strict about types."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        validate_by_alias=True,
        validate_by_name=True,
        alias_generator=kebab,
        allow_inf_nan=False,
        hide_input_in_errors=True,
    )


class RunSection(Section):
    """[run]: where a run writes, and how far it goes."""

    output_dir: str = Field("runs", min_length=1, description="folder that holds the runs")
    phases: Literal["all", "pluralllm", "sft", "serve"] = Field(
        "all",
        description="where the run ends: pluralllm = after its pretraining and scores, sft = after SFT's scores; "
        "serve = it trains no policy and scores other trainers' answers until it is stopped",
    )
    tracker: Literal["none", "tensorboard", "wandb", "trackio"] = Field(
        "none", description="experiment tracker that gets every PPO iteration, locally; its package must be installed"
    )
    resume: bool = Field(False, description="go on with the run that the run folder holds; appa run --resume sets it")


class FederationSection(Section):
    """[federation]: how the server waits for the groups, and what it learns of them."""

    min_groups: int = Field(2, ge=1, description="groups that must answer, else the iteration fails")
    reply_timeout: float = Field(
        600.0, gt=0, description="seconds the server waits for the groups to join, and for their replies"
    )
    group_keys: str = Field(
        "",
        description="TOML file at the server, group = its node's public key; empty = a node may speak for any name",
    )
    sums: Literal["plain", "secure"] = Field(
        "plain", description="what the server learns of groups: plain = each one's numbers, secure = their sums alone"
    )


class DataSection(Section):
    """[data]: which questions and answers of the survey count."""

    test_fraction: float = Field(0.2, gt=0, lt=1, description="share of questions held out (SFT table: 80/20)")
    extra_questions: str = Field(
        SURVEY_QUESTIONS,
        description="questions that the policy learns from by predictions alone: survey = those that none of the "
        "groups has answered; a file = these and its own (question_id, question, options, perhaps ordinal; no "
        "answers); empty = none",
    )
    num_questions: int = Field(400, ge=2, description="questions of the generated survey that were asked")
    num_groups: int = Field(8, ge=2, description="groups of the generated survey")
    disagreement: float = Field(1.5, ge=0, description="of the generated survey: how far groups differ, 0 = not at all")
    max_questions: int = Field(0, ge=0, description="use at most this many questions; 0 = all")
    refusals: Literal["keep", "drop", "separate"] = Field(
        "keep", description="refused answers: an option like others, removed, or removed with their rate reported"
    )
    min_respondents: int = Field(0, ge=0, description="leave out answers of fewer people, where the survey tells")
    group_by: str = Field(
        "", description="columns of a file with one row a respondent, separated by commas: each value is a group"
    )
    weight: str = Field(
        "", description="column of respondents' weights in such a file; empty = one named weight or the like, if any"
    )

    @property
    def extra_file(self) -> str:
        """The file of `extra_questions`; empty where it names none."""
        return "" if self.extra_questions == SURVEY_QUESTIONS else self.extra_questions


class EmbeddingSection(Section):
    """[embedding]: what makes vectors of the public texts."""

    encoder: str = Field(
        NGRAMS,
        min_length=1,
        description="what makes vectors of the public texts: ngrams (hashed), minilm (from its package), or the folder "
        "or hub id of a sentence-transformers model or a causal LM",
    )


class PluralLLMSection(Section):
    """[pluralllm]: the preference predictor and its pretraining."""

    architecture: Architecture = Field(
        "residual", description="a mean with each group's residual in closed form, or the paper's few-shot attention"
    )
    num_context_questions: int = Field(
        512, ge=1, description="most answered questions of a group that a prediction rests on"
    )
    checkpoint: str = Field("", description="weights of an earlier run to use instead of pretraining")
    unseen_groups: str = Field("", description="names; they bring few-shot context only and never train the predictor")
    strategy: Literal["fedavg", "fedadam", "fedprox", "fedyogi"] = Field(
        "fedavg", description="federated strategy of pretraining"
    )
    rounds: int = Field(16, ge=0, description="federated pretraining rounds")
    local_steps: int = Field(24, ge=1, description="optimizer steps of a group in one round")
    learning_rate: float = Field(
        0.03,
        ge=0,
        description="step size of a group's optimizer; 0 = 0.003 of Adam, 0.1 of SGD, as the strategy has it",
    )

    @property
    def fresh_contexts(self) -> bool:
        """Whether each iteration draws contexts anew: the few of the attention network, not the residual's many."""
        return self.architecture == "attention"

    @property
    def local_optimizer(self) -> LocalOptimizer:
        """A group's optimizer: SGD where the server has an adaptive optimizer."""
        return "adam" if self.strategy in AVERAGING else "sgd"

    @property
    def local_learning_rate(self) -> float:
        """A group's step size, 0 resolved."""
        return self.learning_rate or {"sgd": 0.1, "adam": 3e-3}[self.local_optimizer]


class PolicySection(Section):
    """[policy]: the language model, its prompts and number format."""

    prompt_style: Literal["compact", "counted", "full"] = Field(
        "compact", description="full = all instructions of the paper; counted = compact, with the number of options"
    )
    max_sequence_length: int = Field(500, ge=1, description="tokens of prompt and response together (SFT table)")
    compute_dtype: Literal["float32", "bfloat16", "auto"] = Field(
        "float32",
        description="number format (SFT and PPO tables); auto = bfloat16 where GPU or processor computes in it",
    )
    tuning: Literal["full", "lora", "qlora"] = Field(
        "full",
        description="train all weights, or adapters on a frozen base, which PPO has in 4-bit nf4, double-quantised, "
        "with qlora (PPO table)",
    )


class LoRASection(Section):
    """[lora]: the adapters of SFT and PPO."""

    rank: int = Field(16, ge=1, description="rank r of the adapters (SFT and PPO tables)")
    sft_targets: str = Field(ALL_PROJECTIONS, min_length=1, description="layers adapted in SFT (SFT table)")
    ppo_targets: str = Field(
        ATTENTION_PROJECTIONS,
        min_length=1,
        description="layers adapted in PPO, of policy and value model, whose head trains in full (PPO table)",
    )


class SFTSection(Section):
    """[sft]: supervised fine-tuning."""

    target: Literal["majority", "votes", "smoothed-votes", "mean", "predicted-mean"] = Field(
        "predicted-mean",
        description="what SFT teaches: the winner (paper), vote shares, shares with one vote more an option, the mean "
        "of the groups' answers, or that of their predictions",
    )
    answer_step: float = Field(
        0.1,
        ge=0.01,
        le=0.5,
        description="grid of the probabilities that SFT teaches; on a coarse one a small model learns to sum to one",
    )
    checkpoint: str = Field("", description="sft-model of an earlier run to begin PPO with instead of training one")
    steps: int = Field(500, ge=0, description="optimizer steps; 0 = as many as sft.epochs takes")
    epochs: int = Field(1, ge=1, description="passes over the training questions if sft.steps is 0 (SFT table)")
    batch_size: int = Field(64, ge=1, description="answers an optimizer step, in passes of 32 (SFT table: 16)")
    learning_rate: float = Field(2e-3, gt=0, description="AdamW step size (SFT table: 5e-6)")

    @property
    def pass_size(self) -> int:
        """Answers of a forward pass."""
        return min(self.batch_size, SFT_PASS)


class RolloutSection(Section):
    """[rollout]: how the policy answers while it learns."""

    batch_size: int = Field(384, ge=1, description="answers sampled per iteration (PPO table: 4 x 24)")
    answers_per_question: int = Field(8, ge=1, description="answers sampled to each question of an iteration")
    response_length: int = Field(60, ge=1, description="most tokens of an answer (PPO table)")
    temperature: float = Field(1.0, gt=0, description="of sampling in rollouts (PPO table)")


class PPOSection(Section):
    """[ppo]: the update of the policy and the value model."""

    num_iterations: int = Field(
        30, ge=0, description="PPO iterations; 0 = five passes over the training questions (PPO table)"
    )
    num_mini_batches: int = Field(4, ge=1, description="optimizer steps per PPO epoch (PPO table)")
    epochs: int = Field(1, ge=1, description="passes over a rollout batch (PPO table: 2)")
    micro_batch_tokens: int = Field(
        2048,
        ge=1,
        description="most tokens in a pass of PPO, padding counted, shared prompts not; halved if a GPU's memory ends",
    )
    learning_rate: float = Field(
        6e-4, gt=0, description="AdamW step size of policy and value model, which falls to 0 (PPO table: 1e-5)"
    )
    kl_coefficient: float = Field(0.05, ge=0, description="weight of the KL penalty to the SFT policy (PPO table)")
    clip_range: float = Field(
        0.2, gt=0, le=1, description="of the probability ratio, and of the change in value (PPO table)"
    )
    baseline: Literal["value", "question"] = Field(
        "question",
        description="what a reward is compared with: a value model's forecast, or as in RLOO the mean reward of the "
        "question's other answers",
    )


class APPASection(Section):
    """[appa]: parameters of the aggregation rules and of the reward they aggregate (`appa_flwr.config.ranges`)."""

    ema_decay: ranges.EmaDecay = Field(ranges.EMA_DECAY, description="lambda of a group's reward history (APPA table)")
    temperature: ranges.Temperature = Field(ranges.TEMPERATURE, description="T of the group weights (APPA table: 0.1)")
    fairness_threshold: ranges.FairnessThreshold = Field(
        ranges.FAIRNESS_THRESHOLD,
        description="tau: from this fairness index on, the plain mean; above 1 = never (APPA table: 0.99)",
    )
    alignment_weight: ranges.AlignmentWeight = Field(
        ranges.ALIGNMENT_WEIGHT,
        description="omega: share of alignment in the reward, the rest is format (APPA table)",
    )
    alpha: ranges.Alpha = Field(
        0.0, description="of rule alpha, which needs another: -inf is the minimum, inf the maximum"
    )
    worst_share: ranges.WorstShare = Field(
        ranges.WORST_SHARE, description="of rule mix: share of weight for groups that fell behind, the rest is equal"
    )


class EvaluationSection(Section):
    """[eval]: scores on held-out questions."""

    every: int = Field(
        10,
        ge=0,
        description="PPO iterations from one point of the learning curve on held-out questions to the next; 0 = none",
    )
    ceilings: bool = Field(
        True, description="report the best shared answers; asks the groups for scores that reveal their targets"
    )


class ServeSection(Section):
    """[serve]: the service that scores other trainers' answers, with run.phases = "serve"."""

    host: str = Field("127.0.0.1", min_length=1, description="address that it listens on; loopback by default")
    port: int = Field(9200, ge=0, le=65535, description="its port; 0 = a free one, which the log names")
