"""Runs the trials of a grid: each once, in order, and a failed one stops only those that need it.

Several processes may work on one output folder, one for each GPU say: a trial that another one runs is left to it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from appa_flwr.config import Config
from appa_flwr.core.errors import UserError
from appa_flwr.core.files import lock, replace_file
from appa_flwr.launch.terminal import RunFailed
from appa_flwr.run.resume import finished
from appa_flwr.run.run_files import CONFIG_FILE, dumps, read
from experiments.grid.plan import STAGES, Stage, Trial

DONE, LOCKS = "done", "locks"
PAUSE_SECONDS = 5.0
MINUTE = 60

Say = Callable[[str], None]
Launch = Callable[[Config], object]


@dataclass
class Outcome:
    """The seconds of each trial that is done, and why each other one failed; those that needed it among them."""

    done: dict[str, float]
    failed: dict[str, str] = field(default_factory=dict)


def mark(output: Path, trial: Trial) -> Path:
    """The file that says a trial is done, with its seconds."""
    return output / DONE / f"{trial.name}.json"


def done(output: Path, trials: Sequence[Trial]) -> dict[str, float]:
    """The trials that are done -> their seconds."""
    found = {trial.name: _seconds(output, trial) for trial in trials}
    return {name: seconds for name, seconds in found.items() if seconds is not None}


def _seconds(output: Path, trial: Trial) -> float | None:
    found = read(mark(output, trial), dict[str, float])
    return None if found is None else found["seconds"]


def run_trials(trials: Sequence[Trial], output: Path, *, launch: Launch, say: Say) -> Outcome:
    """Run what is not done yet, and wait for what other processes are running."""
    outcome = Outcome(done(output, trials))
    say(f"{len(outcome.done)} of {len(trials)} trials are done")
    left = [trial for trial in trials if trial.name not in outcome.done]
    (output / LOCKS).mkdir(parents=True, exist_ok=True)
    while left:
        before = len(left)
        for trial in list(left):
            try:
                seconds = _run(trial, outcome, output, launch=launch)
            except (RunFailed, UserError) as error:
                outcome.failed[trial.name] = str(error).splitlines()[0]
                say(f"{trial.name}: FAILED: {outcome.failed[trial.name]}")
            else:
                if seconds is None:
                    continue
                outcome.done[trial.name] = seconds
                time_left = _duration(minutes(trials, outcome.done).values())
                say(f"{trial.name}: done; {len(outcome.done)} of {len(trials)} trials, about {time_left} left")
            left.remove(trial)
        if len(left) == before:  # all of them are run elsewhere, or need one that is
            time.sleep(PAUSE_SECONDS)
    return outcome


def _run(trial: Trial, outcome: Outcome, output: Path, *, launch: Launch) -> float | None:
    """Run the trial if it can be run, and return its seconds; None where it is for later."""
    needed = trial.needs
    if needed is not None and needed.name in outcome.failed:
        raise RunFailed(f"needs {needed.name}")
    if needed is not None and needed.name not in outcome.done:
        return None
    try:
        held = lock(output / LOCKS / trial.name)
    except UserError:
        return None
    try:
        if (seconds := _seconds(output, trial)) is None:
            started = time.monotonic()
            if not finished(trial.folder):  # killed between its end and its mark
                # The launcher's first file: it starts nothing new where there is one, were the server never begun.
                resume = (trial.folder / CONFIG_FILE).exists()
                launch(Config.load({**trial.config.flat(), "run.resume": resume}))
            seconds = round(time.monotonic() - started, 1)
            replace_file(mark(output, trial), dumps({"seconds": seconds}).encode(), parents=True)
        return seconds
    finally:
        held.release()


def minutes(trials: Sequence[Trial], seconds: Mapping[str, float]) -> dict[str, float]:
    """Trial not done -> minutes it may take: the mean of those like it that are done, else NaN."""
    measured: dict[tuple[Stage, str], list[float]] = {}
    for trial in trials:
        if trial.name in seconds:
            measured.setdefault((trial.stage, trial.model), []).append(seconds[trial.name] / MINUTE)
    return {
        trial.name: fmean(measured.get((trial.stage, trial.model), [math.nan]))
        for trial in trials
        if trial.name not in seconds
    }


def _duration(minutes: Collection[float]) -> str:
    """All of these minutes, as far as they are known."""
    known = [value for value in minutes if not math.isnan(value)]
    unknown = f", and {len(minutes) - len(known)} trials of unknown time" if len(known) < len(minutes) else ""
    return f"{sum(known):.0f} min{unknown}"


def plan_text(trials: Sequence[Trial], output: Path) -> str:
    """Output of `--dry-run`: a line a trial, and what all of them will take."""
    ended = done(output, trials)
    expected = minutes(trials, ended)
    lines = [
        f"{trial.name}: {'done' if trial.name in ended else _duration([expected[trial.name]])}" for trial in trials
    ]
    counts = ", ".join(f"{sum(trial.stage == stage for trial in trials)} {stage}" for stage in STAGES)
    lines.append(f"{len(trials)} trials ({counts}), {len(ended)} done; left: {_duration(expected.values())}")
    return "\n".join(lines)
