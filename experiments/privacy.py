"""Attacks of a malicious server: what plain replies and secure sums reveal of a group's survey answers.

    python -m experiments.privacy

Groups are deployed nodes: the real ClientApp with owner's policy, ledger and key, asked by the server's real code. The
server chooses config, catalogue, weights and requests, and searches for the answers that explain the replies. With
secure sums it uses the groups' mean as the attacked group's numbers.

Axis letters: G groups, N answered questions, K options, J scored answers, P weights, R numbers of replies, S rounds.
"""

import logging
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
import typer
from flwr.app import ArrayRecord

from appa_flwr.config import Config, Scalar
from appa_flwr.core.errors import UserError
from appa_flwr.owner.owner_policy import SUM_ROUNDING
from appa_flwr.protocol import asks, messages, rewards
from appa_flwr.secure.rule_sums import combine, first
from appa_flwr.survey.types import Question, Survey
from client_app import predictor
from experiments import entry, likeliest, study
from experiments.federation import Deployed, catalogue, flower_task
from pluralllm.data import OPTION_PART, FloatArray, GroupData
from pluralllm.scores import COUNT, MEASURES, PREDICTOR, summed
from pluralllm.training import WARM_UP_STEPS, choices
from server_app.predictor.pretraining import initial_weights

GROUPS, OPTIONS, TRAINING, MADE_UP = 5, 3, 10, 300
SUMS = ("plain", "secure")  # columns of the table: the run's `run.sums`
UNIFORM = "uniform guess"

SETTINGS: Mapping[str, Scalar] = {
    "run.min-groups": 1,
    "pluralllm.rounds": 1000,
    "pluralllm.learning-rate": 3e-3,
    "metric": "cosine",
    "sft.target": "smoothed-votes",
}
# Logarithms of PluralLLM's kernel: predictions are the network's, or the answer to the most similar question.
NETWORK_ALONE = {"log_weight": -6.0, "view_shares": 0.0}
NEAREST_ALONE = {"log_weight": 1.0, "log_noise": -2.0, "view_shares": 1.0}
NOBODY = GroupData("", np.arange(0), np.empty((0, OPTIONS), np.float32))  # for which the network's mean predicts
ROUNDING = 12**-0.5  # standard deviation of the error of rounding to multiples of 1


def _questions(number: int) -> list[Question]:
    options = tuple(f"answer {k}" for k in range(OPTIONS))
    return [Question(f"q{n}", f"What of topic {n}?", options) for n in range(number)]


def _weights(config: Config, seed: int, kernel: Mapping[str, float]) -> ArrayRecord:
    """Make random weights of PluralLLM, with the given weights of the kernel."""
    state, generator = initial_weights(config).to_torch_state_dict(), torch.Generator().manual_seed(seed)
    for name, value in state.items():
        if not name.startswith("log_"):
            value += torch.randn(value.shape, generator=generator)
    for name, number in {"log_feature": -6.0, **kernel}.items():
        state[name][:] = number
    return ArrayRecord(state)


class Nodes(Deployed):
    """Groups with answers (G, N, K) to the questions `asked`; the server attacks the group with index `compared`."""

    def __init__(self, folder: Path, answer_GNK: FloatArray, policy: Mapping[str, object], config: Config) -> None:
        self.answer_GNK, self.compared = answer_GNK, 0
        self.asked = _questions(answer_GNK.shape[1])
        answers = {f"g{g}": {f"q{n}": a_K for n, a_K in enumerate(a_NK)} for g, a_NK in enumerate(answer_GNK)}
        super().__init__(Survey(tuple(self.asked), answers), folder, policy, config)

    def ask(self, request: asks.Ask) -> dict[str, FloatArray]:
        """The attacked group's numbers, or with secure sums the mean over groups; raises UserError if they refuse."""
        answer = self.groups.ask(request)
        return {name: answer.each(name)[0] if answer.data.ndim == 2 else answer.mean(name) for name in answer.numbers}


Attack = Callable[[Nodes], FloatArray]  # reads the answers (N, K) of one group


@cache
def _made_up(config: Config, number: int) -> tuple[FloatArray, FloatArray]:
    """Made-up answers (S, N, K), and the change of the weights by a round of training on each (S, P)."""
    answer_SNK = np.random.default_rng(0).dirichlet(np.ones(OPTIONS), size=(MADE_UP, number))
    public, weight_P = catalogue(_questions(number + 1), held_out=0), messages.join_weights(_weights(config, 0, {}))
    step_SP = np.empty((MADE_UP, len(weight_P)))
    for s, answer_NK in enumerate(answer_SNK.astype(np.float32)):
        train = partial(predictor.train, config, weight_P, GroupData("g0", np.arange(number), answer_NK), public)
        step_SP[s] = train(round_number=WARM_UP_STEPS + 1, secret=f"{s}")[0] - weight_P
    return answer_SNK, step_SP


