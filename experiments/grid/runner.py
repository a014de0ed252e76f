"""Runs the trials of a grid: each once, in order, and a failed one stops only those that need it.

Several processes may work on one output folder, one for each GPU say: a trial that another one runs is left to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from appa_flwr.config import Config
from appa_flwr.core.errors import UserError
from appa_flwr.core.files import lock, replace_file
from appa_flwr.launch.endings import RunFailed
from appa_flwr.run.resume import finished
from appa_flwr.run.run_files import CONFIG_FILE, dumps, read
from experiments.grid.plan import STAGES, Grid, Stage, Trial

DONE, LOCKS = "done", "locks"
PAUSE_SECONDS = 5.0
HOUR = 3600
GIBIBYTE = 2**30

Say = Callable[[str], None]
Launch = Callable[[Config], object]


@dataclass
class Outcome:
    """Outcome of the trials.

    Attributes:
        done: trial -> its seconds, in this or an earlier session.
        failed: trial -> why; those that needed it among them.
    """

    done: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


def mark(output: Path, trial: Trial) -> Path:
    """The file that says a trial is done, with its seconds."""
    return output / DONE / f"{trial.name}.json"


def done(output: Path, trials: Sequence[Trial]) -> dict[str, float]:
    """The trials that are done -> their seconds.

    Raises:
        UserError: a mark cannot be read.
    """
    found = {trial.name: read(mark(output, trial), dict[str, float]) for trial in trials}
    return {name: content["seconds"] for name, content in found.items() if content is not None}


def run_trials(grid: Grid, trials: Sequence[Trial], output: Path, *, launch: Launch, say: Say) -> Outcome:
    """Run what is not done yet, and wait for what other processes are running.

    Raises:
        UserError: the output folder cannot be written.
    """
    outcome = Outcome(done(output, trials))
    say(f"{len(outcome.done)} of {len(trials)} trials are done")
    left = [trial for trial in trials if trial.name not in outcome.done]
    while left:
        before = len(left)
        left = [trial for trial in left if not _settled(grid, trial, trials, outcome, output, launch=launch, say=say)]
        if len(left) == before:  # all of them are run elsewhere, or need one that is
            time.sleep(PAUSE_SECONDS)
    return outcome


def _settled(
    grid: Grid, trial: Trial, trials: Sequence[Trial], outcome: Outcome, output: Path, *, launch: Launch, say: Say
) -> bool:
    """Run the trial if it can be run; False where it is for later."""
    needed = trial.needs
    if needed is not None and needed.name in outcome.failed:
        outcome.failed[trial.name] = f"needs {needed.name}"
        return True
    if needed is not None and needed.name not in outcome.done:
        return False
    path = output / LOCKS / trial.name
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        held = lock(path)
    except UserError:
        return False
    try:
        seconds = read(mark(output, trial), dict[str, float])
        if seconds is None:
            started = time.monotonic()
            if not finished(trial.folder):  # killed between its end and its mark
                launch(_resumed(trial))
            seconds = {"seconds": round(time.monotonic() - started, 1)}
            replace_file(mark(output, trial), dumps(seconds).encode(), parents=True)
    except (RunFailed, UserError) as error:
        outcome.failed[trial.name] = str(error).splitlines()[0]
        say(f"{trial.name}: FAILED: {outcome.failed[trial.name]}")
        return True
    finally:
        held.release()
    outcome.done[trial.name] = seconds["seconds"]
    left = sum(hours(grid, trials, outcome.done).values())
    say(f"{trial.name}: done; {len(outcome.done)} of {len(trials)} trials, about {_duration(left)} left")
    return True


def _resumed(trial: Trial) -> Config:
    # The launcher's first file: it starts nothing new where there is one, were the server never begun.
    return Config.load({**trial.config.flat(), "run.resume": (trial.folder / CONFIG_FILE).exists()})


def hours(grid: Grid, trials: Sequence[Trial], seconds: Mapping[str, float]) -> dict[str, float]:
    """Trial not done -> hours it may take: the mean of those like it, else what the grid file says, else NaN."""
    like: dict[tuple[Stage, str], list[float]] = {}
    for trial in trials:
        if trial.name in seconds:
            like.setdefault((trial.stage, trial.model), []).append(seconds[trial.name] / HOUR)
    found = {}
    for trial in trials:
        if trial.name not in seconds:
            known = like.get((trial.stage, trial.model))
            said = grid.hours.get(trial.model or "all", {}).get(trial.stage, float("nan"))
            found[trial.name] = sum(known) / len(known) if known else said
    return found


def _duration(hours: float) -> str:
    if hours != hours:
        return "an unknown time"
    return f"{hours:.1f} h" if hours >= 1 else f"{60 * hours:.0f} min"


def plan_text(grid: Grid, trials: Sequence[Trial], output: Path) -> str:
    """Output of `--dry-run`: a line a trial, and what all of them will take."""
    ended = done(output, trials)
    expected = hours(grid, trials, ended)
    lines = [
        f"{trial.name}: " + ("done" if trial.name in ended else _duration(expected[trial.name])) for trial in trials
    ]
    known = [value for value in expected.values() if value == value]
    total = f"{_duration(sum(known))}" + ("" if len(known) == len(expected) else " and those of unknown time")
    disk = sum(map(_gibibytes, trials))
    counts = ", ".join(f"{sum(trial.stage == stage for trial in trials)} {stage}" for stage in STAGES)
    lines.append(f"{len(trials)} trials ({counts}), {len(ended)} done; left: {total}; disk: about {disk:.1f} GiB")
    return "\n".join(lines)


def _gibibytes(trial: Trial) -> float:
    """A trial's models on disk: adapters and PPO's state, or whole models; by the shapes of the paper's models."""
    if trial.stage == "predictor":
        return 0.01
    return FOLDER_GIBIBYTES["full" if trial.config.policy.tuning == "full" else "lora"][trial.stage]


FOLDER_GIBIBYTES: Mapping[str, Mapping[Stage, float]] = {
    # of 2 to 3 billion parameters at rank 16: an SFT adapter on all layers; policy, value, Adam's two and the export
    "lora": {"sft": 0.1, "rule": 0.4},
    "full": {"sft": 0.01, "rule": 0.02},  # of the tiny model: a whole run has 17 MB
}
