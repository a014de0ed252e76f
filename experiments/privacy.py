"""The attack of a server that asks for rewards of answers of its own choice, and the price of protections.

    python -m experiments.privacy

The attack goes through the node's own code, with an owner's policy and a ledger. By cosine, the rewards of answers are
linear in the direction of the target, so a least-squares fit finds it, beginning with what the server knows of the
other groups. Answers near each corner are asked in turn, each one a little different: the same one would get the same
noise again. The price is where free answers end (`appa_flwr.analysis.destinations`)
from such rewards, against rewards as they are, over the same populations.

Legend: Q questions, K options, J answers.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
import typer

from appa_flwr.analysis.destinations import VISITS
from appa_flwr.owner.ledger import Ledger
from appa_flwr.owner.owner_policy import OwnerPolicy
from appa_flwr.protocol import wire
from appa_flwr.protocol.rewards import METRICS
from appa_flwr.survey.types import Question
from client_app.outgoing import Refused
from client_app.protection import Protection
from experiments import entry, study
from experiments.attacks import ATTACKS, NOTHING_LIMITED, error

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

NONE = "none"
OWNER_POLICIES: Mapping[str, OwnerPolicy] = {
    NONE: OwnerPolicy(),
    "reward-decimals = 2": OwnerPolicy(reward_decimals=2),
    "reward-decimals = 1": OwnerPolicy(reward_decimals=1),
    "reward-noise = 0.05": OwnerPolicy(reward_noise=0.05),
    "reward-noise = 0.2": OwnerPolicy(reward_noise=0.2),
    "scores-per-question = 2": OwnerPolicy(scores_per_question=2),
    "scores-per-question = 2, reward-noise = 0.05": OwnerPolicy(scores_per_question=2, reward_noise=0.05),
}
SCORES = (1, 2, 4, 16, 64, 256)
"""Scores asked for each question."""
NEAR = 0.05  # how far an asked answer lies from its corner
SPREAD, EXACT = 0.15, 1e-4  # how far a group lies from the others' mean, and what stands for no noise
RULE = "appa"  # as printed
BLURRING = [
    name
    for name, owner_policy in OWNER_POLICIES.items()
    if owner_policy.changes_rewards and not owner_policy.scores_per_question
]
UNIFORM = "no message: uniform answers"
LIMITS = {"no limits": NOTHING_LIMITED, "owner's defaults": OwnerPolicy()}

GUESSES: Mapping[str, Callable[[study.TrueTargets], FloatArray]] = {
    "no score: the mean of the others": lambda people: people.target_GQK[1:].mean(0),
    "no score: the uniform answer": lambda people: people.option_QK / people.option_QK.sum(1, keepdims=True),
}


def attack(owner_policy: OwnerPolicy, people: study.TrueTargets, *, scores: int, seed: int) -> FloatArray:
    """A server's reconstruction of the first group's targets (Q, K), from so many scores of each question at most."""
    target_QK, option_QK = people.target_GQK[0], people.option_QK
    rng = np.random.default_rng(seed)
    questions = tuple(Question(f"q{q}", "", ("",) * int(real.sum())) for q, real in enumerate(option_QK))
    every_Q, features_QKE = np.ones(len(questions), bool), np.zeros((*option_QK.shape, 0), np.float32)
    public = wire.Catalogue(questions, every_Q, features_QKE, option_QK, ~every_Q)
    asked: list[list[FloatArray]] = [[] for _ in questions]
    given_by_question: list[list[float]] = [[] for _ in questions]
    with tempfile.TemporaryDirectory() as folder:
        node = Protection(owner_policy, Ledger(Path(folder) / "ledger.sqlite"))
        for turn in range(scores):
            answer_QK = _near_corners(turn, option_QK, rng)
            request = wire.ScoreRequest(np.arange(len(questions)), answer_QK, ("cosine",))
            scored = {"cosine": np.asarray(METRICS["cosine"](answer_QK, target_QK, option_QK))}
            try:
                given_Q = node.released(request, scored, target_QK, public, group="g", side=wire.TARGET_SIDE)["cosine"]
            except Refused:
                break
            for q, score in enumerate(given_Q):
                asked[q].append(answer_QK[q])
                given_by_question[q].append(2.0 * score - 1.0)
    trust = max(EXACT, (2.0 * owner_policy.reward_noise / SPREAD) ** 2)
    found_QK = people.target_GQK[1:].mean(0)
    for q, option_K in enumerate(option_QK):
        found_QK[q, option_K] = _solved(
            np.array(asked[q])[:, option_K], np.array(given_by_question[q]), found_QK[q, option_K], trust=trust
        )
    return np.asarray(found_QK)


def _near_corners(turn: int, option_QK: BoolArray, rng: np.random.Generator) -> FloatArray:
    """An answer to each question near the corner of one option, the next one in each turn."""
    corner_Q = turn % option_QK.sum(1)
    answer_QK = np.where(option_QK, NEAR * rng.random(option_QK.shape), 0.0)
    answer_QK[np.arange(len(corner_Q)), corner_Q] = 1.0
    return np.asarray(answer_QK / answer_QK.sum(1, keepdims=True))


def _solved(answer_JK: FloatArray, cosine_J: FloatArray, prior_K: FloatArray, *, trust: float) -> FloatArray:
    """The target (K,) whose cosines with the answers fit best, drawn to the prior as far as `trust` says."""
    unit_JK = answer_JK / np.linalg.norm(answer_JK, axis=1, keepdims=True)
    start_K = prior_K / np.linalg.norm(prior_K)
    step_K = np.linalg.solve(
        unit_JK.T @ unit_JK + trust * np.eye(len(start_K)), unit_JK.T @ (cosine_J - unit_JK @ start_K)
    )
    found_K = np.maximum(start_K + step_K, 0.0)
    return np.asarray(found_K / found_K.sum())


def learned(setting: study.Setting, seed: int, *, people: study.TrueTargets) -> dict[str, float]:
    """The error after so many scores of each question under an owner's policy, or of a guess without any."""
    name, scores = setting
    guess = GUESSES.get(name)
    found_QK = guess(people) if guess else attack(OWNER_POLICIES[name], people, scores=scores, seed=seed)
    return {"error": error(found_QK, people.target_GQK[0])}