def by_training(nodes: Nodes, *, rounds: int, steps: int = 16) -> FloatArray:
    """Attack by training rounds from the same weights, compared with the server's own rounds on made-up answers."""
    settings: dict[str, Scalar] = {"pluralllm.local-steps": steps}
    number, nodes.config = len(nodes.asked), Config.load({**nodes.config.flat(), **settings})
    weights = _weights(nodes.config, 0, {})
    nodes.begin(catalogue(_questions(number + 1), held_out=0), weights)  # one more: a single text has no features
    array, rounds_R = {"weights": messages.join_weights(weights)}, WARM_UP_STEPS + 1 + np.arange(rounds)
    replies = [nodes.ask(asks.Ask(asks.UPDATE, array, {"round": int(n)})) for n in rounds_R]
    step_P = np.mean([numbers["step"] / numbers["answers"] for numbers in replies], axis=0)
    made_up = _made_up(Config.load({**SETTINGS, **settings}), number)
    return likeliest.by_steps(*made_up, step_P, rounds=rounds)


def by_errors(nodes: Nodes, *, number: int, turns: int, kind: str) -> FloatArray:
    """Attack by PluralLLM's validation errors, or by its scores (one request per run), with random weights each turn.

    The first `number` questions are held out, the others train; only the network's mean predicts.
    """
    validates, mixes = kind == asks.VALIDATION, choices(nodes.config.pluralllm.architecture)
    settings = {"size": len(mixes if validates else summed())}
    place = summed().index((PREDICTOR, COUNT))
    reply_R, predicted = [], []
    for turn in range(turns):
        weights = _weights(nodes.config, turn, NETWORK_ALONE)
        weight_P = messages.join_weights(weights)
        if turn == 0 or not validates:
            nodes.begin(catalogue(nodes.asked, held_out=number), weights)
        try:
            numbers = nodes.ask(asks.Ask(kind, {"weights": weight_P}, settings))
        except UserError:
            break  # the owner's limit of replies is reached
        if validates:
            totals = np.r_[numbers["answers"], numbers["answers"] - numbers["error"]]
        else:
            totals = numbers["scores"][place : place + 1 + len(MEASURES)]
        if not totals[0]:
            break  # fewer answers than the owner's policy requires
        reply_R += [*totals[1:] / totals[0]]
        mean_NK = predictor.load(nodes.config, weight_P, nodes.public).targets(NOBODY)[:number]
        plain = [shares.plain for shares in mixes if shares] if validates else [0.0]
        predicted += [(1.0 - share) * mean_NK + share / OPTIONS for share in plain]
    distance: Callable[..., FloatArray] = partial(rewards.js_distance, base=np.e)
    measures = [distance] if validates else [rewards.js, distance, rewards.wasserstein]  # the latter are `MEASURES`

    def parts(answer_NK: FloatArray) -> FloatArray:
        pairs = np.concatenate(predicted), np.tile(answer_NK, (len(predicted), 1))
        scores_MTN = [measure(*pairs, np.ones(pairs[0].shape, dtype=bool)).reshape(-1, number) for measure in measures]
        return np.stack(scores_MTN, axis=1).reshape(-1, number) / number

    return likeliest.by_sums(parts, np.array(reply_R), (number, OPTIONS), noise=SUM_ROUNDING * ROUNDING / number)


def _corners(nodes: Nodes) -> asks.ScoreRequest:
    """Begin a run with held-out copies of the groups' questions; returns the request to score each option of these."""
    number = len(nodes.asked)
    copies = [replace(question, question_id=f"copy of {question.question_id}") for question in nodes.asked]
    nodes.begin(catalogue([*copies, *nodes.asked], held_out=number), _weights(nodes.config, 0, NEAREST_ALONE))
    return asks.ScoreRequest(np.repeat(np.arange(number), OPTIONS), np.tile(np.eye(OPTIONS), (number, 1)), ("cosine",))


def _from_corners(reward_J: FloatArray) -> FloatArray:
    """Answers (N, K) from rewards: a corner's cosine is the share of its option divided by the answer's length."""
    cosine_NK = np.maximum(2.0 * reward_J.reshape(-1, OPTIONS) - 1.0, 1e-9)
    return np.asarray(cosine_NK / cosine_NK.sum(axis=1, keepdims=True))


