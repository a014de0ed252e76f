"""Runs the trials of a grid: each once, in order, and a failed one stops only those that need it.

Several processes may work on one output folder, one for each GPU say: a trial that another one runs is left to it.
"""

from __future__ import annotations

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
    """Run what is not done yet, and wait for what other processes are running.

    Returns:
        Why each trial that is not done failed; those that needed it among them.
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
        if len(left) == before:  # all of them are run elsewhere, or need one that is
            time.sleep(PAUSE_SECONDS)
    return failed


def _run(trial: Trial, output: Path, *, launch: Launch) -> bool:
    """Run the trial; False where another process does."""
    try:
        held = lock(output / LOCKS / trial.name)
    except UserError:
        return False
    try:
        if not finished(trial.folder):
            # The launcher's first file: it starts nothing new where there is one, were the server never begun.
            resume = (trial.folder / CONFIG_FILE).exists()
            launch(Config.load({**trial.config.flat(), "run.resume": resume}))
        return True
    finally:
        held.release()
