"""How a simulation grows with the number of groups: seconds of each phase, of a PPO iteration, and memory.

    python -m experiments.benchmarks.scale

Whole runs of the default loop, shortened, one after the other; the federation's part of an iteration is what the server
waits for rewards.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from appa_flwr import markdown
from appa_flwr.files import replace_file
from appa_flwr.launch.endings import RunFailed
from appa_flwr.report.artifacts import Run, read_run
from experiments import entry

ROUNDS, ITERATIONS = 2, 6
KEYS = {
    "pluralllm.rounds": ROUNDS,
    "pluralllm.validate-every": 0,
    "ppo.num-iterations": ITERATIONS,
    "eval.extra-rows": False,
    "policy.threads": 1,
}
HEAD = (
    *("groups", "joining", "sums", "a PluralLLM round", "targets", "waiting in an iteration", "an iteration"),
    "server's memory, MiB",
)


def measured(groups: int, folder: Path) -> Run:
    """A run with so many groups; one that is there already is not repeated."""
    name = f"groups-{groups}"
    if not (folder / name / "report.html").exists():
        given = {**KEYS, "data.num-groups": groups, "run-name": name, "run.output-dir": folder.resolve()}
        keys = [part for key, value in given.items() for part in ("-c", f"{key}={str(value).lower()}")]
        command = [sys.executable, "-c", "from appa_flwr.launch.cli import main; main()", "run", *keys]
        if subprocess.run(command, check=False).returncode:
            raise RunFailed(f"the run with {groups} groups failed; {folder / name} says why")
    return read_run(folder / name)


def row(groups: int, run: Run) -> list[str]:
    """A line of the table."""
    seconds = {phase.phase: phase.seconds for phase in run.phases}
    later = run.iterations[1:]  # the first one warms up
    waited = median(line.seconds["federation_wait"] for line in later)
    whole = median(sum(line.seconds.values()) for line in later)
    memory = max(phase.peak_mib or 0.0 for phase in run.phases)
    shown = [seconds["join"], seconds["population"], seconds["pluralllm"] / ROUNDS, seconds["targets"], waited, whole]
    return [str(groups), *(f"{value:.2f} s" for value in shown), f"{memory:.0f}"]


def table(sizes: Sequence[int], folder: Path) -> str:
    """Markdown, a row a number of groups."""
    return markdown.table(HEAD, [row(size, measured(size, folder)) for size in sizes])


def main(
    sizes: Annotated[str, typer.Option(help="Numbers of groups.")] = "8,64,256,1024",
    output: Annotated[Path, typer.Option(help="Folder of runs and table.")] = Path("runs/scale"),
) -> None:
    """Run with more and more groups, and say what grows."""
    text = table([int(size) for size in sizes.split(",")], output) + "\n"
    replace_file(output / "scale.md", text.encode(), parents=True)
    print(text)


if __name__ == "__main__":
    entry.run(main)
