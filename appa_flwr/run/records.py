"""Records of a run's files, shared by their writers and readers (`appa_flwr.run.schema`).

Fields have the same order and names as in the files.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, StringConstraints, model_serializer

from appa_flwr.config import Scalar

PPO = "ppo"
TRAINED_METHODS = ("base", "sft", PPO)
OPTION_LIST, NEAREST_QUESTIONS, MEAN_PREDICTION = "option-list", "nearest-questions", "mean-prediction"
LOOK_UPS = (OPTION_LIST, NEAREST_QUESTIONS)
"""Baselines that answer with the mean answers to training questions with the same options, or to the nearest ones."""
TRIVIAL_BASELINES = ("uniform", "majority", *LOOK_UPS, MEAN_PREDICTION)
CEILINGS = {"ceiling-average": "average", "ceiling-min": "min"}
"""Method -> objective of the best shared answer."""
METHODS = (*TRAINED_METHODS, *TRIVIAL_BASELINES, *CEILINGS)

MODEL = "model:"
"""Prefix of the method's name for a model from outside the run (`appa eval`)."""

Means = dict[str, float]
PredictorScores = dict[str, Means]
"""Predictor -> measure -> mean over answers; measure "answers" is a number of answers."""


class Record(BaseModel):
    """A JSON object in a run's file; measures may be NaN."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")


class Progress(Record):
    """A line of progress.jsonl, written after a step of a phase; `seconds_left` is for the phase, None if unknown.

    `seconds` is the time that the run has taken, without that between a stop and a resume.
    """

    phase: str
    step: int
    of: int
    message: str
    seconds_left: float | None
    seconds: float = 0.0


class EmbeddingSummary(Record):
    """Features of `pluralllm.encoder` that the network was trained on.

    `probe` (E,) are those of the first question's first option, which differ for another encoder.
    """

    encoder: str
    probe: tuple[float, ...]


class SurveySummary(Record):
    """Survey that the network was trained on.

    `table` is a hash of all public questions in any order, `training` has one for each training question; `groups` maps
    the groups that trained to the number of training questions that they answered.
    """

    table: str
    training: tuple[str, ...]
    num_questions: int
    split_seed: int
    test_fraction: float
    groups: dict[str, int]


class Card(Record):
    """pluralllm.json: what PluralLLM's weights were trained on and how good they are. It holds no answer.

    Attributes:
        format: version of the card and of the inputs that its weights expect; both may be copied out of a run's folder.
        weights: SHA-256 of the file of weights.
        losses: the groups' mean loss in every round.
        distances: in every round, the distance of each group's step from the others' mean step, in its lengths.
        scores: agreement with all groups' own survey answers; `groups` has that with each group's.
    """

    format: Literal[11] = 11
    weights: str = ""
    embedding: EmbeddingSummary
    survey: SurveySummary
    training: dict[str, Scalar]
    losses: tuple[float, ...] = ()
    distances: tuple[Means, ...] = ()
    scores: PredictorScores = {}
    groups: dict[str, PredictorScores] = {}


class RuleValues(Record):
    """A rule of rules.json; values are texts, since parameters of a user's rule may have any type."""

    parameters: dict[str, str]
    text: str = ""  # hash of the text of a user's rule

    def sentence(self) -> str:
        """Text for log and report."""
        return ", ".join(f"{name} = {value}" for name, value in self.parameters.items())


class RuleRound(Record):
    """Result of a rule for one batch of answers; `reward` and `format_score` are means over the batch.

    Attributes:
        fell_back: whether the rule took the plain mean; None for a rule without a threshold.
        rewards: mean alignment reward per group; None for a group that did not answer.
        group_reward: mean alignment reward over the groups that answered.
    """

    iteration: int
    fairness_index: float
    fell_back: bool | None
    weights: dict[str, float]
    history: dict[str, float]
    rewards: dict[str, float | None]
    group_reward: float
    reward: float
    format_score: float
    missing_groups: tuple[str, ...]


class CurvePoint(Record):
    """Scores of the policy's answers to held-out questions after an iteration, by the training metric, in [0, 1]."""

    fi: float
    avg_as: float
    min_as: float


KL_JUMP = 1.0
"""Rise of the KL to the SFT policy, in nats an answer, by which an update throws the policy back."""


