"""What limits a policy on a real survey: scores of answers that no policy wrote, on the questions that score a policy.

    python -m experiments.limits

A policy that is trained on the groups' predictions approaches their mean; each group's own prediction shows what one
answer for all groups costs; the best shared answers, fitted to the held-out survey answers, are ceilings. Surveys,
split and predictor are those of a run with preset `smollm2`. Prints a Markdown table of Avg AS and Min AS by JS against
survey answers: the mean over seeds with the lowest and the highest number.

Axis letters: G groups, Q questions, J held-out questions, K options.
"""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd
import torch
import typer

from appa_flwr.analysis.alignment import alignment_scores, as_arrays, shared_rewards
from appa_flwr.analysis.ceilings import OBJECTIVES, shared_answer
from appa_flwr.config import Config
from appa_flwr.config.sections import MINILM, NGRAMS
from appa_flwr.config.sources import assemble, preset
from appa_flwr.core.arrays import FloatArray
from experiments import entry, study
from experiments.predictor import REAL, SEEN, SURVEYS, Part, Problem, train
from pluralllm.data import group_data
from server_app.baselines import look_ups
from server_app.questions import build_catalogue, run_survey

RUN = ("preset=smollm2",)
ENCODERS = (NGRAMS, MINILM)
"""Of texts; the last embeds them for the look-ups."""
GROUPS = {"globalqa": str(preset("paper")["groups"])}
"""Groups of a run on this survey; all groups of the other surveys."""
MOST_OPTIONS = 8
"""Most options of a question that preset `smollm2` answers in `ppo.response-length` tokens."""


def answers(config: Config) -> Mapping[str, Mapping[str, float]]:
    """Train PluralLLM with all groups of the config's survey, and score shared and own answers: Avg AS and Min AS."""
    public, survey, encoder = build_catalogue(config), run_survey(config), config.pluralllm.encoder
    own = (group_data(name, mine, public=public) for name, mine in survey.answers.items())
    context = tuple(data.only(public.train_Q) for data in own)
    predictor = train(Problem(public, {SEEN: Part(context, ())}), config)
    test_J = np.flatnonzero(public.held_out_Q & (public.option_QK.sum(axis=1) <= MOST_OPTIONS))
    truth_GJK, option_JK = as_arrays([public.questions[j] for j in test_J], survey.answers)
    own_GJK = np.stack([predictor.targets(data)[test_J] for data in context])[:, :, : option_JK.shape[1]]
    sum_QK = np.zeros(public.option_QK.shape)
    for data in context:
        sum_QK[data.question_N] += data.answer_NK
    shared: dict[str, FloatArray] = {"uniform": option_JK / option_JK.sum(axis=1, keepdims=True)}
    shared |= {name: table_JK[:, : option_JK.shape[1]] for name, table_JK in look_ups(sum_QK, public, test_J).items()}
    shared |= {
        f"best shared answer, {objective}": shared_answer(truth_GJK, option_JK, metric="js", objective=objective)
        for objective in OBJECTIVES
    }
    shared |= {f"mean prediction, {encoder}": own_GJK.mean(axis=0), f"own prediction, {encoder}": own_GJK}
    scored = {
        name: alignment_scores(shared_rewards(a, truth_GJK, option_JK, metric="js")) for name, a in shared.items()
    }
    return {name: {"Avg AS": scores.avg_as, "Min AS": scores.min_as} for name, scores in scored.items()}


def main(
    seeds: Annotated[int, typer.Option(min=1, help="Splits of the questions.")] = 3,
    surveys: Annotated[Path, typer.Option(envvar=SURVEYS, help="Folder of the real files.")] = Path(),
) -> None:
    """Print the table of every survey."""
    torch.set_num_threads(1)
    for name, file in REAL.items():
        lines: dict[tuple[str, int], Mapping[str, float]] = {}
        for seed, encoder in itertools.product(range(seeds), ENCODERS):
            keys = f"survey={surveys / file}", f"groups={GROUPS.get(name, '')}", f"seed={seed}"
            config = assemble([*RUN, f"pluralllm.encoder={encoder}", *keys], folder=Path.cwd())
            lines |= {(row, seed): scores for row, scores in answers(config).items()}
        numbers = pd.DataFrame([{"answers": row, "seed": seed, **lines[row, seed]} for row, seed in lines])
        numbers = numbers.set_index(["answers", "seed"])
        table = study.table(study.every(numbers, show=study.extremes))
        print(f"\n### {name}\n\n{table}", flush=True)


if __name__ == "__main__":
    entry.run(main)
