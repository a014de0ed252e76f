"""The server's side: a Flower ServerApp that takes a run through its phases."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from types import FrameType

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from appa_flwr.analysis.aggregation import check_methods
from appa_flwr.config import Config
from appa_flwr.core.errors import UserError
from appa_flwr.core.files import escape_output
from server_app import quiet
from server_app.federation.grid import OverlapGrid, SuperLinkLost
from server_app.run_folder import RunFolder

# Frozen, it loses the part of its own that starts runs.
GO_ON = "start the SuperLink anew, then submit the run again with the same run-name and run.resume=true"
ENDED = f"Flower ended this run: somebody stopped it, or the SuperLink was frozen or gone for too long; {GO_ON}"

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run every phase; a user's mistake ends as one line in error.txt and as the run's failure.

    It leaves as an exception: a simulation that ends by SystemExit counts as completed for Flower.
    """
    escape_output()
    flat = {k: v for k, v in context.run_config.items() if isinstance(v, bool | int | float | str)}
    config = Config.load(flat).named(datetime.now())
    with RunFolder(config) as folder, _last_words(folder):
        try:
            _run(grid, config, folder)
        except SuperLinkLost as error:
            folder.fail(f"Flower's SuperLink does not answer, or has given this run up ({error}); {GO_ON}")
            raise
        except Exception as error:
            folder.fail(str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}")
            raise


def _run(grid: Grid, config: Config, folder: RunFolder) -> None:
    check_methods(config, config.group_names)
    # Half a minute of imports on a busy machine, before which a run whose folder is another's has failed.
    quiet()
    from server_app.run import run_phases

    run_phases(OverlapGrid(grid), config, folder)


@contextmanager
def _last_words(folder: RunFolder) -> Iterator[None]:
    """Have the run's folder say so where Flower ends the run by SIGINT.

    It does that to itself once its SuperLink has gone, or no longer knows the run's token.
    """
    if threading.current_thread() is not threading.main_thread():  # a simulation's, which ends with its launcher
        yield
        return
    flower = signal.getsignal(signal.SIGINT)

    def end(number: int, frame: FrameType | None) -> None:
        folder.fail(ENDED)
        if callable(flower):
            flower(number, frame)

    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, flower)
