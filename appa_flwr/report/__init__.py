"""The report of a run: pictures and one self-contained page, made of the files in the run's folder.

Axis letters: G groups, I iterations.
"""

from __future__ import annotations

from pathlib import Path

from appa_flwr.report import findings, html, plots, predictor
from appa_flwr.report.artifacts import PluralLLM, Run, is_known, read_run, write_atomically

__all__ = ["build"]

PLOTS_FOLDER = "plots"
REPORT_FILE = "report.html"
SPIDER_POLICIES = ("base", "sft", "ppo", "uniform")
LEAST_SPIDER_GROUPS = 3


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
    run_folder = Path(run_folder)
    run = read_run(run_folder)
    pictures = _pictures(run)
    for name, (png, _) in pictures.items():
        write_atomically(run_folder / PLOTS_FOLDER / f"{name}.png", png)
    return write_atomically(run_folder / REPORT_FILE, html.page(run, pictures).encode("utf-8"))


def _pictures(run: Run) -> dict[str, tuple[bytes, str]]:
    """Name -> (PNG, alternative text) of every picture the run has the numbers for."""
    pictures: dict[str, tuple[bytes, str]] = {}
    metric = run.training_metric or ""
    ways = [
        (name, way)
        for name, survey in (("PluralLLM targets", False), ("survey truth", True))
        for way in findings.ways(run, survey=survey)
    ]
    if ways:
        pictures["way_to_ceiling"] = plots.way_to_ceiling(ways, metric=metric), "way from base to ceiling"
    per_group = {
        policy: scores.per_group
        for policy in SPIDER_POLICIES
        if (scores := run.scores(policy, metric, survey=False)) is not None
    }
    if per_group and len(run.groups) >= LEAST_SPIDER_GROUPS:
        pictures["spider"] = plots.spider(per_group, run.groups, metric=metric), "alignment score per group"
    if run.iterations:
        pictures |= _training_pictures(run)
    if run.phases:
        pictures["seconds_per_phase"] = plots.seconds_per_phase(run.phases), "seconds per phase"
    return pictures if run.pluralllm is None else pictures | _predictor_pictures(run.pluralllm)


def _predictor_pictures(found: PluralLLM) -> dict[str, tuple[bytes, str]]:
    """The pictures of the preference predictor."""
    pictures = {}
    if found.rounds:
        picture = plots.loss_curve(found.rounds, chosen=found.chosen)
        pictures["pluralllm"] = picture, "loss and validation error of the preference predictor over its rounds"
    curves = predictor.context_curves(found)
    if curves:
        picture = plots.predictor_by_context(curves)
        pictures["pluralllm_context"] = picture, "score of the preference predictor by number of context answers"
    if found.groups:
        picture = plots.predictor_by_group(predictor.by_group(found))
        pictures["pluralllm_groups"] = picture, "score of the preference predictor by group"
    return pictures


def _training_pictures(run: Run) -> dict[str, tuple[bytes, str]]:
    """The pictures that need iterations; the run has at least one."""
    lines = run.iterations
    found = findings.fall_back(lines)
    fairness_title = (
        "Fairness index"
        if found is None
        else (
            f"Fairness index; grey: plain mean taken in {found.fell_back} of {found.total} iterations"
            f" ({found.share:.0%})"
        )
    )
    waiting = findings.federation_share(lines)
    time_title = "Time per iteration" + ("" if waiting is None else f"; {waiting:.1%} of it waiting for groups")
    return {
        "fairness": (
            plots.fairness(lines, threshold=_threshold(run) if found else None, title=fairness_title),
            "fairness index over the iterations",
        ),
        "weights": (
            plots.group_curves(
                lines,
                run.groups,
                lambda line: line.weights,
                title="Weight per group; dotted: all equal"
                + ("; grey: not used, plain mean taken" if found and found.fell_back else ""),
                axis="weight (share)",
                shade=True,
                level=1 / len(run.groups) if run.groups else None,
            ),
            "weight per group over the iterations",
        ),
        "history": (
            plots.group_curves(
                lines,
                run.groups,
                lambda line: line.history,
                title="History per group",
                axis="smoothed past reward (0 to 1)",
            ),
            "history per group over the iterations",
        ),
        "rewards": (
            plots.group_curves(
                lines,
                run.groups,
                lambda line: line.rewards,
                title="Alignment reward per group",
                axis="mean reward (0 to 1)",
                smooth=True,
            ),
            "alignment reward per group over the iterations",
        ),
        "ppo_health": (plots.ppo_health(lines), "measures of the health of PPO over the iterations"),
        "seconds_per_iteration": (
            plots.seconds_per_iteration(lines, title=time_title),
            "seconds per iteration",
        ),
    }


def _threshold(run: Run) -> float | None:
    value = run.config.get("appa.fairness-threshold")
    return float(value) if isinstance(value, int | float) and is_known(value) else None
