"""Puts this folder on the path, so that tests of every folder can share `fakes`; one cache for a session's tests.

What they build is small from the first import on.
"""

import logging
import sys
from collections.abc import Iterator

import hypothesis
import pytest
from real_run import RealRuns
from short_waits.on_import import SIZES, set_constants

from appa_flwr.launch import cli

set_constants(SIZES)
hypothesis.settings.register_profile("busy machine", deadline=None)
hypothesis.settings.load_profile("busy machine")


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing that the user's own cache holds decides a test, and what one test builds is there for the next.

    On one thread sums come out alike each time.
    """
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("OMP_NUM_THREADS", "1")
        patched.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def appa_run(tmp_path_factory: pytest.TempPathFactory) -> RealRuns:
    """Call it with a run's name and config keys to run the whole loop in a Flower simulation."""
    return RealRuns(tmp_path_factory.mktemp("real_runs"))


@pytest.fixture
def warnings(caplog):
    """The messages that the server has logged."""
    caplog.set_level(logging.WARNING, "appa.server")
    return lambda: caplog.messages


@pytest.fixture
def appa(monkeypatch, capsys):
    """Run a command in this process: what it prints, or with an exit code its error, and for 2 nothing else."""

    def run(*arguments: object, code: int = 0) -> str:
        monkeypatch.setattr(sys, "argv", ["appa", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        printed = capsys.readouterr()
        assert int(ended.value.code or 0) == code, printed.err
        assert code != 2 or not printed.out
        return printed.err if code else printed.out

    return run
