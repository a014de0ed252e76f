"""Check a run before its first phase, also in a process that the launcher starts first.

With this process the launcher itself needs no torch. The process reads the config as JSON from standard input; a user's
mistake gives a line on standard output and exit code 2.
"""

import json
import sys
import warnings
from collections.abc import Callable
from functools import partial

import torch

from appa_flwr.config import TINY_MODEL, Config
from appa_flwr.core.errors import UserError
from appa_flwr.core.files import check_cache
from server_app import quiet, tracking
from server_app.policy import base

WITHOUT_POLICY = ("pluralllm", "serve")
"""Values of `run.phases` with which a run trains no policy."""
LARGEST_FULL_STEP = 1e-4
"""Largest step size of PPO on all weights: at 4e-4 two updates broke SmolLM2, at 1e-5 SmolLM2 learned."""


def check(config: Config, *, say: Callable[[str], None]) -> None:
    """Check that this run can use its tracker and its base model; `say` reports slow steps.

    Raises:
        UserError: one of them cannot be used, or the cache folder cannot be written.
    """
    tracking.check(config.run.tracker)
    if config.run.phases not in WITHOUT_POLICY:
        check_cache()
        base.check(config, say=say)


def main() -> None:
    """Check tracker and base model, and warn of settings that make training slow or break the policy."""
    warnings.simplefilter("ignore")
    quiet(bars=True)
    config, tell = Config.load(json.load(sys.stdin)), partial(print, file=sys.stderr, flush=True)
    try:
        check(config, say=tell)
    except UserError as error:
        print(error)
        sys.exit(2)
    if config.model == TINY_MODEL or config.run.phases in WITHOUT_POLICY:
        return
    if not torch.cuda.is_available():
        tell(f"torch sees no GPU: {config.model} computes on CPU, by {base.threads(config)} threads")
    step = config.ppo.learning_rate
    if config.policy.tuning == "full" and step > LARGEST_FULL_STEP:
        tell(f"ppo.learning-rate = {step:g} is a step for adapters; with policy.tuning = full try 1e-5")


if __name__ == "__main__":
    main()
