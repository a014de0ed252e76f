"""The whole loop in this process, with the groups' real ClientApp and what is smallest of everything else."""

import json
import zlib
from concurrent.futures import Executor, Future
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from in_process import SimulatedGrid, flower_task, simulated
from small import SMALLEST

from appa_flwr.config import Config
from appa_flwr.protocol import formats
from server_app import main
from server_app import run as server
from server_app.federation import responses


def read_every_answer(patched, module=responses):
    """Let each text mean a random answer, so that rewards differ whatever the policy happens to write."""

    def parse(task, text, num_options):
        rng = np.random.default_rng(zlib.crc32(text.encode()))
        meant_K = rng.permutation(num_options) + 1.0 if task == "opa" else rng.dirichlet(np.ones(num_options))
        return formats.Parsed(meant_K, 1.0, parsed=True)

    patched.setattr(module, "formats", SimpleNamespace(**vars(formats) | {"parse": parse}))


class Killed(BaseException):
    """Nothing that a run could catch or write about."""


class InLine(Executor):
    """Does at once what would run beside.

    A model loaded in bfloat16 changes the default dtype of the whole process, and here groups train in the same one.
    """

    def __init__(self, **_) -> None:
        pass

    def submit(self, task, *args, **keys):
        done = Future()
        done.set_result(task(*args, **keys))
        return done


def run_server(grid, config):
    """A run's server app before this grid."""
    with flower_task():
        main.app(grid, Context(17, 1, {}, RecordDict(), dict(config.flat())))


def looped(config, nodes, *, reported=False):
    """The loop of this config with the groups' real ClientApp on so many nodes, or in a grid; the grid between them."""
    grid = SimulatedGrid(simulated(config, nodes)) if isinstance(nodes, int) else nodes
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(server, "ThreadPoolExecutor", InLine)
        if not reported:  # seconds of plots
            patched.setattr(server.report, "build", lambda path: path / "report.html")
        try:
            run_server(grid, config)
        finally:
            torch.set_num_threads(threads)
    return grid


def run_of(folder, **keys):
    """The whole loop on two nodes; its config."""
    places = {"run.output-dir": str(folder / "runs"), "run-name": "r"}
    config = Config.load({**SMALLEST, **places, **keys})
    looped(config, 2)
    return config


def lines_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
