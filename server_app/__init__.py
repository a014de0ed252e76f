"""The server's side: the policy, SFT, rollouts, PPO, strategies and checkpoints."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger("appa.server")
"""The server's logger, whose messages `run_writer` copies into the run's log."""


def quiet(*, bars: bool = False) -> None:
    """Silence warnings of Transformers and bitsandbytes, and progress bars unless `bars`.

    Only for entry points of this package: a program that imports the package decides about its own output.
    """
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # warns on import that a kernel of the hub is missing
    import transformers  # takes seconds, and imports torch

    transformers.utils.logging.set_verbosity_error()
    if not bars:
        transformers.utils.logging.disable_progress_bar()


@contextmanager
def flower_quiet() -> Iterator[None]:
    """Silence Flower's informational log lines."""
    flower = logging.getLogger("flwr")
    level = flower.level
    flower.setLevel(logging.WARNING)
    try:
        yield
    finally:
        flower.setLevel(level)
