"""The server's side: a Flower ServerApp that takes a run through its phases."""

from __future__ import annotations

from datetime import datetime

import transformers
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from appa_flwr.config import Config
from appa_flwr.errors import UserError
from server_app.federation.grid import OverlapGrid
from server_app.models.base import with_dtype
from server_app.run import run_phases
from server_app.run_folder import RunFolder

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run every phase; a user's mistake ends as one line in error.txt and as the run's failure.

    It leaves as an exception: a simulation that ends by SystemExit counts as completed for Flower.
    """
    flat = {k: v for k, v in context.run_config.items() if isinstance(v, bool | int | float | str)}
    config = Config.load(flat).named(datetime.now())
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with RunFolder(config) as folder:
        try:
            run_phases(OverlapGrid(grid), with_dtype(config), folder)
        except Exception as error:
            folder.fail(str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}")
            raise
