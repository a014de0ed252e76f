"""What Flower takes for a message that holds nothing: three nodes over TLS here, with and without a process that stays.

    python -m experiments.benchmarks.floor

The seconds that a server waits for the replies, where it computes for a while between two rounds, as PPO does.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from pathlib import Path
from statistics import mean, stdev
from typing import Annotated

import typer

from appa_flwr import markdown
from appa_flwr.launch.deploy import SUBMITTER, start
from appa_flwr.launch.endings import RunFailed
from appa_flwr.launch.flower import UNFINISHED
from appa_flwr.launch.ports import LOOPBACK, free_port
from appa_flwr.launch.processes import flower_home
from appa_flwr.launch.sites import CONNECTION, GUARD, prepare
from appa_flwr.survey.generate import generate
from experiments import entry

NODES = 3
OWN, STAYS = "Flower's own program", "the process that stays (`appa_flwr.owner.ready`)"
APP = """
[project]
name = "empty"
version = "0.1.0"
license = {text = "Apache-2.0"}

[tool.flwr.app]
publisher = "appa-flwr"

[tool.flwr.app.components]
serverapp = "empty_app:server"
clientapp = "empty_app:client"

[tool.flwr.app.config]
nodes = 0
rounds = 0
seconds = 0.0
result = ""
"""


def waits(folder: Path, *, stays: bool, rounds: int, seconds: float) -> list[float]:
    """Seconds waited in each round but the first, which starts processes."""
    survey = generate(num_questions=20, num_groups=NODES, seed=0)
    sites = prepare(survey, folder / "parties", host=LOOPBACK, port=free_port(), keys={})
    if not stays:
        for name in sites.groups:
            shutil.rmtree(sites.group(name) / GUARD)
    app, result = folder / "app", folder / "waited.json"
    app.mkdir()
    (app / "pyproject.toml").write_text(APP)
    shutil.copy(Path(__file__).with_name("empty_app.py"), app)
    given = {"nodes": NODES, "rounds": rounds + 1, "seconds": seconds, "result": str(result)}
    keys = " ".join(f"{key}={json.dumps(value)}" for key, value in given.items())
    with flower_home() as home:
        submitter = start(sites, home, nodes=sites.groups).parties[SUBMITTER]
        submitter.call(["flwr", "run", str(app), CONNECTION, "--run-config", keys])
        while submitter.status().partition(":")[0] in UNFINISHED:
            time.sleep(2.0)
    if not result.exists():
        raise RunFailed(f"the empty app has not run to its end; {sites.server}/superlink.log says why")
    return list(json.loads(result.read_text()))[1:]


def main(
    rounds: Annotated[int, typer.Option(help="messages to each node that are counted")] = 20,
    seconds: Annotated[float, typer.Option(help="what the server computes between two rounds")] = 2.0,
) -> None:
    """Print the table."""
    lines = []
    for name, stays in ((OWN, False), (STAYS, True)):
        with tempfile.TemporaryDirectory(prefix="floor-") as folder:
            found = waits(Path(folder), stays=stays, rounds=rounds, seconds=seconds)
        lines.append([name, f"{mean(found):.2f} s", f"{stdev(found):.2f} s", f"{max(found):.2f} s"])
    print(markdown.table(["a message starts", "waited, mean", "standard deviation", "longest"], lines))


if __name__ == "__main__":
    entry.run(main)
