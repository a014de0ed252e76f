"""What stream mode's lag of one round costs: the same free answers learn from exact and from streamed rewards.

    python -m experiments.stream --seeds 5

No language model: a question's answer is a softmax of free numbers, moved by the rewards of eight noisy copies less
their mean, as RLOO would move a policy. The service, its rule and the groups, who score by their true shares, are real.

Axis letters: G groups, Q questions, J answers, K options.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
import typer
from scipy.special import softmax

from appa_flwr.analysis import aggregation
from appa_flwr.analysis.alignment import alignment_scores
from appa_flwr.config import Config, assemble
from appa_flwr.core import markdown
from appa_flwr.protocol import wire
from appa_flwr.run.served import ServedRuns
from appa_flwr.survey.arrays import as_arrays
from appa_flwr.survey.generate import ground_truth, population
from experiments import entry
from experiments.grpo import LocalGroups
from server_app import evaluation
from server_app.federation.catalogue import build_catalogue
from server_app.serve.requests import Item, Part
from server_app.serve.service import Service

COPIES, QUESTIONS, NOISE, STEP, MESSAGE = 8, 12, 0.5, 6.0, 8
MODES = ("exact", "stream")

FloatArray = npt.NDArray[np.float64]


async def learn(config: Config, mode: str, *, rounds: int, folder: Path) -> tuple[float, float, float]:
    """Avg AS and Min AS of the answers after so many rounds, and how far rewards lie from exact ones on average."""
    catalogue, rng = build_catalogue(config), np.random.default_rng(config.seed)
    _, truth = ground_truth(**population(config.data, config.seed))
    target_GQK, _ = as_arrays(catalogue.questions, truth)
    groups = LocalGroups(tuple(truth), target_GQK, catalogue.option_QK)
    rule, store = aggregation.configured(config.rule, config.appa), ServedRuns(folder)
    service, exact = (Service(groups, rule, catalogue, config, store) for _ in MODES)
    train_J = np.flatnonzero(~catalogue.held_out_Q)
    free_QK = np.where(catalogue.option_QK, 0.0, -np.inf)
    apart = []
    for number in range(rounds):
        asked = rng.choice(train_J, QUESTIONS, replace=False)
        question_J = np.repeat(asked, COPIES)
        noise_JK = rng.normal(size=(len(question_J), free_QK.shape[1]))
        share_JK = softmax(free_QK[question_J] + NOISE * noise_JK, axis=1)
        items = [
            Item(
                f"{number}/{j}",
                catalogue.questions[q].question_id,
                ",".join(f"{share:.2f}" for share in share_JK[j][catalogue.option_QK[q]]),
            )
            for j, q in enumerate(question_J)
        ]
        part = Part("exact", number + 1, 0, len(items), 0, 1, items)
        if mode == "exact":
            found = (await service.score(part)).items
        else:  # a message to the groups of every few answers
            found = ()
            for start in range(0, len(items), MESSAGE):
                found += (await service.stream("stream", items[start : start + MESSAGE])).items
            whole = (await exact.score(part)).items
            apart.append(np.mean([abs(a["reward"] - b["reward"]) for a, b in zip(found, whole, strict=True)]))
        reward_QJ = np.array([item["reward"] for item in found]).reshape(QUESTIONS, COPIES)
        less_J = (reward_QJ - reward_QJ.mean(axis=1, keepdims=True)).ravel()
        step_JK = less_J[:, None] * noise_JK * np.isfinite(free_QK[question_J])
        np.add.at(free_QK, question_J, STEP * step_JK / COPIES)
    answers = evaluation.given_answers(train_J, softmax(free_QK[train_J], axis=1))
    metric = config.reward_metric
    scores = alignment_scores(groups.score(answers.request([metric]))[metric, wire.TARGET_SIDE])
    await service.close()
    await exact.close()
    store.close()
    return scores.avg_as, scores.min_as, float(np.mean(apart or [0.0]))


def main(
    seeds: Annotated[int, typer.Option(min=1, help="Populations.")] = 5,
    rounds: Annotated[int, typer.Option(min=1, help="Of 96 answers.")] = 300,
    overrides: Annotated[
        list[str] | None, typer.Option("-c", "--config", metavar="KEY=VALUE", help="Another key; repeatable.")
    ] = None,
) -> None:
    """Learn by both modes and print means and standard deviations over seeds."""
    rows = []
    found = {mode: list[tuple[float, float, float]]() for mode in MODES}
    for seed in range(seeds):
        keys = ["data.unanswered=leave", "serve.gather-seconds=0.0", *(overrides or []), f"seed={seed}"]
        config = assemble(None, keys, folder=Path.cwd())
        for mode in MODES:
            with tempfile.TemporaryDirectory(prefix="appa-stream-") as folder:
                found[mode].append(asyncio.run(learn(config, mode, rounds=rounds, folder=Path(folder))))
                print(f"seed {seed}, {mode}: {found[mode][-1]}", flush=True)
    by_mode = {mode: np.array(numbers) for mode, numbers in found.items()}
    for name, numbers in [*by_mode.items(), ("stream less exact", by_mode["stream"] - by_mode["exact"])]:
        spread = numbers.std(axis=0, ddof=1) if seeds > 1 else np.zeros(3)
        rows.append([name, *(f"{mean:+.4f} ± {sd:.4f}" for mean, sd in zip(numbers.mean(axis=0), spread, strict=True))])
    print(markdown.table(["mode", "Avg AS", "Min AS", "reward apart from exact"], rows))


if __name__ == "__main__":
    entry.run(main)
