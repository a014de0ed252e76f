"""The report of a run: frames, pictures and one self-contained page, of the files in its folder. Never for groups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from appa_flwr.core.errors import UserError
from appa_flwr.core.files import replace_file
from appa_flwr.report import frames, plots, predictor, style
from appa_flwr.report.page import page, short
from appa_flwr.run.pair_scores import PREDICTIONS, replace_rows
from appa_flwr.run.read import RunFiles, read_run
from appa_flwr.run.run_files import INTERVALS_FILE, PLOTS_FOLDER, REPORT_FILE, SHORT_REPORT_FILE

__all__ = ["build"]

MOST_SERVED = 6  # trainers whose pictures are shown

Picture = tuple[str, bytes, str]
"""Name, PNG, text for those who cannot see it."""


def build(run_folder: Path) -> Path:
    """Builds report.html, whose path is returned, report.md, intervals.parquet and plots/*.png of what there is so far.

    Raises:
        UserError: the folder is no run or cannot be written to, or a file of it is broken (the message names it), or
            its plots/ is a link, by which a run folder from elsewhere could have any folder written to.
    """
    run = read_run(Path(run_folder))
    if (run.folder / PLOTS_FOLDER).is_symlink():
        raise UserError(f"{run.folder / PLOTS_FOLDER}: is a link; remove it, and the pictures go into a folder there")
    intervals = frames.of_run(run)
    if not intervals.empty:
        replace_rows(run.folder / INTERVALS_FILE, intervals)
    pictures = {name: (png, text) for name, png, text in _pictures(run, intervals)}
    for name, (png, _) in pictures.items():
        replace_file(run.folder / PLOTS_FOLDER / f"{name}.png", png, parents=True)
    replace_file(run.folder / SHORT_REPORT_FILE, short(run, intervals).encode())
    replace_file(run.folder / REPORT_FILE, page(run, intervals, pictures).encode())
    return run.folder / REPORT_FILE


def _pictures(run: RunFiles, intervals: pd.DataFrame) -> Iterator[Picture]:
    """Every picture the run has the numbers for."""
    if not intervals["low"].isna().all():
        yield (
            "worst_group",
            plots.worst_group(intervals, rule=run.config.rule),
            "score of the worst-off group by method",
        )
    kinds = {kind: frames.by_group(run, against=kind).dropna(axis=1, how="all") for kind in frames.TARGETS}
    against = next((kind for kind, known in kinds.items() if not known.empty), PREDICTIONS)
    per_group = kinds[against].rename(
        columns=lambda method: method if method in style.METHOD_STYLE else frames.method_name(method)
    )
    if not per_group.empty and len(run.groups) >= plots.LEAST_SPIDER_GROUPS:
        title = f"Alignment score per group ({run.metric}), against {frames.TARGETS[against]}"
        picture = plots.spider(per_group, run.groups, title=title, rule=run.config.rule)
        yield "spider", picture, "alignment score per group"
    if not run.iterations.empty:
        if run.iterations.columns.str.startswith("held_out/").any():
            yield "learning_curve", plots.learning_curve(run.iterations), "scores of the policy while it learns"
        yield from _rule_pictures(run, run.iterations)
    for name, rounds in list(run.served.items())[:MOST_SERVED]:
        yield from _rule_pictures(run, rounds, prefix=f"served_{name}_")
    card = run.pluralllm
    if card is not None and card.losses:
        yield "pluralllm", plots.loss(card.losses), "loss of PluralLLM over its rounds"
    if card is not None and card.groups:
        yield "pluralllm_groups", plots.predictor(predictor.by_group(card)), "score of PluralLLM by group"


def _rule_pictures(run: RunFiles, rounds: pd.DataFrame, *, prefix: str = "") -> Iterator[Picture]:
    """Weights and rewards where they are known of single groups, and measures of health, over the rounds of a rule."""
    tau = run.config.appa.fairness_threshold if rounds["fell_back"].notna().any() else None
    for what, title, axis in (
        ("weights", "Weight per group; dotted: all equal; grey: not used, plain mean taken", "weight (share)"),
        ("rewards", "Alignment reward per group", "mean reward (0 to 1)"),
    ):
        if rounds.columns.str.startswith(f"{what}/").any():
            png = plots.group_curves(rounds, what, run.groups, title=title, axis=axis)
            yield f"{prefix}{what}", png, f"{what.removesuffix('s')} per group over the iterations"
    yield f"{prefix}health", plots.health(rounds, threshold=tau), "measures of health over the iterations"
