"""Runs the trials of a grid, each once and in order; a failed trial stops only the trials that need it.

Several processes can work on one output folder, for example one per GPU: a process skips trials that others run.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from appa_flwr.config import Config
from appa_flwr.core.errors import UserError
from appa_flwr.core.files import lock
from appa_flwr.launch.terminal import RunFailed
from appa_flwr.run.resume import finished
from appa_flwr.run.run_files import CONFIG_FILE
from experiments.grid.plan import Trial

LOCKS = "locks"
PAUSE_SECONDS = 5.0

Say = Callable[[str], None]
Launch = Callable[[Config], object]


def run_trials(trials: Sequence[Trial], output: Path, *, launch: Launch, say: Say) -> dict[str, str]:
    """Run the unfinished trials, and wait for those that other processes run.

    Returns:
        Name of each failed trial -> reason, including trials that needed a failed one.
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
                if trial.needs in left or not _run(trial, output, launch=launch):
                    continue
            except (RunFailed, UserError) as error:
                failed[trial.name] = str(error).splitlines()[0]
            left.remove(trial)
            say(f"{trial.name}: {failed.get(trial.name, 'done')}; {len(left)} of {len(trials)} trials left")
        if len(left) == before:  # all are run by other processes, or need such a trial
            time.sleep(PAUSE_SECONDS)
    return failed


def _run(trial: Trial, output: Path, *, launch: Launch) -> bool:
    """Run the trial; returns False if another process runs it."""
    try:
        held = lock(output / LOCKS / trial.name)
    except UserError:
        return False
    try:
        if not finished(trial.folder):
            # The launcher writes this file first: with it a run must be resumed, even if the server never began.
            resume = (trial.folder / CONFIG_FILE).exists()
            launch(Config.load({**trial.config.flat(), "run.resume": resume}))
        return True
    finally:
        held.release()
