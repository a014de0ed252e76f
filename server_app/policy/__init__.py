"""The policy: its base, SFT, log-probabilities, sampling and PPO. Only `federation` talks to the groups."""
