"""Run a grid file, and write its tables and pictures.

    python -m experiments.grid experiments/default.toml

Started again after a kill, it skips finished trials and resumes the unfinished one.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

from appa_flwr.config import Config
from appa_flwr.config.sources import read_words
from appa_flwr.core.errors import UserError
from appa_flwr.launch.flower import launch
from appa_flwr.launch.terminal import RUN_FAILED
from appa_flwr.run.resume import finished
from experiments import entry
from experiments.grid.grid_results import write_results
from experiments.grid.plan import read_grid, trials
from experiments.grid.runner import run_trials


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
    here = Path.cwd()
    planned = trials(grid, folder, here=here)
    if dry_run:
        print("\n".join(f"{trial.name}: {'done' if finished(trial.folder) else 'to do'}" for trial in planned))
        return
    failed: dict[str, str] = {}
    if not tables_only:

        def start(config: Config) -> None:
            print(f"{config.run_name}:", flush=True)
            launch(config)

        failed = run_trials(planned, folder, launch=start, say=lambda text: print(text, flush=True))
    path = write_results(grid, planned, folder)
    if path is None:
        raise UserError(f"{folder}: no trial of this grid is done, so there are no results")
    print(f"results: {path}")
    if failed:
        print("\n".join(f"failed: {name}: {why}" for name, why in failed.items()), file=sys.stderr)
        sys.exit(RUN_FAILED)


if __name__ == "__main__":
    entry.run(main)
