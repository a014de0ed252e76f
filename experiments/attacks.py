"""Attacks by a server that chooses catalogue, weights and messages on a group's own answers, through PluralLLM.

The group is its real ClientApp with its owner's policy and ledger. The server knows all else: the run's seed, the code,
and what the group would reply if its answers were others. So it looks for the answers whose replies are those it got.

Axis letters: N answered questions, K options.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from scipy.optimize import least_squares
from scipy.special import softmax

from appa_flwr.config import Config, Scalar
from appa_flwr.owner.owner_policy import AS_IN_SIMULATION, OwnerPolicy
from appa_flwr.protocol import wire
from appa_flwr.protocol.rewards import js, js_distance, wasserstein
from appa_flwr.survey.types import Question
from client_app import predictor
from client_app.main import app
from experiments.pluralllm.federation import flower_task
from pluralllm.architectures import choices
from pluralllm.data import GroupData, OptionEmbedding
from pluralllm.embedding import embed_questions
from pluralllm.prediction import predict_choices
from pluralllm.residual import SHARES_KEY, START_SHARES
from server_app.predictor.pretraining import initial_weights

FloatArray = npt.NDArray[np.float64]

OPTIONS = 3
NOTHING_LIMITED = OwnerPolicy.model_validate(AS_IN_SIMULATION)
"""As before owners' limits were there."""

SETTINGS: dict[str, Scalar] = {
    "pluralllm.strategy": "fedavg",
    "pluralllm.local-steps": 16,
    "pluralllm.learning-rate": 0.003,
    "sft.target": "smoothed-votes",
}
SGD: dict[str, Scalar] = {
    "pluralllm.strategy": "fedadam",
    "pluralllm.local-steps": 1,
    "pluralllm.learning-rate": 1.0,
}
NO_KERNEL = -6.0  # of PluralLLM's logarithms: a prediction then does not depend on the group's answers
LARGE_KERNEL, SMALL_NOISE = 1.0, -2.0
SPREAD = 1.0  # of random weights
UNKNOWN_DRAWS = 0.05  # about how far off the weights of a round with other draws are
DRAWS = 4  # of training rounds whose mean the server tries to meet
EXACT = 1e-6  # how far off a reply is that nobody has rounded
STEP, STARTS, SEARCH = 1e-3, 60, 30  # of the derivative; of the search for one question; of a start at most


@dataclass
class Victim:
    """A group with answers (N, K) to questions `q0`, `q1`, ..., and what the server makes it answer.

    Attributes:
        folder: of its data file, owner's policy and ledger.
        answer_NK: what the server wants to know.
        owner_policy: what may leave.
        settings: the run's keys, which the server chooses.
        name: the group's.
        runs: how many runs there have been.
    """

    folder: Path
    answer_NK: FloatArray
    owner_policy: OwnerPolicy
    settings: dict[str, Scalar]
    name: str = "g"
    runs: int = 0

    def __post_init__(self) -> None:
        """Write the group's files."""
        rows = [
            {
                "question_id": q.question_id,
                "question": q.text,
                "options": q.options,
                "group": self.name,
                "distribution": [*a],
            }
            for q, a in zip(self.questions, self.answer_NK.tolist(), strict=True)
        ]
        (self.folder / "g.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        values = self.owner_policy.model_dump(by_alias=True)
        (self.folder / "g.toml").write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items()))
        self.config = Config.load({**SETTINGS, **self.settings})

    @property
    def questions(self) -> tuple[Question, ...]:
        """Those that the group has answered."""
        options = tuple(f"answer {k}" for k in range(OPTIONS))
        return tuple(Question(f"q{n}", f"What of topic {n}?", options) for n in range(len(self.answer_NK)))

    def begin(self, questions: Sequence[Question], *, train: npt.ArrayLike) -> None:
        """A new run with this catalogue."""
        self.runs += 1
        self.enter()
        table = embed_questions(questions)
        self.embedding = OptionEmbedding(tuple(q.question_id for q in questions), table.value_QKE, table.option_QK)
        self.train_Q = np.asarray(train, dtype=np.bool_)
        nowhere_Q = np.zeros_like(self.train_Q)
        public = wire.Catalogue(tuple(questions), self.train_Q, table.value_QKE, table.option_QK, nowhere_Q)
        self.ask(wire.CATALOGUE, wire.pack_catalogue(public))

    def enter(self) -> None:
        """Forget the run before."""
        files = {"group": self.name, "data": str(self.folder / "g.jsonl"), "policy": str(self.folder / "g.toml")}
        self.context = Context(self.runs, 2, dict(files), RecordDict(), dict(self.config.flat()))

    def ask(self, kind: str, content: RecordDict) -> RecordDict | None:
        """The reply's content; None where the group refuses."""
        reply = app(Message(content, 2, kind), self.context)
        return reply.content if reply.has_content() else None

    def weights(self, seed: int, *, kernel: float | None = None, noise: float | None = None) -> ArrayRecord:
        """Random weights, as they travel; the kernel's are as given."""
        start = initial_weights(self.config).to_torch_state_dict()
        generator = torch.Generator().manual_seed(seed)
        for name, value in start.items():
            if not name.startswith("log_") and name != SHARES_KEY:
                value += SPREAD * torch.randn(value.shape, generator=generator)
        start["log_feature"][:] = NO_KERNEL
        for name, given in (("log_weight", kernel), ("log_noise", noise)):
            if given is not None:
                start[name][:] = given
        return wire.join_weights(ArrayRecord(start))

    def data(self, answer_NK: FloatArray) -> GroupData:
        """Answers as PluralLLM takes them, where they are to the first questions of the catalogue."""
        return GroupData(self.name, np.arange(len(answer_NK)), answer_NK.astype(np.float32))


