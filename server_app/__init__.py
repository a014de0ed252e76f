"""The server's side: the policy, SFT, rollouts, PPO, strategies and checkpoints."""

import logging


def quiet(*, bars: bool = False) -> None:
    """Keep warnings of Transformers and bitsandbytes from a terminal, and progress bars unless `bars`.

    For entry points of our own: whoever imports this package decides about its own terminal.
    """
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # on import: a kernel of the hub is missing
    import transformers  # seconds, and torch with it

    transformers.utils.logging.set_verbosity_error()
    if not bars:
        transformers.utils.logging.disable_progress_bar()
