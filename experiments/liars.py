"""What one lying group of five does to PluralLLM: lies x ways to aggregate the groups' steps.

    python -m experiments.liars

The first group lies in eight rounds of training; predictions of the four others are scored on held-out questions by JS.
On GlobalOpinionQA nobody lies: the first group is Nigeria, which a defence must not take for a liar among rich
countries. Prints a Markdown table of means over seeds with the lowest and highest number.

Axis letters: G groups, N answers, K options, P weights.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import numpy as np
import torch
import typer

from appa_flwr.config.sources import assemble
from appa_flwr.core.arrays import FloatArray
from appa_flwr.protocol.queries import UPDATE, Query
from appa_flwr.protocol.rewards import js
from appa_flwr.survey.generate import generate
from appa_flwr.survey.sources import read_survey
from client_app.numbers import Numbers
from experiments import entry, study
from experiments.predictor import ADAPTIVE, REAL, SEEN, SURVEYS, Part, problem_of, train
from server_app.predictor import updates
from server_app.predictor.updates import Updates

ROUNDS, COUNTRIES = 8, ("Nigeria", "Germany", "United States", "Canada", "Australia")
LONG = 9.5  # times an honest step
HONEST, FLIPPED, FLIPPED_LONG, NOISE = "nobody lies", "flipped", f"flipped, times {LONG}", "noise in the last round"
LIES = {"generated": (HONEST, FLIPPED, FLIPPED_LONG, NOISE), "globalqa": (HONEST,)}


def geometric_median(step_GP: FloatArray, names: Sequence[str]) -> FloatArray:
    """G times the geometric median (RFA, Pillutla et al. 2019), by 50 of Weiszfeld's iterations."""
    middle_P = step_GP.mean(axis=0)
    for _ in range(50):
        weight_G = 1.0 / np.linalg.norm(step_GP - middle_P, axis=1).clip(1e-9)
        middle_P = weight_G @ step_GP / weight_G.sum()
    return np.broadcast_to(middle_P, step_GP.shape)


class CentredClipping:
    """Three iterations around the last round's step; the radius is the median distance (Karimireddy et al. 2021)."""

    centre_P: FloatArray | float = 0.0

    def __call__(self, step_GP: FloatArray, names: Sequence[str]) -> FloatArray:
        """G times the new centre."""
        radius = np.median(np.linalg.norm(step_GP - self.centre_P, axis=1))
        for _ in range(3):
            away_GP = step_GP - self.centre_P
            factor_G = np.minimum(1.0, radius / np.linalg.norm(away_GP, axis=1).clip(1e-9))
            self.centre_P = self.centre_P + factor_G @ away_GP / len(away_GP)
        return np.broadcast_to(self.centre_P, step_GP.shape)


def over_matrix(
    steps_of: Callable[[FloatArray, Sequence[str]], FloatArray],
) -> Callable[[Updates], Iterator[FloatArray]]:
    """Replacement of `Updates.bounded` by a function of all steps (G, P) and the groups' names."""
    return lambda given: iter(steps_of(np.stack([*given.steps()]), given.names))


BOUNDED, BOUND = Updates.bounded, updates.LARGEST_STEP
ROWS: Mapping[str, tuple[Callable[[], Any], float, tuple[str, ...]]] = {
    **{name: (lambda: BOUNDED, BOUND, keys) for name, keys in {"FedAvg": (), **ADAPTIVE}.items()},
    "FedAvg, bound 10": (lambda: BOUNDED, 10.0, ()),
    "geometric median": (lambda: over_matrix(geometric_median), BOUND, ()),
    "centred clipping": (lambda: over_matrix(CentredClipping()), BOUND, ()),
}
"""Row -> what takes the place of `Updates.bounded`, made anew for each training; its bound; config keys."""


def scores(setting: study.Setting, seed: int, *, surveys: Path) -> dict[str, float]:
    """Train with a lie, and score each group's predictions by its true answers."""
    dataset, lie, row = setting
    make, longest, keys = ROWS[row]
    survey = generate(num_groups=5, seed=seed)
    if dataset in REAL:
        survey = read_survey(surveys / REAL[dataset], groups=COUNTRIES, refusals="drop")
    names = [name for name in COUNTRIES if name in survey.groups] or survey.groups
    problem = problem_of(survey, {SEEN: names}, encoder="ngrams", seed=seed)
    part, option_QK, rng = problem.parts[SEEN], problem.public.option_QK, np.random.default_rng(seed)

    def sent(query: Query, group: str, numbers: Numbers) -> Numbers:
        if group == names[0] and query.kind == UPDATE and lie == FLIPPED_LONG:
            return {**numbers, "step": LONG * numbers["step"]}
        if group == names[0] and query.kind == UPDATE and lie == NOISE and query.count("round") == ROUNDS:
            noise_P = rng.standard_normal(len(numbers["step"]))
            return {**numbers, "step": LONG * np.linalg.norm(numbers["step"]) * noise_P / np.linalg.norm(noise_P)}
        return numbers

    liar, *rest = own = part.context
    if lie in (FLIPPED, FLIPPED_LONG):
        rows = zip(liar.answer_NK, option_QK[liar.question_N].sum(axis=1), strict=True)
        liar = replace(liar, answer_NK=np.array([[*row[:n][::-1], *row[n:]] for row, n in rows], np.float32))
    config = assemble((f"pluralllm.rounds={ROUNDS}", f"seed={seed}", *keys), folder=None)
    with patch.object(Updates, "bounded", make()), patch.object(updates, "LARGEST_STEP", longest):
        trained = train(problem._replace(parts={SEEN: Part((liar, *rest), part.truth)}), config, sent=sent)
    tables = zip(map(trained.targets, own), part.truth, strict=True)
    first, *others = (js(qk[t.question_N], t.answer_NK, option_QK[t.question_N]).mean().item() for qk, t in tables)
    return {"others": sum(others) / len(others), "worst of the others": min(others), "first group": first}


def main(
    seeds: Annotated[int, typer.Option(min=1, help="Surveys, splits and trainings.")] = 3,
    surveys: Annotated[Path, typer.Option(envvar=SURVEYS, help="Folder of the real files.")] = Path(),
    output: Annotated[Path, typer.Option(help="Folder of table and single scores.")] = Path("runs/liars"),
) -> None:
    """Train every row with every lie and seed."""
    torch.set_num_threads(1)
    settings = [setting for name, lies in LIES.items() for setting in itertools.product([name], lies, ROWS)]
    study.study(
        "pluralllm_liars",
        ("survey", "lie", "aggregation"),
        settings,
        range(seeds),
        partial(scores, surveys=surveys),
        partial(study.every, show=study.extremes),
        output=output,
    )


if __name__ == "__main__":
    entry.run(main)