class Iteration(RuleRound):
    """A line of metrics.jsonl: one PPO iteration; numbers are means over rollouts.

    Attributes:
        kl: of the policy that sampled the answers, so of all updates before this iteration's.
        kl_jumped: whether this is more than `KL_JUMP` above the iteration before.
        seconds: duration of each part.
        traffic: messages and bytes of their records, to and from the groups, for the rewards.
        held_out: kind of target -> scores every `eval.every` iterations, else empty.
    """

    num_iterations: int
    policy_loss: float
    value_loss: float
    clip_fraction: float
    approximate_kl: float
    kl: float
    kl_jumped: bool = False
    entropy: float
    response_length: float
    seconds: dict[str, float]
    traffic: dict[str, int] = {}
    held_out: dict[str, CurvePoint] = {}


class ServedRound(RuleRound):
    """A round of the rule over `size` answers of another trainer, and the `seconds` that the groups took.

    `round` is the trainer's number, or without it the last number plus 1. A `held_out` round has held-out questions and
    changes no histories. `history`, `answered` and `log_weight` are the rule's `State` after the round, by group;
    `log_weight` is its `memory_G`, which holds log-weights under rule `mix`.
    """

    round: int
    size: int
    held_out: bool
    answered: dict[str, bool]
    log_weight: dict[str, float]
    seconds: float


class ServedAnswer(Record):
    """A scored answer of another trainer, by the trainer's `id` and a hash of question and completion.

    Reward and components are in [0, 1]: "alignment", the mean over the groups that answered, and "format".
    """

    id: str
    digest: str
    reward: float
    components: dict[str, float]


class ServedLine(Record):
    """A line of served.jsonl: a round of a trainer's run, and its answers."""

    run: str
    round: ServedRound
    answers: tuple[ServedAnswer, ...]


class _Evaluated(Record):
    method: Annotated[str, StringConstraints(pattern=rf"^({'|'.join(METHODS)}|{MODEL}.*)$")]
    metric: str
    against: Annotated[str, StringConstraints(pattern="^(survey|predictions)$")]


class ScoreRecord(CurvePoint):
    """One method under one metric, against one kind of target, in [0, 1].

    Source: Appendix "Group, Average, and Minimum Alignment Scores". `fi_readable` is the FI over readable answers, as
    an unreadable answer scores 0 for every group, which FI counts as perfectly fair; NaN if no answer is readable.
    """

    per_group: dict[str, float]
    fi_readable: float


class SummaryRow(ScoreRecord, _Evaluated):
    """A row of summary.json: a method's scores under a metric, against the groups' survey answers or their predictions.

    Attributes:
        format_score: mean format score in [0, 1], None for answers that no model wrote.
        readable: share of answers in [0, 1] that give a prediction.
        sampled: number of questions if they are a sample of the held-out ones, as ceilings of many groups are; else the
            file has no such key.
    """

    format_score: float | None
    readable: float
    sampled: int | None = None

    @model_serializer(mode="wrap")
    def _without_none(self, fields: SerializerFunctionWrapHandler) -> dict[str, Any]:
        row: dict[str, Any] = fields(self)
        return row if self.sampled else {key: value for key, value in row.items() if key != "sampled"}


class MethodAnswer(Record):
    """A method's shares of the options, or preference scores; None if unreadable. `text` is what a model wrote."""

    shares: tuple[float, ...] | None
    text: str


class Example(Record):
    """A held-out question of examples.json, and how each method and group answers it.

    Attributes:
        answers: method -> its answer.
        survey: group -> its own survey answer, which the server of a simulation knows.
        predictions: group without such -> PluralLLM's prediction, if all owners let predictions leave for ceilings.
    """

    question_id: str
    question: str
    options: tuple[str, ...]
    answers: dict[str, MethodAnswer] = {}
    survey: dict[str, tuple[float, ...]] = {}
    predictions: dict[str, tuple[float, ...]] = {}


class QuestionCounts(Record):
    """questions.json: how many questions the policy is asked, and how many are left out.

    Nobody answered `unanswered` of the `training` questions. Answers to the unanswerable do not fit into
    `ppo.response-length`, prompts and answers of those that are too long not into `policy.max-sequence-length`.
    """

    training: int
    unanswered: int
    held_out: int
    unanswerable: int
    too_long: int

    def sentence(self) -> str:
        """Text for the log."""
        words = {"unanswered": "of them unanswered"}
        return "questions: " + ", ".join(f"{n} {words.get(name, name.replace('_', ' '))}" for name, n in self if n)
