"""What noise for respondents costs a survey, and what it leaves to an attacker: respondents a group x epsilon.

    python -m experiments.privacy

Respondents are drawn from the generated population and answer all questions. The error is the mean L1 distance of
released shares to the file's own. The advantage is the share of hits minus that of false alarms of someone who knows
everybody's answers and guesses from noisy counts whether one of them took part. PluralLLM is trained on released
shares, and scored on held-out questions by the file's own. Axis letters: K options, C counts, T trials.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd
import torch
import typer

from appa_flwr.config.sources import assemble
from appa_flwr.core.arrays import FloatArray
from appa_flwr.survey import noise, respondents
from appa_flwr.survey.codebook import Codebook
from appa_flwr.survey.frames import Frame
from appa_flwr.survey.generate import ground_truth
from appa_flwr.survey.types import UNITS, Noise, Question, Survey
from experiments import entry, study
from experiments.predictor import SEEN, SETTINGS, measure, problem_of, train

QUESTIONS, GROUPS, PEOPLE = 40, 8, (300, 1000, 3000)
EXACT, TRIALS = math.inf, 1000
EPSILONS, TRAINED = (8.0, 4.0, 2.0, 1.0, EXACT), (4.0, EXACT)


def invented(people: int, *, seed: int, groups: int = GROUPS) -> tuple[Frame, Codebook, tuple[Question, ...]]:
    """Draw respondents of each group; codes count the options, and the groups, from 0."""
    questions, truth = ground_truth(num_questions=QUESTIONS, num_groups=groups, seed=seed)
    rng, cells = np.random.default_rng([seed, 2]), {"GROUP": np.repeat(np.arange(groups), people).astype(str)}
    for key, size in ((question.question_id, len(question.options)) for question in questions):
        drawn = [rng.choice(size, size=people, p=shares[key]) for shares in truth.values()]
        cells[key] = np.concatenate(drawn).astype(str)
    labels = {"GROUP": tuple(truth)} | {question.question_id: question.options for question in questions}
    options = {key: [{"code": str(k), "label": name} for k, name in enumerate(names)] for key, names in labels.items()}
    items = {q.question_id: {"id": q.question_id, "text": q.text, "options": options[q.question_id]} for q in questions}
    book = {"weight": {}, "groups": {"GROUP": {"options": options["GROUP"]}}, "questions": items}
    return Frame("invented", pd.DataFrame(cells, dtype=object)), Codebook.model_validate(book), questions


def released(frame: Frame, book: Codebook, epsilon: float) -> Mapping[str, Mapping[str, FloatArray]]:
    """Group -> question -> shares with noise, or the file's own if epsilon is infinite."""
    exact, shares = epsilon == EXACT, dict[str, dict[str, FloatArray]]()
    raws = respondents.raw_answers(frame, book) if exact else noise.release(frame, book, noise.Promise(epsilon))[0]
    for raw in filter(lambda raw: raw.shares, raws):
        shares.setdefault(raw.group, {})[raw.question_id] = np.array(raw.shares)
    return shares


def advantage(frame: Frame, book: Codebook, line: Noise | None, *, trials: int = TRIALS) -> float:
    """The advantage of the best test for the last respondent, by counts with this noise."""
    others = replace(frame, cells=frame.cells.iloc[:-1])
    files = (noise.counts(part, book, 1.0).values() for part in (frame, others))
    with_C, without_C = (np.concatenate([*map(np.ravel, counts)]) for counts in files)
    own_C = with_C != without_C  # noise elsewhere tells nothing
    guesses = []
    for count_C in (with_C[own_C], without_C[own_C]):
        sent_C = np.tile(count_C, trials)
        seen_C = sent_C / UNITS if line is None else noise.draw(sent_C, line)
        excess_T = seen_C.reshape(trials, -1).sum(axis=1) - without_C[own_C].sum() / UNITS
        guesses.append((excess_T > own_C.sum() / 2.0).mean())
    return float(guesses[0] - guesses[1])


def costs(setting: study.Setting, seed: int) -> dict[str, float]:
    """Error, advantage and PluralLLM's scores (see `experiments.predictor.measure`), NaN where it is not trained."""
    people, epsilon = setting
    frame, book, questions = invented(people, seed=seed)
    own, noisy = released(frame, book, EXACT), released(frame, book, epsilon)
    moved = [np.abs(share_K - own[group][key]).sum() for group in noisy for key, share_K in noisy[group].items()]
    line = None if epsilon == EXACT else noise.plan(book, noise.Promise(epsilon))
    numbers = {"error": float(np.mean(moved)), "advantage": advantage(frame, book, line)}
    if epsilon not in TRAINED:
        return numbers | {"js_distance": math.nan, "r": math.nan}
    files = (Survey(questions, shares) for shares in (noisy, own))
    seen, clean = (problem_of(file, {SEEN: [*own]}, encoder="ngrams", seed=seed) for file in files)
    network = train(seen, assemble((*SETTINGS, f"seed={seed}"), folder=None))
    tables = [network.targets(data) for data in seen.parts[SEEN].context]
    return numbers | measure(tables, clean.parts[SEEN].truth, seen.public.option_QK)


def main(
    seeds: Annotated[int, typer.Option(min=1, help="Populations.")] = 3,
    output: Annotated[Path, typer.Option(help="Folder of table and single numbers.")] = Path("runs/privacy"),
) -> None:
    """Measure every size of a group and every epsilon."""
    torch.set_num_threads(1)
    settings, names = itertools.product(PEOPLE, EPSILONS), ("respondents", "epsilon")
    columns = partial(study.every, show=study.spread)
    study.study("privacy", names, settings, range(seeds), costs, columns, output=output)


if __name__ == "__main__":
    entry.run(main)