def by_rewards(nodes: Nodes, *, change: float | None = None) -> FloatArray:
    """Attack by scores of copied questions; with `change`, by a second sum without the group over changed answers."""
    request, name, groups = _corners(nodes), "cosine targets reward", len(nodes.answer_GNK)
    reward_J = nodes.ask(request.ask(asks.REWARDS))[name]
    if change is not None and not nodes.groups.plain:
        nodes.silent = {0}
        nearly = replace(request, prediction_JK=request.prediction_JK + change)
        reward_J = groups * reward_J - (groups - 1) * nodes.ask(nearly.ask(asks.REWARDS))[name]
    return _from_corners(reward_J)


def by_own_scores(nodes: Nodes, *, option_RN: npt.NDArray[np.int64]) -> FloatArray:
    """Attack by own scores, one per row of options for the copied questions."""
    metrics, number, reply_R = _corners(nodes).metrics, len(nodes.asked), list[float]()
    for option_N in option_RN:
        request = asks.ScoreRequest(np.arange(number), np.eye(OPTIONS)[option_N], metrics)
        score, leaves = nodes.ask(request.ask(asks.OWN_SCORES))["cosine targets"]
        reply_R += [score] * int(leaves)

    def parts(answer_NK: FloatArray) -> FloatArray:
        reward_NK = 0.5 + answer_NK / np.linalg.norm(answer_NK, axis=1, keepdims=True) / 2.0
        return np.asarray(reward_NK[np.arange(number), option_RN[: len(reply_R)]] / number)

    return likeliest.by_sums(parts, np.array(reply_R), (number, OPTIONS), noise=0.01 * ROUNDING)


def by_terms(nodes: Nodes, *, iterations: int = 20) -> FloatArray:
    """Attack by rule appa's sums, after requests with one answer have given the worst-off group nearly all weight."""
    corners, groups, appa = _corners(nodes), len(nodes.answer_GNK), nodes.config.appa
    nodes.compared = int(nodes.answer_GNK[:, 0, 0].argmin())
    state, sums = first("appa", appa, groups), dict[str, FloatArray]()
    single = asks.ScoreRequest(corners.question_J[:1], corners.prediction_JK[:1], corners.metrics)
    for request in [single] * (iterations - 1) + [corners]:
        number = len(request.question_J)
        arrays = {"format": np.ones(number), "parsed": np.ones(number, dtype=np.bool_)}
        stands = {**vars(state), "completed": list(state.completed)}
        answer = nodes.groups.ask(request.ask(asks.TERMS, arrays=arrays, rule="appa", **stands))
        sums = {name: answer.sum(name) for name in answer.numbers}
        state = combine("appa", appa, state, sums, groups=groups, task=answer.task).state
    training_J = np.log1p(np.expm1(1.0) * sums["term"]) / sums["weight"]
    return _from_corners(1.0 - (1.0 - training_J) / appa.alignment_weight)


def by_votes(nodes: Nodes, *, runs: int = 5, copies: int = 200) -> FloatArray:
    """Attack by votes on copies of the first question; reads the group with the lowest share of the first option.

    The copies' options differ in the length of their features, which changes the network's mean, not the kernel. So the
    group's prediction of a copy is the copy's mean plus what the group's answer differs from the first question's mean.
    """
    random, number, groups = np.random.default_rng(0), len(nodes.asked), len(nodes.answer_GNK)
    repeated = [replace(nodes.asked[0], question_id=f"copy {n}") for n in range(copies)]
    answer_CK = random.dirichlet(np.ones(OPTIONS), size=10 * MADE_UP)
    votes, counts = [], []
    for run in range(runs):
        public = catalogue([*nodes.asked, *repeated], held_out=0)
        public.embedding_QKE[number:, :, OPTION_PART] *= np.exp(random.normal(scale=1.5, size=(copies, OPTIONS, 1)))
        nodes.begin(public, _weights(nodes.config, run, NEAREST_ALONE))
        counts += [nodes.ask(asks.Ask(asks.VOTES))["votes"][number:].ravel() * groups]
        weight_P = messages.join_weights(_weights(nodes.config, run, NETWORK_ALONE))
        root_QK = np.sqrt(predictor.load(nodes.config, weight_P, public).targets(NOBODY))
        root_CNK = (np.sqrt(answer_CK) - root_QK[0])[:, None] + root_QK[number:]
        votes += [np.eye(OPTIONS)[root_CNK.argmax(axis=-1)].reshape(len(answer_CK), -1)]
    nodes.compared = int(nodes.answer_GNK[:, 0, 0].argmin())
    read_G = likeliest.by_counts(np.concatenate(votes, axis=1), np.concatenate(counts), groups)
    return np.asarray(answer_CK[[min(read_G, key=lambda c: answer_CK[c, 0])]])


