"""The report of a run: pictures and one self-contained page, made of the files in the run's folder."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path

from appa_flwr.report import findings, predictor
from appa_flwr.report.artifacts import PluralLLM, Run, is_known, read_run, write_atomically
from appa_flwr.report.page import page
from appa_flwr.report.plots import predictor as predictor_plots
from appa_flwr.report.plots import results, training

__all__ = ["build"]

PLOTS_FOLDER = "plots"
REPORT_FILE = "report.html"
SPIDER_POLICIES = ("base", "sft", "ppo", "uniform")

Picture = tuple[str, bytes, str]
"""Name, PNG, text for those who cannot see it."""


def build(run_folder: Path) -> Path:
    """Builds report.html and plots/*.png of whatever the run has written so far.

    Args:
        run_folder: the folder the server writes to.

    Returns:
        The path of report.html.

    Raises:
        UserError: the folder is no run, or one of its files is broken (the message names file, line or row).
        OSError: the folder cannot be written to.
    """
    run = read_run(Path(run_folder))
    pictures = {name: (png, text) for name, png, text in _pictures(run)}
    for name, (png, _) in pictures.items():
        write_atomically(run.folder / PLOTS_FOLDER / f"{name}.png", png)
    return write_atomically(run.folder / REPORT_FILE, page(run, pictures).encode("utf-8"))


def _pictures(run: Run) -> Iterable[Picture]:
    """Every picture the run has the numbers for."""
    metric = run.training_metric or ""
    ways = [
        (name, way)
        for name, survey in (("PluralLLM targets", False), ("survey truth", True))
        for way in findings.ways(run, survey=survey)
    ]
    if ways:
        yield "way_to_ceiling", results.way_to_ceiling(ways, metric=metric), "way from base to ceiling"
    scores = {policy: run.scores(policy, metric, survey=False) for policy in SPIDER_POLICIES}
    per_group = {policy: found.per_group for policy, found in scores.items() if found is not None}
    if per_group and len(run.groups) >= results.LEAST_SPIDER_GROUPS:
        yield "spider", results.spider(per_group, run.groups, metric=metric), "alignment score per group"
    if run.iterations:
        yield from _training_pictures(run)
    if run.phases:
        yield "seconds_per_phase", training.seconds_per_phase(run.phases), "seconds per phase"
    if run.pluralllm is not None:
        yield from _predictor_pictures(run.pluralllm)


def _predictor_pictures(found: PluralLLM) -> Iterable[Picture]:
    of = "of the preference predictor"
    if found.rounds:
        picture = predictor_plots.loss_curve(found.rounds, chosen=found.chosen)
        yield "pluralllm", picture, f"loss and validation error {of} over its rounds"
    if curves := predictor.context_curves(found):
        yield (
            "pluralllm_context",
            predictor_plots.predictor_by_context(curves),
            f"score {of} by number of context answers",
        )
    if found.groups:
        yield "pluralllm_groups", predictor_plots.predictor_by_group(predictor.by_group(found)), f"score {of} by group"


def _training_pictures(run: Run) -> Iterable[Picture]:
    """The pictures that need iterations; the run has at least one."""
    lines, found, waiting = (
        run.iterations,
        findings.fall_back(run.iterations),
        findings.federation_share(run.iterations),
    )
    title, threshold = "Fairness index", None
    if found is not None:
        title += f"; grey: plain mean taken in {found.fell_back} of {found.total} iterations ({found.share:.0%})"
        given = run.config.get("appa.fairness-threshold")
        threshold = float(given) if isinstance(given, int | float) and is_known(given) else None
    yield "fairness", training.fairness(lines, threshold=threshold, title=title), "fairness index over the iterations"
    title = "Weight per group; dotted: all equal" + (
        "; grey: not used, plain mean taken" if found and found.fell_back else ""
    )
    curves = functools.partial(training.group_curves, lines, run.groups)
    weights = curves(
        lambda line: line.weights,
        title=title,
        axis="weight (share)",
        shade=True,
        level=1 / len(run.groups) if run.groups else None,
    )
    yield "weights", weights, "weight per group over the iterations"
    history = curves(lambda line: line.history, title="History per group", axis="smoothed past reward (0 to 1)")
    yield "history", history, "history per group over the iterations"
    title, axis = "Alignment reward per group", "mean reward (0 to 1)"
    rewards = curves(lambda line: line.rewards, title=title, axis=axis, smooth=True)
    yield "rewards", rewards, "alignment reward per group over the iterations"
    yield "ppo_health", training.ppo_health(lines), "measures of the health of PPO over the iterations"
    title = "Time per iteration" + ("" if waiting is None else f"; {waiting:.1%} of it waiting for groups")
    yield "seconds_per_iteration", training.seconds_per_iteration(lines, title=title), "seconds per iteration"
