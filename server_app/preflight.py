"""Faults of a run that show before Flower starts: a process of the launcher, which itself needs no torch.

It reads the config as JSON on standard input; a user's mistake is a line on standard output and exit code 2.
"""

from __future__ import annotations

import json
import sys
import warnings

import torch
import transformers

from appa_flwr.config import TINY_MODEL, Config
from appa_flwr.core.errors import UserError
from server_app import tracking
from server_app.models import base

LARGEST_FULL_STEP = 1e-4
"""Of PPO with all weights: at 4e-4 two updates broke SmolLM2, at 1e-5 it learned."""


def main() -> None:
    """Check the tracker and, where a policy is trained, its base model."""
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    config = Config.load(json.load(sys.stdin))

    def tell(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    try:
        tracking.check(config)
        if config.run.phases not in ("pluralllm", "serve"):
            base.check(config, say=tell)
            if config.model != TINY_MODEL and not torch.cuda.is_available():
                tell(f"torch sees no GPU: {config.model} computes on CPU, by {base.threads(config)} threads")
            step = config.ppo.learning_rate
            if config.model != TINY_MODEL and config.policy.tuning == "full" and step > LARGEST_FULL_STEP:
                tell(f"ppo.learning-rate = {step:g} is a step for adapters; with policy.tuning = full try 1e-5")
    except UserError as error:
        print(error)
        sys.exit(2)


if __name__ == "__main__":
    main()