def by_sums_of_rewards(nodes: Nodes, *, answers: int = 20) -> FloatArray:
    """Attack by rewards of some answers to one question; reads the group with the lowest share of the first option."""
    _corners(nodes)
    prediction_JK = np.random.default_rng(0).dirichlet(np.ones(OPTIONS), size=answers)
    request = asks.ScoreRequest(np.zeros(answers, dtype=np.int64), prediction_JK, ("js",))
    groups, reward_J = len(nodes.answer_GNK), nodes.ask(request.ask(asks.REWARDS))["js targets reward"]

    def parts(answer_GK: FloatArray) -> FloatArray:
        pairs = np.broadcast_arrays(prediction_JK[:, None], answer_GK)
        return np.asarray(rewards.js(*pairs, np.ones(pairs[0].shape, dtype=bool)) / groups)

    nodes.compared = int(nodes.answer_GNK[:, 0, 0].argmin())
    read_GK = likeliest.by_sums(parts, reward_J, (groups, OPTIONS), noise=1e-9)
    return np.asarray(read_GK[[read_GK[:, 0].argmin()]])


RANDOM = np.random.default_rng(0).integers(OPTIONS, size=(100, 10))
ATTACKS: Mapping[str, tuple[int, Attack]] = {  # name -> number of answered questions, of which ten are read; attack
    "training: 50 rounds of 16 steps": (10, partial(by_training, rounds=50)),
    "validation: 50 replies": (10 + TRAINING, partial(by_errors, kind=asks.VALIDATION, number=10, turns=50)),
    "scores of PluralLLM: 20 runs": (10 + TRAINING, partial(by_errors, kind=asks.SCORES, number=10, turns=20)),
    "votes: 1000 copies of a question, of one group, unnamed": (10, by_votes),
    "rewards: each option": (10, by_rewards),
    "rewards: 20 answers to a question, of one group, unnamed": (10, by_sums_of_rewards),
    "rewards: a second sum without the group, of answers 0.001 apart": (10, partial(by_rewards, change=1e-3)),
    "own scores: 100 times": (10, partial(by_own_scores, option_RN=RANDOM)),
    "terms of appa: of the worst-off group, unnamed": (10, by_terms),
}


def guess(nodes: Nodes) -> FloatArray:
    """Guess uniform answers, without any message."""
    return np.full(nodes.answer_GNK.shape[1:], 1.0 / OPTIONS)


def learned(number: int, read: Attack, *, sums: str, seed: int, policy: Mapping[str, object]) -> float:
    """Mean total variation distance between an attack's result and the answers; NaN if the attack is refused.

    `number` is that of the questions that the groups have answered; `policy` has the keys of every owner's policy.
    """
    groups = GROUPS if sums == "secure" else 1
    answer_GNK = np.random.default_rng(seed).dirichlet(np.ones(OPTIONS), size=(GROUPS, number))[:groups]
    with tempfile.TemporaryDirectory() as folder, flower_task():
        nodes = Nodes(Path(folder), answer_GNK, policy, Config.load({**SETTINGS, "run.sums": sums}))
        try:
            read_NK = read(nodes)
        except UserError:
            return np.nan
    return float(np.abs(read_NK - answer_GNK[nodes.compared, : len(read_NK)]).sum(axis=1).mean() / 2.0)


def main(
    seeds: Annotated[int, typer.Option(help="Sets of groups.", min=1)] = 2,
    output: Annotated[Path, typer.Option(help="Folder of the table and single numbers.")] = Path("runs/privacy"),
) -> None:
    """Measure what chosen messages reveal of a group's answers under the owner's defaults; 0 is exact."""
    torch.set_num_threads(1)
    logging.getLogger("appa").setLevel(logging.CRITICAL)  # hides logs of refusals, which the table shows

    def measure(setting: study.Setting, seed: int) -> dict[str, float]:
        number, read = ATTACKS[setting[0]]
        at = partial(learned, number, seed=seed, policy={})
        return {UNIFORM: at(guess, sums="plain"), **{sums: at(read, sums=sums) for sums in SUMS}}

    def columns(numbers: pd.DataFrame) -> study.Columns:
        return {name: (numbers[name], partial(study.spread, absent="refused")) for name in (*SUMS, UNIFORM)}

    attacks = [(name,) for name in ATTACKS]
    study.study("privacy", ("attack",), attacks, range(seeds), measure, columns, output=output)


if __name__ == "__main__":
    entry.run(main)
