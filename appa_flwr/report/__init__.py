"""The report of a run: pictures and one self-contained page, of the files in its folder. Never imported by groups."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from pathlib import Path

from appa_flwr.core.errors import UserError
from appa_flwr.core.files import replace_file
from appa_flwr.report import accuracy, findings, judged, second_rule
from appa_flwr.report.artifacts import RunArtifacts, read_run
from appa_flwr.report.page import page, short, summed
from appa_flwr.report.plots import predictor_plots, results, training_curves
from appa_flwr.run.cards import Card
from appa_flwr.run.records import MODEL, RuleRound
from appa_flwr.run.run_files import PLOTS_FOLDER, REPORT_FILE, SHORT_REPORT_FILE

__all__ = ["build"]

MOST_SERVED = 6  # trainers whose pictures are shown
SPIDER_METHODS = ("base", "sft", "ppo", "uniform")

Picture = tuple[str, bytes, str]
"""Name, PNG, text for those who cannot see it."""


def build(run_folder: Path) -> Path:
    """Builds report.html, whose path is returned, report.md and plots/*.png of whatever the run has written so far.

    Raises:
        UserError: the folder is no run or cannot be written to, or a file of it is broken (the message names it), or
            its plots/ is a link, by which a run folder from elsewhere could have any folder written to.
    """
    run = read_run(Path(run_folder))
    if (run.folder / PLOTS_FOLDER).is_symlink():
        raise UserError(f"{run.folder / PLOTS_FOLDER}: is a link; remove it, and the pictures go into a folder there")
    pictures = {name: (png, text) for name, png, text in _pictures(run)}
    for name, (png, _) in pictures.items():
        replace_file(run.folder / PLOTS_FOLDER / f"{name}.png", png, parents=True)
    replace_file(run.folder / SHORT_REPORT_FILE, short(run).encode())
    replace_file(run.folder / REPORT_FILE, page(run, pictures).encode())
    return run.folder / REPORT_FILE


def _pictures(run: RunArtifacts) -> Iterable[Picture]:
    """Every picture the run has the numbers for."""
    if by_rule := second_rule.second_rule(run):
        yield "worst_group", second_rule.picture(by_rule), "score of the worst-served group by rule"
    metric = run.training_metric
    scores = {method: run.scores(method, metric, survey=False) for method in (*SPIDER_METHODS, *run.models)}
    per_group = {name.removeprefix(MODEL): found.per_group for name, found in scores.items() if found is not None}
    if per_group and len(run.groups) >= results.LEAST_SPIDER_GROUPS:
        yield "spider", results.spider(per_group, run.groups, metric=metric), "alignment score per group"
    if run.models and run.pair_scores is not None:
        found = judged.result(run.folder, differences=False)
        yield "models", judged.picture(found), "average against worst-served group, by model"
    if run.iterations:
        yield from _training_pictures(run)
    for name, lines in list(run.served.items())[:MOST_SERVED]:
        yield from _rule_pictures(run, lines, prefix=f"served_{name}_", below=f"{name}'s round")
    if run.pluralllm is not None:
        yield from _predictor_pictures(run.pluralllm)


def _predictor_pictures(found: Card) -> Iterable[Picture]:
    of = "of the preference predictor"
    if found.losses:
        yield "pluralllm", predictor_plots.loss_curve(found.losses), f"loss {of} over its rounds"
    if found.groups:
        yield "pluralllm_groups", predictor_plots.predictor_by_group(accuracy.by_group(found)), f"score {of} by group"


def _rule_pictures(
    run: RunArtifacts, lines: Sequence[RuleRound], *, prefix: str = "", below: str = training_curves.PPO_ITERATION
) -> Iterable[Picture]:
    """Fairness, weights, histories and rewards over the rounds of the rule, of which there is at least one."""
    found, over = findings.fall_back(lines), f"over the {below.split()[-1]}s"
    title, unused, threshold = "Fairness index", "", None
    if found is not None:
        title += f"; grey: plain mean taken in {found.fell_back} of {found.total} iterations ({found.share:.0%})"
        unused = "; grey: not used, plain mean taken" if found.fell_back else ""
        threshold = run.settings.appa.fairness_threshold
    picture = training_curves.fairness(lines, threshold=threshold, title=title, below=below)
    yield f"{prefix}fairness", picture, f"fairness index {over}"
    if summed(run):
        return
    groups = run.groups or tuple(lines[-1].history)
    title, level = f"Weight per group; dotted: all equal{unused}", 1 / len(groups)
    curves = functools.partial(training_curves.group_curves, lines, groups, below=below)
    picture = curves(lambda line: line.weights, title=title, axis="weight (share)", shade=True, level=level)
    yield f"{prefix}weights", picture, f"weight per group {over}"
    picture = curves(lambda line: line.history, title="History per group", axis="smoothed past reward (0 to 1)")
    yield f"{prefix}history", picture, f"history per group {over}"
    title, axis = "Alignment reward per group", "mean reward (0 to 1)"
    picture = curves(lambda line: line.rewards, title=title, axis=axis, smooth=True)
    yield f"{prefix}rewards", picture, f"alignment reward per group {over}"


def _training_pictures(run: RunArtifacts) -> Iterable[Picture]:
    """The pictures that need iterations; the run has at least one."""
    lines = run.iterations
    yield from _rule_pictures(run, lines)
    if any(line.held_out for line in lines):
        yield "learning_curve", training_curves.learning_curve(lines), "scores of the policy while it learns"
    yield "ppo_health", training_curves.ppo_health(lines), "measures of the health of PPO over the iterations"
