"""Run a grid file, and write its tables and pictures.

    python -m experiments.grid experiments/default.toml

Started again after a kill, it skips finished trials and resumes the unfinished one. Several processes can work on one
output folder, for example one per GPU: each skips the trials that others run.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from appa_flwr.config import Config
from appa_flwr.config.sources import read_words
from appa_flwr.core.errors import UserError
from appa_flwr.core.files import lock
from appa_flwr.launch.flower import launch
from appa_flwr.launch.terminal import RUN_FAILED, RunFailed
from appa_flwr.run.resume import finished
from appa_flwr.run.schema import CONFIG_FILE
from experiments import entry
from experiments.grid.grid_results import write_results
from experiments.grid.plan import Trial, read_grid, trials

LOCKS = "locks"
PAUSE_SECONDS = 5.0


def main(
    grid_file: Annotated[Path, typer.Argument(help="TOML: datasets, tasks, models, rules, seeds.")],
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[FILE.toml] [KEY=VALUE]", help="Keys that come after the file's.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Folder of runs and results; default runs/NAME.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print trials, and run nothing.")] = False,
    tables_only: Annotated[bool, typer.Option("--tables", help="Write the results of what is done.")] = False,
) -> None:
    """Run every trial of a grid once, then write tables, intervals and pictures."""
    grid = read_grid(grid_file, last=read_words(words or ()))
    folder = output or Path("runs") / grid_file.stem
    planned = trials(grid, folder, here=Path.cwd())
    if dry_run:
        print("\n".join(f"{trial.name}: {'done' if finished(trial.folder) else 'to do'}" for trial in planned))
        return
    try:
        failed = {} if tables_only else run_trials(planned, folder)
    except KeyboardInterrupt:
        print(f"the same command continues the grid in {folder}", file=sys.stderr)
        raise
    path = write_results(grid, planned, folder)
    if path is None:
        raise UserError(f"{folder}: no trial of this grid is done, so there are no results")
    print(f"results: {path}")
    if failed:
        print("\n".join(f"failed: {name}: {why}" for name, why in failed.items()), file=sys.stderr)
        sys.exit(RUN_FAILED)


def run_trials(trials: Sequence[Trial], output: Path) -> dict[str, str]:
    """Run the unfinished trials, and wait for those that other processes run.

    A failed trial stops only those that need it; the result has its name and the reason, and theirs.
    """
    failed: dict[str, str] = {}
    left = [trial for trial in trials if not finished(trial.folder)]
    (output / LOCKS).mkdir(parents=True, exist_ok=True)
    while left:
        before = len(left)
        for trial in list(left):
            try:
                if trial.needs is not None and trial.needs.name in failed:
                    raise RunFailed(f"needs {trial.needs.name}")
                if trial.needs in left or not _run(trial, output):
                    continue
            except (RunFailed, UserError) as error:
                failed[trial.name] = str(error).splitlines()[0]
            left.remove(trial)
            state = failed.get(trial.name, "done")
            print(f"{trial.name}: {state}; {len(left)} of {len(trials)} trials left", flush=True)
        if len(left) == before:  # all are run by other processes, or need such a trial
            time.sleep(PAUSE_SECONDS)
    return failed


def _run(trial: Trial, output: Path) -> bool:
    """Run the trial; returns False if another process runs it."""
    try:
        held = lock(output / LOCKS / trial.name)
    except UserError:
        return False
    try:
        if not finished(trial.folder):
            print(f"{trial.name}:", flush=True)
            # The launcher writes this file first: with it a run must be resumed, even if the server never began.
            resume = (trial.folder / CONFIG_FILE).exists()
            launch(Config.load({**trial.config.flat(), "run.resume": resume}))
        return True
    finally:
        held.release()


if __name__ == "__main__":
    entry.run(main)
