"""The server's side: a Flower ServerApp that takes a run through its phases."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from types import FrameType

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from appa_flwr.config import Config
from appa_flwr.core.errors import UserError
from appa_flwr.core.files import escape_output
from appa_flwr.run.schema import MACHINE
from server_app import quiet
from server_app.federation.grid import OverlapGrid, SuperLinkLost
from server_app.run_writer import RunWriter

# A SuperLink that was frozen loses its own process that starts runs.
GO_ON = "start the SuperLink anew, then submit the run again with the same run-name and run.resume=true"
ENDED = f"Flower ended this run: somebody stopped it, or the SuperLink was frozen or gone for too long; {GO_ON}"

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run every phase; an error is written as one line to error.txt and fails the run.

    The error leaves as an exception, since Flower counts a simulation that ends by SystemExit as completed.
    """
    escape_output()
    config = Config.load(context.run_config).named(datetime.now())
    with RunWriter(config) as folder, _last_words(folder):
        try:
            # The imports take up to half a minute; a run whose folder belongs to another run has failed before.
            from server_app.machine import machine

            folder.progress(MACHINE, 1, 1, machine(folder.path), None)
            quiet()
            from server_app.run import run_phases

            run_phases(OverlapGrid(grid), config, folder)
        except SuperLinkLost as error:
            folder.fail(f"Flower's SuperLink does not answer, or has given this run up ({error}); {GO_ON}")
            raise
        except Exception as error:
            folder.fail(str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}")
            raise


@contextmanager
def _last_words(folder: RunWriter) -> Iterator[None]:
    """Write the reason into the run's folder if Flower ends the run by SIGINT.

    Flower's process sends itself SIGINT once its SuperLink has gone, or no longer knows the run's token.
    """
    if threading.current_thread() is not threading.main_thread():  # a simulation, which ends with its launcher
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
