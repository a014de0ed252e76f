"""CPU time and duration of a default run, beside another checkout's, on an idle machine.

    python -m experiments.run_cost [--beside CHECKOUT] [KEY=VALUE ...]

Flower and Ray start processes that their parents do not wait for, so the whole machine's CPU time is counted. Each run
has a new cache folder, in which it builds the tiny base, and one thread a process. A checkout's first run also compiles
its modules, so there is a second.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import psutil
import typer

from appa_flwr.core import markdown
from appa_flwr.core.errors import UserError
from experiments import entry

HERE = Path(__file__).resolve().parents[1]
APPA = "import sys; from appa_flwr.launch.cli import main; sys.exit(main())"


def cost(checkout: Path, keys: list[str]) -> tuple[float, float]:
    """CPU seconds of the machine and duration, in seconds, of a run of this checkout; UserError if it fails."""
    with tempfile.TemporaryDirectory() as home:
        places = {"HOME": home, "XDG_CACHE_HOME": f"{home}/cache", "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", APPA, "run", *keys, f"run.output-dir={home}/runs"]
        before, started = psutil.cpu_times(), time.monotonic()
        done = subprocess.run(command, cwd=checkout, env=os.environ | places, check=False, stdout=subprocess.DEVNULL)
        after, seconds = psutil.cpu_times(), time.monotonic() - started
    if done.returncode:
        raise UserError(f"the run of {checkout} ended with exit code {done.returncode}")
    return sum(getattr(after, part) - getattr(before, part) for part in ("user", "nice", "system")), seconds


def main(
    keys: Annotated[list[str] | None, typer.Argument(help="Config keys of the runs, KEY=VALUE.")] = None,
    beside: Annotated[
        Path | None, typer.Option(help="Another checkout of this repository, which runs by turns.")
    ] = None,
    times: Annotated[int, typer.Option(min=1, help="Runs of each checkout.")] = 2,
) -> None:
    """Measure runs of this checkout and of another one, and print a Markdown table."""
    checkouts = [HERE, *([beside.resolve()] if beside else [])]
    rows = [
        [checkout.name, str(number), *(f"{value:.0f}" for value in cost(checkout, keys or []))]
        for number in range(1, times + 1)
        for checkout in checkouts
    ]
    typer.echo(markdown.table(["checkout", "run", "CPU s", "seconds"], rows))


if __name__ == "__main__":
    entry.run(main)
