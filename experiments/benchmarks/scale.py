"""How a simulation grows with the number of groups.

    python -m experiments.benchmarks.scale

Runs that are there already are read, not made again.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Annotated

import pandas as pd
import typer

from appa_flwr.config.sources import assemble
from appa_flwr.launch.checks import find_app_folder
from appa_flwr.launch.flower import launch
from appa_flwr.report.artifacts import RunArtifacts, read_run
from experiments import entry
from experiments.benchmarks.engine import Out, shown

ROUNDS, ITERATIONS = 2, 6


def grown(groups: int, folder: Path) -> RunArtifacts:
    """A shortened run with so many groups."""
    name = f"groups-{groups}"
    if not (folder / name / "report.html").exists():
        keys = [f"pluralllm.rounds={ROUNDS}", f"ppo.num-iterations={ITERATIONS}", f"data.num-groups={groups}"]
        keys += [f"run-name={name}", f"run.output-dir={folder}"]
        launch(assemble(keys, folder=Path.cwd()), app_folder=find_app_folder(Path.cwd()))
    return read_run(folder / name)


def growth(run: RunArtifacts) -> dict[str, float]:
    """Seconds of phases and of an iteration, of which the first one warms up, and the server's memory."""
    seconds = {phase.phase: phase.seconds for phase in run.phases}
    later = [line.seconds for line in run.iterations[1:]]
    return {
        "a PluralLLM round": seconds["pluralllm"] / ROUNDS,
        "targets": seconds["targets"],
        "waiting in an iteration": median(line["federation_wait"] for line in later),
        "an iteration": median(sum(line.values()) for line in later),
        "MiB": max(phase.peak_mib or 0.0 for phase in run.phases),
    }


def main(
    sizes: Annotated[str, typer.Option(help="Numbers of groups.")] = "8,64,256,1024",
    output: Out = Path("runs/scale"),
) -> None:
    """Run the default loop with more and more groups, and say what grows."""
    rows = {size: growth(grown(int(size), output)) for size in sizes.split(",")}
    print(shown(pd.DataFrame.from_dict(rows, orient="index").rename_axis("groups")))


if __name__ == "__main__":
    entry.run(main)
