"""The server's side: the policy, SFT, rollouts, PPO, strategies and checkpoints."""

import logging

logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # each import would say that a kernel of the hub is missing
