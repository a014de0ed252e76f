"""Runs the cells of a grid: each once, in order, and a failed one stops only those that need it.

Several processes may work on one output folder, one for each GPU say: a cell that another one runs is left to it.
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
from experiments.grid.plan import STAGES, Cell, Grid, Stage

DONE, LOCKS = "done", "locks"
PAUSE_SECONDS = 5.0
HOUR = 3600
GIBIBYTE = 2**30

Say = Callable[[str], None]
Launch = Callable[[Config], object]


@dataclass
class Outcome:
    """What became of the cells.

    Attributes:
        done: cell -> its seconds, in this or an earlier session.
        failed: cell -> why; those that needed it among them.
    """

    done: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


def mark(output: Path, cell: Cell) -> Path:
    """The file that says a cell is done, with its seconds."""
    return output / DONE / f"{cell.name}.json"


def done(output: Path, cells: Sequence[Cell]) -> dict[str, float]:
    """The cells that are done -> their seconds.

    Raises:
        UserError: a mark cannot be read.
    """
    found = {cell.name: read(mark(output, cell), dict[str, float]) for cell in cells}
    return {name: content["seconds"] for name, content in found.items() if content is not None}


def run_cells(grid: Grid, cells: Sequence[Cell], output: Path, *, launch: Launch, say: Say) -> Outcome:
    """Run what is not done yet, and wait for what other processes are running.

    Raises:
        UserError: the output folder cannot be written.
    """
    outcome = Outcome(done(output, cells))
    say(f"{len(outcome.done)} of {len(cells)} cells are done")
    left = [cell for cell in cells if cell.name not in outcome.done]
    while left:
        before = len(left)
        left = [cell for cell in left if not _settled(grid, cell, cells, outcome, output, launch=launch, say=say)]
        if len(left) == before:  # all of them are run elsewhere, or need one that is
            time.sleep(PAUSE_SECONDS)
    return outcome


def _settled(
    grid: Grid, cell: Cell, cells: Sequence[Cell], outcome: Outcome, output: Path, *, launch: Launch, say: Say
) -> bool:
    """Run the cell if it can be run; False where it is for later."""
    needed = cell.needs
    if needed is not None and needed.name in outcome.failed:
        outcome.failed[cell.name] = f"needs {needed.name}"
        return True
    if needed is not None and needed.name not in outcome.done:
        return False
    path = output / LOCKS / cell.name
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        held = lock(path)
    except UserError:
        return False
    try:
        seconds = read(mark(output, cell), dict[str, float])
        if seconds is None:
            started = time.monotonic()
            if not finished(cell.folder):  # killed between its end and its mark
                launch(_resumed(cell))
            seconds = {"seconds": round(time.monotonic() - started, 1)}
            replace_file(mark(output, cell), dumps(seconds).encode(), parents=True)
    except (RunFailed, UserError) as error:
        outcome.failed[cell.name] = str(error).splitlines()[0]
        say(f"{cell.name}: FAILED: {outcome.failed[cell.name]}")
        return True
    finally:
        held.release()
    outcome.done[cell.name] = seconds["seconds"]
    left = sum(hours(grid, cells, outcome.done).values())
    say(f"{cell.name}: done; {len(outcome.done)} of {len(cells)} cells, about {_duration(left)} left")
    return True


def _resumed(cell: Cell) -> Config:
    # The launcher's first file: it starts nothing new where there is one, were the server never begun.
    return Config.load({**cell.config.flat(), "run.resume": (cell.folder / CONFIG_FILE).exists()})


def hours(grid: Grid, cells: Sequence[Cell], seconds: Mapping[str, float]) -> dict[str, float]:
    """Cell that is not done -> hours it may take: the mean of those like it, else what the grid file says, else NaN."""
    like: dict[tuple[Stage, str], list[float]] = {}
    for cell in cells:
        if cell.name in seconds:
            like.setdefault((cell.stage, cell.model), []).append(seconds[cell.name] / HOUR)
    found = {}
    for cell in cells:
        if cell.name not in seconds:
            known = like.get((cell.stage, cell.model))
            said = grid.hours.get(cell.model or "all", {}).get(cell.stage, float("nan"))
            found[cell.name] = sum(known) / len(known) if known else said
    return found


def _duration(hours: float) -> str:
    if hours != hours:
        return "an unknown time"
    return f"{hours:.1f} h" if hours >= 1 else f"{60 * hours:.0f} min"


def plan_text(grid: Grid, cells: Sequence[Cell], output: Path) -> str:
    """What `--dry-run` prints: a line a cell, and what all of them will take."""
    ended = done(output, cells)
    expected = hours(grid, cells, ended)
    lines = [f"{cell.name}: " + ("done" if cell.name in ended else _duration(expected[cell.name])) for cell in cells]
    known = [value for value in expected.values() if value == value]
    total = f"{_duration(sum(known))}" + ("" if len(known) == len(expected) else " and those of unknown time")
    disk = sum(map(_gibibytes, cells))
    counts = ", ".join(f"{sum(cell.stage == stage for cell in cells)} {stage}" for stage in STAGES)
    lines.append(f"{len(cells)} cells ({counts}), {len(ended)} done; left: {total}; disk: about {disk:.1f} GiB")
    return "\n".join(lines)


def _gibibytes(cell: Cell) -> float:
    """A cell's models on disk: adapters and PPO's state, or whole models; by the shapes of the paper's models."""
    if cell.stage == "predictor":
        return 0.01
    return FOLDER_GIBIBYTES["full" if cell.config.policy.tuning == "full" else "lora"][cell.stage]


FOLDER_GIBIBYTES: Mapping[str, Mapping[Stage, float]] = {
    # of 2 to 3 billion parameters at rank 16: an SFT adapter on all layers; policy, value, Adam's two and the export
    "lora": {"sft": 0.1, "rule": 0.4},
    "full": {"sft": 0.01, "rule": 0.02},  # of the tiny model: a whole run has 17 MB
}
