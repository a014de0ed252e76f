"""One fixture for all tests that start real runs, so that they share the tiny models they build."""

from __future__ import annotations

import pytest
from real_run import RealRuns


@pytest.fixture(scope="session")
def appa_run(tmp_path_factory: pytest.TempPathFactory) -> RealRuns:
    """Call it with a run's name and config keys to run the whole loop in a Flower simulation."""
    return RealRuns(tmp_path_factory.mktemp("real_runs"))