def found(
    replies: Callable[[FloatArray], FloatArray], got_R: FloatArray, *, number: int, blur: float, starts: int
) -> FloatArray:
    """The answers (N, K) of which `replies` are nearest to those that the group gave (R,), by several starts.

    `blur` is how far a reply may be off; the more, the nearer the answers stay to uniform ones.
    """

    def answers(free: FloatArray) -> FloatArray:
        return np.asarray(softmax(np.c_[free.reshape(number, OPTIONS - 1), np.zeros(number)], axis=1))

    def missed(free: FloatArray) -> FloatArray:
        return np.asarray(np.r_[replies(answers(free)) - got_R, max(blur, EXACT) * free])

    def slope(free: FloatArray) -> FloatArray:  # replies are of float32, which scipy's own steps are too short for
        steps = STEP * np.eye(len(free))
        return np.stack([(missed(free + step) - missed(free - step)) / (2 * STEP) for step in steps], axis=1)

    rng = np.random.default_rng(0)
    first = [np.zeros(number * (OPTIONS - 1)), *rng.normal(size=(starts - 1, number * (OPTIONS - 1)))]
    fits = [least_squares(missed, start, slope, max_nfev=SEARCH) for start in first]
    return answers(min(fits, key=lambda fit: fit.cost).x)


def by_training(victim: Victim, *, rounds: int) -> FloatArray | None:
    """From so many training rounds that start with the same weights: the mean of what they change."""
    number = len(victim.answer_NK)
    made_up = Question("made up", "Nobody was asked this.", victim.questions[0].options)
    victim.begin((*victim.questions, made_up), train=[True] * number + [False])
    start = victim.weights(0)

    def message(turn: int) -> RecordDict:
        return RecordDict({"arrays": start, "config": ConfigRecord({"server-round": turn})})

    got = [
        reply.array_records["arrays"]["weights"].numpy()
        for turn in range(1, rounds + 1)
        if (reply := victim.ask("train", message(turn))) is not None
    ]
    if not got:
        return None

    def replies(answer_NK: FloatArray) -> FloatArray:
        given = [victim.data(answer_NK)]
        made = [
            predictor.train_round(victim.config, start, given, victim.embedding, round_number=turn).weights["weights"]
            for turn in range(1, 1 + min(rounds, DRAWS))
        ]
        mean: FloatArray = np.mean([array.numpy() for array in made], axis=0, dtype=np.float64)
        return mean

    blur = UNKNOWN_DRAWS if victim.owner_policy.secret_draws else 0.0
    return found(replies, np.mean(got, axis=0, dtype=np.float64), number=number, blur=blur, starts=1)


