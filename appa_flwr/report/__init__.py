"""The report of a run from the files in its folder: frames, pictures and a self-contained page. Not used by groups."""

from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from appa_flwr.core.errors import UserError
from appa_flwr.core.files import replace_file
from appa_flwr.report import frames, plots
from appa_flwr.report.page import Picture, page
from appa_flwr.run.read import RunReader, read_run
from appa_flwr.run.schema import PLOTS_FOLDER, REPORT_FILE

__all__ = ["build"]

MOST_SERVED = 6  # trainers whose pictures are shown


def build(run_folder: Path) -> Path:
    """Build report.html (whose path is returned) and plots/*.png from the run's files so far.

    Raises:
        UserError: the folder is no run or cannot be written to, one of its files is broken (the message names it), or
            plots/ is a link, by which a run folder of another party could redirect the files to any folder.
    """
    run = read_run(Path(run_folder))
    if (run.folder / PLOTS_FOLDER).is_symlink():
        raise UserError(f"{run.folder / PLOTS_FOLDER}: is a link; remove it, and the pictures go into a folder there")
    intervals = frames.of_run(run)
    pictures = dict(_pictures(run, intervals))
    for name, (png, _) in pictures.items():
        replace_file(run.folder / PLOTS_FOLDER / f"{name}.png", png, parents=True)
    replace_file(run.folder / REPORT_FILE, page(run, intervals, pictures).encode())
    return run.folder / REPORT_FILE


def _pictures(run: RunReader, intervals: pd.DataFrame) -> Iterator[tuple[str, Picture]]:
    """Yield the name of every picture for which the run has numbers, and the picture."""
    if not intervals["low"].isna().all():
        yield "methods", (plots.methods(intervals, rule=run.config.rule), "scores by method, with intervals")
    if (scores := frames.before_and_after(run)).shape[1] > 1:
        yield "groups", (plots.slopes(scores), "groups' scores after SFT and after PPO")
    rules = {"training": run.iterations} | {f"served_{name}": run.served[name] for name in [*run.served][:MOST_SERVED]}
    for name, rounds in rules.items():
        if not rounds.empty:
            yield name, (plots.training(rounds), "reward, format and KL by iteration")
            yield f"more_{name}", (plots.more_of_training(rounds, run.groups), "weights and health by iteration")
    if run.pluralllm is not None and run.pluralllm.losses:
        yield "pluralllm", (plots.pretraining(run.pluralllm), "loss and groups' steps of PluralLLM over its rounds")