def price(setting: study.Setting, seed: int, *, visits: int, num_questions: int, num_groups: int) -> dict[str, float]:
    """Result of rule `RULE` on rewards that an owner's policy has changed."""
    (name,) = setting
    owner_policy, noise = OWNER_POLICIES[name], np.random.default_rng([seed, 1])

    def blur(reward_GJ: FloatArray) -> FloatArray:
        blurred_GJ = reward_GJ + noise.normal(0.0, owner_policy.reward_noise, reward_GJ.shape)
        return np.asarray(np.clip(blurred_GJ.round(owner_policy.reward_decimals), 0.0, 1.0))

    people = study.true_targets(seed, num_questions=num_questions, num_groups=num_groups)
    return study.average_and_worst(study.end_scores(study.RULES[RULE], people, seed=seed, visits=visits, sent=blur))


def read_through_pluralllm(setting: study.Setting, seed: int) -> dict[str, float]:
    """An attack's error without an owner's limits, with the default ones, and that of uniform answers."""
    (read,) = (one for one in ATTACKS if (one.name,) == setting)
    errors = {name: read.error(owner_policy, seed=seed) for name, owner_policy in LIMITS.items()}
    return {**errors, UNIFORM: read.guess(seed=seed)}


def main(
    seeds: study.Seeds = 5,
    visits: study.Visits = VISITS,
    questions: study.Questions = 60,
    groups: study.Groups = 8,
    attacks: Annotated[int, typer.Option(help="Groups that are attacked through PluralLLM; 0 = none.", min=0)] = 3,
    output: Annotated[Path, typer.Option(help="Folder of the tables and single numbers.")] = Path("runs/privacy"),
) -> None:
    """Measure what chosen messages tell of a group's targets and answers, and what each protection costs."""
    people = study.true_targets(0, num_questions=questions, num_groups=groups)
    study.study(
        "learned",
        ("owner's policy", "scores"),
        itertools.product((*OWNER_POLICIES, *GUESSES), SCORES),
        (0,),
        partial(learned, people=people),
        [study.StudyColumn(f"{number} scores", "error", case=number) for number in SCORES],
        output=output,
    )
    study.study(
        "price",
        ("owner's policy",),
        [(name,) for name in (NONE, *BLURRING)],
        range(seeds),
        partial(price, visits=visits, num_questions=questions, num_groups=groups),
        (
            study.StudyColumn("Avg AS", "avg_as", study.difference, less=NONE),
            study.StudyColumn("Min AS", "min_as", study.difference, less=NONE),
        ),
        output=output,
    )
    if attacks:
        study_attacks(attacks, output=output)


def study_attacks(seeds: int, *, output: Path) -> None:
    """Measure what the attacks through PluralLLM find of so many groups."""
    study.study(
        "attacks",
        ("attack",),
        [(one.name,) for one in ATTACKS],
        range(seeds),
        read_through_pluralllm,
        [study.StudyColumn(name, name, partial(study.spread, ddof=0)) for name in (*LIMITS, UNIFORM)],
        output=output,
    )


if __name__ == "__main__":
    entry.run(main)
