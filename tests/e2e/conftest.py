"""One fixture for all tests that start real runs, so that they share the tiny models they build."""

from __future__ import annotations

import pytest
from real_run import Finished, Runner, run_appa


@pytest.fixture(scope="session")
def appa_run(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """Call it with a run's name and config keys to run the whole loop in a Flower simulation."""
    folder = tmp_path_factory.mktemp("real_runs")

    def run(name: str, **changes: object) -> Finished:
        return run_appa(name, changes, folder=folder)

    return run
