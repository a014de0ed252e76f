"""Do lies pay? For every rule, what a lying minority wins for itself and costs the others.

    python -m experiments.liars

A stand-in for the whole loop, which takes seconds: the policy is a free answer to each question of the generated
population, softmax(theta) with noise, and follows the aggregated reward of 96 answers an iteration, whitened and
clamped as in PPO. One group of the smallest cluster lies in training, always in the same way; scores are then by every
group's true answers. Honest and lying runs share questions and noise, so their difference is the lie's.

Legend: G groups, Q questions, K options, J answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
import typer
from scipy.special import softmax

from appa_flwr import markdown
from appa_flwr.aggregation import Rule, make
from appa_flwr.files import replace_file
from appa_flwr.rewards import js
from appa_flwr.survey import generate
from appa_flwr.survey.arrays import as_arrays
from experiments import entry

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

ANSWERS, NOISE, CLAMP = 96, 0.3, 5.0
STRETCH = 3.0
NEVER = 1.1
CAP = 2.0

RULES: Mapping[str, Rule] = {
    "average": make("average"),
    "min": make("min"),
    "nash": make("nash"),
    "worst": make("worst"),
    "appa": make("appa"),
    "appa-open": make("appa", fairness_threshold=NEVER),
    "appa-open, T = .02": make("appa", fairness_threshold=NEVER, temperature=0.02),
    "appa-open, T = .02, cap 2": make("appa", fairness_threshold=NEVER, temperature=0.02, weight_cap=CAP),
    "mix": make("mix"),
    "mix, cap 2": make("mix", weight_cap=CAP),
    "group-dro": make("group-dro"),
    "group-dro, cap 2": make("group-dro", weight_cap=CAP),
}


def _stretched(reward_J: FloatArray) -> FloatArray:
    return np.asarray(np.clip(reward_J.mean() + STRETCH * (reward_J - reward_J.mean()), 0.0, 1.0))


LIES: Mapping[str, Callable[[FloatArray], FloatArray]] = {
    "half": lambda reward_J: reward_J / 2,
    "zero": np.zeros_like,
    "stretched": _stretched,
}
"""What the liar sends in place of its rewards (J,): half of them; nothing; three times their distance from the mean."""


@dataclass(frozen=True, eq=False)
class Population:
    """True answers (G, Q, K), the real options (Q, K), and which group lies."""

    target_GQK: FloatArray
    option_QK: BoolArray
    liar: int


def population(seed: int, *, num_questions: int, num_groups: int) -> Population:
    """The generated population; the liar is the group that the mean of all serves worst."""
    drawn: generate.Population = {
        "num_questions": num_questions,
        "num_groups": num_groups,
        "disagreement": 1.0,
        "seed": seed,
    }
    target_GQK, option_QK = as_arrays(*generate.ground_truth(**drawn))
    scores_G = js(target_GQK.mean(0), target_GQK, option_QK).mean(axis=1)
    return Population(target_GQK, option_QK, int(np.argmin(scores_G)))


def trained(
    rule: Rule,
    people: Population,
    lie: Callable[[FloatArray], FloatArray] | None,
    *,
    iterations: int,
    seed: int,
    step: float = 0.02,
) -> FloatArray:
    """Each group's true score (G,) of the answers that a policy ends with."""
    rng = np.random.default_rng(seed)
    num_questions, num_options = people.option_QK.shape
    theta_QK = np.zeros((num_questions, num_options))
    state = rule.init(len(people.target_GQK))
    for _ in range(iterations):
        question_J = rng.integers(num_questions, size=ANSWERS)
        noise_JK = NOISE * rng.standard_normal((ANSWERS, num_options))
        answer_JK = _answers(theta_QK[question_J] + noise_JK, people.option_QK[question_J])
        reward_GJ = js(answer_JK, people.target_GQK[:, question_J], people.option_QK[question_J])
        if lie is not None:
            reward_GJ = np.array(reward_GJ)
            reward_GJ[people.liar] = lie(reward_GJ[people.liar])
        result = rule.apply(state, reward_GJ, reward_GJ)
        state = result.state
        spread = result.aggregate_J.std()
        white_J = (result.aggregate_J - result.aggregate_J.mean()) / spread if spread > 0 else np.zeros(ANSWERS)
        gain_JK = np.clip(white_J, -CLAMP, CLAMP)[:, None] * noise_JK / NOISE
        np.add.at(theta_QK, question_J, step * gain_JK)
    answer_QK = _answers(theta_QK, people.option_QK)
    return np.asarray(js(answer_QK, people.target_GQK, people.option_QK).mean(axis=1))


def _answers(theta_JK: FloatArray, option_JK: BoolArray) -> FloatArray:
    return np.asarray(softmax(np.where(option_JK, theta_JK, -np.inf), axis=1))


def audit(seeds: Sequence[int], *, iterations: int, num_questions: int, num_groups: int) -> list[dict[str, object]]:
    """A record for each rule, lie and seed: what the liar and the others, on average, won by it, in score."""
    found: list[dict[str, object]] = []
    for seed in seeds:
        people = population(seed, num_questions=num_questions, num_groups=num_groups)
        others_G = np.arange(num_groups) != people.liar
        for name, rule in RULES.items():
            honest_G = trained(rule, people, None, iterations=iterations, seed=seed)
            for lie, tell in LIES.items():
                gain_G = trained(rule, people, tell, iterations=iterations, seed=seed) - honest_G
                record = {"rule": name, "lie": lie, "seed": seed, "min_as": float(honest_G.min())}
                record |= {"avg_as": float(honest_G.mean())}
                found.append(record | {"liar": float(gain_G[people.liar]), "others": float(gain_G[others_G].mean())})
    return found


def table(records: Sequence[Mapping[str, object]]) -> str:
    """Markdown: a row a rule, its honest scores, and for each lie what the liar and the others won, over the seeds."""
    rows = []
    for name in RULES:
        of_rule = [record for record in records if record["rule"] == name]
        row = [name, *(_mean([one[key] for one in of_rule], sign=False) for key in ("avg_as", "min_as"))]
        for lie in LIES:
            told = [record for record in of_rule if record["lie"] == lie]
            row += [_mean([one[who] for one in told], sign=True) for who in ("liar", "others")]
        rows.append(row)
    head = ["rule", "Avg AS", "Min AS", *(f"{who}, {lie}" for lie in LIES for who in ("liar", "others"))]
    return markdown.table(head, rows)


def _mean(values: Sequence[object], *, sign: bool) -> str:
    numbers = np.array(values, dtype=np.float64)
    spread = f" ± {numbers.std(ddof=1):.3f}" if len(numbers) > 1 else ""
    return f"{numbers.mean():{'+' if sign else ''}.3f}{spread}"


def main(
    seeds: Annotated[int, typer.Option(help="Populations.")] = 5,
    iterations: Annotated[int, typer.Option(help="Updates of the answers.")] = 1500,
    questions: Annotated[int, typer.Option(help="Questions of a population.")] = 60,
    groups: Annotated[int, typer.Option(help="Groups of a population.")] = 8,
    output: Annotated[Path, typer.Option(help="Folder of the table.")] = Path("runs/liars"),
) -> None:
    """Measure what lies win under every rule."""
    records = audit(range(seeds), iterations=iterations, num_questions=questions, num_groups=groups)
    text = table(records) + "\n"
    replace_file(output / "liars.md", text.encode(), parents=True)
    print(text)


if __name__ == "__main__":
    entry.run(main)
