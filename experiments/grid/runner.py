"""Runs the trials of a grid: each once, in order, and a failed one stops only those that need it.

Several processes may work on one output folder, one for each GPU say: a trial that another one runs is left to it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from appa_flwr.config import Config
from appa_flwr.core.errors import UserError
from appa_flwr.core.files import lock
from appa_flwr.launch.terminal import RunFailed
from appa_flwr.run.resume import finished
from appa_flwr.run.run_files import CONFIG_FILE, PROGRESS
from experiments.grid.plan import STAGES, Stage, Trial

LOCKS = "locks"
PAUSE_SECONDS = 5.0
MINUTE = 60

Say = Callable[[str], None]
Launch = Callable[[Config], object]


def done(trials: Sequence[Trial]) -> dict[str, float]:
    """The trials that are done -> minutes from their last start to their end."""
    return {
        trial.name: ((trial.folder / PROGRESS.name).stat().st_mtime - (trial.folder / CONFIG_FILE).stat().st_mtime)
        / MINUTE
        for trial in trials
        if finished(trial.folder)
    }


def run_trials(trials: Sequence[Trial], output: Path, *, launch: Launch, say: Say) -> dict[str, str]:
    """Run what is not done yet, and wait for what other processes are running.

    Returns:
        Why each trial that is not done failed; those that needed it among them.
    """
    failed: dict[str, str] = {}
    say(f"{len(done(trials))} of {len(trials)} trials are done")
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
                say(f"{trial.name}: FAILED: {failed[trial.name]}")
            else:
                ended = done(trials)
                time_left = _duration(expected(trials, ended).values())
                say(f"{trial.name}: done; {len(ended)} of {len(trials)} trials, about {time_left} left")
            left.remove(trial)
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


def expected(trials: Sequence[Trial], ended: Mapping[str, float]) -> dict[str, float]:
    """Trial not done -> minutes it may take: the mean of those like it that are done, else NaN."""
    measured: dict[tuple[Stage, str], list[float]] = {}
    for trial in trials:
        if trial.name in ended:
            measured.setdefault((trial.stage, trial.model), []).append(ended[trial.name])
    return {
        trial.name: fmean(measured.get((trial.stage, trial.model), [math.nan]))
        for trial in trials
        if trial.name not in ended
    }


def _duration(minutes: Collection[float]) -> str:
    """All of these minutes, as far as they are known."""
    known = [value for value in minutes if not math.isnan(value)]
    unknown = f", and {len(minutes) - len(known)} trials of unknown time" if len(known) < len(minutes) else ""
    return f"{sum(known):.0f} min{unknown}"


def plan_text(trials: Sequence[Trial]) -> str:
    """Output of `--dry-run`: a line a trial, and what all of them will take."""
    ended = done(trials)
    times = expected(trials, ended)
    lines = [f"{trial.name}: {'done' if trial.name in ended else _duration([times[trial.name]])}" for trial in trials]
    counts = ", ".join(f"{sum(trial.stage == stage for trial in trials)} {stage}" for stage in STAGES)
    lines.append(f"{len(trials)} trials ({counts}), {len(ended)} done; left: {_duration(times.values())}")
    return "\n".join(lines)