def by_errors(victim: Victim, *, number: int, messages: int, kind: str = "evaluate") -> FloatArray | None:
    """From errors ("evaluate"), or sums of scores (`wire.TARGETS`, one a run), of so many random weights.

    The first so many questions are held out, the others train; the network's mean alone predicts.
    """
    train = np.arange(len(victim.answer_NK)) >= number
    option_NK = np.ones((number, OPTIONS), dtype=bool)
    got, predicted = [], []
    for turn in range(messages):
        if turn == 0 or kind == wire.TARGETS:
            victim.begin(victim.questions, train=train)
        weights = victim.weights(turn, kernel=NO_KERNEL)
        content = RecordDict({"arrays": weights, "config": ConfigRecord({})})
        reply = victim.ask(kind, content if kind == "evaluate" else RecordDict({"weights": weights}))
        if reply is None:
            break
        numbers = reply.metric_records["metrics" if kind == "evaluate" else "sums"]
        if kind == "evaluate" and numbers["num-examples"]:
            got.append(np.ravel(numbers["errors"]))
        elif numbers.get("0|held-out|pluralllm|answers") and (
            sums := [numbers[key] for m in ("js", "wasserstein") if (key := f"0|held-out|pluralllm|{m}") in numbers]
        ):
            got.append(np.array(sums) / number)
        else:
            continue
        ours = predictor.load(victim.config, weights, victim.embedding, victim.train_Q)
        nobody = victim.data(np.empty((0, OPTIONS)))
        mean_NK = predict_choices(
            ours.model, nobody, victim.embedding, num_context=1, seed=0, trained=train, rows=np.arange(number)
        )[0]
        counted = choices(victim.config.pluralllm.architecture) if kind == "evaluate" else (START_SHARES,)
        predicted += [(1.0 - shares.plain) * mean_NK + shares.plain / OPTIONS for shares in counted if shares]
    if not got:
        return None

    def replies(answer_NK: FloatArray) -> FloatArray:
        cases = [(p_NK, answer_NK, option_NK) for p_NK in predicted]
        if kind == "evaluate":
            return np.array([1.0 - js_distance(*case, base=np.e).mean() for case in cases])
        return np.array([measure(*case).mean() for case in cases for measure in (js, wasserstein)])

    blur = victim.owner_policy.sum_rounding / number / 12**0.5
    return found(replies, np.concatenate(got), number=number, blur=blur, starts=max(3, STARTS // number))


def by_predictions(victim: Victim) -> FloatArray | None:
    """From scores of answers to made-up questions that read as the group's own ones."""
    number = len(victim.answer_NK)
    copies = tuple(replace(question, question_id=f"copy of {question.question_id}") for question in victim.questions)
    victim.begin((*victim.questions, *copies), train=[True] * number + [False] * number)
    weights = victim.weights(0, kernel=LARGE_KERNEL, noise=SMALL_NOISE)
    victim.ask(wire.TARGETS, RecordDict({"weights": weights}))
    question_J = np.repeat(np.arange(number, 2 * number), OPTIONS)
    request = wire.ScoreRequest(question_J, np.tile(np.eye(OPTIONS), (number, 1)), ("cosine",))
    reply = victim.ask(wire.SCORE, wire.pack_score_request(request))
    if reply is None:
        return None
    # The cosine of a corner and a distribution is the share of that option over the distribution's length.
    cosine_NK = 2.0 * reply.array_records["rewards"]["0|cosine|targets"].numpy().reshape(number, OPTIONS) - 1.0
    return np.asarray(cosine_NK / cosine_NK.sum(axis=1, keepdims=True))


def error(found_NK: FloatArray | None, answer_NK: FloatArray) -> float:
    """Mean total variation distance; that of uniform answers where nothing was found."""
    guess_NK = np.full_like(answer_NK, 1.0 / OPTIONS) if found_NK is None else found_NK
    return float(np.abs(guess_NK - answer_NK[: len(guess_NK)]).sum(1).mean() / 2)


@dataclass(frozen=True)
class Attack:
    """One way to read answers: what it is called, how many the group has, how they are read, the keys it takes."""

    name: str
    number: int
    read: Callable[[Victim], FloatArray | None]
    settings: dict[str, Scalar] = field(default_factory=dict)

    def error(self, owner_policy: OwnerPolicy, *, seed: int) -> float:
        """Against this owner's policy, for random answers."""
        answer_NK = self.answers(seed)
        with tempfile.TemporaryDirectory() as folder, flower_task():
            return error(self.read(Victim(Path(folder), answer_NK, owner_policy, self.settings)), answer_NK)

    def guess(self, *, seed: int) -> float:
        """Of uniform answers to the same questions."""
        return error(None, self.answers(seed))

    def answers(self, seed: int) -> FloatArray:
        """What the group has answered."""
        return np.random.default_rng(seed).dirichlet(np.ones(OPTIONS), size=self.number)


_by_sums = partial(by_errors, kind=wire.TARGETS)
TRAINING = 10  # questions, beside those that are held out
ATTACKS = (
    Attack("train: one question, one step of SGD", 1, partial(by_training, rounds=1), SGD),
    Attack("train: ten questions, one round of 16 steps", 10, partial(by_training, rounds=1)),
    Attack("train: ten questions, 100 such rounds", 10, partial(by_training, rounds=100)),
    Attack("evaluate: one question, 3 messages", 1 + TRAINING, partial(by_errors, number=1, messages=3)),
    Attack("evaluate: ten questions, 100 messages", 10 + TRAINING, partial(by_errors, number=10, messages=100)),
    Attack("evaluate: 60 questions, 100 messages", 60 + TRAINING, partial(by_errors, number=60, messages=100)),
    Attack("targets: one question, two runs", 1 + TRAINING, partial(_by_sums, number=1, messages=2)),
    Attack("targets: ten questions, 20 runs", 10 + TRAINING, partial(_by_sums, number=10, messages=20)),
    Attack("scores: ten questions, 3 of each prediction", 10, by_predictions),
)
